"""The bytes of a pickle, gathered from many places at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.signedinteger[Any]]

# So many bytes from the place of a lane are gathered at a time: one is not much cheaper than all,
# and while all lanes move by as much, the next opcodes of all are in the same column of them.
WINDOW = 64
# Zeros that must follow the data: a window may begin at its end.
PADDING = 80
# So much is searched at a time: what comes of it stays in the cache.
_SPAN = 1 << 18
# So much shows which bytes are rare.
_SAMPLE = 1 << 16


class Words:
    """The bytes of a pickle, to be gathered one or eight at a time from any places.

    Attributes:
        end: number of bytes.
    """

    def __init__(self, data: bytearray, end: int) -> None:
        """Look at `data[:end]`; `PADDING` zeros must follow it."""
        import numpy as np

        self.end = end
        self._bytes = np.frombuffer(data, np.uint8)
        self._words = np.ndarray((len(data) - 7,), "<i8", data, strides=(1,))
        starts = len(data) - WINDOW + 1
        self._windows = np.ndarray((starts,), f"V{WINDOW}", data, strides=(1,))

    def find(self, opcodes: bytes, start: int, end: int) -> Ints:
        """Return every place in `[start, end)` where some bytes begin, eight at most."""
        import numpy as np

        wanted, mask = as_word(opcodes)
        common = np.bincount(self._bytes[start : min(start + _SAMPLE, end)], minlength=256)
        rare = min(range(len(opcodes)), key=lambda at: common[opcodes[at]])
        found = [np.empty(0, np.int64)]
        for begin in range(start + rare, end, _SPAN):
            places = np.flatnonzero(self._bytes[begin : min(begin + _SPAN, end)] == opcodes[rare])
            places += begin - rare
            found.append(places[(self._words[places] & mask) == wanted])
        return np.concatenate(found)

    def bytes_at(self, places: Ints) -> npt.NDArray[np.uint8]:
        """Return one byte from each place."""
        return self._bytes.take(places)

    def windows(self, places: Ints) -> npt.NDArray[np.uint8]:
        """Return `WINDOW` bytes from each place, a row each."""
        import numpy as np

        rows = self._windows[places]
        return rows.view(np.uint8).reshape(len(places), WINDOW)

    def at(self, places: Ints) -> Ints:
        """Return eight bytes from each place as a little-endian number."""
        words: Ints = self._words[places]
        return words


def as_word(part: bytes) -> tuple[int, int]:
    """Return up to eight bytes as `Words.at` gives them, and which bits of it they are."""
    wanted = int.from_bytes(part.ljust(8, b"\0"), "little", signed=True)
    mask = int.from_bytes((b"\xff" * len(part)).ljust(8, b"\0"), "little", signed=True)
    return wanted, mask
