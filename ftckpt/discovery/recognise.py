"""Find the format that knows a place, from one listing of one level."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ftckpt.checkpoint import Checkpoint, CommitState
from ftckpt.storage.source import Source
from ftckpt.storage.store import Entry, EntryKind

# How the names of files end that were compressed as a whole.
COMPRESSED = (".zst", ".lz4", ".gz")


@dataclass(frozen=True)
class Listing:
    """One level of a directory, or one file: what recognition may look at.

    Attributes:
        files: regular and special files directly inside, by name. Of a large local directory one
            name costs a look, but all of them are listed as soon as they are gone through.
        directories: names of the directories directly inside.
        single: the file's name where the place is one file; `files` holds just it.
        head: returns up to the first `n` bytes of a file of `files` (at most 4 KiB are worth it).
        inside: returns the names directly below one of `directories` (one more listing).
        some: where not all names are listed yet, a listing of a hundred or so of them.
    """

    files: Mapping[str, Entry]
    directories: Collection[str]
    head: Callable[[str, int], bytes]
    inside: Callable[[str], Listing]
    single: str = ""
    some: Listing | None = None

    @property
    def at_hand(self) -> Listing:
        """The names that cost nothing to go through: all, or `some` of a large directory's."""
        return self.some or self


class Recognition(NamedTuple):
    """What a format sees in a listing.

    Attributes:
        format: its name.
        reason: the evidence in words ("has .metadata").
        commit: what the names alone say about completeness.
        supported: False for what is known by name and refused (exit 13), with `reason` saying so.
        shares: whether it is a file of several that make up one checkpoint, in a directory that
            holds other checkpoints too: it can be read, and not dropped or mended in its place.
    """

    format: str
    reason: str
    commit: CommitState
    supported: bool = True
    shares: bool = False


class Format(Protocol):
    """One on-disk format. Stateless; the catalog holds one instance of each."""

    @property
    def name(self) -> str:
        """The format's name in answers (`dcp`, `safetensors`)."""

    def recognise(self, listing: Listing) -> Recognition | None:
        """Say whether `listing` is a checkpoint of this format; cheap, never raises for content."""

    def open(self, source: Source) -> Checkpoint:
        """Parse headers and metadata.

        Raises:
            IncompleteError: not committed.
            CorruptError, UnsafeError, UnsupportedError: what cannot be opened, and why.
        """


class UnopenedPart(NamedTuple):
    """A recognised checkpoint that is not opened yet.

    Attributes:
        entry: its directory or file, by the store's path.
        format: who recognised it.
        recognition: what was seen.
    """

    entry: Entry
    format: Format
    recognition: Recognition


def recognise(formats: Iterable[Format], listing: Listing) -> tuple[Format, Recognition] | None:
    """Return the first format, in catalog order, that recognises `listing`."""
    for candidate in formats:
        found = candidate.recognise(listing)
        if found is not None:
            return candidate, found
    return None


def listing_of(source_files: Sequence[Entry], base: str) -> tuple[dict[str, Entry], frozenset[str]]:
    """Split the children of `base` into files by name and directory names."""
    skip = len(base) + 1 if base else 0
    files = {e.path[skip:]: e for e in source_files if e.kind is not EntryKind.DIRECTORY}
    dirs = frozenset(e.path[skip:] for e in source_files if e.kind is EntryKind.DIRECTORY)
    return files, dirs
