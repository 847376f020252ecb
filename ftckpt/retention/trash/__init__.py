"""The trash of a root: dropped entries can be restored until they are freed.

    20261121T031500.123456Z~step-100        dropped then, and can be restored
    20261121T031500.123456Z!step-100        being freed; not to be trusted

The name alone holds what undelete needs, so a full disk cannot prevent it. Local roots rename
(`trash.local`); object stores cannot (`trash.remote`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import ClassVar, NamedTuple, Protocol

from ftckpt.discovery.step_names import step_in_name
from ftckpt.errors import FtckptError
from ftckpt.reports import UNSAID
from ftckpt.retention.policy.plan import Decision
from ftckpt.retention.scan.entry import ScannedEntry
from ftckpt.storage.store import join

FOLDER = "trash"
# Prefix of names in the root itself, used if no trash directory can be made.
BESIDE = ".ftckpt-trash-"

_STAMP = "%Y%m%dT%H%M%S.%fZ"
_NAME = r"(?s)([0-9]{8}T[0-9]{6}\.[0-9]{6}Z)([~!])(.+)"


@dataclass(frozen=True, slots=True)
class Trashed:
    """A dropped entry that is not freed yet.

    Attributes:
        name: its old name, relative to the run's root.
        time: when it was dropped, in seconds since the epoch, by that machine's clock.
        group: the path of its run's root in the store.
        path: its present path in the store.
        erasing: whether it is being freed and cannot be restored.
        written: when its record was written, in seconds since the epoch, by the store's clock,
            which a name cannot forge; None where it has no record.
    """

    SAID: ClassVar = {"id": "id", "name": "entry", "step": "step"}

    name: str = field(metadata=UNSAID)
    time: float
    group: str = field(metadata=UNSAID)
    path: str
    erasing: bool = False
    written: float | None = field(default=None, metadata=UNSAID)

    @property
    def id(self) -> str:
        """Return its unique name in the trash: `20261121T031500.123456Z~step-100`."""
        return trash_name(self.name, self.time)

    @property
    def entry(self) -> str:
        """Return the name that the entry had in plans (`RootEntry.name`)."""
        return join(self.group, self.name)

    @property
    def step(self) -> int | None:
        """Return the step of its name."""
        return step_in_name(self.name)


class Erased(NamedTuple):
    """The result of freeing one thing.

    Attributes:
        nbytes: bytes of removed files that had no other name.
        errors: failures by path; empty if all is gone.
    """

    nbytes: int
    errors: Mapping[str, FtckptError]


class Trash(Protocol):
    """The trash of one root. Methods that change it are called within `lock`."""

    def lock(self, actor: str, now: float) -> AbstractContextManager[None]:
        """Exclude every other gc of this root; others see `actor`.

        A killed holder blocks others for at most half an hour. If a lock can be lost, every change
        checks it first and raises RefusedError.

        Raises:
            RefusedError: another holds it.
            UnsupportedError: the store cannot exclude other writers.
            UnsafeError: a link stands in place of the root's own files.
        """

    def discard(
        self,
        found: ScannedEntry,
        decision: Decision,
        *,
        actor: str,
        now: float,
        final: bool = False,
    ) -> Trashed:
        """Take an entry out of the root at once; it stops being a checkpoint and can be restored.

        If a full disk has no room even for a name, the entry is being freed instead
        (`Trashed.erasing`), so that at least the next one can be kept.

        Args:
            found: the entry, as just listed.
            decision: why it goes.
            actor: who drops it.
            now: seconds since the epoch.
            final: it will be freed at once, so nothing of it need be kept.

        Raises:
            NotFoundError: it is gone.
            UnsafeError: a link or device stands in its place.
            RefusedError: the lock was lost, or the trash cannot keep its name.
            DeniedError, NoResourceError, UnavailableError: the storage refused; it still stands.
        """

    def listed(self) -> list[Trashed]:
        """Return the trash, the earliest first; empty without a trash.

        Raises:
            DeniedError, UnavailableError: it could not be listed.
        """

    def restore(self, trashed: Trashed) -> None:
        """Restore a thing under its old name, whole.

        Raises:
            ExistsError: the name is taken.
            NotFoundError: it is not in the trash any more.
            RefusedError: it is being freed.
        """

    def is_whole(self, trashed: Trashed) -> bool:
        """Whether a thing may still be a whole checkpoint: nothing shows that any of it went.

        Raises:
            DeniedError, UnavailableError: it could not be read.
        """

    def recall(self, trashed: Trashed) -> bool:
        """Take back the record of a drop that did not happen; return whether it was one.

        Raises:
            DeniedError, UnavailableError: it could not be read, or not be deleted.
        """

    def is_ours(self, trashed: Trashed) -> bool:
        """Whether only somebody who may also delete a thing can have put it into the trash."""

    def erase(self, trashed: Trashed) -> Erased:
        """Free a thing for good, or continue an interrupted erasure.

        Before the first byte goes, the thing is marked as not restorable.
        """


def trash_name(name: str, time: float, *, erasing: bool = False) -> str:
    """Return an entry's name in the trash; `erasing` marks it as not restorable."""
    stamp = datetime.fromtimestamp(time, UTC).strftime(_STAMP)
    return f"{stamp}{'!' if erasing else '~'}{name}"


def parse_trash_name(text: str) -> tuple[str, float, bool] | None:
    """Return name, time and whether it is being erased; None if `text` is not such a name."""
    match = re.fullmatch(_NAME, text.removeprefix(BESIDE))
    if match is None:
        return None
    try:
        time = datetime.strptime(match[1], _STAMP).replace(tzinfo=UTC)
    except ValueError:  # a month of 13
        return None
    return match[3], time.timestamp(), match[2] == "!"
