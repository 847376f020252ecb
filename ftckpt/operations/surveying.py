"""The checkpoints of a run, how they and the machine are doing: `ls`, `status`, `doctor`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from ftckpt.amounts import Duration, seconds
from ftckpt.errors import ExitCode, FtckptError, NotFoundError, UsageError
from ftckpt.findings import counted
from ftckpt.observer import SILENT, Observer
from ftckpt.progress import Counter
from ftckpt.reports import UNSAID, said_as
from ftckpt.storage import StoreOptions

from .definition import argument, assumption, operation, option, switch
from .opening import STORES, chosen

if TYPE_CHECKING:
    from ftckpt.capabilities import Check
    from ftckpt.discovery.resolve import Place
    from ftckpt.discovery.roots import Root
    from ftckpt.health import Status, Survey, SurveyedEntry
    from ftckpt.parts.finish import DividedState
    from ftckpt.retention.scan.entries import EntryVerdict, Pin


@dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """One entry of a root, as listings show it.

    Attributes:
        path: its path or URL.
        root: that of its run.
        step: None where neither its name nor its headers say it.
        time: when it was saved, in seconds since the epoch; None where the store keeps no times.
        age_s: seconds since then.
        bytes: of its files; None where they were not listed.
        files: number of them.
        format: "" where none recognises it.
        entry_class: see `EntryClass`; `NO MARKER` where the format has no commit marker, `ABSENT`
            of what is pinned or tagged and is not there.
        why: why it is of this class.
        sealed: whether it has a manifest.
        verified: whether a check of its content is remembered, or it was sealed after one.
        verdict: what the ledger of the root says of its content as it is now; None for nothing.
        pointers: names of the root's pointers to it.
        tags: its tags.
        pins: its pins.
    """

    path: str
    root: str
    step: int | None
    time: float | None
    age_s: float | None
    bytes: int | None
    files: int | None
    format: str
    entry_class: str = field(metadata=said_as("class"))
    why: str
    sealed: bool
    verified: bool
    verdict: EntryVerdict | None
    pointers: tuple[str, ...]
    tags: tuple[str, ...]
    pins: tuple[Pin, ...]


class ListOrder(StrEnum):
    """Orders of checkpoints: the newest, the oldest, the largest first, or by name."""

    STEP = "step"
    AGE = "age"
    SIZE = "size"
    NAME = "name"


@operation(
    examples=(
        ("ftckpt ls", "what the working directory holds"),
        ("ftckpt ls /ckpt/run7", "steps, ages, sizes, classes, and what keeps each"),
        ("ftckpt ls s3://run7/ckpt --all", "the trash, foreign names, pins of what is gone"),
        ("ftckpt ls /ckpt/run7@latest", "one checkpoint"),
        ("ftckpt ls /ckpt/run7 --sort size --older-than 7d", "the largest of the older ones first"),
        ("ftckpt ls /ckpt/run7 --class corrupt --class abandoned", "what nobody restarts from"),
    ),
    codes={
        ExitCode.OK: "listed; no content was checked",
        ExitCode.NOT_FOUND: "no such root, nothing that a format knows, or none as asked for",
        ExitCode.UNAVAILABLE: "",
        ExitCode.DENIED: "",
    },
)
def ls(
    path: Annotated[str, argument("[PATH]", "Directory or URL that holds the checkpoints.")] = ".",
    *,
    all_: Annotated[
        bool, switch("--all", "The trash, foreign names, and pins of what is gone, too.")
    ] = False,
    sort: Annotated[
        ListOrder | str, option("", "Order: the newest step, the oldest or the largest first.")
    ] = ListOrder.STEP,
    older_than: Annotated[Duration, option("T", "Only those of at least this age: 7d.")] = "",
    newer_than: Annotated[Duration, option("T", "Only those of at most this age: 1h.")] = "",
    class_: Annotated[
        Sequence[str], option("CLASS", "Only of this class: corrupt. Repeatable.", "--class")
    ] = (),
    tag: Annotated[Sequence[str], option("TAG", "Only with this tag. Repeatable.", "--tag")] = (),
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> tuple[ListedCheckpoint, ...]:
    """List the checkpoints of a root: step, age, size, verified, pins.

    Told by listings and manifests; no checkpoint is opened, except for a step that its name does
    not show. The newest comes first; several runs below PATH are listed apart. Of one checkpoint,
    ROOT@STEP too, the row of it alone is shown.

    Raises:
        NotFoundError: no such root, nothing in it that a format knows, or no one is as asked for.
        UsageError: it is a file that belongs to a checkpoint, or a part of one.
        UnsupportedError: nothing in it, or the one checkpoint that it is, is read.
        UnavailableError, DeniedError: something could not be listed.
    """
    from ftckpt.retention.apply.check import verified_names
    from ftckpt.retention.document import shown_class
    from ftckpt.retention.scan.entries import EntryClass

    on.report(target=path)
    order, now, only = chosen(ListOrder, sort, "--sort"), time.time(), ""
    wanted = _Wanted.of(older_than, newer_than, class_, tag)
    try:
        _, surveys = _surveys(path, now, stores, on.counter)
    except UsageError as error:
        root, only = _root_around(path, stores)
        if not only:
            raise
        try:
            _, surveys = _surveys(root, now, stores, on.counter, only=only)
        except UsageError:
            raise error from None
        rows = [held.entry for one in surveys for held in one.held if held.entry.name == only]
        if not any(all_ or entry.is_listed for entry in rows):
            raise
    found: list[ListedCheckpoint] = []
    for one in surveys:
        members = {} if one.run is None else {f.entry.name: f for f in one.run.members}
        verified = verified_names(
            [f for f in members.values() if f.entry.entry_class is EntryClass.COMMITTED]
        )
        for held in reversed(one.held):
            entry, contents = held.entry, held.entry.contents
            if only and entry.name != only:
                continue
            if not (all_ or entry.is_listed):
                continue
            saved = held.finished if entry.time is None else entry.time
            found.append(
                ListedCheckpoint(
                    path=held.url,
                    root=one.url,
                    step=entry.step,
                    time=saved,
                    age_s=None if saved is None else now - saved,
                    bytes=None if contents is None else contents.nbytes + contents.linked,
                    files=None if contents is None else contents.files,
                    format=entry.format,
                    entry_class=shown_class(entry),
                    why=entry.why,
                    sealed=entry.name in members and members[entry.name].sealed,
                    verified=entry.name in verified or entry.content_passed,
                    verdict=entry.verdict,
                    pointers=entry.pointers,
                    tags=entry.tags,
                    pins=entry.pins,
                )
            )
        if all_ and not only and one.run is not None:
            found += _absent(one, one.run.root)
    if not (kept := [one for one in found if wanted.takes(one)]):
        raise NotFoundError(f"none of {counted(len(found), 'checkpoint')} is as asked for")
    _sort(kept, order)
    on.report(checkpoints=kept)
    return tuple(kept)


class _Wanted(NamedTuple):
    """Which checkpoints are listed; where nothing is known of one, it is not what was asked for."""

    older: float | None
    newer: float | None
    classes: frozenset[str]
    tags: frozenset[str]

    @classmethod
    def of(
        cls, older: Duration, newer: Duration, classes: Sequence[str], tags: Sequence[str]
    ) -> _Wanted:
        """Return what the flags ask for.

        Raises:
            UsageError: a time, or a class that does not exist.
        """
        from ftckpt.retention.document import NO_MARKER
        from ftckpt.retention.scan.entries import EntryClass

        known = [*EntryClass, NO_MARKER]
        asked = frozenset(one.upper().replace("-", " ") for one in classes)
        for one in sorted(asked - set(known)):
            names = ", ".join(word.lower().replace(" ", "-") for word in known)
            raise UsageError(
                f"--class does not know {one.lower()}", hint=f"the classes are {names}"
            )
        return cls(
            None if older == "" else seconds(older, "--older-than"),
            None if newer == "" else seconds(newer, "--newer-than"),
            asked,
            frozenset(tags),
        )

    def takes(self, one: ListedCheckpoint) -> bool:
        """Whether one checkpoint is listed."""
        age = one.age_s
        return (
            (self.older is None or (age is not None and age >= self.older))
            and (self.newer is None or (age is not None and age <= self.newer))
            and (not self.classes or not self.classes.isdisjoint(_classes(one)))
            and (not self.tags or not self.tags.isdisjoint(one.tags))
        )


def _classes(one: ListedCheckpoint) -> set[str]:
    """Return the classes that one is of: without a marker in its format it is committed, too."""
    from ftckpt.retention.document import NO_MARKER
    from ftckpt.retention.scan.entries import EntryClass

    return {one.entry_class, *[EntryClass.COMMITTED.value] * (one.entry_class == NO_MARKER)}


def _sort(found: list[ListedCheckpoint], order: ListOrder) -> None:
    """Sort what was listed, run by run; the order of steps is that of the listing."""
    from ftckpt.inspection.usage import natural

    keys: dict[ListOrder, Callable[[ListedCheckpoint], Any]] = {
        ListOrder.AGE: lambda one: -(one.age_s or 0.0),
        ListOrder.SIZE: lambda one: -(one.bytes or 0),
        ListOrder.NAME: lambda one: natural(one.path),
    }
    if order in keys:
        roots = {one.root: place for place, one in reversed([*enumerate(found)])}
        found.sort(key=lambda one: (roots[one.root], keys[order](one)))


def _absent(survey: Survey, root: Root) -> Iterator[ListedCheckpoint]:
    """Yield what is pinned or tagged in a root and is not there."""
    from ftckpt.retention.policy.select import Chosen
    from ftckpt.retention.records.pins import pins
    from ftckpt.retention.records.tags import tags

    there = {pin.entry for held in survey.held for pin in held.entry.pins}
    there |= {held.entry.name for held in survey.held}
    pinned, tagged = pins(root), tags(root)
    for name in sorted({*(pin.entry for pin in pinned), *tagged} - there):
        yield ListedCheckpoint(
            path=Chosen(root, name).url, root=survey.url, step=None, time=None, age_s=None,
            bytes=None, files=None, format="", entry_class="ABSENT",
            why="pinned or tagged, and not there", sealed=False, verified=False, verdict=None,
            pointers=(), tags=tuple(tagged.get(name, ())),
            pins=tuple(pin for pin in pinned if pin.entry == name),
        )  # fmt: skip


def _root_around(path: str, stores: StoreOptions) -> tuple[str, str]:
    """Return the root that one checkpoint is in, and its name there; "" where it is none.

    Raises:
        UnsupportedError: it is a checkpoint of a format that is not read.
    """
    from ftckpt.discovery.resolve import open_target
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.storage.remotes import split

    target = open_target(path, FORMATS, stores)
    place = target.place
    if target.part is not None and not target.part.recognition.supported:
        target.open()
    if target.root is not None and place.which:
        from ftckpt.discovery.candidates import choose_child

        return place.url, choose_child(target.root, place.which).candidate.entry.path
    local = place.store.local_path(place.entry.path)
    # `.` has no name of its own.
    url = os.path.abspath(path) if local is not None and split(path)[1] in ("", ".", "..") else path
    return split(url.rstrip("/")) if target.part is not None else ("", "")


@dataclass(frozen=True)
class DividedWork:
    """How far the parts of divided operations are.

    Attributes:
        divided: each operation.
        code: PARTIAL where parts are lost.
        message: how many there are, or how many parts are lost.
        hint: what to do about it.
    """

    divided: Sequence[DividedState]
    code: ExitCode = field(metadata=UNSAID)
    message: str = field(metadata=UNSAID)
    hint: str = field(metadata=UNSAID)


@operation(
    examples=(
        (
            "ftckpt status /ckpt/run7",
            "the newest save, its age, how regular and how slow saves are",
        ),
        (
            "ftckpt status /ckpt/run7 --expect-interval 22m -q || page-somebody",
            "exit 14 where the newest is older than two intervals, or something else is wrong",
        ),
        (
            "ftckpt status /nvme/run7 --tier s3://bucket/run7",
            "which saves are not on the second tier yet",
        ),
        (
            "ftckpt status /ckpt/run7 --prometheus /var/lib/node_exporter/ftckpt.prom",
            "for node_exporter, from cron",
        ),
        (
            "ftckpt status /ckpt/run7 --expect-interval 22m --alert-url https://hooks.example.com/ops",
            "tell somebody, once for each thing",
        ),
        (
            "ftckpt status /ckpt/run7 --policy retention.toml --plot saves.png",
            "a timeline of saves, and which of them the policy keeps",
        ),
        (
            "ftckpt status --parts /ckpt/run7",
            "how far parts of a check or a copy are, node by node",
        ),
    ),
    codes={
        ExitCode.OK: "nothing that somebody should look at",
        ExitCode.PARTIAL: "something that somebody should look at: it is listed",
        ExitCode.UNVERIFIED: "nothing says which save is the newest",
        ExitCode.UNSAFE: "the root's .ftckpt is a link",
        ExitCode.REFUSED: "another file stands where the picture's numbers would go",
        ExitCode.NOT_FOUND: "no such root, or nothing in it that a format knows",
        ExitCode.UNAVAILABLE: "a listing failed; nothing is concluded",
        ExitCode.DENIED: "",
        ExitCode.NO_RESOURCE: "the metrics or the picture could not be written",
        ExitCode.UNSUPPORTED: "--plot needs matplotlib",
    },
    everyday=("--expect-interval", "--late", "--tier", "--scrub-every", "--policy", "--plot"),
)
def status(
    root: Annotated[str, argument("ROOT", "Directory or URL that holds the checkpoints.")] = "",
    *,
    parts: Annotated[
        str,
        option(
            "PLACE",
            "Show instead how far the parts are that leave their records in PLACE.",
        ),
    ] = "",
    expect_interval: Annotated[
        Duration, option("T", "How often a save is due: 22m; else as measured.")
    ] = "",
    late: Annotated[float, assumption("N", "Alert above N intervals without a save.", min=1)] = 2.0,
    slower: Annotated[
        float, assumption("N", "Alert when saves take N times as long.", min=1)
    ] = 1.5,
    tier: Annotated[str, option("ROOT", "The second tier: counts the saves that it lacks.")] = "",
    policy: Annotated[str, option("FILE.toml", "Show what a retention policy keeps.")] = "",
    scrub_every: Annotated[
        Duration, option("T", "Alert on a save that no scrub has read for T: 30d.")
    ] = "",
    ledger: Annotated[
        str, option("DIR", "Where verdicts are remembered; else .ftckpt/ in the root.")
    ] = "",
    prometheus: Annotated[str, option("FILE", "Write metrics for node_exporter, atomically.")] = "",
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> Status:
    """Show a run's checkpoint health: age, cadence, size, alerts.

    What is finished is told by names, when by modification times. Of the newest save the headers
    are read and its structure is checked; what is known of the content of any comes from the
    ledger of the root, which `ftckpt verify --remember` and others write. Several runs under one
    root are told one by one.

    Returns:
        Each run, with what to look at. Of `parts`: a `DividedWork`.

    Raises:
        NotFoundError: no such root, or nothing in it that a format knows.
        UsageError: it is one checkpoint, the tiers hold other runs, or the policy is none.
        UnavailableError, DeniedError: something could not be listed; nothing is concluded.
    """
    from ftckpt.health import Thresholds, judge, metrics
    from ftckpt.health.prometheus import unreadable
    from ftckpt.health.survey import with_newest, with_order
    from ftckpt.storage.local.atomic import write_over
    from ftckpt.storage.local.writable import check_file

    if parts:
        divided: Any = _divided(parts, stores, on)
        found: Status = divided
        return found
    if not root:
        raise UsageError("no ROOT was given", hint="or --parts PLACE for the parts of a check")
    on.report(target=root)
    expected = _positive(expect_interval, "--expect-interval")
    unread = _positive(scrub_every, "--scrub-every")
    if prometheus:
        check_file("--prometheus", prometheus)
    now = time.time()
    try:
        place, surveys = _surveys(root, now, stores, on.counter)
        surveys = _with_scrubs(
            [with_newest(with_order(one), now) for one in surveys], ledger, stores
        )
        urls = [one.url for one in surveys]
        second = _second(tier, urls, now, stores, on.counter) if tier else {}
    except FtckptError:
        if prometheus:  # a monitor must not go on with what was true once
            write_over(prometheus, unreadable(root, now).encode())
        raise
    found = judge(root, surveys, now, Thresholds(expected, late, slower, unread), second)
    if prometheus:  # before anything else can fail, or nobody reads the answer
        write_over(prometheus, metrics(found).encode())
    if policy:
        found = _judged_by(policy, found, place, on.counter)
    return replace(found, guard=_guard(surveys))


def _divided(place: str, stores: StoreOptions, on: Observer) -> DividedWork:
    from ftckpt.parts.finish import watch

    on.report(target=place)
    found = watch(place, stores)
    lost = [one for state in found for one in state.lost if not state.dead]
    if not lost:
        return DividedWork(found, ExitCode.OK, counted(len(found), "divided operation"), "")
    return DividedWork(
        found,
        ExitCode.PARTIAL,
        f"{counted(len(lost), 'part')} that ran said nothing for a while: part {lost[0].number}"
        f" on {lost[0].host} first",
        "run the same line again for them",
    )


def _guard(surveys: Sequence[Survey]) -> Mapping[str, object] | None:
    """Return the last decision of the root's guard; None without one, or where it is not read."""
    from ftckpt.guard.journal import last_decision

    runs = [one.run for one in surveys if one.run is not None]
    try:
        return last_decision(runs[0].root) if runs else None
    except FtckptError:
        return None


def _positive(value: Duration, flag: str) -> float | None:
    if value == "":
        return None
    found = seconds(value, flag)
    if found <= 0:
        raise UsageError(f"{flag} must be more than nothing")
    return found


def _with_scrubs(surveys: Sequence[Survey], ledger: str, stores: StoreOptions) -> list[Survey]:
    """Add what is remembered of the content of each run."""
    from ftckpt.verification.scrub import Scrub

    return [
        one
        if one.run is None
        else replace(one, scrub=Scrub(None, stores, ledger).history(one.run.root))
        for one in surveys
    ]


def _surveys(
    root: str, now: float, stores: StoreOptions, counter: Counter, only: str = ""
) -> tuple[Place, list[Survey]]:
    """List a place, every run of it; or the one entry that `only` names, where that says all.

    Raises:
        NotFoundError: there is nothing that a format knows.
        UsageError: it is one checkpoint, or one step of a root.
    """
    from ftckpt.discovery.candidates import nothing_known
    from ftckpt.discovery.resolve import locate, open_runs
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.health.survey import survey, survey_one
    from ftckpt.retention.scan.entry import ScanOptions, no_bases

    place = locate(root, stores)
    if place.which:
        raise UsageError(f"the root is wanted, not one step of it: {root}")
    # Nothing is dropped by what is read here, so that a delta need not be opened for its base.
    how = ScanOptions(FORMATS, now, bases=no_bases)
    runs = open_runs(place, FORMATS)
    for run in runs if only else ():
        one = survey_one(run, how, only, counter=counter)
        if one.held:
            return place, [one]
    found = [survey(one, how, counter=counter) for one in runs]
    if not any(held.entry.is_listed for one in found for held in one.held):
        raise nothing_known(runs[0], "name the directory whose children are the checkpoints")
    return place, found


def _second(
    tier: str, urls: Sequence[str], now: float, stores: StoreOptions, counter: Counter
) -> Mapping[str, Survey]:
    """Return the second tier of each run: of one run the place itself, of several by their names.

    Raises:
        UsageError: the tiers do not hold the same runs.
    """
    from ftckpt.discovery.resolve import locate
    from ftckpt.health import Survey

    try:
        _, there = _surveys(tier, now, stores, counter)
    except NotFoundError:
        # That nothing was copied yet is what is asked about. That the place is not there at all
        # may be a slip of the pen, or a mount that is gone: that is not an answer.
        there = [Survey(locate(tier, stores).store.describe(""), (), None, (), None)]
    if len(urls) == len(there) == 1:
        return {urls[0]: there[0]}
    by_name = {one.url.rstrip("/").rpartition("/")[2]: one for one in there}
    empty = Survey(tier, (), None, (), None)
    return {url: by_name.get(url.rstrip("/").rpartition("/")[2], empty) for url in urls}


def _judged_by(policy: str, found: Status, place: Place, counter: Counter) -> Status:
    """Add which saves a policy keeps, and which it thins, as `gc` would plan it."""
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.retention.apply.prepare import prepare

    from .retaining import policy_of_file

    chosen = policy_of_file(policy, found.url)
    runs = [run.survey.run for run in found.runs if run.survey.run is not None]
    prepared = prepare(place, FORMATS, chosen, found.now, runs=runs, counter=counter)
    fates = {d.entry.name: d for d in prepared.plan.decisions}

    def judged(held: SurveyedEntry) -> SurveyedEntry:
        fate = fates.get(held.entry.name)
        return held if fate is None else replace(held, keep=fate.keep, thin=fate.thin)

    surveys = [replace(r.survey, held=tuple(map(judged, r.survey.held))) for r in found.runs]
    runs_judged = (replace(r, survey=s) for r, s in zip(found.runs, surveys, strict=True))
    return replace(found, runs=tuple(runs_judged))


@dataclass(frozen=True)
class Examination:
    """What this machine, and a place, can do.

    Attributes:
        checks: what was tried or looked up, one by one.
        code: PARTIAL where one is a problem.
        message: how many of them are, or the first.
        hint: what to do about it.
    """

    checks: tuple[Check, ...]
    code: ExitCode = field(metadata=UNSAID)
    message: str = field(metadata=UNSAID)
    hint: str = field(metadata=UNSAID)


@operation(
    examples=(
        ("ftckpt doctor", "packages, processor, limits and GPUs of this machine"),
        (
            "ftckpt doctor /ckpt/run7",
            "and locks, hard links, renames, clock and room of its filesystem",
        ),
        (
            "ftckpt doctor s3://bucket/run7",
            "and conditions, versions, lifecycle rules of the bucket",
        ),
        (
            "ftckpt doctor /ckpt/run7 --json | jq '.checks[] | select(.state == \"problem\")'",
            "what to mend, for a script",
        ),
    ),
    codes={
        ExitCode.OK: "nothing that makes a verb fail or endangers a checkpoint",
        ExitCode.USAGE: "the place is a file",
        ExitCode.NOT_FOUND: "no such directory or bucket",
        ExitCode.UNAVAILABLE: "",
        ExitCode.DENIED: "the place cannot even be listed",
        ExitCode.UNSUPPORTED: "the package for this kind of URL is not installed",
        ExitCode.PARTIAL: "a problem: it is listed, with what to do",
    },
)
def doctor(
    root: Annotated[str, argument("[ROOT]", "Directory or URL to try; else the machine.")] = "",
    *,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> Examination:
    """Show what this machine and a place can do, and what is wrong.

    Each line was tried or looked up, and says what follows from it. A place is tried with small
    files of our own, which are removed again; those of a killed run go with the next one. A note is
    something to know; a problem makes a verb fail or endangers a checkpoint.

    Raises:
        NotFoundError, UsageError: it does not exist, or is a file.
        DeniedError, UnavailableError: nothing of it can be read.
        MissingPackageError: the package for this kind of URL is not installed.
    """
    from ftckpt.capabilities import State, examine

    on.report(target=root or None, checks=[])
    checks: list[Check] = []
    for check in examine(root, stores=stores):
        checks.append(check)
        on.report(checks=checks)
    problems = [one for one in checks if one.state is State.PROBLEM]
    if not problems:
        notes = counted(sum(one.state is State.NOTE for one in checks), "note")
        return Examination(tuple(checks), ExitCode.OK, f"no problem, {notes}", "")
    first, *rest = problems
    more = f" (and {len(rest)} more)" if rest else ""
    said = f"{first.name}: {first.found}: {first.means}{more}"
    return Examination(tuple(checks), ExitCode.PARTIAL, said, first.do)
