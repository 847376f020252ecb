"""Take the frames out of a pickle."""

from __future__ import annotations

from .pickle_cut import MOST_BYTES, DeclinedError

_FRAME = 0x95
# A pickler begins a frame every 64 KiB: where there are as many as this, it was no pickler.
_FEW_FRAMES, _FRAME_BYTES = 16, 4 << 10


def unframe(data: bytearray, end: int) -> tuple[int, list[int]]:
    """Take the frames of `data[:end]` out of it, in place: they only say how much to read at once.

    A pickler begins one every 64 KiB, anywhere between two opcodes: inside of records too.

    Returns:
        How many bytes are left, and where in them frames began, ascending; zeros are behind them.

    Raises:
        DeclinedError: they do not follow each other from the protocol to the last byte, or are too
            many; the data is in pieces then.
    """
    if end >= MOST_BYTES or data[0] != 0x80 or data[1] not in (4, 5):
        raise DeclinedError
    at = to = 2
    joints: list[int] = []
    with memoryview(data) as view:
        while at < end:
            begin, at = at + 9, at + 9 + int.from_bytes(view[at + 1 : at + 9], "little")
            if view[begin - 9] != _FRAME or at > end:
                raise DeclinedError
            if to not in joints[-1:]:  # else the frame before it is empty
                joints.append(to)
            view[to : to + at - begin] = view[begin:at]
            to += at - begin
        view[to:end] = bytes(end - to)
    if len(joints) > _FEW_FRAMES + end // _FRAME_BYTES:
        raise DeclinedError
    return to, joints
