"""The same moves on another device: spans go up, are placed and cast there, and come back whole.

Every worker thread has a stream and page-locked buffers of its own, so that one thread's reading
overlaps another's transfers and kernels. On `cpu` the same code runs without them, which is how it
is tested without an accelerator.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.dtypes import DType
from ftckpt.errors import NoResourceError, UsageError
from ftckpt.findings import counted
from ftckpt.packages import needing
from ftckpt.transfer.read.copies_plan import ElementMove
from ftckpt.transfer.read.elements import Gatherer, Region

from .casting import require_cast
from .layout import Elements, Layout

if TYPE_CHECKING:
    import torch

    from ftckpt.workers.limits import RateLimit

_SAMPLE = 128 << 20
# What moves items of a size without reading them.
_RAW = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
# How `checkpoint.rounding` spells a NaN: the shift and mask of its payload, and the quiet bits.
_NANS = {"bfloat16": (16, 0x7F, 0x7FC0), "float16": (13, 0x03FF, 0x7E00)}


def torch_device(name: str) -> torch.device:
    """Return a device by its name.

    Args:
        name: `cpu`, `cuda` or `cuda:N`.

    Raises:
        UsageError: no name of a device.
        NoResourceError: this machine has no such device.
        MissingPackageError: torch is not installed.
    """
    kind, colon, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not (number.isascii() and number.isdecimal())):
        raise UsageError(f"{name!r} is not a device: cpu, cuda or cuda:N")
    with needing(f"the device {name}", "take --device cpu, which does the same"):
        import torch
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise NoResourceError(
                f"no {name} here: torch sees {counted(count, 'CUDA device')}",
                hint="--device cpu does the same",
            )
    return device


class DeviceGatherer(Gatherer):
    """Places and casts elements on a torch device.

    Args:
        checkpoint: the source, opened.
        device: `cpu`, `cuda` or `cuda:N`.
        limiter: bounds the rate of reading.

    Raises:
        UsageError, NoResourceError, MissingPackageError: see `torch_device`.
    """

    # A transfer costs some ten microseconds however small it is.
    chunk = 16 << 20

    def __init__(
        self, checkpoint: Checkpoint, device: str, limiter: RateLimit | None = None
    ) -> None:
        super().__init__(checkpoint, limiter)
        self._device = torch_device(device)

    def place(self, region: Region, start: int, stop: int, out: memoryview) -> None:
        """Put elements `start` to `stop` of a region into `out`; see `Gatherer.place`."""
        import torch

        dtype = region.shard.dtype
        items = torch.empty if region.full else torch.zeros
        with self._stream():
            held = items(stop - start, dtype=_type(dtype, cast=False), device=self._device)
            for reading in self.readings(region, start, stop):
                raw = self._buffer("up", reading.nbytes)
                view: Any = raw.numpy()
                self.bytes.get(reading.held, reading.offset, memoryview(view))
                sent = raw.to(self._device, non_blocking=True)
                for move in reading.moves:
                    target = held.as_strided(move.sizes, move.steps, move.start - start)
                    target.copy_(_items(sent, move.offset - reading.offset, move, dtype))
                self._wait()  # the buffer is filled again by the next reading
            self._fetch(held, out)

    def _fetch(self, held: torch.Tensor, out: memoryview) -> None:
        import numpy as np
        import torch

        flat = held.view(torch.uint8)
        back = self._buffer("down", flat.numel())
        back.copy_(flat, non_blocking=True)
        self._wait()
        np.frombuffer(out, np.uint8)[:] = back.numpy()

    def _buffer(self, name: str, nbytes: int) -> torch.Tensor:
        """Return page-locked memory of this thread; the next call with the same name reuses it."""
        import torch

        known: torch.Tensor | None = getattr(self._thread, name, None)
        if known is None or known.numel() < nbytes:
            pinned = self._device.type == "cuda"
            known = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
            setattr(self._thread, name, known)
        return known[:nbytes]

    def _stream(self) -> Any:
        import torch

        if self._device.type != "cuda":
            return torch.inference_mode()
        stream = getattr(self._thread, "stream", None)
        if stream is None:
            make: Any = torch.cuda.Stream
            stream = self._thread.stream = make(self._device)
        return torch.cuda.stream(stream)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            self._thread.stream.synchronize()


def gatherer(
    checkpoint: Checkpoint, device: str, layout: Layout, limiter: RateLimit | None = None
) -> Gatherer:
    """Return what gathers on a device; `auto` measures and takes the faster.

    Plain merges move bytes and compute nothing, so a device must pay for two transfers with the
    casts and strided copies that it saves. Whether it does depends on the machine: `auto` gathers
    up to 128 MiB of the layout both ways, where there is a CUDA device at all.

    Raises:
        UsageError, NoResourceError, MissingPackageError: see `torch_device`.
    """
    plain = Gatherer(checkpoint, limiter)
    if device == "cpu":
        return plain
    if device != "auto":
        return DeviceGatherer(checkpoint, device, limiter)
    try:
        import torch
    except ModuleNotFoundError:  # nothing to measure
        return plain
    if not torch.cuda.is_available():
        return plain
    other = DeviceGatherer(checkpoint, "cuda", limiter)
    _seconds(other, layout)  # the first kernels and buffers are not what is asked about
    slower, faster = sorted((plain, other), key=lambda one: _seconds(one, layout), reverse=True)
    slower.close()
    return faster


def _seconds(one: Gatherer, layout: Layout) -> float:
    """Return how long gathering the first elements of a layout takes."""
    left = _SAMPLE
    out = memoryview(bytearray(one.chunk))
    began = time.monotonic()
    for file in layout.files:
        for segment in file.segments:
            if left <= 0:
                return time.monotonic() - began
            size = segment.shard.dtype.itemsize if isinstance(segment, Elements) else 0
            if isinstance(segment, Elements) and size:
                step = one.chunk // size
                for start in range(segment.start, segment.stop, step):
                    stop = min(start + step, segment.stop)
                    one.fill(segment.shard, start, stop, out[: (stop - start) * size])
                    left -= (stop - start) * size
                    if left <= 0:
                        break
    return time.monotonic() - began


def _items(sent: torch.Tensor, skip: int, move: ElementMove, dtype: DType) -> torch.Tensor:
    """Return the elements of a move, of which the first begins at byte `skip`, as `dtype`."""
    size, casts = move.dtype.itemsize, move.dtype != dtype
    strides = [s // size for s in move.strides]
    found = sent.view(_type(move.dtype, cast=casts)).as_strided(move.sizes, strides, skip // size)
    if not casts:
        return found
    require_cast(move.dtype, dtype)
    done = found.to(_type(dtype, cast=True)).view(_type(dtype, cast=False))
    rule = _NANS.get(dtype.name)
    if rule is None or move.dtype.family != "float":
        return done
    import torch

    shift, mask, quiet = rule
    bits = found.to(torch.float32).view(torch.int32)
    spelled = ((bits >> shift) & mask) | ((bits >> 16) & 0x8000) | quiet
    return torch.where(found.isnan(), spelled.to(done.dtype), done)


def _type(dtype: DType, *, cast: bool) -> torch.dtype:
    """Return torch's type for elements, or for moving them without reading them."""
    import torch

    found: torch.dtype = getattr(torch, dtype.name if cast else _RAW[dtype.itemsize])
    return found
