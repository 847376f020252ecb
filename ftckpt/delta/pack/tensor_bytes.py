"""The bytes of a checkpoint's tensors in their dense C order, whatever its format and topology.

Keep what one thread has just read, for the tensors that it predicts.

The tensors of a parameter are encoded block by block, one after the other, and up to five blocks
are read for one: a moment for itself, for the other moment and for the master.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ftckpt.checkpoint import Checkpoint, TensorInfo
from ftckpt.transfer.content import Content
from ftckpt.transfer.read.elements import Gatherer

if TYPE_CHECKING:
    from ftckpt.delta.codec.decode import Fill
    from ftckpt.delta.codec.predict import DeltaSide
    from ftckpt.transfer.read.source_bytes import ReadObserver
    from ftckpt.workers.limits import RateLimit


class TensorBytes:
    """Reads the tensors of one checkpoint by key; may be used from many threads.

    Args:
        checkpoint: opened.
        limiter: bounds the rate of reading.
    """

    def __init__(self, checkpoint: Checkpoint, limiter: RateLimit | None = None) -> None:
        self._content = Content.of(checkpoint)
        self._gatherer = Gatherer(checkpoint, limiter)

    def fill(self, key: str, offset: int, view: memoryview) -> None:
        """Put the bytes of a tensor that begin at an offset into `view`: a `Fill`.

        Raises:
            CorruptError: the checkpoint's bytes are missing, or its pieces leave a hole.
            UnsupportedError: a tensor whose elements are smaller than a byte, not in one piece.
            FtckptError: what the storage raises.
        """
        self._gatherer.fill_bytes(self._content.whole(key), offset, view)

    def tell(self, observer: ReadObserver | None) -> None:
        """Tell of what is read from now on."""
        self._gatherer.bytes.observer = observer

    def close(self) -> None:
        """Close every file."""
        self._gatherer.close()


def tied(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the tensors that are copies of another of one kind, shape and type: key -> its key.

    A name that shares memory with one of another kind is a tensor of its own here. A name that the
    checkpoint does not list as a tensor is a copy too.
    """
    tensors, aliases = checkpoint.tensors, checkpoint.aliases
    found = {}
    for key in aliases:
        owner, seen = key, set()
        while owner in aliases and owner not in seen:
            seen.add(owner)
            owner = aliases[owner]
        held = tensors.get(owner)
        if held is None or owner in seen:
            continue
        if key not in tensors or _form(held) == _form(tensors[key]):
            found[key] = owner
    return found


def own_tensors(checkpoint: Checkpoint) -> Mapping[str, TensorInfo]:
    """Return the tensors that are no copies of others, in order: those that the content counts."""
    copies = tied(checkpoint)
    return {key: info for key, info in checkpoint.tensors.items() if key not in copies}


def _form(info: TensorInfo) -> tuple[object, ...]:
    return info.component, info.kind, info.shape, info.dtype


_MOST = 8  # blocks: one is encoded from up to seven


class RecentBlocks(threading.local):
    """The last few blocks that a thread has read, of both checkpoints."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[DeltaSide, str, int, int], mmap.mmap] = OrderedDict()

    def read(self, fill: Fill, side: DeltaSide, key: str, offset: int, nbytes: int) -> memoryview:
        """Return bytes of a tensor; nobody writes to them, and seven reads later they are others.

        Args:
            fill: reads the side's tensors.
            side: which checkpoint.
            key: of the tensor in it.
            offset: of the first byte in the tensor's dense C order.
            nbytes: how many.

        Raises:
            FtckptError: what `fill` raises.
        """
        place = (side, key, offset, nbytes)
        memory = self._held.pop(place, None)
        if memory is None:
            if len(self._held) == _MOST:
                _, memory = self._held.popitem(last=False)
            if memory is None or len(memory) < nbytes:
                memory = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            fill(key, offset, memoryview(memory)[:nbytes])
        self._held[place] = memory
        return memoryview(memory)[:nbytes]
