"""Look at a part of one tensor, or at other state, reading only the bytes that it needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.checkpoint import Checkpoint, TensorInfo
from ftckpt.checkpoint.read_tensor import BLOCK, read_box, slabs
from ftckpt.errors import NotFoundError, UnsupportedError, UsageError
from ftckpt.extents import Box
from ftckpt.storage.suggestions import hint_for_name

from .arithmetic import bits_of, has_values, part_of, values, wide_type

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_INDEX = re.compile(r"\s*(-?\d{1,19})\s*")
_RANGE = re.compile(r"\s*(-?\d{1,19})?\s*:\s*(-?\d{1,19})?\s*")


class Statistics(NamedTuple):
    """Numbers about the elements of a view; None where no finite element is.

    Attributes:
        elements: number of them; a complex number is two, its parts.
        nan: number of NaNs.
        infinite: number of infinities.
        zeros: number of zeros.
        least: the least finite value.
        most: the greatest finite value.
        mean: of the finite values.
        std: their standard deviation, of the whole population.
        norm: the root of the sum of their squares.
    """

    elements: int
    nan: int
    infinite: int
    zeros: int
    least: float | None
    most: float | None
    mean: float | None
    std: float | None
    norm: float | None


class Histogram(NamedTuple):
    """Finite elements by value: `counts[i]` lie from `edges[i]` up to `edges[i + 1]`."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


class TensorPart(NamedTuple):
    """A part of a tensor; nothing of it is read before it is asked for.

    Attributes:
        checkpoint: open.
        info: the tensor.
        box: the part.
        shape: that numpy would give it: an axis that an index chose is gone.
    """

    checkpoint: Checkpoint
    info: TensorInfo
    box: Box
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.info.dtype.nbytes(self.box.volume)

    def first(self, most: int) -> TensorPart:
        """Return the beginning of the part along each axis, `most` elements at most."""
        sizes = tuple(min(size, most) for size in self.box.sizes)
        return self._replace(
            box=Box(self.box.offsets, sizes), shape=tuple(min(n, most) for n in self.shape)
        )

    def raw(self) -> Iterator[bytes]:
        """Yield the elements' bytes in C order, in blocks of bounded size."""
        for slab in slabs(self.box, BLOCK, self.info.dtype.itemsize):
            yield read_box(self.checkpoint, self.info, slab).tobytes()

    def blocks(self) -> Iterator[Array]:
        """Yield the values in C order, as `elements.values` gives them."""
        import numpy as np

        for data in self.raw():
            bits = bits_of(self.info.dtype, data)
            out = np.empty(bits.size, wide_type(self.info.dtype))
            values(self.info.dtype, bits, out)
            yield out

    def array(self) -> Array:
        """Return the values as one array of `shape`; a complex number is a last axis of two."""
        import numpy as np

        parts = (2,) if part_of(self.info.dtype) != self.info.dtype else ()
        found = list(self.blocks())
        whole = np.concatenate(found) if found else np.empty(0, wide_type(self.info.dtype))
        return whole.reshape((*self.shape, *parts))

    def statistics(self) -> Statistics:
        """Count and measure the elements, in one pass of bounded memory."""
        import numpy as np

        elements = nan = infinite = zeros = finite = 0
        least, most = np.inf, -np.inf
        squares = mean = spread = 0.0
        for block in self.blocks():
            elements += block.size
            nan += int(np.count_nonzero(np.isnan(block)))
            infinite += int(np.count_nonzero(np.isinf(block)))
            zeros += int(np.count_nonzero(block == 0))
            kept = block[np.isfinite(block)]
            if not kept.size:
                continue
            least, most = min(least, kept.min()), max(most, kept.max())
            squares += float(np.sum(np.square(kept)))
            # Chan's way of joining two variances: a difference of squares would lose all digits.
            own = kept.mean()
            both, apart = finite + kept.size, own - mean
            spread += float(np.sum(np.square(kept - own))) + apart**2 * finite * kept.size / both
            mean += apart * kept.size / both
            finite = both
        if not finite:
            return Statistics(elements, nan, infinite, zeros, None, None, None, None, None)
        return Statistics(
            elements, nan, infinite, zeros, float(least), float(most), float(mean),
            float((spread / finite) ** 0.5), float(squares**0.5),
        )  # fmt: skip

    def histogram(self, bins: int = 20) -> Histogram:
        """Count the finite elements by value, in two passes of bounded memory."""
        import numpy as np

        low, high = np.inf, -np.inf
        for block in self.blocks():
            kept = block[np.isfinite(block)]
            if kept.size:
                low, high = min(low, float(kept.min())), max(high, float(kept.max()))
        if low > high:
            return Histogram((), ())
        if low == high:
            count = sum(int(np.count_nonzero(np.isfinite(block))) for block in self.blocks())
            return Histogram((low, high), (count,))
        half = np.linspace(low / 2, high / 2, bins + 1)  # the range itself may be no number
        edges = np.concatenate([[low], 2 * half[1:-1], [high]])
        counts = np.zeros(bins, np.int64)
        for block in self.blocks():
            kept = block[np.isfinite(block)].astype(np.float64)
            counts += np.histogram(kept, edges)[0]
        return Histogram(tuple(map(float, edges)), tuple(map(int, counts)))


def view_of(checkpoint: Checkpoint, name: str, part: str = "") -> TensorPart | None:
    """Return a view of the tensor with this key or name; None where there is none.

    Raises:
        UsageError: the slice is none, lies outside, or the name means several tensors.
        UnsupportedError: elements without values: smaller than a byte, or raw bits.
    """
    from ftckpt.inspection import find_tensor

    info = checkpoint.tensors.get(name)
    if info is None:
        found = find_tensor(checkpoint, name)
        if not found:
            return None
        if len(found) > 1:
            keys = ", ".join(one.key for one in found)
            raise UsageError(f"{name} means several tensors", hint=f"name one of them: {keys}")
        info = found[0]
    if not has_values(info.dtype):
        raise UnsupportedError(
            f"{info.key} is of {info.dtype.name}, whose elements are no numbers by themselves",
            tensor=info.key,
        )
    box, shape = parse_slice(part, info.shape)
    return TensorPart(checkpoint, info, box, shape)


def parse_slice(text: str, shape: Sequence[int]) -> tuple[Box, tuple[int, ...]]:
    """Return the box that numpy's indexing means, and the shape that it has then.

    Args:
        text: ranges and indices, one an axis: `0:4,:`, `-1`; "" and missing axes mean all.
        shape: of the tensor.

    Raises:
        UsageError: it cannot be read, or reaches outside.
    """
    words = text.split(",") if text.strip() else []
    if len(words) > len(shape):
        raise UsageError(f"--slice {text!r} has {len(words)} axes and the tensor {len(shape)}")
    offsets, sizes, kept = [], [], []
    for axis, size in enumerate(shape):
        word = words[axis] if axis < len(words) else ":"
        index, bounds = _INDEX.fullmatch(word), _RANGE.fullmatch(word)
        if index is not None:
            at = int(index[1]) + size * (int(index[1]) < 0)
            if not 0 <= at < size:
                raise UsageError(f"--slice {text!r}: axis {axis} has {size} elements")
            offsets.append(at)
            sizes.append(1)
        elif bounds is not None:
            ends = (None if bound is None else int(bound) for bound in bounds.groups())
            start, stop, _ = slice(*ends).indices(size)
            offsets.append(start)
            sizes.append(max(0, stop - start))
            kept.append(max(0, stop - start))
        else:
            raise UsageError(
                f"--slice {text!r}: {word!r} is not an index", hint="write 0:4,: or -1"
            )
    return Box(tuple(offsets), tuple(sizes)), tuple(kept)


def state_at(checkpoint: Checkpoint, name: str) -> Any:
    """Return other state as plain data: an object, a subtree of them, or a field inside one.

    Raises:
        NotFoundError: there is nothing of that name.
        CorruptError, UnsafeError: it is damaged or hostile.
    """
    if name in checkpoint.objects:
        return checkpoint.load_object(name)
    below = {one[len(name) + 1 :]: one for one in checkpoint.objects if one.startswith(f"{name}.")}
    if below:
        return {rest: checkpoint.load_object(one) for rest, one in below.items()}
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        whole = ".".join(parts[:end])
        if whole in checkpoint.objects:
            found, missing = _inside(checkpoint.load_object(whole), parts[end:])
            if not missing:
                return found
    near = hint_for_name(name, [*checkpoint.tensors, *checkpoint.objects])
    raise NotFoundError(
        f"{checkpoint.source.url} has no tensor and no state {name}",
        hint=near or "ftckpt inspect PATH --tensors lists the tensors",
        tensor=name,
    )


def _inside(value: Any, parts: Sequence[str]) -> tuple[Any, Sequence[str]]:
    """Return what lies at a path inside a value, and the parts that were not found."""
    for done, part in enumerate(parts):
        keys: tuple[Any, ...] = (part, int(part)) if part.isdigit() else (part,)
        if isinstance(value, Mapping):
            key = next((one for one in keys if one in value), None)
            if key is None:
                return value, parts[done:]
            value = value[key]
        elif isinstance(value, (list, tuple)) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return value, parts[done:]
    return value, ()
