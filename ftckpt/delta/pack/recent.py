"""Keep what one thread has just read, for the tensors that it predicts.

The tensors of a parameter are encoded block by block, one after the other, and up to five blocks
are read for one: a moment for itself, for the other moment and for the master.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftckpt.delta.codec.decode import Fill
    from ftckpt.delta.codec.predict import DeltaSide

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
