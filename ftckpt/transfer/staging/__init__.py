"""Build a result where nobody sees it, and make it visible in one step."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ftckpt.digests.blocks import block_count
from ftckpt.errors import UnsupportedError
from ftckpt.storage.source import Source
from ftckpt.storage.store import Store, Upload
from ftckpt.transfer.layout import OutputFile
from ftckpt.transfer.write.blocks import BlockMade, Sink
from ftckpt.workers.buffers import buffer

_PART_SLOT = 2


class BlockSink(Sink):
    """Takes the chunks of one block, in order; used by one thread, which fills one at a time."""

    def __init__(self, upload: Upload, length: int) -> None:
        self._upload = upload
        # A store that wants whole parts gets the block at once.
        self._held = buffer(length, _PART_SLOT) if upload.unit > 1 else None
        self._begin: int | None = None

    def write(self, offset: int, view: memoryview) -> None:
        """Keep or pass on the bytes at `offset`."""
        if self._held is None:
            self._upload.write(offset, view)
            return
        if self._begin is None:
            self._begin = offset
        self._held[offset - self._begin : offset - self._begin + len(view)] = view

    def flush(self) -> None:
        """Hand on what was kept."""
        if self._held is not None and self._begin is not None:
            self._upload.write(self._begin, self._held)


class OpenFile:
    """A file on its way.

    Args:
        upload: takes its bytes.
        size: of the whole file.
        count: number of blocks that are made here; None: all.

    Attributes:
        blocks: that are there so far, by number.
    """

    def __init__(self, upload: Upload, size: int, count: int | None = None) -> None:
        self.upload = upload
        self.blocks: dict[int, BlockMade] = {}
        self._count = block_count(size) if count is None else count
        self._lock = threading.Lock()

    def completes(self, made: BlockMade) -> bool:
        """Note a block, and say whether it is the last; from any thread."""
        with self._lock:
            self.blocks[made.number] = made
            return len(self.blocks) == self._count


class StagedFile(NamedTuple):
    """One file being built.

    Attributes:
        upload: takes its bytes; None where an earlier run has finished it.
        earlier: blocks that an earlier run says it has made, by number.
    """

    upload: Upload | None
    earlier: Mapping[int, BlockMade]


class Staging(ABC):
    """One destination.

    Used by one thread, but for `open`, `holds`, `peek`, `add` and `finished`.

    Attributes:
        shows_before_proof: whether nobody can read the result back before it is visible.
        by_processes: whether a copy of this process may `open` its files too, and `add` to them.
        joins: whether a file whose blocks several parts have written must be joined by one of them,
            before it can be read.
    """

    shows_before_proof = False
    by_processes = False
    joins = False

    @abstractmethod
    def begin(self, plan: str, files: Mapping[str, int], *, restart: bool) -> bool:
        """Take possession of the place; return whether an earlier run has finished already.

        Args:
            plan: fingerprint of the transfer.
            files: size of every file of the result, by path.
            restart: forget what earlier runs have left.

        Raises:
            ExistsError: something stands at the destination.
            RefusedError: another run is writing there, or has left something else.
            NotFoundError: the directory around it does not exist.
            NoResourceError: not enough room.
        """

    def join(self, plan: str, files: Mapping[str, int], part: str) -> str:
        """Build a share of the result beside other parts; `open` and `close` are for it then.

        Args:
            plan: fingerprint of the transfer.
            files: size of every file of the result, by path.
            part: which; no other process does the same one meanwhile, where that can be known.

        Returns:
            What this staging place is called: another one, built later, has another name.

        Raises:
            UnsupportedError: it is not built by several.
            ExistsError, RefusedError, NotFoundError, NoResourceError: as `begin`.
        """
        raise UnsupportedError(
            "one object is written by one machine: no part of it can be",
            hint="copy it without --part",
        )

    def believe(self, blocks: Iterable[BlockMade], built: str) -> None:  # noqa: B027 - some keep records of files
        """Take blocks for made that parts have written and flushed, after `begin`.

        Args:
            blocks: which.
            built: what `join` has called the place.

        Raises:
            RefusedError: this is another place.
        """

    @property
    def built(self) -> Store:
        """Where the files lie that are being built.

        Raises:
            UnsupportedError: it is not built by several.
        """
        raise UnsupportedError("one object is written by one machine")

    def cuts(self, size: int, share: int) -> bool:
        """Say whether parts write blocks of one file; else it is of one part.

        Args:
            size: of the file.
            share: bytes that each part has, roughly.
        """
        return False

    def open_cut(self, file: OutputFile) -> StagedFile:
        """Begin or go on with a file of which other parts write blocks too; from any thread.

        Returns:
            What takes its bytes; None and all blocks where the file is whole already.
        """
        return self.open(file)

    def noted(self, upload: Upload, made: BlockMade) -> BlockMade:
        """Return a block of a cut file that was written, with what shows later that it is there.

        Args:
            upload: that took it.
            made: the block.
        """
        return made

    def is_whole(self, plan: str, path: str) -> bool:
        """Say whether a file that parts have cut can be read now; also before `join`.

        Args:
            plan: fingerprint of the transfer.
            path: of the file.
        """
        return True

    def require_room(self, nbytes: int) -> None:  # noqa: B027 - where nobody knows it, none fails
        """Refuse early what is known not to fit.

        Args:
            nbytes: of the whole result.

        Raises:
            NoResourceError: not enough room.
        """

    @abstractmethod
    def open(self, file: OutputFile, *, at_most: bool = False) -> StagedFile:
        """Begin or go on with one file; from any thread.

        Args:
            file: which.
            at_most: whether its size is not known yet, and `file.size` is the most it can be.
        """

    @abstractmethod
    def holds(self, file: OutputFile, made: BlockMade) -> bool:
        """Say whether the place still holds a block as an earlier run made it."""

    def peek(self, path: str, offset: int, view: memoryview) -> bool:
        """Put bytes of a file that is being built into `view`, as they are now; from any thread.

        Returns:
            Whether they could be read and cost nothing; they may be of no block that is made.
        """
        return False

    @abstractmethod
    def add(self, made: BlockMade) -> None:
        """Note a block that has been written; from any thread."""

    @abstractmethod
    def finished(self, file: OutputFile, blocks: Sequence[BlockMade]) -> None:
        """Note a file that is whole and durable; from any thread."""

    @abstractmethod
    def source(self, commit: Mapping[str, bytes]) -> Source:
        """Return the result as readers will see it, with its last small files."""

    def date(self, times: Mapping[str, float]) -> None:  # noqa: B027 - most stores date by themselves
        """Give files the modification times that they had elsewhere.

        Args:
            times: seconds since the epoch, by path.
        """

    @abstractmethod
    def publish(self, commit: Mapping[str, bytes], manifest: bytes) -> None:
        """Make it visible, durably, by one last act; then sweep away what is only staging.

        Raises:
            ExistsError: somebody else has made the destination meanwhile.
        """

    def forget(self) -> None:  # noqa: B027 - where two runs may build at once, it is theirs too
        """Remove what was built, where no run can go on from it: its source is another now."""

    @abstractmethod
    def close(self) -> None:
        """Let go; what was built stays and can be resumed."""
