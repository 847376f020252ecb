"""Compressed records of a source, undone whole and kept while their neighbours are asked for.

A record can only be undone from its beginning, and every worker asks for parts of the same few:
each is undone once, and all that are held or on their way share one bound.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import Payload
from ftckpt.extents import Extent
from ftckpt.storage.decompress import short, undo_into
from ftckpt.storage.ranges import size_for
from ftckpt.storage.source import Source
from ftckpt.workers.budget import budget, demand

if TYPE_CHECKING:
    from ftckpt.workers.limits import RateLimit

_SHARE = 2  # of the budget, as a divisor
_KEPT = 4  # of it for records that are kept, if two fit
_MOST = 256  # records kept, however small


class _Record(NamedTuple):
    extent: Extent
    length: int


class UndoneStreams:
    """Undoes records; may be used from many threads.

    Args:
        source: where they lie.
        limiter: bounds the rate of reading.
    """

    def __init__(self, source: Source, limiter: RateLimit | None = None) -> None:
        self._source = source
        self._limiter = limiter
        self._changed = threading.Condition()
        self._kept: OrderedDict[_Record, memoryview] = OrderedDict()
        self._coming: set[_Record] = set()

    def get(self, payload: Payload) -> memoryview:
        """Return the undone stream of a payload up to its tensor's end.

        Raises:
            NoResourceError: it takes more than half of the memory budget.
            UnsupportedError, CorruptError: see `ftckpt.storage.decompress.undo`.
        """
        assert payload.inner is not None
        record = _Record(payload.extent, sum(payload.inner))
        demand(record.length * _SHARE, f"a compressed record of {payload.extent.file}")
        with self._changed:
            while True:
                known = self._kept.get(record)
                if known is not None:
                    self._kept.move_to_end(record)
                    return known
                if record not in self._coming and self._make_room(record.length):
                    break
                self._changed.wait()
            self._coming.add(record)
        try:
            data = self._undo(payload, record.length)
            with self._changed:
                self._kept[record] = data
        finally:
            with self._changed:
                self._coming.discard(record)
                self._changed.notify_all()
        return data

    def clear(self) -> None:
        """Forget what is kept."""
        with self._changed:
            self._kept.clear()

    def _make_room(self, length: int) -> bool:
        """Forget the longest unused until `length` bytes more fit; with nothing held, all fits."""
        most = min(budget() // _SHARE, max(budget() // _KEPT, 2 * length))
        room = most - length - sum(record.length for record in self._coming)
        held = sum(record.length for record in self._kept)
        while self._kept and (held > room or len(self._kept) >= _MOST):
            record, _ = self._kept.popitem(last=False)
            held -= record.length
        return held <= room or not self._coming

    def _undo(self, payload: Payload, length: int) -> memoryview:
        import numpy as np

        result = np.empty(length, np.uint8).data  # a bytearray would be filled first
        with self._source.open(payload.extent.file) as reader:
            at = undo_into(
                reader,
                payload.extent,
                payload.transforms,
                result,
                size=size_for(self._source.store),
                limiter=self._source.limited(self._limiter),
            )
        if at != length:
            raise short(payload.extent, length, at)
        return result.toreadonly()
