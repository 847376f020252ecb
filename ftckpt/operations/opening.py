"""A path or URL becomes an open checkpoint: what operations begin with.

One that reads a checkpoint and gets a root takes its newest checkpoint and says so; others refuse.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeVar

from ftckpt import amounts
from ftckpt.errors import UsageError
from ftckpt.observer import SILENT, Observer
from ftckpt.operations.attaching import loads_itself
from ftckpt.operations.definition import argument, lenient, option
from ftckpt.storage import StoreOptions

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.checkpoint.sharding import Rules
    from ftckpt.discovery.resolve import Place, Target
    from ftckpt.discovery.roots import Root

STORES = StoreOptions()

# A checkpoint to read: where it lies, or opened by the caller.
Opened = Annotated[
    "Checkpoint | str",
    argument(
        "PATH",
        "A checkpoint or root: local path, s3:// or other URL, REMOTE:path, ROOT@STEP, "
        "ROOT@latest.",
    ),
]
Source = Annotated[
    "Checkpoint | str", argument("SRC", "The checkpoint to read: path, URL or ROOT@STEP.")
]
Also = Annotated[
    Sequence[str],
    option(
        "DIR",
        "Another place with files of the same checkpoint: another node's disk. Repeatable.",
        "--also",
    ),
]

Memory = Annotated[amounts.Size, option("SIZE", "Memory limit.", "--max-memory")]
Jobs = Annotated[int, option("N", "Workers; 0: one a processor.", "--jobs", "-j", min=0)]
Rate = Annotated[amounts.Rate, option("RATE", "Read no faster: 200MiB/s.", "--limit-rate")]

# How many candidates an error message lists.
_LISTED = 8

Choice = TypeVar("Choice", bound=StrEnum)


@lenient
@loads_itself
def open_checkpoint(
    path: str | os.PathLike[str],
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
    return opened(os.fspath(path), stores, rules=rules, bases=bases, also=also)


def opened(
    checkpoint: Checkpoint | str,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
    *,
    newest: bool = False,
    rules: Rules | None = None,
    bases: Sequence[str] = (),
    also: Sequence[str] = (),
) -> Checkpoint:
    """Return a checkpoint that is open, or open the one at a path.

    Args:
        checkpoint: opened, or its path.
        stores: how to reach object stores.
        on: is told which checkpoint and format it is.
        newest: whether a root without a selector means its newest checkpoint, which an operation
            may take that only reads; else it is refused, with the candidates in the hint.
        rules: the user's table of how tensors are cut over ranks.
        bases: where the user says that bases of deltas lie.
        also: further places with files of the same checkpoint or root.

    Raises:
        UsageError: a root, and `newest` is False; `also` of one that is open.
        NotFoundError: the selected step is not there.
        IncompleteError, CorruptError, UnsafeError, UnsupportedError: it cannot be opened.
    """
    if not isinstance(checkpoint, str):
        if also:
            raise UsageError("the checkpoint is open: also= belongs to open_checkpoint")
        on.report(target=checkpoint.source.url, format=checkpoint.format)
        return checkpoint
    target = open_target(checkpoint, stores, on, rules=rules, bases=bases, also=also)
    return open_from(target, on, newest=newest)


# Names beside a file that are looked at.
_NAMES_BESIDE = 4096


def open_target(
    path: str,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
    *,
    rules: Rules | None = None,
    bases: Sequence[str] = (),
    also: Sequence[str] = (),
) -> Target:
    """Find out what lies at a path, and report it as `target` and `format`; see `opened`.

    Raises:
        NotFoundError, UnsupportedError, UnsafeError: see `ftckpt.discovery.resolve.open_target`.
    """
    from ftckpt.discovery import resolve
    from ftckpt.discovery.parent_checkpoint import enclosing
    from ftckpt.discovery.step_names import pieces_among
    from ftckpt.formats.catalog import formats
    from ftckpt.storage.store import EntryKind

    on.report(target=path, **({"also": list(also)} if also else {}))
    known = formats(rules, bases)
    target = resolve.open_target(path, known, stores, also)
    on.report(format=target.format)
    # A remark is worth a look at the directory, but no request for what else may lie there.
    place = target.place
    if on is not SILENT and place.store.traits.local and target.part is not None:
        if target.part.entry.kind is EntryKind.FILE:
            what, whole = "file", resolve.checkpoint_around(place, known)
        else:
            what, whole = "part", enclosing(place.url, place.store, known)
        if whole:
            on.note(f"{path} is one {what} of the checkpoint {whole}: this is about it alone")
        elif what == "file" and place.entry.path in pieces_among(
            place.store.names("", _NAMES_BESIDE)
        ):
            on.note(f"{path} is one rank's piece of a save, by its name: this is about it alone")
    return target


def open_from(target: Target, on: Observer = SILENT, *, newest: bool = False) -> Checkpoint:
    """Open the one checkpoint that a target means; see `opened`."""
    from ftckpt.workers.memory import no_gc

    if target.root is None:
        with no_gc():  # it lives until the end, and is large: no garbage to look for
            return on.keep(target.open())
    if not target.place.which and not newest:
        raise UsageError(
            f"{target.place.url} is a root, not one checkpoint",
            hint=f"name one of its checkpoints: {_names(target.root)}",
        )
    from ftckpt.discovery.candidates import choose_child
    from ftckpt.discovery.fewer_files import open_child

    child = choose_child(target.root, target.place.which, on.warn)
    url = target.root.url_of(child.candidate)
    if not target.place.which:
        on.note(f"{target.place.url} is a root; taking {url}")
    on.report(target=url, format=child.part.format.name)
    with no_gc():
        return on.keep(open_child(target.root, child))


def _names(root: Root) -> str:
    from ftckpt.discovery.roots import Child, newest_names_first

    named = [c for c in newest_names_first(root.candidates) if not c.staging]
    names = [root.url_of(c) for c in named if c.step is not None]
    if not names:  # then the names say nothing, and what is there has to be asked
        found = root.recognise_all(named[: 2 * _LISTED])
        names = [root.url_of(one.candidate) for one in found if isinstance(one, Child)]
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def root_at(path: str, stores: StoreOptions) -> Place:
    """Return the place of a root.

    Raises:
        NotFoundError: nothing is there.
        UsageError: one checkpoint of a root is selected.
    """
    from ftckpt.discovery import resolve

    place = resolve.locate(path, stores)
    if place.which:
        raise UsageError(f"{path} selects one checkpoint of a root", hint="name the root alone")
    return place


def runs_at(path: str, stores: StoreOptions) -> list[Root]:
    """Return the roots of the runs at a path.

    Raises:
        NotFoundError: nothing is there.
        UsageError: it is not a root.
    """
    from ftckpt.discovery import resolve
    from ftckpt.formats.catalog import FORMATS

    return resolve.open_runs(root_at(path, stores), FORMATS)


def chosen(kind: type[Choice], word: str, flag: str) -> Choice:
    """Return the member of an enum that a word names.

    Raises:
        UsageError: there is none of that name.
    """
    if word not in list(kind):
        raise UsageError(f"{flag} {word!r} is not known", hint=", ".join(kind))
    return kind(word)
