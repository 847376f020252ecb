"""Nothing is written into a checkpoint, whosever it is: what lies in one is its or a stray."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from ftckpt.checkpoint import CommitState
from ftckpt.errors import FtckptError, RefusedError, UsageError
from ftckpt.listing import listing_of_directory, listing_of_file
from ftckpt.manifest import NAME
from ftckpt.registry import Format, Listing, recognise
from ftckpt.roots import step_in_name
from ftckpt.store import EntryKind, Store
from ftckpt.stores import StoreOptions, open_store

from .places import absolute, around

# So many directories above a local destination are looked at: a universal checkpoint of DeepSpeed
# keeps its files two below. An object store is asked about the nearest one alone.
_LEVELS = 3

# Of a directory of loose files, so many are looked at.
_FILES = 64


def require_outside(destination: str, formats: Sequence[Format], options: StoreOptions) -> None:
    """Refuse a destination inside a checkpoint.

    A directory that holds steps too is a root, although a trainer saved its last weights there, and
    one in which somebody keeps a file of weights is where that lies, like a home or a scratch.

    Args:
        destination: path or URL of what is to be written.
        formats: in asking order.
        options: how to reach object stores.

    Raises:
        RefusedError: a checkpoint lies around it.
    """
    store = open_store(destination, options)
    levels = _LEVELS if store.traits.local else 1
    above = absolute(store) if store.traits.local else destination
    for _ in range(levels):
        try:
            above = around(above.rstrip("/")).rstrip("/")
            found = bool(above) and _is_checkpoint(open_store(above, options), formats)
        except UsageError:  # a bucket: there is nothing above it
            return
        except FtckptError:  # it is not there, or may not be listed: nothing speaks against it
            found = False
        if found:
            raise RefusedError(
                f"{destination} lies inside the checkpoint {above}",
                hint="nothing is written into a checkpoint: choose a place beside it",
            )


def _is_checkpoint(store: Store, formats: Sequence[Format]) -> bool:
    listing = listing_of_directory(store, "")
    found = recognise(formats, listing)
    sealed = NAME in listing.files
    known = found if found is not None and found[1].supported else None
    if not sealed and known is None:
        return False
    if any(step_in_name(name) is not None for name in listing.directories):
        return False
    if sealed or known is None or known[1].commit is CommitState.COMMITTED:
        return True
    return not _is_loose(store, known[0], listing)


def _is_loose(store: Store, known: Format, listing: Listing) -> bool:
    """Say whether a file of a directory is by itself what the directory is known for."""
    entries = (listing.files[name] for name in islice(listing.at_hand.files, _FILES))
    return any(
        entry.kind is EntryKind.FILE and known.recognise(listing_of_file(store, entry)) is not None
        for entry in entries
    )
