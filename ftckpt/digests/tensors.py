"""The digest of a logical tensor: the same however it is sharded and in whatever order it is read.

Two sums modulo 2^64 over the tensor's elements, each mixed with its global index, so that pieces
can be added in any order and on any machine, and a swap of two elements is seen. Bits are compared,
not values: NaN payloads and -0.0 count. `docs/tensor-digest.md` has the definition with vectors.

    w    the element's bits, little-endian, zero-extended to 64
    p    its index in the tensor's C order
    x  = w xor (p + 1) * 0x9E3779B97F4A7C15
    x ^= x >> 32;  x *= 0xE9846AF9B1A615D;  x ^= x >> 32;  x *= 0xE9846AF9B1A615D;  x ^= x >> 28
    S1 = sum of x,  S2 = sum of x * x

All arithmetic is modulo 2^64. A 16-byte element is two words, of indices 2p and 2p + 1. Of types
smaller than a byte the packed bytes are the elements. The digest is XXH3-128 over
`<dtype>[<size>,<size>,…]` in ASCII, S1 and S2 (8 bytes each, little-endian), in hexadecimal.

The multiplications and shifts are Jon Maiga's xmxmx bit mixer, a bijection on 64 bits:
one changed element always changes S1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from ftckpt.checkpoint import Box, Checkpoint, Piece, TensorInfo
from ftckpt.checkpoint.dtypes import DType
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.workers.buffers import buffer

if TYPE_CHECKING:
    import numpy as np

    from ftckpt.workers.limits import RateLimit

    Array = np.ndarray[Any, Any]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = 0xE9846AF9B1A615D
_MASK = (1 << 64) - 1
# Words mixed at once. The fewer the calls, the less often one thread waits for another to leave the
# interpreter; three arrays of 512 KiB are in the processor's own cache, of 1 MiB they are not.
_CHUNK = 64 << 10
_MIXED_SLOT, _SHIFTED_SLOT = 30, 31


class TensorDigest:
    """Takes the elements of one tensor in any order, each once.

    Args:
        dtype: of the elements.
        shape: global shape.
    """

    def __init__(self, dtype: DType, shape: Sequence[int]) -> None:
        self.dtype = dtype
        self.shape = tuple(shape)
        self.elements = 0
        self._s1 = 0
        self._s2 = 0
        self._wide = dtype.itemsize == 16
        self._packed = dtype.itemsize == 0

    @property
    def complete(self) -> bool:
        """Whether as many elements were given as the tensor has."""
        return self.elements == prod(self.shape)

    @property
    def sums(self) -> tuple[int, int]:
        """S1 and S2 of what was given so far."""
        return self._s1, self._s2

    def update(self, box: Box, data: Any, start: int = 0) -> None:
        """Add elements `start`, `start + 1`, … of `box`, in its C order.

        Args:
            box: where in the tensor.
            data: their bytes, dense and little-endian; a whole number of elements.
            start: the first one's index inside the box; at the beginning of a byte.

        Raises:
            ValueError: more elements than the box holds from `start` on.
            UnsupportedError: a box of a tensor whose elements are smaller than a byte.
        """
        import numpy as np

        raw = np.frombuffer(data, np.uint8)
        if self._packed:
            self._update_packed(box, raw, start)
            return
        size = self.dtype.itemsize
        words = raw.view(np.dtype(f"<u{min(size, 8)}"))
        count = raw.size // size
        if start < 0 or start + count > box.volume:
            raise ValueError(f"{count} elements from {start} on do not fit into {box}")
        self.elements += count
        shape, offsets, sizes = self.shape, box.offsets, box.sizes
        if self._wide:  # two words an element are one more axis
            shape, offsets, sizes, start = (*shape, 2), (*offsets, 0), (*sizes, 2), 2 * start
        self._walk(shape, offsets, sizes, words, start)

    def add(self, elements: int, s1: int, s2: int) -> None:
        """Add a number of elements by their sums, as `sums` gave them."""
        self.elements += elements
        self._s1 = (self._s1 + s1) & _MASK
        self._s2 = (self._s2 + s2) & _MASK

    def merge(self, other: TensorDigest) -> None:
        """Add the elements that `other` was given.

        Raises:
            ValueError: it is of another shape or type.
        """
        if (other.dtype, other.shape) != (self.dtype, self.shape):
            raise ValueError("digests of different tensors cannot be merged")
        self.add(other.elements, *other.sums)

    def hexdigest(self) -> str:
        """Return the digest of what was given so far: 32 hexadecimal digits."""
        import xxhash

        head = f"{self.dtype.name}[{','.join(map(str, self.shape))}]".encode()
        sums = self._s1.to_bytes(8, "little") + self._s2.to_bytes(8, "little")
        digest: str = xxhash.xxh3_128_hexdigest(head + sums)
        return digest

    def _update_packed(self, box: Box, raw: Array, start: int) -> None:
        numel, bits = prod(self.shape), self.dtype.bits
        nbytes, (first, cut) = self.dtype.nbytes(numel), divmod(start * bits, 8)
        if box != Box.whole(self.shape) or cut or first + raw.size > nbytes:
            raise UnsupportedError(
                f"a tensor of {self.dtype.name} is digested in whole bytes of all of it: its "
                "elements are smaller than a byte"
            )
        self.elements += min(raw.size * 8 // bits, numel - start)
        self._walk((nbytes,), (0,), (nbytes,), raw, first)

    def _walk(
        self,
        shape: tuple[int, ...],
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        words: Array,
        start: int,
    ) -> None:
        """Cut the words into rows that are contiguous in the whole tensor, and mix them."""
        run, outer = _contiguous(shape, sizes)
        done = 0
        while done < words.size:
            row, column = divmod(start + done, run)
            left = words.size - done
            if column or left < run or run >= _CHUNK:
                count = min(left, run - column)
                first = int(_row_starts(shape, offsets, sizes, outer, row, 1)[0]) + column
                for begin in range(0, count, _CHUNK):
                    part = words[done + begin : done + min(count, begin + _CHUNK)]
                    self._mix(part, _key(first + begin), _keys(_CHUNK)[: part.size])
                done += count
                continue
            rows = min(left // run, max(1, _CHUNK // run))
            starts = _row_starts(shape, offsets, sizes, outer, row, rows)
            part = words[done : done + rows * run].reshape(rows, run)
            self._mix_rows(part, starts)
            done += rows * run

    def _mix_rows(self, words: Array, starts: Array) -> None:
        import numpy as np

        golden = np.uint64(_GOLDEN)
        keys = (starts.astype(np.uint64) + np.uint64(1)) * golden
        self._mix(words, keys[:, None], _keys(words.shape[1])[None, :])

    def _mix(self, words: Array, first: Any, steps: Array) -> None:
        import numpy as np

        x, t = (_scratch(words.shape, slot) for slot in (_MIXED_SLOT, _SHIFTED_SLOT))
        np.add(first, steps, out=x)
        np.copyto(t, words)
        x ^= t
        for _ in range(2):
            np.right_shift(x, np.uint64(32), out=t)
            x ^= t
            x *= np.uint64(_MIX)
        np.right_shift(x, np.uint64(28), out=t)
        x ^= t
        self._s1 = (self._s1 + int(np.add.reduce(x, axis=None))) & _MASK
        flat = x.reshape(-1)
        self._s2 = (self._s2 + int(np.dot(flat, flat))) & _MASK


def _scratch(shape: tuple[int, ...], slot: int) -> Array:
    """Return words of this thread's that are used again: fresh memory costs more than the work."""
    import numpy as np

    return np.frombuffer(buffer(8 * prod(shape), slot), np.uint64).reshape(shape)


def digest_tensor(
    checkpoint: Checkpoint, info: TensorInfo, limiter: RateLimit | None = None
) -> str:
    """Return the digest of a tensor of `checkpoint`, read piece by piece in bounded memory.

    Raises:
        CorruptError: bytes are missing, or the main pieces do not cover the tensor (`hole`).
        UnsupportedError: a sharded tensor whose elements are smaller than a byte.
    """
    digest = TensorDigest(info.dtype, info.shape)
    for piece in info.pieces:
        if piece.replica == 0 and piece.box.volume:
            _add_piece(digest, checkpoint, info, piece, limiter)
    if not digest.complete:
        raise CorruptError(
            f"{prod(info.shape) - digest.elements} elements of {info.key} are in no piece",
            kind="hole",
            tensor=info.key,
        )
    return digest.hexdigest()


def _add_piece(
    digest: TensorDigest,
    checkpoint: Checkpoint,
    info: TensorInfo,
    piece: Piece,
    limiter: RateLimit | None,
) -> None:
    from ftckpt.checkpoint.read_tensor import BLOCK, read_part, slabs, stream_payload

    payload = checkpoint.payload(piece)
    if payload.strides is not None:
        for slab in slabs(piece.box, BLOCK, info.dtype.itemsize):
            digest.update(slab, read_part(checkpoint, info, piece, slab, limiter).tobytes())
        return
    size = info.dtype.itemsize
    if size == 0:
        digest.update(piece.box, b"".join(stream_payload(checkpoint.source, payload, limiter)))
        return
    start = piece.flat[0] if piece.flat is not None else 0
    rest = b""
    for part in stream_payload(checkpoint.source, payload, limiter):
        data = rest + part if rest else part
        whole = len(data) - len(data) % size
        digest.update(piece.box, memoryview(data)[:whole], start)
        start += whole // size
        rest = data[whole:]


def _contiguous(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, int]:
    """Return the length of the box's runs in the whole tensor, and the number of axes outside."""
    run = 1
    for axis in range(len(shape) - 1, -1, -1):
        run *= sizes[axis]
        if sizes[axis] != shape[axis]:
            return run, axis
    return max(run, 1), 0


def _row_starts(
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    outer: int,
    row: int,
    rows: int,
) -> Array:
    """Return the global word index at which each of `rows` runs begins, from run `row` on."""
    import numpy as np

    left = np.arange(row, row + rows, dtype=np.int64)
    base, stride = 0, 1
    starts = np.zeros(rows, np.int64)
    for axis in range(len(shape) - 1, -1, -1):
        base += offsets[axis] * stride
        if axis < outer:
            left, place = np.divmod(left, sizes[axis])
            starts += place * stride
        stride *= shape[axis]
    return starts + base


def _key(index: int) -> Any:
    import numpy as np

    return np.uint64((index + 1) * _GOLDEN & _MASK)


@cache
def _steps() -> Array:
    import numpy as np

    return np.arange(_CHUNK, dtype=np.uint64) * np.uint64(_GOLDEN)


def _keys(count: int) -> Array:
    """Return 0, 1, 2, … times the golden constant."""
    return _steps()[:count]
