"""The bytes of a source's tensors: open files, undone streams, and where each tensor lies."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ftckpt.checkpoint import Box, Checkpoint, Piece, TensorInfo
from ftckpt.errors import CorruptError

from .copies_plan import Boxes, StoredBox, held_by, reach
from .decompressed_cache import UndoneStreams

if TYPE_CHECKING:
    from ftckpt.extents import Extent
    from ftckpt.storage.prefetch.reads import Ahead
    from ftckpt.storage.store import Reader
    from ftckpt.workers.limits import RateLimit

_OPEN_FILES = 128
_SHARE = (
    8  # of the files that the process may open, as a divisor: source and result are read at once
)
_KNOWN_TENSORS = 1024
_FEW = 4  # boxes that are compared as fast as they are looked up


class Places:
    """Where the main pieces of one tensor lie, or one other piece of it.

    Args:
        held: each at a regular place; they do not overlap.
    """

    def __init__(self, held: Sequence[StoredBox]) -> None:
        self._held = held
        many = len(held) > _FEW and held[0].box.sizes
        self._boxes = Boxes.of([one.box for one in held]) if many else None

    @property
    def only(self) -> StoredBox | None:
        """The one place where all that is there lies; None where there are several, or none."""
        return self._held[0] if len(self._held) == 1 else None

    def near(self, box: Box) -> Sequence[StoredBox]:
        """Return all that share elements with a box of the tensor, and perhaps others."""
        if self._boxes is None:
            return self._held
        return [self._held[n] for n in self._boxes.near(box)]


class ReadObserver(Protocol):
    """Is told, by the thread that reads, of the bytes of files that were read."""

    def saw(self, file: str, offset: int, data: memoryview) -> None:
        """Look at bytes of a file as they are."""

    def undid(self, extent: Extent) -> None:
        """Hear that a compressed record was undone, now or before."""


class SourceBytes:
    """Reads the files of one checkpoint; may be used from many threads.

    Args:
        checkpoint: opened.
        limiter: bounds the rate of reading.
        observer: is told of what is read.

    Attributes:
        checkpoint: as given.
        observer: as given.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        limiter: RateLimit | None = None,
        observer: ReadObserver | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self._limiter = limiter
        self.observer = observer
        self._lock = threading.Lock()
        self._most = most_open_files()
        self._readers: OrderedDict[str, Reader] = OrderedDict()
        self._ahead: Ahead | None = None
        self._places: OrderedDict[tuple[str, Piece | None], Places] = OrderedDict()
        self._undone = UndoneStreams(checkpoint.source, limiter)

    @property
    def gap(self) -> int:
        """Reads that are closer than this many bytes are better done as one."""
        return self.checkpoint.source.store.traits.gap

    def places(self, info: TensorInfo, piece: Piece | None = None) -> Places:
        """Return where the main pieces of a tensor lie; found once while it is worked on.

        Args:
            info: the tensor.
            piece: a piece of it that is meant alone, of some volume: a replica.

        Raises:
            CorruptError: a piece has fewer bytes than its elements need (`size-mismatch`).
        """
        with self._lock:
            known = self._places.get((info.key, piece))
        if known is not None:
            return known
        main = (one for one in info.pieces if not one.replica and one.box.volume)
        pieces = main if piece is None else (piece,)
        found = Places([held for one in pieces for held in self._places_of(info, one)])
        with self._lock:
            self._places[info.key, piece] = found
            while len(self._places) > _KNOWN_TENSORS:
                self._places.popitem(last=False)
        return found

    def get(self, held: StoredBox, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes at `offset` of a file, or of the stream that is undone."""
        if held.undone is None:
            self.read(held.file, offset, out)
        else:
            out[:] = self._undone.get(held.undone)[offset : offset + len(out)]
            if self.observer is not None:
                self.observer.undid(held.undone.extent)

    def read(self, file: str, offset: int, out: memoryview) -> None:
        """Fill `out` with bytes of a file as they are."""
        if self._limiter is not None:
            limiter = self.checkpoint.source.limited(self._limiter)
            if limiter is not None:
                limiter.take(len(out))
        self._reader(file).readinto(offset, out)
        if self.observer is not None:
            self.observer.saw(file, offset, out)

    def close(self) -> None:
        """Close every file, and let go of what was undone."""
        self._undone.clear()
        with self._lock:
            while self._readers:
                self._readers.popitem()[1].close()

    def _places_of(self, info: TensorInfo, piece: Piece) -> list[StoredBox]:
        payload = self.checkpoint.payload(piece)
        begin, has = payload.inner or (payload.extent.offset, payload.extent.length)
        found = list(held_by(piece, payload, info.dtype.itemsize))
        for held in found:
            end = held.origin + reach(held.box.sizes, held.strides, info.dtype.itemsize)
            if end > begin + has:
                raise CorruptError(
                    f"a piece of {info.key} has {has} bytes and needs {end - begin}",
                    kind="size-mismatch",
                    file=piece.extent.file,
                    tensor=info.key,
                    offset=piece.extent.offset,
                    length=piece.extent.length,
                )
        return found

    def _reader(self, file: str) -> Reader:
        ahead = self.checkpoint.source.lookahead.current
        with self._lock:
            if ahead is not self._ahead:  # what was opened before does not know of it
                self._ahead = ahead
                self._readers.clear()
            reader = self._readers.get(file)
            if reader is None:
                reader = self._readers[file] = self.checkpoint.source.open(file)
                if len(self._readers) > self._most:
                    # Another thread may still read from it: the last reference closes it.
                    self._readers.popitem(last=False)
            return reader


def most_open_files() -> int:
    """Return how many files one side of a transfer keeps open."""
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except (ImportError, OSError):
        return _OPEN_FILES
    return _OPEN_FILES if soft < 0 else max(1, min(_OPEN_FILES, soft // _SHARE))
