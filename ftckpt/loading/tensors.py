"""A job's tensors as places to load into: straight on the CPU, by page-locked memory on a GPU.

Every thread has two buffers. What it reads into one goes up by a stream of its own while it reads
into the other; on the device it is put in place with its strides, and cast there. Without a
GPU the same code runs without streams, and that is how it is tested.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.errors import UnsupportedError
from ftckpt.transfer.casting import require_cast
from ftckpt.transfer.read.copies_plan import ElementMove
from ftckpt.transfer.read.elements import REMOTE
from ftckpt.workers.buffers import buffer

# Bytes of each of the two buffers of a thread; a reading is never longer.
STAGE = REMOTE
_SLOT = 3  # of `workers.buffers`
# What moves elements of a size without looking at them.
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def dtype_of(tensor: torch.Tensor) -> DType:
    """Return the type of a tensor's elements.

    Raises:
        UnsupportedError: it is one that ftckpt does not know.
    """
    found = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if found is None:
        raise UnsupportedError(f"a tensor of {tensor.dtype} cannot be loaded into")
    return found


class StagingBuffers:
    """The buffers of all threads, and what goes up from them.

    Args:
        device: where tensors go: the CPU, or a GPU.
        forced: whether the buffers are used where tensors could be read into directly; for tests.
    """

    def __init__(self, device: torch.device, *, forced: bool = False) -> None:
        self.device = device
        self.direct = device.type == "cpu" and not forced
        self._cuda = device.type == "cuda"
        self._thread = threading.local()
        self._streams: list[Any] = []
        self._lock = threading.Lock()
        self._begun = torch.cuda.current_stream(device) if self._cuda else None

    def buffer(self, nbytes: int) -> memoryview:
        """Return memory of this thread, of which nothing is on its way any more."""
        mine = self._thread
        if self.direct or (not self._cuda and nbytes > STAGE):
            mine.held = None
            return buffer(nbytes, _SLOT)
        ring = getattr(mine, "ring", None)
        if ring is None:
            ring = mine.ring = [self._page_locked(max(STAGE, nbytes)) for _ in range(2)]
            mine.events = [None, None]
            mine.turn = 0
            mine.stream = None
            if self._cuda:
                make: Any = torch.cuda.Stream
                mine.stream = make(self.device)
                mine.stream.wait_stream(self._begun)
                with self._lock:
                    self._streams.append(mine.stream)
        mine.turn = 1 - mine.turn
        if ring[mine.turn].numel() < nbytes:
            ring[mine.turn] = self._page_locked(nbytes)
        if mine.events[mine.turn] is not None:
            mine.events[mine.turn].synchronize()
            mine.events[mine.turn] = None
        mine.held, mine.sent = ring[mine.turn], None
        view: Any = mine.held.numpy()
        return memoryview(view)[:nbytes]

    def sent(self, raw: memoryview) -> torch.Tensor:
        """Return bytes of this thread's buffer on the device."""
        mine = self._thread
        if getattr(mine, "held", None) is None:
            return torch.frombuffer(raw, dtype=torch.uint8)
        if not self._cuda:
            found: torch.Tensor = mine.held[: len(raw)]
            return found
        if mine.sent is None:
            mine.sent = mine.held[: len(raw)].to(self.device, non_blocking=True)
        up: torch.Tensor = mine.sent
        return up

    def host(self, raw: memoryview) -> torch.Tensor:
        """Return bytes of this thread's buffer where they are."""
        return torch.frombuffer(raw, dtype=torch.uint8)

    def stream(self) -> Any:
        """Return the context in which this thread's work for the device is put."""
        stream = getattr(self._thread, "stream", None)
        return torch.no_grad() if stream is None else torch.cuda.stream(stream)

    def mark(self) -> None:
        """Remember that what was put so far needs the buffer."""
        mine = self._thread
        if self._cuda and getattr(mine, "held", None) is not None:
            make: Any = torch.cuda.Event
            event = make()
            event.record(mine.stream)
            mine.events[mine.turn] = event

    def finish(self) -> None:
        """Let what the job puts on the device next wait for all that was loaded."""
        if not self._cuda:
            return
        current: Any = torch.cuda.current_stream(self.device)
        for stream in self._streams:
            current.wait_stream(stream)
        current.synchronize()

    def _page_locked(self, nbytes: int) -> torch.Tensor:
        if not self._cuda:
            return torch.empty(nbytes, dtype=torch.uint8)
        with torch.cuda.device(self.device):  # a thread begins on the first device, and not on ours
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class TensorTarget:
    """A plain tensor of the job's; fits `ftckpt.loading.targets.LoadTarget`.

    Args:
        tensor: on any device, with any strides.
        staging: the buffers.
        name: for messages.

    Raises:
        UnsupportedError: a subclass that keeps its values in another way, or an unknown type.
    """

    def __init__(self, tensor: torch.Tensor, staging: StagingBuffers, name: str) -> None:
        tensor = tensor.detach()
        if type(tensor) is not torch.Tensor:
            what = type(tensor).__name__
            raise UnsupportedError(f"{name} is a {what}, which cannot be loaded into", tensor=name)
        self.dtype = dtype_of(tensor)
        self._tensor = tensor
        self._staging = staging
        self._on_cpu = tensor.device.type == "cpu"
        # Elements in the order of the file need no more than one copy at the end.
        self._apart = not tensor.is_contiguous()
        held = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if (
            self._apart) else tensor  # fmt: skip
        self._flat = held.view(-1) if held.numel() else held.reshape(0)
        self._memory: memoryview | None = None
        if self._on_cpu and staging.direct and held.numel():
            bytes_: Any = self._flat.view(torch.uint8).numpy()
            self._memory = memoryview(bytes_)

    def memory(self, start: int, count: int) -> memoryview | None:
        """Return the bytes of some elements, on the CPU."""
        size = self.dtype.itemsize
        if self._memory is None:
            return None
        return self._memory[start * size : (start + count) * size]

    def buffer(self, nbytes: int) -> memoryview:
        """Return this thread's buffer."""
        return self._staging.buffer(nbytes)

    def put(self, raw: memoryview, offset: int, moves: Sequence[ElementMove]) -> None:
        """Put elements in place on their device, cast where the types differ."""
        if self._on_cpu:
            sent = self._staging.host(raw)
            for move in moves:
                self._place(sent, offset, move)
            return
        with self._staging.stream(), torch.no_grad():
            sent = self._staging.sent(raw)
            for move in moves:
                self._place(sent, offset, move)
            self._staging.mark()

    def _place(self, sent: torch.Tensor, offset: int, move: ElementMove) -> None:
        same = move.dtype == self.dtype
        size = move.dtype.itemsize
        begin = move.offset - offset
        part = sent[begin : begin + move.span]
        if part.data_ptr() % size:
            part = part.clone()
        if same:
            kind, own = _RAW[size], self._flat.view(_RAW[size])
        else:
            require_cast(move.dtype, self.dtype)
            kind, own = getattr(torch, move.dtype.name), self._flat
        items = part.view(kind)
        strides = [stride // size for stride in move.strides]
        items = items.as_strided(move.sizes, strides, items.storage_offset())
        at = own.storage_offset() + move.start
        own.as_strided(move.sizes, move.steps, at).copy_(items)

    def clear(self) -> None:
        """Make all elements zero."""
        self._flat.zero_()

    def whole(self, data: memoryview) -> None:
        """Put all bytes in place."""
        flat = self._flat.view(torch.uint8)
        flat.copy_(torch.frombuffer(data, dtype=torch.uint8).to(flat.device))

    def finish(self) -> None:
        """Copy what was put together apart from a tensor with other strides."""
        if self._apart:
            self._staging.finish()
            self._tensor.copy_(self._flat.view(self._tensor.shape))
