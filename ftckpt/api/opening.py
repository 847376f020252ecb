"""From a path to an open checkpoint, and what all functions of the API share."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, TypedDict, TypeVar

from ftckpt.checkpoint import Checkpoint
from ftckpt.discovery.resolve import locate, open_runs, open_target
from ftckpt.errors import UsageError
from ftckpt.formats.catalog import FORMATS, formats
from ftckpt.storage import StoreOptions
from ftckpt.workers import limits

from .attaching import loads_itself

if TYPE_CHECKING:
    from ftckpt.checkpoint.rules import Rules
    from ftckpt.discovery.resolve import Place
    from ftckpt.discovery.roots import Root


class RunFlags(TypedDict, total=False):
    """How something is written and proven.

    Attributes:
        no_proof: check neither the source nor, read back, the result.
        restart: forget what another run to the destination has left.
        jobs: threads, or blocks in flight; 0 for one a processor, and for 8 in a copy to or from an
            object store.
        limit_rate: bytes a second, or a text such as "200MiB/s".
    """

    no_proof: bool
    restart: bool
    jobs: int
    limit_rate: float | str


STORES = StoreOptions()

Choice = TypeVar("Choice", bound=StrEnum)


@loads_itself
def open_checkpoint(
    path: str,
    stores: StoreOptions = STORES,
    *,
    rules: Rules | None = None,
    bases: Sequence[str] = (),
    also: Sequence[str] = (),
) -> Checkpoint:
    """Open one checkpoint: headers and metadata are parsed, tensor bytes are not.

    Args:
        path: a checkpoint, `ROOT@STEP` or `ROOT@latest`; local or any URL.
        stores: how to reach object stores.
        rules: how tensors are divided over ranks, where a trainer saved shards by hand.
        bases: where the bases of a delta lie now.
        also: directories with more files of it under the same relative names: the disks of other
            nodes. A file of several places must be the same in all.

    Raises:
        UsageError: a root without a selector; places that cannot be of one checkpoint.
        NotFoundError: nothing is there.
        IncompleteError, CorruptError, UnsafeError, UnsupportedError: it cannot be opened.
    """
    target = open_target(path, formats(rules, bases), stores, also)
    if target.root is None or not target.place.which:
        return target.open()
    from ftckpt.discovery.candidates import choose_child
    from ftckpt.discovery.fewer_files import open_child

    return open_child(target.root, choose_child(target.root, target.place.which))


def opened(
    checkpoint: Checkpoint | str,
    stores: StoreOptions,
    *,
    rules: Rules | None = None,
    bases: Sequence[str] = (),
    also: Sequence[str] = (),
) -> Checkpoint:
    """Return a checkpoint that is open, or open the one at a path (see `open_checkpoint`)."""
    if not isinstance(checkpoint, str):
        if also:
            raise UsageError("the checkpoint is open: also= belongs to open_checkpoint")
        return checkpoint
    return open_checkpoint(checkpoint, stores, rules=rules, bases=bases, also=also)


def root_at(path: str, stores: StoreOptions) -> Place:
    """Return the place of a root.

    Raises:
        NotFoundError: nothing is there.
        UsageError: one checkpoint of a root is selected.
    """
    place = locate(path, stores)
    if place.which:
        raise UsageError(f"{path} selects one checkpoint of a root", hint="name the root alone")
    return place


def runs_at(path: str, stores: StoreOptions) -> list[Root]:
    """Return the roots of the runs at a path.

    Raises:
        NotFoundError: nothing is there.
        UsageError: it is not a root.
    """
    return open_runs(root_at(path, stores), FORMATS)


def chosen(kind: type[Choice], word: str, flag: str) -> Choice:
    """Return the member of an enum that a word names.

    Raises:
        UsageError: there is none of that name.
    """
    if word not in list(kind):
        raise UsageError(f"{flag} {word!r} is not known", hint=", ".join(kind))
    return kind(word)


def job_count(jobs: int) -> int:
    """Return a number of threads: what was asked for, or one for each processor we may use."""
    return jobs or limits.jobs()


def rate_limit(rate: float | str) -> limits.RateLimit | None:
    """Return a limiter of bytes a second; None for "" and 0: without a limit.

    Raises:
        UsageError: the text is not a rate.
    """
    number = limits.parse_rate(rate) if isinstance(rate, str) and rate else rate
    return limits.RateLimit(float(number)) if number else None


def seconds(value: float | str, flag: str) -> float:
    """Return a duration in seconds; a text has its unit: 90s, 5m, 24h, 7d.

    Raises:
        UsageError: the text is not a duration.
    """
    if not isinstance(value, str):
        return float(value)
    from ftckpt.amounts import duration

    return float(duration(value, flag))
