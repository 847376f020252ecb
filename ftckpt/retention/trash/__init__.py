"""The trash of a root: what was dropped can be had back until it is reclaimed.

    20261121T031500.123456Z~step-100        was dropped then, and can be had back
    20261121T031500.123456Z!step-100        is being reclaimed; nothing of it is to be trusted

The name alone carries what undoing needs, so that a full disk forbids none of it. How a store
drops is its own matter: local roots rename (`local_trash`), object stores cannot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

from ftckpt.discovery.step_names import step_in_name
from ftckpt.errors import FtckptError
from ftckpt.retention.policy.plan import Decision
from ftckpt.retention.scan.entry import ScannedEntry
from ftckpt.storage.store import join

FOLDER = "trash"
# What a name begins with that lies in the root itself, because no directory could be made.
BESIDE = ".ftckpt-trash-"

_STAMP = "%Y%m%dT%H%M%S.%fZ"
_NAME = re.compile(r"([0-9]{8}T[0-9]{6}\.[0-9]{6}Z)([~!])(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Trashed:
    """Something that was dropped and is not reclaimed yet.

    Attributes:
        name: what it was called, relative to the run's root.
        time: when it was dropped, in seconds since the epoch, by that machine's clock.
        group: the run it belongs to: the path of that run's root in the store.
        path: where it lies now: a path in the store.
        erasing: whether it is being reclaimed, so that it cannot be had back.
    """

    name: str
    time: float
    group: str
    path: str
    erasing: bool = False

    @property
    def id(self) -> str:
        """What names it among others of the same name: `20261121T031500.123456Z~step-100`."""
        return trash_name(self.name, self.time)

    @property
    def entry(self) -> str:
        """What a plan calls the entry that it was (`RootEntry.name`)."""
        return join(self.group, self.name)

    @property
    def step(self) -> int | None:
        """The step that its name says."""
        return step_in_name(self.name)


class Erased(NamedTuple):
    """What reclaiming one thing came to.

    Attributes:
        nbytes: bytes of the files that are gone, and had no other name.
        errors: what could not be removed, by its path, and why; empty where all is gone.
    """

    nbytes: int
    errors: Mapping[str, FtckptError]


class Trash(Protocol):
    """The trash of one root. What changes anything is called within `lock`."""

    def lock(self, actor: str, now: float) -> AbstractContextManager[None]:
        """Keep every other gc of this root away.

        A holder that is killed keeps nobody away for longer than half an hour. Where a lock can
        be lost while it is held, every change asks first and raises RefusedError.

        Args:
            actor: who; shown to others who find it locked.
            now: seconds since the epoch.

        Raises:
            RefusedError: another has it.
            UnsupportedError: the store cannot keep anybody away.
            UnsafeError: a link stands where the root's own files belong.
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
        """Take an entry out of the root at once; it stops being a checkpoint, and can be restored.

        Where a full disk has no room even for a name, it is on its way to being reclaimed instead
        (`Trashed.erasing`), so that at least the next one can be kept.

        Args:
            found: the entry, as it was just listed.
            decision: why it goes.
            actor: who drops it.
            now: seconds since the epoch.
            final: it is to be reclaimed at once, so that nothing of it need be kept.

        Raises:
            NotFoundError: it is gone.
            UnsafeError: something else stands in its place: a link, a device.
            RefusedError: the lock was lost, or its name cannot be kept in the trash.
            DeniedError, NoResourceError, UnavailableError: the storage refused; it still stands.
        """

    def listed(self) -> list[Trashed]:
        """Return what lies in the trash, the earliest first; nothing without a trash.

        Raises:
            DeniedError, UnavailableError: it could not be listed; nothing is concluded then.
        """

    def restore(self, trashed: Trashed) -> None:
        """Give a thing its old name again, whole.

        Raises:
            ExistsError: something stands there now.
            NotFoundError: it is not in the trash any more.
            RefusedError: it is being reclaimed.
        """

    def erase(self, trashed: Trashed) -> Erased:
        """Reclaim a thing for good; one whose reclaiming was interrupted is taken up again.

        Before the first byte goes, it is made unmistakable that it cannot be had back.
        """


def trash_name(name: str, time: float, *, erasing: bool = False) -> str:
    """Return what an entry is called in the trash; `erasing` makes it no longer."""
    stamp = datetime.fromtimestamp(time, UTC).strftime(_STAMP)
    return f"{stamp}{'!' if erasing else '~'}{name}"


def parse_trash_name(text: str) -> tuple[str, float, bool] | None:
    """Return name, time and whether it is being erased; None where `text` is not such a name."""
    match = _NAME.fullmatch(text.removeprefix(BESIDE))
    if match is None:
        return None
    try:
        time = datetime.strptime(match[1], _STAMP).replace(tzinfo=UTC)
    except ValueError:  # a month of 13
        return None
    return match[3], time.timestamp(), match[2] == "!"
