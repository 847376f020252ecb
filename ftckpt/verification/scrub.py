"""Read a root's checkpoints in turn, over many runs: a record of what was read, and when.

The record is one JSON file, `.ftckpt/scrub.json` below the root or a file that the user names. It
has the verdict on each checkpoint, bound to the identity of its files (`receipts.fingerprint`), so
a checkpoint that was saved again or repaired counts as never read. It holds no evidence: `latest`
does not believe it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.open_part import files_of
from ftckpt.errors import (
    CorruptError,
    ExitCode,
    FtckptError,
    NewerWriterError,
    NotFoundError,
    UsageError,
)
from ftckpt.own_files import FOLDER
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.remotes import split
from ftckpt.storage.store import Store, join
from ftckpt.strict_json import decode

from .receipts import fingerprint

if TYPE_CHECKING:
    from ftckpt.discovery.roots import Child, Root

SCHEMA = "ftckpt.scrub/1"
_NAME = f"{FOLDER}/scrub.json"
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ScrubRecord:
    """The last check of one checkpoint.

    Attributes:
        checked: when it ended, in seconds since the epoch.
        code: its exit code.
        message: the verdict in a sentence.
        nbytes: bytes read.
        seconds: how long it took.
        fingerprint: of its files before they were read.
        proven: whether its content was read and held to evidence; if not, because there is none or
            a share was enough, nobody has verified its bytes.
    """

    checked: float
    code: int
    message: str
    nbytes: int
    seconds: float
    fingerprint: str
    proven: bool = True


class ScrubSummary(NamedTuple):
    """How far a scrub has come.

    Attributes:
        state: the record's path or URL.
        checkpoints: number in the root; those that are not committed do not count.
        checked: number that this run has read.
        never: number that no run has read as they are now.
        oldest: when the one that was not read for longest was read, in seconds since the epoch;
            None if one was never read.
        unproven: number of those that were opened, and whose content no evidence covers.
    """

    state: str
    checkpoints: int
    checked: int
    never: int
    oldest: float | None
    unproven: int = 0


class ScrubHistory(NamedTuple):
    """What the runs of a scrub have found so far.

    Attributes:
        state: the record's path or URL.
        checks: by the path or URL of each committed checkpoint, the last check of its files as
            they are now; None if they were never read.
    """

    state: str
    checks: dict[str, ScrubRecord | None]


class _Turn(NamedTuple):
    """One checkpoint that may be read."""

    child: Child
    fingerprint: str
    nbytes: int


@dataclass
class Scrub:
    """One run over a root.

    Attributes:
        state: path or URL of the record; "" for beside the root.
        budget: seconds after which no further checkpoint is begun; None for no limit.
        stores: how to reach object stores.
        passed_over: names that are not committed.
    """

    state: str
    budget: float | None
    stores: StoreOptions
    passed_over: list[str] = field(default_factory=list)

    def turns(self, root: Root) -> Iterator[Child]:
        """Yield the checkpoints that were not read for longest, until the budget is spent.

        The first is always read; a further one only if the time that is left is enough for its
        bytes, at the speed so far.

        Raises:
            CorruptError: the record cannot be read.
            DeniedError, NoResourceError: it cannot be written.
            UnsupportedError: the store shows nothing that changes with a file's content.
        """
        began = time.monotonic()
        self._store, self._path = self._place(root)
        self._known = self._read()
        self._write()  # what cannot be remembered is not begun
        self._turns = {turn.child.candidate.path: turn for turn in self._all(root)}
        self._done: set[str] = set()
        for name in sorted(self._turns, key=self._last):
            if self._done and self.budget is not None:
                left = self.budget - (time.monotonic() - began)
                if left <= self._turns[name].nbytes / self._speed():
                    return
            yield self._turns[name].child

    def record(
        self, child: Child, code: ExitCode, message: str, nbytes: int, took: float, *, proven: bool
    ) -> None:
        """Remember a verdict (see `ScrubRecord`); a killed run loses the one it was at.

        Raises:
            FtckptError: the record could not be written.
        """
        name = child.candidate.path
        self._done.add(name)
        turn = self._turns[name]
        known = self._read()  # another run may have written since
        self._known = {one: known[one] for one in known if one in self._turns}
        self._known[name] = ScrubRecord(
            time.time(), int(code), message, nbytes, took, turn.fingerprint, proven
        )
        self._write()

    def remembered(self) -> list[tuple[Child, ScrubRecord]]:
        """Return the checkpoints that an earlier run found bad and that this one did not read."""
        return [
            (turn.child, checked)
            for name, turn in self._turns.items()
            if name not in self._done
            if (checked := self._valid(name)) is not None and checked.code != ExitCode.OK
        ]

    def history(self, root: Root) -> ScrubHistory | None:
        """Return what earlier runs have found; None if no run has read anything here.

        Raises:
            CorruptError: the record cannot be read.
            UnsupportedError: the store shows nothing that changes with a file's content.
        """
        self._store, self._path = self._place(root)
        self._known = self._read()
        if not self._known:
            return None
        self._turns = {turn.child.candidate.path: turn for turn in self._all(root)}
        found = {
            root.url_of(turn.child.candidate): self._valid(name)
            for name, turn in self._turns.items()
        }
        return ScrubHistory(self._store.describe(self._path), found)

    def summary(self) -> ScrubSummary:
        """Return how far the scrub has come."""
        valid = [self._valid(name) for name in self._turns]
        times = [one.checked for one in valid if one is not None]
        never = len(valid) - len(times)
        oldest = min(times) if times and not never else None
        url = self._store.describe(self._path)
        unproven = sum(one is not None and not one.proven for one in valid)
        return ScrubSummary(url, len(valid), len(self._done), never, oldest, unproven)

    def _place(self, root: Root) -> tuple[Store, str]:
        if not self.state:
            return root.store, join(root.base, _NAME)
        parent, name = split(self.state)
        return open_store(parent, self.stores), name

    def _all(self, root: Root) -> Iterator[_Turn]:
        for child in root.children():
            if any(part.recognition.commit is CommitState.UNCOMMITTED for part in child.parts):
                self.passed_over.append(root.url_of(child.candidate))
                continue
            marks, nbytes = [], 0
            for part in child.parts:
                try:
                    source = files_of(root.store, part.entry)
                    marks.append(fingerprint(source))
                    nbytes += sum(entry.size for entry in source.entries.values())
                except NotFoundError:
                    continue  # removed meanwhile: the check says so
            yield _Turn(child, "+".join(marks), nbytes)

    def _valid(self, name: str) -> ScrubRecord | None:
        """Return the last check of a checkpoint, if its files are still the same."""
        checked = self._known.get(name)
        same = checked is not None and checked.fingerprint == self._turns[name].fingerprint
        return checked if same and self._turns[name].fingerprint else None

    def _last(self, name: str) -> float:
        checked = self._valid(name)
        return 0.0 if checked is None else checked.checked

    def _speed(self) -> float:
        """Return the bytes a second of this run so far."""
        done = [self._known[name] for name in self._done if name in self._known]
        nbytes, seconds = sum(one.nbytes for one in done), sum(one.seconds for one in done)
        return max(nbytes, 1) / max(seconds, 1e-3)

    def _read(self) -> dict[str, ScrubRecord]:
        try:
            size = self._store.stat(self._path).size
            data = self._store.read(self._path, 0, min(size, _MAX_BYTES))
        except NotFoundError:
            return {}
        try:
            body = decode(data)
            if isinstance(body.get("schema"), str) and body["schema"] != SCHEMA:
                url = self._store.describe(self._path)
                raise NewerWriterError.of(
                    f"the schema of {url}", expected=SCHEMA, found=body["schema"][:80], file=url
                )
            if body.get("schema") != SCHEMA:
                raise ValueError("it has no schema")
            known = {name: ScrubRecord(**one) for name, one in body["checkpoints"].items()}
            for one in known.values():
                ExitCode(one.code)
                if type(one.proven) is not bool or not all(
                    isinstance(n, (int, float)) for n in (one.checked, one.nbytes, one.seconds)
                ):
                    raise ValueError("a number is none")
            return known
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            url = self._store.describe(self._path)
            raise CorruptError(
                f"{url} is not the record of a scrub: {error}",
                hint="remove it, and every checkpoint is read anew",
                file=url,
            ) from error

    def _write(self) -> None:
        kept = {name: asdict(one) for name, one in sorted(self._known.items())}
        body = {"schema": SCHEMA, "checkpoints": kept}
        try:
            self._store.put(self._path, json.dumps(body, indent=1).encode() + b"\n")
        except FtckptError as error:
            if not self.state:
                error.hint = f"{error.hint}; " if error.hint else ""
                error.hint += "--state FILE keeps the record elsewhere"
            raise


def scrubbing(
    oldest_first: bool, state: str, budget: float | None, stores: StoreOptions
) -> Scrub | None:
    """Return the scrub that the flags ask for; None if they ask for none.

    Raises:
        UsageError: a budget or a record without `--oldest-first`, or a budget of nothing.
    """
    if not oldest_first:
        if state or budget is not None:
            raise UsageError(f"{'--state' if state else '--budget'} needs --oldest-first")
        return None
    if budget is not None and budget <= 0:
        raise UsageError("--budget must be more than nothing")
    return Scrub(state, budget, stores)
