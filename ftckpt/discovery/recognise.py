"""Find the format of a place, from one listing of one level.

Files by which a trainer says whether the step in whose folder they lie is finished.

A format's own commit marker (`.metadata`, `trainer_state.json`) is the format's; these mark a whole
step, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from ftckpt.checkpoint import Checkpoint, CommitState
from ftckpt.errors import FtckptError
from ftckpt.storage.source import Source
from ftckpt.storage.store import Entry, EntryKind, Store, is_shadow

# NeMo Automodel makes it before it writes, and removes it last; a step that has it is neither
# loaded nor counted (nemo_automodel/components/checkpoint/{lifecycle,utils}.py, 0.7).
UNFINISHED = ".incomplete"
# The opposite, written last: it commits a step whose format has no marker.
FINISHED = ".complete"


# Endings of files that were compressed as a whole.
COMPRESSED = (".zst", ".lz4", ".gz")


@dataclass(frozen=True)
class Listing:
    """One level of a directory, or one file: the input of recognition.

    Attributes:
        files: regular and special files directly inside, by name. In a large local directory one
            name costs a look-up, and iteration lists all of them.
        directories: names of the directories directly inside.
        single: the file's name if the place is one file; `files` holds only it.
        head: returns up to the first `n` bytes of a file of `files` (use at most 4 KiB).
        inside: returns the names directly below one of `directories` (one more listing).
        some: if not all names are listed yet, a listing of a hundred or so of them.
        beside: of one file: whether the directory that it lies in has a file of some name (one
            look-up each).
        called: the directory's own name; "" if nothing tells it.
        is_sibling: whether directories beside it with such a name are each one checkpoint of
            several parts: it is another, with all of its parts or not.
    """

    files: Mapping[str, Entry]
    directories: Collection[str]
    head: Callable[[str, int], bytes]
    inside: Callable[[str], Listing]
    single: str = ""
    some: Listing | None = None
    beside: Callable[[str], bool] = lambda _: False
    called: str = ""
    is_sibling: bool = False

    @property
    def at_hand(self) -> Listing:
        """The names that are free to iterate: all, or `some` of a large directory's."""
        return self.some or self


class Recognition(NamedTuple):
    """A format's view of a listing.

    Attributes:
        format: its name.
        reason: the evidence in words ("has .metadata").
        commit: completeness, by the names alone.
        supported: False for formats that are recognised but refused (exit 13); `reason` says so.
        shares: whether it is one of several files of a checkpoint, in a directory with other
            checkpoints: it can be read, but not dropped or repaired in place.
        parts: the names of the files and markers that make it up, each number as `#`, where a
            trainer saves several: every step of a series has the same.
        by_names: whether names alone say that its parts are one checkpoint.
    """

    format: str
    reason: str
    commit: CommitState
    supported: bool = True
    shares: bool = False
    parts: tuple[str, ...] = ()
    by_names: bool = False


class Format(Protocol):
    """One on-disk format. Stateless; the catalog holds one instance of each."""

    @property
    def name(self) -> str:
        """The format's name in answers (`dcp`, `safetensors`)."""

    def recognise(self, listing: Listing) -> Recognition | None:
        """Return what `listing` is in this format, or None; cheap, never raises for content."""

    def open(self, source: Source) -> Checkpoint:
        """Parse headers and metadata.

        Raises:
            IncompleteError: not committed.
            CorruptError, UnsafeError, UnsupportedError: it cannot be opened.
        """


@runtime_checkable
class OrderedByRank(Protocol):
    """A format whose roots hold folders of ranks, each with files of several steps."""

    def by_step(self, store: Store, base: str, names: Collection[str]) -> Store | None:
        """Return a root at `base`, with the candidates `names`, as a store with a folder a step.

        None if it is another format's. Cheap for names that are steps.
        """


class UnopenedPart(NamedTuple):
    """A recognised checkpoint that is not opened yet; `entry` has the store's path."""

    entry: Entry
    format: Format
    recognition: Recognition


def recognise(formats: Iterable[Format], listing: Listing) -> tuple[Format, Recognition] | None:
    """Return the first format, in catalog order, that recognises `listing`.

    A trainer's own mark says whether the step is finished (see `marks`).
    """
    for candidate in formats:
        try:
            found = candidate.recognise(listing)
            if found is not None and not isinstance(found, Recognition):
                raise TypeError(f"recognise returned {type(found).__name__}, not a Recognition")
        except (Exception, SystemExit) as error:
            if added_error(candidate, error) is None:
                raise
            continue  # noted, and it hides no other
        if found is not None:
            return candidate, found if listing.single else _marked(found, listing.files)
    return None


def added_error(candidate: Format, error: BaseException) -> FtckptError | None:
    """Return the error for a mistake in another package's format, which is noted; else None."""
    ours = type(candidate).__module__.startswith("ftckpt.")
    if ours or isinstance(error, (FtckptError, MemoryError)):
        return None
    from ftckpt import plugins

    if candidate.name not in plugins.plugins(plugins.FORMATS):
        return None
    return plugins.failed(plugins.FORMATS, candidate.name, error)


def _marked(found: Recognition, names: Collection[str]) -> Recognition:
    """Return what a format says by its own names, and a trainer's mark says better."""
    if UNFINISHED in names:
        reason = f"has {UNFINISHED}: its trainer has not finished it"
        return found._replace(reason=reason, commit=CommitState.UNCOMMITTED)
    if found.commit is CommitState.NO_MARKER and FINISHED in names:
        reason = f"{found.reason} and {FINISHED}"
        return found._replace(reason=reason, commit=CommitState.COMMITTED)
    return found


def listing_of(source_files: Sequence[Entry], base: str) -> tuple[dict[str, Entry], frozenset[str]]:
    """Split the children of `base` into files by name and directory names."""
    skip = len(base) + 1 if base else 0
    files = {
        e.path[skip:]: e
        for e in source_files
        if e.kind is not EntryKind.DIRECTORY and not is_shadow(e.path)
    }
    dirs = frozenset(e.path[skip:] for e in source_files if e.kind is EntryKind.DIRECTORY)
    return files, dirs
