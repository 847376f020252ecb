"""List one run of a root with bytes and times; open nothing.

Find which saves of one tier a second tier holds too.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ftckpt.discovery.candidates import Walk
from ftckpt.discovery.neighbours import lacking
from ftckpt.discovery.recognise import OrderedByRank
from ftckpt.discovery.roots import Root, concurrently
from ftckpt.discovery.step_names import is_file_of_step, is_put_aside, set_member, step_in_name
from ftckpt.discovery.unordered import newest_together
from ftckpt.errors import ExitCode, FtckptError, NotFoundError
from ftckpt.own_files import SUFFIX, is_leftover, is_own
from ftckpt.progress import NULL, Counter
from ftckpt.reports import IF_ANY, UNSAID, said_as
from ftckpt.retention.apply.check import as_damaged, checked, newest_verified
from ftckpt.retention.scan.entries import SHARED, EntryClass, EntryContents, RootEntry
from ftckpt.retention.scan.entry import Run, ScannedEntry, ScanOptions, list_entry, sum_up
from ftckpt.retention.scan.leftovers import dead_plans, dead_uploads
from ftckpt.retention.scan.read import read_entries
from ftckpt.storage.local.oserror import translate
from ftckpt.storage.store import Entry, relative
from ftckpt.verification.scrub import ScrubHistory

from .cadence import Save, while_saved

# What nobody here wrote may be a data set of any size: it is counted and not listed.
_NOT_LISTED = frozenset({EntryClass.FOREIGN})
_SIDE_BY_SIDE = "files of steps side by side"
# The most saves that are opened until one is whole.
_MOST = 8
# With these `latest` says why no save is the newest.
_NO_ORDER = frozenset({ExitCode.UNVERIFIED, ExitCode.USAGE})


@dataclass(frozen=True, slots=True)
class SurveyedEntry:
    """One entry of a run.

    Attributes:
        entry: what it is (`ftckpt.retention.scan.entries`), its contents listed unless it is
        FOREIGN.
        url: its path or URL.
        began: modification time of its first file in seconds since the epoch; None where the store
            keeps none. What ftckpt wrote beside the data does not count in times.
        finished: modification time of its last file; files that came long after it do not count.
        keep: whether a retention policy keeps it; None where none was named.
        thin: whether it keeps the weights alone.
    """

    SAID: ClassVar = {
        "name": "entry.name", "step": "entry.step", "class": "entry.entry_class",
        "format": "entry.format", "bytes": "nbytes", "files": "files", "pinned": "pinned",
        "thinned": "thinned",
    }  # fmt: skip

    entry: RootEntry = field(metadata=UNSAID)
    url: str = field(metadata=UNSAID)
    began: float | None = None
    finished: float | None = None
    keep: bool | None = field(default=None, metadata=IF_ANY)
    thin: bool | None = field(default=None, metadata=IF_ANY)

    @property
    def nbytes(self) -> int | None:
        """Return the bytes of its files; None where they were not listed."""
        return None if self.entry.contents is None else self.entry.contents.nbytes

    @property
    def files(self) -> int | None:
        """Return the number of its files; None where they were not listed."""
        return None if self.entry.contents is None else self.entry.contents.files

    @property
    def pinned(self) -> bool:
        """Whether somebody has pinned it."""
        return bool(self.entry.pins)

    @property
    def thinned(self) -> bool:
        """Whether gc has left its weights alone."""
        return bool(self.entry.thinned)

    @property
    def save(self) -> Save | None:
        """The entry as a save (`ftckpt.health.cadence`); None without a step or contents.

        What gc has thinned is none: its files are younger than the save.
        """
        held = self.entry.contents
        if self.entry.step is None or held is None or self.entry.thinned:
            return None
        return Save(self.url, self.entry.step, held.nbytes, held.files, self.began, self.finished)


@dataclass(frozen=True, slots=True)
class Survey:
    """One run, as it was listed.

    Attributes:
        url: of the run's root.
        held: every entry, by ascending step.
        verified: the newest whose content passed a check, as far as is known; None without one.
        dangling: pointers that name nothing: the pointer, and what it says.
        free: bytes that the filesystem has left; None on object stores.
        run: as retention reads it, the files of its entries listed; None where nothing was read.
        scrub: what is remembered of the content; None for nothing.
        dead_parts: paths of the records of divided operations that nobody went on with.
        uploads: keys of uploads that ftckpt began, and that nobody has finished for a day.
        order: names of saves as `latest` orders them, the newest first; None where each has a step.
        together: how many of the first of them make one save.
        halves: names of later files, of which the other half of a save is not there.
        doubt: why no save is known to be the newest; "" where one is.
        unread: why the newest save is read in part or not at all; "" where it is read.
    """

    url: str
    held: tuple[SurveyedEntry, ...]
    verified: SurveyedEntry | None
    dangling: tuple[tuple[str, str], ...]
    free: int | None
    run: Run | None = None
    scrub: ScrubHistory | None = None
    dead_parts: tuple[str, ...] = ()
    uploads: tuple[str, ...] = ()
    order: tuple[str, ...] | None = None
    together: int = 1
    halves: tuple[str, ...] = ()
    doubt: str = ""
    unread: str = ""

    @property
    def leftovers(self) -> tuple[str, ...]:
        """Names of temporary files that killed runs of ftckpt have left."""
        return tuple(one.entry.name for one in self.held if is_leftover(one.entry.name))

    def of(self, *classes: EntryClass) -> tuple[SurveyedEntry, ...]:
        """Return the entries of some classes."""
        return tuple(one for one in self.held if one.entry.entry_class in classes)

    def nbytes(self) -> Mapping[EntryClass, int]:
        """Return the bytes of each class that was listed.

        A file of several names counts once, in the first class of `EntryClass` that has it.
        """
        seen: set[str] = set()
        totals: dict[EntryClass, int] = {}
        for entry_class in EntryClass:
            members = [h.entry.contents for h in self.of(entry_class)]
            known = [contents for contents in members if contents is not None]
            if known:
                totals[entry_class] = sum(_counted(contents, seen) for contents in known)
        return totals


def survey(root: Root, how: ScanOptions, *, counter: Counter = NULL) -> Survey:
    """List one run.

    Raises:
        UnavailableError, DeniedError: something could not be listed; nothing is concluded then.
        UnsafeError: the root's `.ftckpt` is a link.
    """
    found = read_entries(root, how, counter=counter)
    counter.start("listing", len(found), "entries")

    def one(each: ScannedEntry) -> tuple[ScannedEntry, SurveyedEntry] | None:
        listed = _listed(root, each)
        counter.add(1)
        return listed

    listed = [each for each in concurrently(root.store, one, found) if each is not None]
    run = Run(root, [each for each, _ in listed])
    held = sorted(_with_parts(run, listed, how.now), key=lambda each: each.entry.age_order)
    newest = newest_verified(run.members, how.now)
    verified = next((h for h in held if newest and h.entry.name == newest.entry.name), None)
    dangling = tuple((p.name, p.says) for p in root.pointers if p.dangling)
    dead = tuple(path[len(root.base) :].lstrip("/") for path in dead_plans(root, how.now))
    return Survey(
        root.url, tuple(held), verified, dangling, _free(root), run, dead_parts=dead,
        uploads=_uploads(root, how.now),
    )  # fmt: skip


def survey_one(root: Root, how: ScanOptions, name: str, *, counter: Counter = NULL) -> Survey:
    """List one entry of a run alone, by its name; nothing where it is not a checkpoint by itself.

    What says no step has its place among the others, so that these would have to be read too.

    Raises:
        UnavailableError, DeniedError: it could not be listed.
        UnsafeError: the root's `.ftckpt` is a link.
    """
    found = read_entries(root, how, only=name, counter=counter)
    every = [_listed(root, each) for each in found if each.entry.step is not None]
    listed = [one for one in every if one is not None]
    run = Run(root, [each for each, _ in listed])
    held = tuple(each for each in _with_parts(run, listed, how.now) if each.entry.is_listed)
    return Survey(root.url, held, None, (), None, run)


def with_order(found: Survey) -> Survey:
    """Return a survey with the order that `latest` finds, where the names of saves say no step.

    Raises:
        UnavailableError, DeniedError: one could not be read.
    """
    if found.run is None:
        return found
    root, saves = found.run.root, {h.entry.name: h for h in _saves(found)}
    if not any(c.step is None and c.entry.path in saves for c in root.candidates):
        return found
    walk, order, together, doubt = Walk(root), list[str](), 1, ""
    halves: tuple[str, ...] = ()
    unread = ""
    for looked in walk.newest_first():
        error = looked.error
        if error is not None and looked.child is None and error.exit_code in _NO_ORDER:
            if not order and error.exit_code is ExitCode.USAGE:
                whole, later = newest_together(root, walk.looked)
                halves = tuple(one.candidate.entry.path for one in later)
                order, together = [one.candidate.entry.path for one in whole], len(whole)
            doubt = "" if order else error.message
            break
        code = ExitCode.OK if error is None else error.exit_code
        if error is not None and code is ExitCode.UNSUPPORTED and not order:
            unread = unread or f"{looked.candidate.path}: {error.message}"
        torn = looked.child is not None and code is ExitCode.INCOMPLETE
        if (error is None or torn) and looked.candidate.entry.path in saves:
            order.append(looked.candidate.entry.path)
    first = (saves[name] for name in order if name in saves and saves[name].entry.content_passed)
    passed = [h for h in saves.values() if h.entry.content_passed and h.finished is not None]
    verified = next(first, None) or max(passed, key=lambda h: h.finished or 0, default=None)
    return replace(
        found, verified=verified or found.verified, order=tuple(order), together=together,
        halves=halves, doubt=doubt, unread=unread,
    )  # fmt: skip


def with_newest(found: Survey, now: float) -> Survey:
    """Return a survey with the structure of its newest save checked, and of those before a bad one.

    Raises:
        UnavailableError, DeniedError: one could not be read.
    """
    if found.run is None:
        return found
    members = {one.entry.name: one for one in found.run.members}
    held = {one.entry.name: one for one in found.held}
    saves = _saves(found)
    newest_first = sorted(saves, key=lambda h: h.entry.age_order, reverse=True)
    if found.order is not None:
        by_name = {h.entry.name: h for h in saves}
        newest_first = [by_name[name] for name in found.order if name in by_name]
    unread = found.unread
    for number, one in enumerate(newest_first[:_MOST], 1):
        if one.entry.thinned or is_put_aside(one.entry.name.rpartition("/")[2]):
            continue
        child = members[one.entry.name].child
        if child is None or isinstance(child.part.format, OrderedByRank):
            break  # a node's own disk: the ranks that it lacks lie on others
        shares = one.entry.why == SHARED
        member = members[one.entry.name]
        now_is = checked(member.now(entry_class=one.entry.entry_class), now, None)
        if now_is is not None and now_is.entry.no_state:
            members[one.entry.name] = now_is
            held[one.entry.name] = replace(one, entry=now_is.entry)
            continue
        if now_is is not None and now_is.entry.entry_class is EntryClass.FOREIGN:
            unread = unread or f"{one.entry.name}: {now_is.entry.why}"
            break
        if now_is is None or now_is.entry.entry_class is EntryClass.COMMITTED:
            if number < found.together:
                continue
            break
        members[one.entry.name] = member if shares else now_is
        held[one.entry.name] = replace(one, entry=now_is.entry)
    run = Run(found.run.root, list(members.values()))
    return replace(found, held=tuple(held.values()), run=run, unread=unread)


def _saves(found: Survey) -> list[SurveyedEntry]:
    """Return what the names of its files call a finished save, whole or not."""
    run = found.run
    named = {f.entry.name: f.entry.entry_class for f in run.members} if run is not None else {}
    return [
        one
        for one in found.held
        if EntryClass.COMMITTED in (one.entry.entry_class, named.get(one.entry.name))
    ]


def _with_parts(
    run: Run, listed: Sequence[tuple[ScannedEntry, SurveyedEntry]], now: float
) -> Iterator[SurveyedEntry]:
    """Yield the entries; a save that lacks what the saves beside it have is none that is whole.

    The names that were listed tell it. The small files of each save would be one more request each
    on an object store, where they are left to `verify`.
    """
    root = run.root
    skip = len(root.base) + 1 if root.base else 0
    members = [(f.place.path[skip:], f, held) for f, held in listed]
    by_path = {candidate.path: candidate for candidate in root.candidates}
    for path, member, held in members:
        lost = None
        if member.entry.entry_class is EntryClass.COMMITTED and path in by_path:
            assert member.child is not None
            with suppress(FtckptError):  # `verify` says that a save beside it cannot be listed
                lost = lacking(
                    root, member.child, member.entry.step, root.candidates,
                    small=root.store.traits.local,
                )  # fmt: skip
        if lost is not None and lost.certain:
            held = replace(held, entry=as_damaged(member, lost.message, now).entry)
        yield held


def _uploads(root: Root, now: float) -> tuple[str, ...]:
    """Return what killed transfers still pay for; () where the store does not say it."""
    try:
        own = dead_uploads(root, now)
    except FtckptError:  # an aside: the saves are listed
        return ()
    return tuple(one.path[len(root.base) :].lstrip("/") for one in own)


def _listed(root: Root, found: ScannedEntry) -> tuple[ScannedEntry, SurveyedEntry] | None:
    """Return an entry with its files summed up; None where it was removed meanwhile."""
    url = root.store.describe(found.place.path)
    shares = found.entry.why == SHARED
    if found.entry.entry_class in _NOT_LISTED and not shares:
        return found, SurveyedEntry(found.entry, url)
    try:
        files = _of_step(root, found) if shares else list_entry(root.store, found.place)
    except NotFoundError:
        return None
    times = _times(files, found.place.path)
    found = found.now(contents=sum_up(files))
    entry = replace(found.entry, entry_class=EntryClass.COMMITTED) if shares else found.entry
    return found, SurveyedEntry(entry, url, min(times, default=None), max(times, default=None))


def _of_step(root: Root, found: ScannedEntry) -> list[Entry]:
    """Return the files of a step that shares its directory with others; gc judges none of them."""
    steps: dict[int, list[Entry]] | None = root.memo.get(_SIDE_BY_SIDE)
    if steps is None:
        steps = defaultdict(list)
        for entry in root.store.children(root.base):
            name = relative(root.base, entry.path)
            step, member = step_in_name(name), set_member(name)
            if is_file_of_step(name) and (member or step is not None):
                steps[int(member.digits) if member else step or 0].append(entry)
        root.memo[_SIDE_BY_SIDE] = steps
    return steps.get(found.entry.step or 0) or list_entry(root.store, found.place)


def _times(files: Sequence[Entry], base: str) -> list[float]:
    """Return when the data files were written; empty where that of one is not known."""
    own = base + SUFFIX  # beside a checkpoint that is one file
    data = [f for f in files if f.path != own and not is_own(f.path[len(base) + 1 :])]
    known = [(f.path, f.mtime) for f in data if f.mtime is not None]
    return while_saved(known) if len(known) == len(data) else []


def _counted(contents: EntryContents, seen: set[str]) -> int:
    new = [file for file in contents.shared if file.inode not in seen]
    seen.update(file.inode for file in new)
    return contents.unshared + sum(file.size for file in new)


def _free(root: Root) -> int | None:
    path = root.store.local_path(root.base)
    if path is None:
        return None
    try:
        held = os.statvfs(path)
    except OSError as error:
        raise translate(error, path, "look at") from error
    return held.f_bavail * held.f_frsize


@dataclass(frozen=True, slots=True)
class Durable:
    """What a second tier holds of a run.

    Attributes:
        url: of the second tier.
        newest: the newest committed save of the first tier whose step is committed on the second;
            None where there is none.
        missing: committed saves of the first tier that are not on the second, by ascending step.
        unfinished: of those, the ones that the second tier holds a part of.
    """

    SAID: ClassVar = {"missing": "missing_names", "unfinished": "unfinished_names"}

    url: str = field(metadata=said_as("root"))
    newest: SurveyedEntry | None
    missing: tuple[SurveyedEntry, ...] = field(metadata=UNSAID)
    unfinished: tuple[SurveyedEntry, ...] = field(metadata=UNSAID)

    @property
    def missing_names(self) -> list[str]:
        """Return the names of those that are missing."""
        return [held.entry.name for held in self.missing]

    @property
    def unfinished_names(self) -> list[str]:
        """Return the names of those that are there in part."""
        return [held.entry.name for held in self.unfinished]


def durable(first: Survey, second: Survey) -> Durable:
    """Compare two tiers by step; a step that the second has dropped on purpose is missing too.

    What both hold may be of another format or size on each, so only that it is committed there is
    asked: `ftckpt verify --against` compares content.
    """
    there = {h.entry.step for h in second.of(EntryClass.COMMITTED) if h.entry.step is not None}
    begun = {h.entry.step for h in second.of(EntryClass.STAGING, EntryClass.ABANDONED)}
    saves = [h for h in first.of(EntryClass.COMMITTED) if h.entry.step is not None]
    saves.sort(key=lambda h: h.entry.age_order)
    held = [h for h in saves if h.entry.step in there]
    missing = tuple(h for h in saves if h.entry.step not in there)
    partly = tuple(h for h in missing if h.entry.step in begun)
    return Durable(second.url, held[-1] if held else None, missing, partly)
