"""Read windows of files, several at a time and ahead of use, in bounded memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ftckpt.errors import CorruptError, FtckptError, NoResourceError
from ftckpt.extents import Extent
from ftckpt.storage.store import Reader, Store
from ftckpt.workers.threads import DaemonThreads

from .plan import Window, Windows

if TYPE_CHECKING:
    from ftckpt.workers.limits import RateLimit

_BATCH = 4  # divisor of the bound: bytes that are read ahead at once
_SMALL, _AGAIN = 64 << 10, 64  # bytes, and number, of ranges that are kept for repeated reads
_TICK = 0.5  # seconds that a wait may delay a signal


class Ahead:
    """Reads windows and keeps them; may be used from many threads.

    Args:
        store: of the files.
        windows: of the expected reads.
        bound: bytes that may be kept, besides a window in flight for each thread.
        limiter: bounds the rate of reading.
    """

    def __init__(
        self, store: Store, windows: Windows, bound: int, limiter: RateLimit | None = None
    ) -> None:
        self.limiter = limiter
        self._bound = bound
        self._store = store
        self._windows = windows
        self._gap, self._parallel = store.traits.gap, store.traits.parallel
        self._changed = threading.Condition()
        self._kept: OrderedDict[int, Window] = OrderedDict()
        self._nbytes = 0  # kept and coming
        self._used = self._wasted = 0  # windows that were read early
        self._again: OrderedDict[Extent, bytes] = OrderedDict()
        self._readers: dict[str, Reader] = {}
        self._thread: DaemonThreads | None = None
        self._sent = False
        self._closed = False
        if len(windows.all) > 1:
            # One, and started here: a thread takes tens of megabytes of addresses, which are
            # limited while a pickle is parsed.
            with suppress(NoResourceError):
                self._thread = DaemonThreads(1)
                self._thread.submit(bytearray)

    def open(self, path: str) -> Reader:
        """Return a reader of one object."""
        return _AheadReader(self, path, self._reader(path))

    def get(self, path: str, offset: int, length: int) -> memoryview | None:
        """Return bytes of an object; None if they are best read by themselves.

        Raises:
            FtckptError: of the store.
        """
        window = self._windows.holding(path, offset, length)
        data = None if window is None else self._get(window, length)
        if window is None or data is None:
            return None
        return data[offset - window.offset :][:length]

    def read(self, path: str, offset: int, length: int) -> bytes:
        """Return bytes of an object; keeps the last small ranges outside windows too.

        The directory of an archive is read again for each object in it.

        Raises:
            FtckptError: of the store.
        """
        data = self.get(path, offset, length)
        if data is not None:
            return bytes(data)
        place = Extent(path, offset, length)
        with self._changed:
            known = self._again.pop(place, None)
            if known is not None:
                self._again[place] = known
                return known
        if self.limiter is not None:
            self.limiter.take(length)
        found = self._reader(path).read(offset, length)
        if length <= _SMALL:
            with self._changed:
                self._again[place] = found
                while len(self._again) > _AGAIN:
                    self._again.popitem(last=False)
        return found

    def read_many(self, extents: Sequence[Extent]) -> list[bytes]:
        """Return the bytes of each extent: from one window, or as the store does for several."""
        windows = {self._windows.holding(*extent) for extent in extents}
        if len(windows) == 1 and None not in windows:
            found = [self.get(*extent) for extent in extents]
            if all(data is not None for data in found):
                return [bytes(data) for data in found if data is not None]
        if self.limiter is not None:
            self.limiter.take(sum(extent.length for extent in extents))
        return self._store.read_many(extents)

    def forget(self) -> None:
        """Drop the kept bytes."""
        with self._changed:
            while self._kept:
                self._drop(next(iter(self._kept.values())))
            self._again.clear()

    def close(self) -> None:
        """Stop reading ahead; open readers continue without it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.forget()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _get(self, window: Window, length: int) -> memoryview | None:
        with self._changed:
            while window.coming and not self._closed:
                self._changed.wait(_TICK)
            data = window.data
            if data is None and (self._closed or not window.pays(self._gap)):
                window.reads += 1
                return None
            if data is None:
                self._begin(window)
            else:
                self._kept.move_to_end(window.number)
            if window.early:
                window.early = False
                self._used += 1
            window.reads += 1
            window.served += length
            if window.reads == 1:
                self._send_ahead(window.number + 1)
        if data is not None:
            return data
        try:
            return self._fetch(window)
        except CorruptError:  # reading the range alone reports what is wrong, if anything is
            return None

    def _begin(self, window: Window) -> None:
        """Mark a window as being read, and make room for it."""
        window.coming = True
        window.fetches += 1
        window.reads = window.served = 0
        self._nbytes += window.length
        self._make_room(0)
        while self._nbytes > self._bound and self._kept:
            self._drop(next(iter(self._kept.values())))

    def _make_room(self, nbytes: int) -> bool:
        """Drop used-up windows, longest unused first; return whether the bytes fit then."""
        bound = self._bound - nbytes
        if self._nbytes > bound:
            for window in [window for window in self._kept.values() if window.done]:
                self._drop(window)
                if self._nbytes <= bound:
                    break
        return self._nbytes <= bound

    def _drop(self, window: Window) -> None:
        del self._kept[window.number]
        self._nbytes -= window.length
        self._wasted += window.early
        window.data, window.early = None, False

    def _fetch(self, window: Window) -> memoryview:
        """Read a window after `_begin`."""
        try:
            if self.limiter is not None:
                self.limiter.take(window.length)
            data = memoryview(bytearray(window.length))
            self._reader(window.path).readinto(window.offset, data)
        except BaseException as error:
            with self._changed:
                window.hopeless = isinstance(error, CorruptError)
                self._undo(window)
            raise
        with self._changed:
            self._keep(window, data.toreadonly())
        return data

    def _keep(self, window: Window, data: memoryview) -> None:
        window.data = data
        self._kept[window.number] = window
        self._end(window)
        if self._closed:
            self._drop(window)

    def _undo(self, window: Window) -> None:
        window.early = False
        window.fetches -= 1
        self._nbytes -= window.length
        self._end(window)

    def _end(self, window: Window) -> None:
        window.coming = False
        self._changed.notify_all()

    def _send_ahead(self, number: int) -> None:
        """Start reading the next windows, as long as that has helped."""
        if self._sent or self._thread is None or self._wasted > self._used + self._parallel:
            return
        batch: list[Window] = []
        left = self._bound // _BATCH
        for window in self._windows.all[number : number + self._parallel]:
            if window.fetches or window.hopeless:
                continue
            left -= window.length
            if left < 0 or not self._make_room(window.length):
                break
            self._begin(window)
            window.early = True
            batch.append(window)
        if batch:
            self._sent = True
            self._thread.submit(self._bring, batch)

    def _bring(self, batch: Sequence[Window]) -> None:
        """Read windows after `_begin`, in few concurrent requests."""
        found: Sequence[bytes] = ()
        try:
            if self.limiter is not None:
                self.limiter.take(sum(window.length for window in batch))
            places = [Extent(one.path, one.offset, one.length) for one in batch]
            found = self._store.read_many(places)
        except FtckptError:  # a request for one of them reads it again and raises
            pass
        finally:
            with self._changed:
                self._sent = not found  # do not retry a failed read-ahead
                for window, data in zip(batch, found, strict=False):
                    self._keep(window, memoryview(data))
                for window in batch[len(found) :]:
                    self._undo(window)

    def _reader(self, path: str) -> Reader:
        """Return the one reader of an object, which ensures that all bytes are of one version."""
        with self._changed:
            reader = self._readers.get(path)
        if reader is None:
            opened = self._store.open(path)
            with self._changed:
                reader = self._readers.setdefault(path, opened)
        return reader


class _AheadReader(Reader):
    """One object, as far as possible from the read-ahead."""

    def __init__(self, ahead: Ahead, path: str, reader: Reader) -> None:
        self._ahead = ahead
        self._path = path
        self._direct = reader

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes at `offset`; TruncatedError if it is shorter."""
        return self._ahead.read(self._path, offset, length)

    def readinto(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`; TruncatedError if it is shorter."""
        view = view.cast("B")
        data = self._ahead.get(self._path, offset, len(view))
        if data is not None:
            view[:] = data
            return
        if self._ahead.limiter is not None:
            self._ahead.limiter.take(len(view))
        self._direct.readinto(offset, view)

    def close(self) -> None:
        """Release it; nothing is held open between reads."""
