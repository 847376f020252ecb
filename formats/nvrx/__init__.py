"""Local checkpoints of NVIDIA's resiliency extension (`nvidia_resiliency_ext`), one file a rank.

    SESSION/RANK/iter_0000010_3_local.pt          saved by RANK: the state of rank 3 at iteration 10
    SESSION/RANK/iter_0000010_3_local.dirty.pt    still being written

Each node has the folders of its own ranks, and with replication a rank keeps the files of the other
ranks of its clique too. A session is a root whose steps are its iterations: `SESSION@10`. Nothing
marks the end of a save: an iteration is complete if every rank's file is in some place.

Source: nvidia_resiliency_ext 0.4.1, `checkpointing/local/ckpt_managers/local_manager.py`
(`_filename_from_template`) and `base_manager.py` (`find_latest`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.recognise import Listing, Recognition
from ftckpt.errors import NotFoundError
from ftckpt.storage.source import Source
from ftckpt.storage.store import Store, join

from .by_iteration import LocalFile, local_file

if TYPE_CHECKING:
    from .reader import NvrxCheckpoint

# Number of folders of ranks that are listed to find such files.
_ASKED = 4


class NvrxLocal:
    """The format `nvrx-local` (see the module's docstring)."""

    name = "nvrx-local"

    def recognise(self, listing: Listing) -> Recognition | None:
        """Know one iteration by its files; a session of several is a root (`by_step`)."""
        if listing.single:
            return None
        found = _files(listing)
        if len({file.iteration for file in found}) != 1:
            return None
        whole = {file.rank for file in found if not file.dirty}
        dirty = any(file.dirty and file.rank not in whole for file in found)
        state = CommitState.UNCOMMITTED if dirty else CommitState.NO_MARKER
        return Recognition(self.name, f"has {found[0].path}", state)

    def by_step(self, store: Store, base: str, names: Collection[str]) -> Store | None:
        """Return the iterations of a session, or of one rank's folder, as directories.

        Raises:
            FtckptError: a folder could not be listed.
        """
        folders = [name for name in sorted(names) if name.isdecimal()]
        held = any(local_file(name) for name in names)
        if not held and len(folders) == len(names):
            held = any(_holds(store, join(base, name)) for name in folders[:_ASKED])
        if not held:
            return None
        from .by_iteration import IterationStore

        return IterationStore(store, base)

    def open(self, source: Source) -> NvrxCheckpoint:
        """Parse the pickles of all ranks and put their tensors together.

        Raises:
            IncompleteError: no rank's file was finished.
            CorruptError: no rank's file can be parsed; damage of some is a finding of `check`.
            UnsafeError, UnsupportedError: of the first file that is hostile or cannot be read.
        """
        from .reader import open_local

        return open_local(source)


def _files(listing: Listing) -> list[LocalFile]:
    found = _known(listing.files)
    if found or not all(name.isdecimal() for name in listing.directories):
        return found
    folders = sorted(listing.directories)
    if not any(_known(listing.inside(name).files) for name in folders[:_ASKED]):
        return []
    return [f for name in folders for f in _known(listing.inside(name).files, name + "/")]


def _known(names: Iterable[str], folder: str = "") -> list[LocalFile]:
    return [file for name in names if (file := local_file(folder + name)) is not None]


def _holds(store: Store, path: str) -> bool:
    try:
        return bool(_known(store.names(path)))
    except NotFoundError:
        return False
