"""A checkpoint of raw bytes, placed in every way that the data model knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from hypothesis import strategies as st

from ftckpt.checkpoint import Box, Checkpoint, Extent, Kind, Piece, TensorInfo
from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.checkpoint.read_tensor import raw_dtype
from ftckpt.storage.memory import MemoryStore
from ftckpt.storage.source import Source

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


@dataclass(kw_only=True)
class RawCheckpoint(Checkpoint):
    """Tensors whose pieces are plain extents."""

    format: ClassVar[str] = "raw"

    def members(self) -> Iterable[str]:
        return self.source.entries

    def load_object(self, name: str) -> Any:
        raise KeyError(name)


def slices(box: Box) -> Any:
    """Return what selects a box of an array; the ellipsis keeps a 0-d array an array."""
    spans = (slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
    return (*spans, ...)


def cut(draw: st.DrawFn, shape: Sequence[int]) -> list[Box]:
    """Cut a shape into boxes by a few random cuts."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 3)) if shape else 0):
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, shape[axis]))
        done = []
        for offsets, sizes in boxes:
            begin, size = offsets[axis], sizes[axis]
            for start, stop in ((begin, min(at, begin + size)), (max(at, begin), begin + size)):
                if start < stop:
                    done.append(
                        Box(
                            (*offsets[:axis], start, *offsets[axis + 1 :]),
                            (*sizes[:axis], stop - start, *sizes[axis + 1 :]),
                        )
                    )
        boxes = done
    return boxes


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[RawCheckpoint, dict[str, Array]]:
    """Draw a checkpoint and the tensors that it holds, as arrays of raw items."""
    import numpy as np

    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    tensors: dict[str, tuple[DType, Array]] = {}
    for number in range(draw(st.integers(1, 4))):
        dtype = DTYPES[draw(st.sampled_from(["uint8", "bfloat16", "float32", "complex128"]))]
        shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
        raw = random.integers(0, 256, prod(shape) * dtype.itemsize, np.uint8).tobytes()
        whole = np.frombuffer(raw, raw_dtype(dtype.itemsize)).reshape(shape)
        tensors[f"t{number}"] = dtype, whole
    return placed(draw, tensors), {name: whole for name, (_, whole) in tensors.items()}


def placed(
    draw: st.DrawFn,
    tensors: Mapping[str, tuple[DType, Array]],
    place: str = "raw-checkpoint",
    *,
    replicas: bool = False,
) -> RawCheckpoint:
    """Draw where the elements of tensors, arrays of raw items, lie in a few files of `place`.

    Args:
        draw: hypothesis's.
        tensors: by name.
        place: name of a store in memory.
        replicas: whether some elements lie there again, in the same boxes and in others; else
            there is one replica without its bytes, which nobody may read.
    """
    files: list[bytearray] = [bytearray(b"head") for _ in range(draw(st.integers(1, 3)))]
    infos = {}
    for name, (dtype, whole) in tensors.items():
        boxes = cut(draw, whole.shape)
        pieces = [p for box in boxes for p in _put(draw, whole[slices(box)], box, dtype, files)]
        if replicas:
            for number in range(1, draw(st.integers(1, 4))):
                again = boxes if draw(st.booleans()) else cut(draw, whole.shape)
                for box in draw(st.lists(st.sampled_from(again), unique=True)):
                    copies = _put(draw, whole[slices(box)], box, dtype, files)
                    pieces += [piece._replace(replica=number) for piece in copies]
        else:
            pieces += [p._replace(replica=1, extent=Extent("f0", 0, 0)) for p in pieces[:1]]
        draw(st.randoms()).shuffle(pieces)
        infos[name] = TensorInfo("model", name, Kind.PARAM, whole.shape, dtype, pieces)
    store = MemoryStore(f"memory://{place}")
    for index, content in enumerate(files):
        store.put(f"f{index}", bytes(content))
    return RawCheckpoint(source=Source.directory(store), tensors=infos, objects={})


def _put(
    draw: st.DrawFn, part: Array, box: Box, dtype: DType, files: Sequence[bytearray]
) -> list[Piece]:
    """Draw how the elements of a box lie in files, and put them there."""
    import numpy as np

    pieces: list[Piece] = []
    flat: list[tuple[int, int] | None] = [None]
    strides = None
    stored = np.ascontiguousarray(part).reshape(-1)
    if draw(st.booleans()):
        ends = sorted({0, box.volume, *draw(st.lists(st.integers(0, box.volume)))})
        flat = list(pairwise(ends))
    elif draw(st.booleans()) and len(box.sizes) > 1:
        stored = np.ascontiguousarray(part.T).reshape(-1)
        steps = np.ascontiguousarray(part.T).T.strides
        strides = tuple(s // dtype.itemsize for s in steps)
    for span in flat:
        data = stored[slice(*span) if span else slice(None)].tobytes()
        file = draw(st.integers(0, len(files) - 1))
        extent = Extent(f"f{file}", len(files[file]), len(data))
        files[file] += data + b"gap"
        pieces.append(Piece(box, extent, span, strides))
    return pieces
