"""The root of a guarded command: which checkpoint it starts from, and what is kept in it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ftckpt.alerting import AlertHook
from ftckpt.checkpoint import Checkpoint
from ftckpt.discovery.select import Note, Selection, SelectionRules, select
from ftckpt.errors import (
    ExitCode,
    FtckptError,
    MissingError,
    NotFoundError,
    RefusedError,
    UsageError,
)
from ftckpt.findings import CheckLevel
from ftckpt.guard.alarm import Alarm
from ftckpt.guard.journal import GuardJournal, log_of, of_place
from ftckpt.guard.lock import WAIT, Hold, held
from ftckpt.guard.nodes import NodePlace, team_of
from ftckpt.guard.run import Guard
from ftckpt.guard.terms import Ended, GuardSettings, StartPoint
from ftckpt.guard.watch import CheckedSave, NewSave, SaveWatcher, Shown, Verifier, shown
from ftckpt.observer import SILENT, Observer
from ftckpt.progress import Counter
from ftckpt.storage import StoreOptions

from .choosing import (
    ChoiceFlags,
    checks_of,
    condition_of,
    read_root,
    read_tiers,
    selection_rules,
)
from .opening import STORES, opened

if TYPE_CHECKING:
    from ftckpt.discovery.checks import Checks
    from ftckpt.discovery.roots import Root

# Whose pin keeps the last known good checkpoint.
OWNER = "ftckpt-guard"
_REASON = "the last known good checkpoint of a running job"
# Seconds after which a save that has not changed is not waited for any more: nobody writes it.
QUIET = 60.0
_SUSPECTED = "was started from twice without a newer save"
_TAKE_IT = "--retry-suspected starts from it again"
# A filesystem that does not take this many bytes is full.
_LEAST_SPACE = 1 << 20


@dataclass(frozen=True)
class GuardChoice:
    """Which checkpoint a guarded command starts from.

    Attributes:
        root: directory or URL that holds the checkpoints.
        tiers: further places of the same run: damage is mended from them, and the newest that
            passes anywhere is taken.
        level: how deep each checkpoint is checked.
        timeout: seconds to wait for a save in flight.
        allow_missing_tier: choose although a tier is away.
        skip_unverified: walk back over those without evidence: saves that were killed before
            they were sealed.
        world: ranks of the job; None if its checkpoints load at any.
        scratch: where a checkpoint is resharded to, if it must be.
        reader: whether the job loads with `ftckpt.torch.Reader`, so that nothing is resharded.
        batch, lr, accumulation: of the run so far, for advice when the world has changed.
        limit_rate: bytes a second of the verification beside the training.
        flags: which checkpoints count.
    """

    root: str
    tiers: Sequence[str] = ()
    level: CheckLevel = CheckLevel.CONTENT
    timeout: float = 600.0
    allow_missing_tier: bool = False
    skip_unverified: bool = False
    world: int | None = None
    scratch: str = ""
    reader: bool = False
    batch: int | None = None
    lr: float | None = None
    accumulation: int = 1
    limit_rate: float | None = None
    flags: ChoiceFlags = field(default_factory=ChoiceFlags)


def guarded(
    command: Sequence[str],
    choice: GuardChoice,
    settings: GuardSettings | None = None,
    *,
    wait_lock: float = WAIT,
    no_lock: bool = False,
    node: NodePlace | None = None,
    retry_suspected: bool = False,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
    told: Callable[[GuardJournal], None] = lambda _: None,
) -> Ended:
    """Start a job from its newest good checkpoint, watch it, and restart it.

    Args:
        command: the training; `{}` is the path of the checkpoint.
        choice: which checkpoint it starts from.
        settings: how it is watched and restarted.
        wait_lock: seconds to wait for another guard of the root to end.
        no_lock: do not exclude other guards.
        node: this guard's place among those of one job; None if it is alone.
        retry_suspected: forget which checkpoints failed twice before.
        stores: how to reach object stores.
        on: is told what happens, and what must be seen.
        told: is given the log, whose `own` events are this guard's.

    Raises:
        MissingError: the root is not there, or not known to be one.
        RefusedError: another guard holds the root.
        UnavailableError, DeniedError: the root could not be read.
    """
    from ftckpt.retention.records.who import actor

    if not command:
        raise UsageError("no command to guard", hint="ftckpt guard ROOT -- COMMAND...")
    how = settings or GuardSettings()
    place, warn = _Place(choice, how, stores, on), on.warn
    with ExitStack() as held_here:
        try:
            root = place.read()
            own = of_place(root)
            follows = node is not None and node.rank > 0
            hold = Hold()
            if not (no_lock or follows):
                hold = held_here.enter_context(held(root, actor(), wait=wait_lock, say=warn))
            journal = GuardJournal(own, warn, log_of(node.rank if node is not None else 0))
            told(journal)
            place.also = hold.also
            journal.load()
            if retry_suspected:
                journal.add("cleared")
        except FtckptError as error:
            alarm = Alarm(AlertHook(how.on_alert, how.alert_url), choice.root, warn)
            alarm.raise_("no-start", error.message)
            alarm.close()
            raise
        folder = held_here.enter_context(tempfile.TemporaryDirectory(prefix="ftckpt-guard-"))
        return Guard(
            command, place, how, journal, hold, folder, on.note, warn,
            team_of(own, node, choice.timeout),
        ).run()  # fmt: skip


@dataclass
class _Place:
    """The root of a guarded command, with the formats and stores that it needs."""

    choice: GuardChoice
    how: GuardSettings
    stores: StoreOptions
    on: Observer
    listed: Shown = field(default_factory=dict)
    started: bool = False
    also: Callable[[Root], None] = lambda _: None

    def watcher(
        self,
        before: Shown,
        verifier: Verifier,
        tell: Callable[[NewSave | CheckedSave], None],
        since: int | None,
    ) -> SaveWatcher:
        """Return the thread that looks for saves."""
        return SaveWatcher(
            self.read, before, verifier.verify, tell,
            every=self.how.every, settled=self.how.settled, since=since,
        )  # fmt: skip

    def begun(self) -> Shown:
        """Return what the root showed when the command began, which is now."""
        self.started = True
        return self.listed

    def read(self) -> Root:
        """Read the root anew, and hold the place of its steps too."""
        root = read_root(self.choice.root, self.stores)
        self.also(root)
        return root

    def verifier(self) -> Verifier:
        """Return what verifies a save beside the training."""
        given = self.stores._asdict()
        flags = [f"--retry-seconds={given.pop('retry_seconds')}"]
        given.pop("timeout")
        for name, value in given.items():
            flag = f"--{name.replace('_', '-')}"
            if value:
                flags += [flag] if value is True else [f"{flag}={value}"]
        if self.choice.limit_rate:
            flags.append(f"--limit-rate={self.choice.limit_rate:.0f}B/s")
        if self.choice.level is not CheckLevel.STRUCTURE:
            flags.append("--remember")
            if self.choice.flags.get("ledger"):
                flags.append(f"--ledger={self.choice.flags['ledger']}")
        return Verifier(flags, self.choice.level.value)

    def full(self) -> str:
        """Return in words why the root's filesystem takes no more bytes; "" if it takes some."""
        from ftckpt.storage.local.writable import full_because

        try:
            path = self.read().store.local_path()
        except FtckptError:
            return ""
        why = "" if path is None else full_because(path, _LEAST_SPACE)
        return why and f"the filesystem of {self.choice.root} is full: {why}"

    def interval(self) -> float | None:
        """Return the usual seconds between saves; None if too few show."""
        from .surveying import status

        with suppress(FtckptError):
            runs = status(self.choice.root, stores=self.stores).runs
            return runs[0].rhythm.interval_s if runs else None
        return None

    def keep(self, name: str) -> None:
        """Pin an entry as the last known good; the pin before goes once this one stands."""
        from ftckpt.retention.records import pins

        try:
            root = self.read()
            pins.pin(root, name, owner=OWNER, reason=_REASON, now=time.time())
            for old in pins.pins(root):
                if old.owner == OWNER and old.entry != name:
                    with suppress(NotFoundError):
                        pins.unpin(root, old.entry, owner=OWNER)
        except FtckptError as error:
            self.on.warn(f"guard: {name} is not pinned: {error.message}")

    def choose(self, suspected: frozenset[str]) -> StartPoint:
        """Return what the command starts from.

        Raises:
            FtckptError: the root could not be read, or the resharding failed.
        """
        try:
            return self._choose(suspected)
        except MissingError:
            raise
        except NotFoundError as error:  # 9 would be taken for a fresh start
            raise RefusedError(f"it went while it was read: {error.message}") from error

    def _choose(self, suspected: frozenset[str]) -> StartPoint:
        looked = _Looks(suspected)
        flags, told = self.choice.flags, _Remarks(self.on)
        check = checks_of(self.choice.level, flags, self.stores, told)
        looked.check = check
        rules = replace(
            selection_rules(
                flags,
                condition_of(flags, told),
                skip_unverified=self.choice.skip_unverified,
            ),
            passed_over=looked.passed_over,
        )
        repaired: list[str] = []
        tried: set[str] = set()
        while True:
            found = self._select(looked, rules)
            broken = [
                one.path
                for one in found.skipped
                if one.code is ExitCode.CORRUPT and one.path not in tried
            ]
            mended = False
            for path in broken:
                tried.add(path)
                if self._repair(path):
                    repaired.append(path)
                    mended = True
                    break
            if not mended:
                break
        if found.path is None:
            return self._nothing(found, looked, rules, repaired)
        return self._start(found, looked, repaired)

    def _select(self, looked: _Looks, rules: SelectionRules) -> Selection:
        from ftckpt.discovery.tiers import select_tiers, select_waiting

        def read() -> Root:
            root = self.read()
            self.listed = shown(root)
            return root

        # With tiers the second look says what was passed over.
        note: Note = (lambda _: None) if self.choice.tiers else self.on.warn
        # After its own command no save is in flight: every process of it has ended.
        left = 0.0 if self.started else self.choice.timeout
        notes: list[str] = []
        found = select(read(), looked, rules, notes.append)
        while found.pending and left > 0:
            seen, wait = self._in_flight(found), min(QUIET, left)
            notes.clear()
            found = select_waiting(read, looked, rules, wait, notes.append, say=self.on.note)
            left -= wait
            if self._in_flight(found) == seen:
                break  # nobody writes it
        for line in notes:
            note(line)
        if not self.choice.tiers or found.code in (ExitCode.UNAVAILABLE, ExitCode.DENIED):
            return found
        tiers = read_tiers([self.choice.root, *self.choice.tiers], self.stores)
        return select_tiers(
            tiers, looked, rules, self.on.warn, allow_missing=self.choice.allow_missing_tier
        ).chosen

    def _in_flight(self, found: Selection) -> object:
        """Return what shows whether somebody still writes the saves that are not finished."""
        store = self.read().store
        files = []
        for one in found.pending:
            with suppress(FtckptError):
                entries = store.walk(one.entry.path)
                files += [(e.path, e.size, e.mtime) for e in entries] or [(one.path, 0, None)]
        return files

    def _entry(self, path: str) -> str:
        """Return the name of a checkpoint in the root; "" if it lies elsewhere."""
        root = self.read()
        start = root.url.rstrip("/") + "/"
        return path[len(start) :] if path.startswith(start) else ""

    def _repair(self, path: str) -> bool:
        """Mend a damaged checkpoint of the root from the first tier that can."""
        from .replicating import repair

        name = self._entry(path) if self.choice.tiers else ""
        if not name:
            return False
        for tier in self.choice.tiers:
            replica = f"{tier.rstrip('/')}/{name}"
            try:
                report = repair(path, replica, stores=self.stores, on=Observer(self.on.counter))
            except FtckptError as error:
                self.on.warn(f"guard: {path} is not mended from {replica}: {error.message}")
                continue
            self.on.warn(f"guard: {path} was damaged, and is mended from {replica}")
            if report.kept:
                self.on.note(f"guard: the damaged files are in {report.kept}")
            return True
        return False

    def _nothing(
        self, found: Selection, looked: _Looks, rules: SelectionRules, repaired: Sequence[str]
    ) -> StartPoint:
        skipped = _skipped(found)
        others = {one.code for one in found.skipped if _SUSPECTED not in one.message}
        if looked.refused and all(rules.walks_over(code) for code in others):
            return StartPoint(
                ExitCode.REFUSED,
                f"every checkpoint that passes {_SUSPECTED}: {', '.join(sorted(looked.refused))}",
                "the fault may be in the command, or in what all of them hold; once it is mended, "
                "--retry-suspected starts from the newest again",
                skipped=skipped,
            )
        return StartPoint(
            found.code, found.message, found.hint, skipped=skipped, repaired=tuple(repaired)
        )

    def _start(self, found: Selection, looked: _Looks, repaired: Sequence[str]) -> StartPoint:
        from .restarting import Job, loadable

        assert found.path is not None
        entry = self._entry(found.path)
        if entry:
            self.keep(entry)
        path, environment = found.path, {}
        if self.choice.world is not None:
            environment = self._elastic(found.path)
            job = Job(
                self.choice.world, {}, self.choice.scratch, reader=self.choice.reader,
                stores=self.stores,
            )  # fmt: skip
            path = loadable(found.path, job, _Remarks(self.on)).path
        return StartPoint(
            ExitCode.OK, found.message, "", path, found.step, found.path,
            looked.identity(found.path), entry, _skipped(found), tuple(repaired), environment,
        )  # fmt: skip

    def _elastic(self, path: str) -> dict[str, str]:
        """Print and export what to do about the batch, if the world has changed."""
        import json
        from dataclasses import asdict

        from ftckpt.planning.models import arithmetic

        before, now = opened(path, self.stores).topology.world_size, self.choice.world
        batch, lr = self.choice.batch, self.choice.lr
        if before is None or now is None or before == now:
            return {}
        told: dict[str, object] = {"from": before, "to": now, "options": []}
        self.on.warn(f"guard: {path} was written by {before} ranks, and {now} start from it")
        if batch is not None and lr is not None:
            try:
                ways = arithmetic.options(before, now, batch, lr, self.choice.accumulation)
            except UsageError as error:
                self.on.warn(f"guard: no advice on the batch: {error.message}")
                ways = ()
            for way in ways:
                self.on.note(
                    f"guard: {way.name}: {way.per_gpu} a GPU, {way.accumulation} passes, batch "
                    f"{way.batch}, lr {way.lr_linear:.4g} (linear) or {way.lr_sqrt:.4g} (sqrt)"
                )
            told["options"] = [asdict(way) for way in ways]
        return {"FTCKPT_ELASTIC": json.dumps(told)}


class _Remarks(Observer):
    """Hands on what is told as remarks, and nothing of what is reported."""

    def __init__(self, on: Observer) -> None:
        self._on = on

    @property
    def counter(self) -> Counter:
        return self._on.counter

    def note(self, text: str) -> None:
        self._on.note(text)

    def warn(self, text: str) -> None:
        self._on.note(text)


@dataclass
class _Looks:
    """The check of one choice; what has not changed is not read a second time.

    Attributes:
        suspected: identities of checkpoints that are not started from.
        check: verifies an open checkpoint.
        refused: the URLs that were passed over because they are suspected.
        identities: by the URL of each checkpoint that was looked at.
    """

    suspected: frozenset[str]
    check: Checks | None = None
    refused: set[str] = field(default_factory=set)
    identities: dict[str, str] = field(default_factory=dict)
    _answers: dict[str, tuple[ExitCode, str]] = field(default_factory=dict)

    def passed_over(self, checkpoint: Checkpoint) -> str:
        """Return why the command is not started from a checkpoint; "" if it may be."""
        url = checkpoint.source.url
        self.identities[url] = identity_of(checkpoint)
        if self.identities[url] not in self.suspected:
            return ""
        self.refused.add(url)
        return f"{_SUSPECTED} ({_TAKE_IT})"

    def __call__(self, checkpoint: Checkpoint, root: Root) -> tuple[ExitCode, str]:
        assert self.check is not None
        identity = self.identities.get(checkpoint.source.url, "")
        if identity in self._answers:
            return self._answers[identity]
        answer = self.check(checkpoint, root)
        if identity and answer[0] in (ExitCode.OK, ExitCode.CORRUPT):
            self._answers[identity] = answer
        return answer

    def identity(self, path: str) -> str:
        """Return that of the first checkpoint at a path."""
        inside = sorted(u for u in self.identities if (u + "/").startswith(path.rstrip("/") + "/"))
        return self.identities[inside[0]] if inside else ""


def identity_of(checkpoint: Checkpoint) -> str:
    """Return a digest of where a checkpoint lies, and of its files as they are now."""
    import xxhash

    from ftckpt.discovery.ledger import identity_of_files
    from ftckpt.errors import UnsupportedError

    source = checkpoint.source
    try:
        files = identity_of_files(source)
    except UnsupportedError:  # a store without ETags
        files = repr(sorted((n, e.size, e.mtime) for n, e in source.entries.items()))
    told = repr([source.url, files]).encode("utf-8", "surrogateescape")
    return xxhash.xxh3_64_hexdigest(told)


def _skipped(found: Selection) -> tuple[str, ...]:
    return tuple(f"{one.path}: {one.code.name}: {one.message}" for one in found.skipped)
