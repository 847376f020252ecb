"""Locate one rank's shard in the global tensor by the placements in the pickle.

Pure geometry: no file is read here. A DTensor is a mesh, one placement a mesh dimension and a
local tensor; a ShardedTensor lists its boxes itself (`formats.sharded`).

Two rules exist for `_StridedShard(dim, split_factor)`, which FSDP2 writes over tensor parallelism:
- *physical*, what FSDP2 really did: every later mesh dimension cuts first, the strided one cuts the
  result. Each rank then holds one interval of `dim`.
- *nominal*, what torch's `compute_local_shape_and_global_offset` says: cut into `split_factor`
  pieces, cut each piece over the mesh dimension, then go on with what this rank got.
They agree wherever every cut is even. Where they differ, the shapes of the stored local tensors
decide, all ranks together.

Sources: torch 2.0-2.13 `distributed/tensor/placement_types.py`, `_utils.py`; before 2.5
`distributed/_tensor/`.

Pieces of tensors, made when asked for: there may be a million, and few are looked at.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import product
from typing import NamedTuple, overload

from ftckpt.checkpoint import Box, Piece
from ftckpt.errors import CorruptError, UnsupportedError

# A run of global indices, half open.
Run = tuple[int, int]

# No real mesh cuts one dimension into more pieces; a hostile file could ask for any number.
MAX_SPLIT = 256
MAX_BOXES = 256


class How(StrEnum):
    """The placement types of torch."""

    SHARD = "shard"
    STRIDED = "strided shard"
    REPLICATE = "replicate"
    PARTIAL = "partial"


class Placement(NamedTuple):
    """What one mesh dimension does to a tensor.

    Attributes:
        how: the placement type.
        dim: tensor dimension that it cuts, for the two shard types.
        split_factor: for `_StridedShard`: the number of pieces cut by later mesh dimensions.
    """

    how: How
    dim: int = 0
    split_factor: int = 1


class Patch(NamedTuple):
    """A box of the global tensor and where it begins in the local tensor."""

    box: Box
    start: tuple[int, ...]


class LocalShard(NamedTuple):
    """One rank's shard: the shape of its local tensor and the boxes that this holds."""

    shape: tuple[int, ...]
    patches: tuple[Patch, ...]


def local_of(
    shape: Sequence[int],
    mesh: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
    *,
    nominal: bool = False,
) -> LocalShard:
    """Return the shard that the rank at `coordinate` of a mesh holds.

    Args:
        shape: global shape.
        mesh: sizes of the mesh dimensions.
        placements: one a mesh dimension.
        coordinate: the rank's place in the mesh.
        nominal: which rule holds for `_StridedShard` (see the module's docstring).

    Raises:
        UnsupportedError: a `Partial` placement (`partial-tensor`).
        CorruptError: placements that do not fit the mesh or the shape (`bad-metadata`).
    """
    return _local_of(tuple(shape), tuple(mesh), tuple(placements), tuple(coordinate), nominal)


# The layers of a model have the same few shapes, so most answers were given before.
@lru_cache(maxsize=4096)
def _local_of(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    placements: tuple[Placement, ...],
    coordinate: tuple[int, ...],
    nominal: bool,
) -> LocalShard:
    check_fits(shape, mesh, placements, coordinate)
    runs = [[(0, size)] for size in shape]
    for axis in _order(placements, nominal):
        placement, parts, mine = placements[axis], mesh[axis], coordinate[axis]
        cut = runs[placement.dim]
        if nominal and placement.how is How.STRIDED:
            runs[placement.dim] = _strided(cut, placement.split_factor, parts, mine)
        else:
            runs[placement.dim] = _chunk(cut, parts, mine)
    sizes = tuple(sum(stop - start for start, stop in dim) for dim in runs)
    return LocalShard(sizes, tuple(_patches(runs, shape)))


def check_fits(
    shape: Sequence[int],
    mesh: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> None:
    """Refuse placements that cannot be of this mesh and shape; see `local_of` for the errors."""
    if any(p.how is How.PARTIAL for p in placements):
        raise UnsupportedError(
            "a tensor is stored as partial sums that were never reduced over its ranks",
            kind="partial-tensor",
            hint="save it after a redistribute to Replicate or Shard",
        )
    if not len(placements) == len(mesh) == len(coordinate):
        raise CorruptError(
            f"{len(placements)} placements and {len(coordinate)} coordinates for a mesh of"
            f" {len(mesh)} dimensions",
            kind="bad-metadata",
        )
    for parts, mine, placement in zip(mesh, coordinate, placements, strict=True):
        if not 0 <= mine < parts:
            raise CorruptError(
                f"coordinate {mine} lies outside a mesh dimension of {parts}", kind="bad-metadata"
            )
        if placement.how is not How.REPLICATE and not 0 <= placement.dim < len(shape):
            raise CorruptError(
                f"a placement cuts dimension {placement.dim} of a tensor of {len(shape)}",
                kind="bad-metadata",
            )
        if not 1 <= placement.split_factor <= MAX_SPLIT:
            raise CorruptError(
                f"a split factor of {placement.split_factor} is out of range", kind="bad-metadata"
            )


def choose_rule(
    shape: Sequence[int],
    mesh: Sequence[int],
    placements: Sequence[Placement],
    stored: Sequence[tuple[Sequence[int], tuple[int, ...]]],
) -> bool | None:
    """Say which rule the stored shards obey: False physical, True nominal, None neither.

    Args:
        shape: global shape.
        mesh: sizes of the mesh dimensions.
        placements: one a mesh dimension.
        stored: (coordinate, shape of the stored local tensor) of every rank at hand.
    """
    strided = any(p.how is How.STRIDED for p in placements)
    # The physical rule stands only where the split factor is what the later cuts amount to.
    for nominal in (False, True) if strided and _factors_fit(mesh, placements) else (strided,):
        if all(local_of(shape, mesh, placements, c, nominal=nominal).shape == s for c, s in stored):
            return nominal
    return None


def _factors_fit(mesh: Sequence[int], placements: Sequence[Placement]) -> bool:
    for axis, placement in enumerate(placements):
        if placement.how is not How.STRIDED:
            continue
        later = 1
        for parts, other in zip(mesh[axis + 1 :], placements[axis + 1 :], strict=True):
            if other.how in (How.SHARD, How.STRIDED) and other.dim == placement.dim:
                later *= parts
        if later != placement.split_factor:
            return False
    return True


def _order(placements: Sequence[Placement], nominal: bool) -> list[int]:
    cutting = [i for i, p in enumerate(placements) if p.how in (How.SHARD, How.STRIDED)]
    if nominal:
        return cutting
    order: list[int] = []
    for axis in reversed(cutting):
        order.insert(len(order) if placements[axis].how is How.STRIDED else 0, axis)
    return order


def _length(runs: Sequence[Run]) -> int:
    return sum(stop - start for start, stop in runs)


def _slice(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """Return the runs of the elements number `start` to `stop`."""
    out: list[Run] = []
    seen = 0
    for first, last in runs:
        low, high = max(start, seen), min(stop, seen + last - first)
        if low < high:
            out.append((first + low - seen, first + high - seen))
        seen += last - first
    return out


def _chunk(runs: Sequence[Run], parts: int, mine: int) -> list[Run]:
    """Cut as `torch.chunk` does: ceil(n / parts) each, the last ones short or empty."""
    total = _length(runs)
    size = -(-total // parts)
    return _slice(runs, min(mine * size, total), min((mine + 1) * size, total))


def _strided(runs: Sequence[Run], split_factor: int, parts: int, mine: int) -> list[Run]:
    out: list[Run] = []
    # Pieces after the last element are empty, whatever the split factor says.
    for piece in range(min(split_factor, _length(runs))):
        for start, stop in _chunk(_chunk(runs, split_factor, piece), parts, mine):
            if out and out[-1][1] == start:
                out[-1] = (out[-1][0], stop)
            else:
                out.append((start, stop))
    return out


def _patches(runs: Sequence[Sequence[Run]], shape: Sequence[int]) -> list[Patch]:
    """Return the boxes of all combinations of runs; one empty box where a dimension has none."""
    if any(_length(dim) == 0 for dim in runs):
        # An empty shard begins where its dimension ends, as torch writes it.
        offsets = tuple(d[0][0] if _length(d) else n for d, n in zip(runs, shape, strict=True))
        sizes = tuple(_length(d) for d in runs)
        return [Patch(Box(offsets, sizes), (0,) * len(runs))]
    count = 1
    for dim in runs:
        count *= len(dim)
    if count > MAX_BOXES:
        raise UnsupportedError(f"one shard falls into {count} separate boxes")
    placed = []
    for dim in runs:
        local = 0
        spots = []
        for start, stop in dim:
            spots.append((start, stop - start, local))
            local += stop - start
        placed.append(spots)
    return [
        Patch(
            Box(tuple(spot[0] for spot in spots), tuple(spot[1] for spot in spots)),
            tuple(spot[2] for spot in spots),
        )
        for spots in product(*placed)
    ]


class LazyPieces(Sequence[Piece]):
    """The pieces of one tensor."""

    __slots__ = ()

    @abstractmethod
    def piece(self, index: int) -> Piece:
        """Return one piece; `index` is in range.

        Raises:
            CorruptError: it lies in no file.
        """

    @abstractmethod
    def box(self, index: int) -> Box:
        """Return the box of one piece, whether it lies in a file or not."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Piece]: ...
    def __getitem__(self, index: int | slice) -> Piece | Sequence[Piece]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.piece(range(len(self))[index])
