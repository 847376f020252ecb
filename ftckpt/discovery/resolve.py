"""From a path or URL to an open checkpoint, or to the root that holds several.

Recognition reads one level of names (`recognise.Listing`); only a known checkpoint is listed as a
whole. A root of thousands of checkpoints is never walked. Modules about roots are imported only for
a root, since most commands name one checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import (
    CorruptError,
    FtckptError,
    IncompleteError,
    MissingError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.remotes import SELECTOR, split
from ftckpt.storage.secrets import withheld
from ftckpt.storage.source import Source, leads_nowhere
from ftckpt.storage.store import Entry, EntryKind, Store

from .listing import open_part, recognise_at
from .recognise import Format, OrderedByRank, UnopenedPart
from .step_names import is_file_of_step

if TYPE_CHECKING:
    from .roots import Root

_NO_ROOT = "ftckpt verify checks a single checkpoint"
# Names beside a rank's folder that are looked at.
_BESIDE = 4096
_FROM_HUB = "s--"  # models--ORG--NAME, datasets--..., spaces--...
_DIRECTORY = Entry("", 0, None, EntryKind.DIRECTORY)
_STORES = StoreOptions()
# What may have been meant to name one of a root's checkpoints.
_AFTER_AT = r"(?P<root>.+)@(?P<name>[^/@]*)"


class Place(NamedTuple):
    """An existing path or URL.

    Attributes:
        url: as typed, without the selector.
        store: opened at the directory, or at the directory of the file.
        entry: the directory (path "") or the one file.
        which: "latest", a step in decimal, or "" without a selector.
        stores: how the stores around it are reached.
    """

    url: str
    store: Store
    entry: Entry
    which: str = ""
    stores: StoreOptions = _STORES


@dataclass(frozen=True)
class Target:
    """The content of a place: one checkpoint, or a root.

    Attributes:
        part: the checkpoint, not opened yet; None for a root.
        root: None for a checkpoint.
        formats: those that were asked.
        stores: how the stores around it are reached.
    """

    place: Place
    part: UnopenedPart | None = None
    root: Root | None = None
    formats: Sequence[Format] = ()
    stores: StoreOptions = _STORES

    @property
    def format(self) -> str | None:
        """Name of the format, for a checkpoint."""
        return None if self.part is None else self.part.format.name

    def open(self) -> Checkpoint:
        """Open the checkpoint (see `open_part`); a note says which files it probably lost.

        Raises:
            UsageError: it is a root.
            NotFoundError: it lacks what gc has taken away when it dropped it.
        """
        if self.part is None:
            raise UsageError(f"{self.place.url} is a root, not one checkpoint")
        try:
            checkpoint = open_part(self.place.store, self.part)
        except (CorruptError, IncompleteError) as error:
            if self.place.store.traits.local:
                raise
            from .dropped import dropped_instead

            dropped = dropped_instead(self.place.url, self.stores)
            if dropped is None:
                raise
            raise dropped from error
        if checkpoint.implied or self.part.recognition.by_names:
            from .fewer_files import lacking_alone

            lost = lacking_alone(self.place.url, self.part, checkpoint, self.formats, self.stores)
            if lost is not None:
                lost.noted_in(checkpoint)
        return checkpoint


def locate(url: str, options: StoreOptions) -> Place:
    """Resolve `url`: a file, a directory, or `ROOT@STEP` or `ROOT@latest`.

    A path that exists as typed takes precedence over a selector.

    Raises:
        NotFoundError: neither exists.
    """
    try:
        return _at(url, options)
    except NotFoundError as error:
        from ftckpt.storage.suggestions import hint_for_absent

        match = re.fullmatch(f"(?P<root>.+){SELECTOR}", url)
        if match is None:
            error.hint = error.hint or _after_at(url) or hint_for_absent(url)
            raise
    which = "latest" if match["which"] == "newest" else match["which"]
    try:
        return _at(match["root"], options)._replace(which=which)
    except NotFoundError as error:
        from ftckpt.storage.suggestions import hint_for_absent

        error.hint = error.hint or hint_for_absent(match["root"])
        raise


def _after_at(url: str) -> str:
    """Return a hint for `ROOT@` with a word that names none; "" where no such root is local."""
    match = re.fullmatch(_AFTER_AT, url)
    if match is None or not os.path.isdir(match["root"]):
        return ""
    number = re.search(r"\d+$", match["name"])
    which = str(int(number[0])) if number else "latest"
    return f"after @ comes the number of a step, or latest: {match['root']}@{which}"


def gathered(place: Place, also: Sequence[str], options: StoreOptions) -> Place:
    """Return a place with the files of further directories (see `gather`).

    Raises:
        NotFoundError, UsageError: as `gather`.
    """
    if not also:
        return place
    from .gather import gather

    first = place.store if place.entry.path == "" else open_store(place.url, options)
    return place._replace(store=gather(place.url, first, also, options))


def locate_root(url: str, options: StoreOptions) -> Place:
    """Locate a root; its absence is not a run's first start.

    Raises:
        MissingError: no such path or bucket; in an object store, no key begins with it.
    """
    try:
        return locate(url, options)
    except NotFoundError as error:
        raise MissingError(error.message, hint=error.hint, file=error.file) from error


def _at(url: str, options: StoreOptions) -> Place:
    url = withheld(url)
    store = open_store(url, options)
    entry = store.stat("")
    if entry.kind is EntryKind.DIRECTORY:
        if _FROM_HUB in (store.local_path("") or url):
            from .hub_cache import snapshot_of

            below = snapshot_of(store, url)
            if below:
                return _at(f"{url.rstrip('/')}/{below}", options)
        return Place(url, store, entry._replace(path=""), stores=options)
    here = store.local_path("") if entry.link else None
    if here is not None and is_file_of_step(os.path.basename(os.path.realpath(here))):
        url = os.path.realpath(here)  # the other files of the step lie beside the link's target
    # A store is a place with names below it, so a file is opened through its directory.
    parent, name = split(url)
    store = open_store(parent, options)
    return Place(url, store, entry._replace(path=name), stores=options)


def open_target(
    url: str, formats: Sequence[Format], options: StoreOptions, also: Sequence[str] = ()
) -> Target:
    """Recognise a path, a URL, `ROOT@STEP` or `ROOT@latest`; reads at most two levels of names.

    `also` are directories with more files of the same checkpoint or root (see `gather`).

    Raises:
        NotFoundError: nothing is there, or nothing that any format knows.
        UsageError: a directory that is only one part of a checkpoint.
        UnsupportedError: one file, and no format knows it.
        IncompleteError: one file, which is a Git LFS pointer.
        CorruptError: a link to nothing.
        UnsafeError: a fifo, socket or device.
    """
    place = locate(url, options)
    place = gathered(place, also, options)
    if place.entry.dangling:
        raise leads_nowhere(url, place.entry)
    if place.entry.kind is EntryKind.SPECIAL:
        raise UnsafeError(f"{url} is not a regular file or directory", kind="special-file")
    part = None if place.which else recognise_at(place.store, place.entry, formats)
    if part is not None:
        return Target(place, part=part, formats=formats, stores=options)
    if place.entry.kind is not EntryKind.DIRECTORY:
        if place.which:
            raise UsageError(f"{place.url} is one file and has no steps to select from")
        Source.file(place.store, place.entry).require_fetched(place.entry.path.rpartition("/")[2])
        whole = _to_name(place, formats)
        raise UnsupportedError(
            f"{url} is not a checkpoint of any known format", hint=whole and f"name {whole}"
        )
    part = None if place.which else _among_siblings(place, formats)
    if part is not None:
        return Target(place, part=part, formats=formats, stores=options)
    root = open_root(place, formats)
    if not root.holds_checkpoints():
        from .candidates import nothing_known

        whole = "" if place.which else _checkpoint_above(place, formats, options)
        hint = "name a checkpoint, or the directory whose children are checkpoints"
        raise nothing_known(root, f"name {whole}" if whole else hint)
    return Target(place, root=root, formats=formats, stores=options)


def checkpoint_around(place: Place, formats: Sequence[Format]) -> str:
    """Return the directory of a file, as a user would type it; "" if it is not a checkpoint."""
    try:
        known = recognise_at(place.store, _DIRECTORY, formats) is not None
    except FtckptError:
        known = False
    return _around(place.url) if known else ""


def _checkpoint_above(place: Place, formats: Sequence[Format], options: StoreOptions) -> str:
    """Return the checkpoint around an unrecognised directory; "" for none."""
    above = _around(place.url.rstrip("/"))
    try:
        return checkpoint_around(Place(place.url, open_store(above, options), _DIRECTORY), formats)
    except FtckptError:
        return ""


def _to_name(place: Place, formats: Sequence[Format]) -> str:
    """Return the likely target: the checkpoint around a file, or a pointer's root."""
    whole = checkpoint_around(place, formats)
    if whole:
        return whole
    url = _around(place.url)
    try:
        pointers = open_root(place._replace(url=url, entry=_DIRECTORY), formats).pointers
    except FtckptError:
        return ""
    return url if any(pointer.name == place.entry.path for pointer in pointers) else ""


def _around(url: str) -> str:
    return split(url)[0]


def open_root(place: Place, formats: Sequence[Format]) -> Root:
    """Read a directory as a root: names and pointers of one level (see `roots.read_root`).

    A place that is a checkpoint itself can hold steps too (a trainer saves the final model above
    its `checkpoint-N`); its own files are not children then.

    Raises:
        UsageError: a checkpoint without steps, one part of a checkpoint, or not a directory.
    """
    from .roots import read_root

    return _as_root(place, _by_step(read_root(*_asking(place, formats)), formats), formats)


def open_runs(place: Place, formats: Sequence[Format]) -> list[Root]:
    """Read a directory of one or several roots, one per run (see `roots.read_runs`).

    Raises:
        UsageError: a checkpoint without steps, one part of a checkpoint, or not a directory.
    """
    from .roots import read_runs

    found = read_runs(*_asking(place, formats))
    return [_as_root(place, _by_step(root, formats), formats) for root in found]


def _by_step(root: Root, formats: Sequence[Format]) -> Root:
    """Return a root with a candidate for each step, if its folders are those of ranks."""
    names = [candidate.path for candidate in root.candidates]
    for one in formats if names else ():
        store = (
            one.by_step(root.store, root.base, names) if isinstance(one, OrderedByRank) else None
        )
        if store is not None:
            from .roots import read_root

            return read_root(store, partial(recognise_at, store, formats=formats))
    return root


def _asking(
    place: Place, formats: Sequence[Format]
) -> tuple[Store, Callable[[Entry], UnopenedPart | None]]:
    if place.entry.kind is not EntryKind.DIRECTORY:
        whole = _to_name(place, formats)
        hint = f"name {whole}" if whole else _NO_ROOT
        raise UsageError(f"{place.url} is a file, not a root", hint=hint)
    return place.store, lambda entry: recognise_at(place.store, entry, formats)


def _as_root(place: Place, root: Root, formats: Sequence[Format]) -> Root:
    if root.base:
        return root
    if recognise_at(place.store, place.entry, formats) is None:
        if root.candidates:
            _require_all_ranks(place)
        if not root.pointers and all(c.step is None for c in root.candidates):
            _require_whole(place, formats)
            _require_root(place, root, formats)
        return root
    steps = tuple(
        c
        for c in root.candidates
        if c.step is not None and (c.entry.kind is EntryKind.DIRECTORY or is_file_of_step(c.path))
    )
    if not steps:
        hint = f"leave @{place.which} out" if place.which else _NO_ROOT
        raise UsageError(f"{place.url} is a checkpoint, not a root", hint=hint)
    return replace(root, candidates=steps)


def _require_whole(place: Place, formats: Sequence[Format]) -> None:
    """Refuse a rank's folder: its files are not checkpoints of a run.

    Raises:
        UsageError: it is one.
    """
    from .parent_checkpoint import enclosing

    whole = enclosing(place.url, place.store, formats)
    if whole:
        raise UsageError(f"{place.url} is one part of the checkpoint {whole}", hint=f"name {whole}")


def _require_all_ranks(place: Place) -> None:
    """Refuse the folder of one rank beside those of others: the newest step may lack a piece.

    Raises:
        UnsupportedError: it is one.
    """
    from .step_names import folders_of_ranks, is_folder_of_rank

    local = place.store.local_path("")
    above, name = split(os.path.abspath(local) if local is not None else place.url.rstrip("/"))
    if not is_folder_of_rank(name):
        return
    try:
        beside = open_store(above, place.stores).names("", _BESIDE)
    except FtckptError:
        return  # the directory itself is there, and nobody asked for more
    ranks = folders_of_ranks(n for n, kind in beside.items() if kind is EntryKind.DIRECTORY)
    if name in ranks:
        from .roots import of_each_rank

        raise of_each_rank(above, ranks)


def _among_siblings(place: Place, formats: Sequence[Format]) -> UnopenedPart | None:
    """Return what a directory is by its siblings, if no format knows it by itself."""
    from .parent_checkpoint import as_its_root_says

    said = as_its_root_says(place.url, formats, place.stores)
    return said._replace(entry=place.entry) if isinstance(said, UnopenedPart) else None


def _require_root(place: Place, root: Root, formats: Sequence[Format]) -> None:
    """Refuse a step whose layout is not known: what lies in it are its parts, and no checkpoints.

    A name with a number may be a run's too: then its files are a series, or it is marked as a root.

    Raises:
        UsageError: it is a checkpoint that has lost a part, as its siblings tell.
        UnsupportedError: it is a step by its name, and the root around it refuses it.
    """
    from .parent_checkpoint import as_its_root_says
    from .root_marker import is_marked
    from .series import are_saves

    if are_saves(c.path for c in root.candidates) or not root.holds_checkpoints():
        return
    said = None if is_marked(root.store, "") else as_its_root_says(place.url, formats, place.stores)
    if isinstance(said, UnopenedPart):
        raise UsageError(f"{place.url} is a checkpoint, not a root", hint=_NO_ROOT)
    if said is not None:
        raise said


def files_at(url: str, formats: Sequence[Format], options: StoreOptions) -> Source:
    """List the files of a checkpoint that may be too damaged to be recognised.

    Raises:
        NotFoundError: nothing is there, or no such step.
    """
    place = locate(url, options)
    entry = place.entry
    if place.which:
        from .candidates import child_of_step, newest_child

        root = open_root(place, formats)
        newest = place.which == "latest"
        child = newest_child(root) if newest else child_of_step(root, int(place.which))
        entry = child.candidate.entry
    if entry.kind is EntryKind.DIRECTORY:
        return Source.directory(place.store, entry.path)
    return Source.file(place.store, entry)


def open_source(source: Source, formats: Sequence[Format]) -> Checkpoint:
    """Open the checkpoint of listed files; lists them anew.

    Raises:
        UnsupportedError: no format knows them.
        IncompleteError, CorruptError, UnsafeError: see `open_part`.
    """
    entry = Entry(source.base, 0, None, EntryKind.DIRECTORY)
    if source.single:
        entry = next(iter(source.entries.values()))
    part = recognise_at(source.store, entry, formats)
    if part is None:
        raise UnsupportedError(f"{source.url} is not a checkpoint of any known format")
    return open_part(source.store, part)
