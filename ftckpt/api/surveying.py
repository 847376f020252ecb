"""The checkpoints of a run, how they and the machine are doing: `ls`, `status`, `doctor`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.errors import FtckptError, NotFoundError, UsageError
from ftckpt.formats.catalog import FORMATS
from ftckpt.progress import NULL, Counter
from ftckpt.storage import StoreOptions

from .opening import STORES, seconds

if TYPE_CHECKING:
    from ftckpt.capabilities import Check
    from ftckpt.discovery.resolve import Place
    from ftckpt.health import Status, Survey
    from ftckpt.retention.scan.entries import EntryVerdict, Pin


class ListedCheckpoint(NamedTuple):
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
        entry_class: see `EntryClass`; `NO MARKER` where the format has no commit marker.
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
    entry_class: str
    why: str
    sealed: bool
    verified: bool
    verdict: EntryVerdict | None
    pointers: tuple[str, ...]
    tags: tuple[str, ...]
    pins: tuple[Pin, ...]


def ls(
    path: str = ".",
    *,
    all_: bool = False,
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
) -> tuple[ListedCheckpoint, ...]:
    """List the checkpoints of a root, the newest first; no checkpoint is opened.

    Args:
        path: directory or URL that holds the checkpoints, of one run or several; of one checkpoint
            its own row alone.
        all_: foreign names and the trash, too.
        stores: how to reach object stores.
        counter: is told of the work.

    Raises:
        NotFoundError: no such root, or nothing in it that a format knows.
        UsageError: it is a file that belongs to a checkpoint, or a part of one.
        UnsupportedError: nothing in it, or the one checkpoint that it is, is read.
        UnavailableError, DeniedError: something could not be listed.
    """
    from ftckpt.retention.apply.check import verified_names
    from ftckpt.retention.document import shown_class
    from ftckpt.retention.scan.entries import EntryClass

    now = time.time()
    only = ""
    try:
        _, surveys = _surveys(path, now, stores, counter)
    except UsageError as error:
        root, only = _root_around(path, stores)
        if not only:
            raise
        try:
            _, surveys = _surveys(root, now, stores, counter)
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
    return tuple(found)


def _root_around(path: str, stores: StoreOptions) -> tuple[str, str]:
    """Return the root that one checkpoint is in, and its name there; "" where it is none.

    Raises:
        UnsupportedError: it is a checkpoint of a format that is not read.
    """
    from ftckpt.discovery.resolve import open_target
    from ftckpt.storage.remotes import split

    target = open_target(path, FORMATS, stores)
    place = target.place
    if target.part is not None and not target.part.recognition.supported:
        target.open()
    if target.root is not None and place.which:
        from ftckpt.discovery.candidates import choose_child

        return place.url, choose_child(target.root, place.which).candidate.path
    local = place.store.local_path(place.entry.path)
    # `.` has no name of its own.
    url = os.path.abspath(path) if local is not None and split(path)[1] in ("", ".", "..") else path
    return split(url.rstrip("/")) if target.part is not None else ("", "")


def status(
    root: str,
    *,
    expect_interval: float | str = "",
    late: float = 2.0,
    slower: float = 1.5,
    tier: str = "",
    policy: str = "",
    scrub_every: float | str = "",
    ledger: str = "",
    prometheus: str = "",
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
) -> Status:
    """Show a run's checkpoint health: newest saves, age, cadence, size, alerts.

    Told by listings, by the structure of the newest save, and by the ledger of the root.

    Args:
        root: directory or URL that holds the checkpoints, of one run or several.
        expect_interval: seconds, or a text: how often a save is due; "" for as measured.
        late: alert above this number of intervals without a save.
        slower: alert when saves take this many times as long.
        tier: the second tier: what is not there is counted.
        policy: a retention.toml; `kept` says what it keeps.
        scrub_every: seconds, or a text: in which a scrub should read everything; "" for no alert.
        ledger: directory or URL of the ledger of verdicts; "" for that of each root.
        prometheus: a file to write metrics to, atomically, also where the root cannot be read.
        stores: how to reach object stores.
        counter: is told of the work.

    Raises:
        NotFoundError: no such root, or nothing in it that a format knows.
        UsageError: it is one checkpoint, the tiers hold other runs, or the policy is none.
        UnavailableError, DeniedError: something could not be listed; nothing is concluded.
    """
    from ftckpt.health import Thresholds, judge, metrics
    from ftckpt.health.prometheus import unreadable
    from ftckpt.health.survey import with_newest, with_order
    from ftckpt.storage.local.atomic import write_over

    expected = _positive(expect_interval, "--expect-interval")
    unread = _positive(scrub_every, "--scrub-every")
    now = time.time()
    try:
        place, surveys = _surveys(root, now, stores, counter)
        surveys = _with_scrubs(
            [with_newest(with_order(one), now) for one in surveys], ledger, stores
        )
        urls = [one.url for one in surveys]
        second = _second(tier, urls, now, stores, counter) if tier else {}
    except FtckptError:
        if prometheus:  # a monitor must not go on with what was true once
            write_over(prometheus, unreadable(root, now).encode())
        raise
    found = judge(root, surveys, now, Thresholds(expected, late, slower, unread), second)
    if prometheus:  # before anything else can fail, or nobody reads the answer
        write_over(prometheus, metrics(found).encode())
    if not policy:
        return found
    kept, thins = _kept(root, place, surveys, policy, now, counter)
    return replace(found, kept=kept, thins=thins)


def _positive(value: float | str, flag: str) -> float | None:
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
    root: str, now: float, stores: StoreOptions, counter: Counter
) -> tuple[Place, list[Survey]]:
    """List a place, every run of it.

    Raises:
        NotFoundError: there is nothing that a format knows.
        UsageError: it is one checkpoint, or one step of a root.
    """
    from ftckpt.discovery.candidates import nothing_known
    from ftckpt.discovery.resolve import locate, open_runs
    from ftckpt.health.survey import survey
    from ftckpt.retention.scan.entry import ScanOptions, no_bases

    place = locate(root, stores)
    if place.which:
        raise UsageError(f"the root is wanted, not one step of it: {root}")
    # Nothing is dropped by what is read here, so that a delta need not be opened for its base.
    how = ScanOptions(FORMATS, now, bases=no_bases)
    runs = open_runs(place, FORMATS)
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


def _kept(
    root: str,
    place: Place,
    surveys: Sequence[Survey],
    policy: str,
    now: float,
    counter: Counter,
) -> tuple[Mapping[str, bool], frozenset[str]]:
    """Return by name which entries a policy keeps, and which it thins, as `gc` would plan it."""
    from ftckpt.retention.apply.prepare import prepare

    from .retaining import policy_of_file

    chosen = policy_of_file(policy, root)
    runs = [one.run for one in surveys if one.run is not None]
    prepared = prepare(place, FORMATS, chosen, now, runs=runs, counter=counter)
    decisions = prepared.plan.decisions
    thins = frozenset(d.entry.name for d in decisions if d.thin)
    return {d.entry.name: d.keep for d in decisions}, thins


def doctor(root: str = "", *, stores: StoreOptions = STORES) -> list[Check]:
    """Try what this machine, and a place, can do (see `ftckpt.capabilities.examine`).

    Args:
        root: directory or URL; "" for the machine alone.
        stores: how to reach object stores.

    Raises:
        NotFoundError, UsageError: it does not exist, or is a file.
        DeniedError, UnavailableError: nothing of it can be read.
        MissingPackageError: the package for this kind of URL is not installed.
    """
    from ftckpt.capabilities import examine

    return list(examine(root, stores=stores))
