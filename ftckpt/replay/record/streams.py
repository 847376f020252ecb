"""Random streams: a generator's state, and the number of draws between two states.

Python, NumPy's global generator and torch on CPU are all the Mersenne Twister MT19937: 624 words of
32 bits, drawn one after the other and then computed anew. So two states of one stream are a
countable number of words apart, and that number is a clue: two words are one draw of 64 bits, such
as the seed that a data loader's iterator draws.

The recurrence: Matsumoto and Nishimura, ACM TOMACS 8 (1998) 3. The layout of torch's state:
`at::CPUGeneratorImplStateLegacy` (aten/src/ATen/CPUGeneratorImpl.cpp). A device's generator is a
seed and an offset (16 bytes).
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.errors import CorruptError

if TYPE_CHECKING:
    import numpy as np

    Words = np.ndarray[Any, np.dtype[np.uint32]]

WORDS = 624
# Maximum search distance: a million words, three milliseconds a thousand times.
SEARCHED = 1 << 20
_MIDDLE = 397
_TORCH = struct.Struct("<QiiQ")


class RngStream(NamedTuple):
    """The state of one generator.

    Attributes:
        digest: of all of the state, cached normal deviates included.
        words: MT19937's block, 2496 bytes little-endian; b"" if not recorded.
        position: words of the block already drawn, 0 to 624; a device's offset.
        seed: its seed, if the state shows it.
    """

    digest: str
    words: bytes = b""
    position: int | None = None
    seed: int | None = None

    def record(self, *, whole: bool = True) -> dict[str, Any]:
        """Return it as JSON; without the words unless `whole`."""
        out: dict[str, Any] = {"digest": self.digest}
        if self.position is not None:
            out["position"] = self.position
        if self.seed is not None:
            out["seed"] = self.seed
        if whole and self.words:
            out["words"] = base64.b64encode(self.words).decode()
        return out


def read_stream(record: Mapping[str, Any]) -> RngStream:
    """Parse the result of `RngStream.record`.

    Raises:
        CorruptError: it is not of that form.
    """
    try:
        words = base64.b64decode(record.get("words", ""), validate=True)
        position, seed = record.get("position"), record.get("seed")
        ok = isinstance(record["digest"], str) and len(words) in (0, 4 * WORDS)
        if ok and all(n is None or type(n) is int for n in (position, seed)):
            return RngStream(record["digest"], words, position, seed)
    except (KeyError, TypeError, binascii.Error):
        pass
    raise CorruptError("the state of a random stream in the log is damaged")


def python_stream(state: tuple[int, tuple[int, ...], float | None]) -> RngStream:
    """Return `random.getstate()` as a stream."""
    _, values, cached = state
    words = struct.pack(f"<{WORDS}I", *values[:WORDS])
    return _twister(words, values[WORDS], repr(cached))


def numpy_stream(state: tuple[Any, ...]) -> RngStream:
    """Return `numpy.random.get_state()` as a stream."""
    name, keys, position, has_cached, cached = state
    if name != "MT19937":
        return RngStream(_hash(repr(state).encode()))
    return _twister(keys.astype("<u4").tobytes(), int(position), f"{has_cached} {cached!r}")


def torch_stream(state: bytes) -> RngStream:
    """Return the bytes of `torch.get_rng_state()` as a stream."""
    if len(state) != 5056:
        return RngStream(_hash(state))
    seed, left, _, following = _TORCH.unpack_from(state)
    # Each word stands in eight bytes. One word left means that the block is computed anew first.
    words = b"".join(state[place : place + 4] for place in range(24, 24 + 8 * WORDS, 8))
    position = WORDS if left == 1 else following
    return RngStream(_hash(state), words, position, seed)


def device_stream(state: bytes) -> RngStream:
    """Return the bytes of `torch.cuda.get_rng_state()` as a stream."""
    if len(state) != 16:
        return RngStream(_hash(state))
    seed, offset = struct.unpack("<Qq", state)
    return RngStream(_hash(state), b"", offset, seed)


def _twister(words: bytes, position: int, rest: str) -> RngStream:
    return RngStream(_hash(words, f"{position} {rest}".encode()), words, position)


def _hash(*parts: bytes) -> str:
    return blake2b(b"".join(parts), digest_size=16).hexdigest()


def distance(first: RngStream, second: RngStream) -> int | None:
    """Return by how many words `second` is ahead of `first`; negative if it is behind.

    For a device's generator it counts offsets. None if the two are not of one sequence, further
    apart than `SEARCHED`, or without recorded words.
    """
    if not (first.words and second.words):
        known = first.seed is not None and not first.words and not second.words
        if known and first.seed == second.seed and None not in (first.position, second.position):
            return (second.position or 0) - (first.position or 0)
        return None
    import numpy as np

    # Both are renewed in turn, so the nearer direction is found without searching the other.
    aims = [np.frombuffer(stream.words, "<u4") for stream in (first, second)]
    moving = [aim.copy() for aim in aims]
    apart = (second.position or 0) - (first.position or 0)
    for blocks in range(SEARCHED // WORDS + 1):
        if np.array_equal(moving[0], aims[1]):
            return apart + blocks * WORDS
        if np.array_equal(moving[1], aims[0]):
            return apart - blocks * WORDS
        for words in moving:
            _renew(words)
    return None


def _renew(words: Words) -> None:
    """Compute the next block in place; slices are the longest whose inputs are old or ready."""
    import numpy as np

    def mixed(high: Words, low: Words) -> Words:
        y = (high & np.uint32(0x80000000)) | (low & np.uint32(0x7FFFFFFF))
        return (y >> np.uint32(1)) ^ np.where(y & np.uint32(1), np.uint32(0x9908B0DF), np.uint32(0))

    shift = WORDS - _MIDDLE
    words[:shift] = words[_MIDDLE:] ^ mixed(words[:shift], words[1 : shift + 1])
    middle = slice(shift, 2 * shift)
    words[middle] = words[:shift] ^ mixed(words[middle], words[shift + 1 : 2 * shift + 1])
    last = slice(2 * shift, WORDS - 1)
    words[last] = words[shift : WORDS - 1 - shift] ^ mixed(words[last], words[2 * shift + 1 :])
    words[-1:] = words[_MIDDLE - 1 : _MIDDLE] ^ mixed(words[-1:], words[:1])


def difference_in_words(first: RngStream, second: RngStream) -> str:
    """Describe `second` (the restart's) relative to `first` (the uninterrupted run's)."""
    if first.seed is not None and second.seed is not None and first.seed != second.seed:
        return f"seeded with {second.seed} instead of {first.seed}"
    words = distance(first, second)
    if words is None:
        recorded = bool(first.words and second.words)
        return "not of the same sequence, or far apart in it" if recorded else "another state"
    if words == 0:
        return "same position, another cached normal deviate"
    many, what = abs(words), "32-bit draw"
    if many % 2 == 0:
        many, what = many // 2, "64-bit draw"
    plural = "" if many == 1 else "s"
    number = "one" if many == 1 else f"{many:,}"
    return f"{number} {'extra' if words > 0 else 'missing'} {what}{plural}"
