"""Words transformed and cut into planes by torch, on another device.

The same integers as `ftckpt.delta.words` and `planes` compute, bit for bit, so that nothing in a
delta says where it was made. Frames are made on the processor. Signed words are used throughout:
torch shifts no unsigned ones, and subtraction and shifts to the left do not see the sign.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftckpt.transfer.device import torch_device

from .blocks import Form

if TYPE_CHECKING:
    import torch

    from .words import Array


class Device:
    """A device that cuts blocks; may be used from many threads.

    Args:
        name: `cpu`, `cuda` or `cuda:N`.

    Raises:
        UsageError, NoResourceError: see `ftckpt.transfer.device.torch_device`.
    """

    def __init__(self, name: str) -> None:
        self._device = torch_device(name)

    def cutter(
        self, values: Array, reference: Array | None, form: Form, joined: int
    ) -> DeviceCutter:
        """Return the words of a block in one of the forms of planes, cut.

        Args:
            values: the block's words.
            reference: as many, which the reader will have; None for nothing.
            form: planes, rotated, difference or xor.
            joined: how many of the lowest bytes of each word stay together.
        """
        import torch

        bits = 8 * values.itemsize
        words = self._moved(values)
        if form is Form.ROTATED:
            words = (words << 1) | ((words >> bits - 1) & 1)
        elif form in (Form.DIFFERENCE, Form.XOR):
            assert reference is not None
            other = self._moved(reference)
            words = words ^ other if form is Form.XOR else _zigzag(words - other, bits)
        columns = words.view(torch.uint8).view(-1, values.itemsize)
        low, planes = columns[:, :joined], columns[:, joined:].t()
        return DeviceCutter(_fetched(low).reshape(-1), _fetched(planes), joined)

    def _moved(self, words: Array) -> torch.Tensor:
        import torch

        return torch.from_numpy(words.view(f"<i{words.itemsize}")).to(self._device)


class DeviceCutter:
    """What a device has cut, chunk by chunk (`ftckpt.delta.planes.Cutter`).

    Args:
        low: the joined bytes, word by word.
        planes: a row for each plane.
        joined: place of the first plane.
    """

    def __init__(self, low: Array, planes: Array, joined: int) -> None:
        self._low, self._planes, self._joined = low, planes, joined

    def turn_to(self, start: int, stop: int) -> None:
        """Make words `start` to `stop` those that are cut."""
        self._words = slice(start, stop)

    def cut(self, place: int, out: Array) -> None:
        """Put the bytes of each of these words from a place on into its word of `out`."""
        if place < self._joined:
            out[...] = self._low.view(out.dtype)[self._words]
        else:
            out[...] = self._planes[place - self._joined, self._words]


def device_named(name: str) -> Device | None:
    """Return the device of a name; None for `cpu`, which needs no torch.

    Args:
        name: `cpu`, `cuda` or `cuda:N`; or `auto` for CUDA where there is some, else the processor.

    Raises:
        UsageError, NoResourceError: see `ftckpt.transfer.device.torch_device`.
    """
    if name == "auto":
        try:
            import torch
        except ModuleNotFoundError:
            return None
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return None if name == "cpu" else Device(name)


def _zigzag(apart: torch.Tensor, bits: int) -> torch.Tensor:
    return (apart << 1) ^ (apart >> bits - 1)


def _fetched(part: torch.Tensor) -> Array:
    return part.contiguous().cpu().numpy()
