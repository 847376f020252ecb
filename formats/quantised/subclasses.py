"""Weights in torchao's NF4, computed as `NF4Tensor.get_original_weight` does.

A byte of `quantized_data` has two codes, the first in its high half. A code is an index into `nf4`.
Each block of `block_size` elements has one scale, which is in codes itself: `quantized_scalers`, of
8 bits, divided by the `quantization_factor` of its `scaler_block_size` scales, plus `scaler_mean`.
Each step is rounded to the type of the weight.

The sizes of the blocks stand in the record of the tensor subclass, not beside the codes. Other
subclasses are refused, since a cast leaves their codes as they are and says that all is well.

Source: `dequantize_scalers` and `get_original_weight` in torchao 0.18,
`quantization/quantize_/workflows/nf4/nf4_tensor.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.checkpoint import Box, Checkpoint, Kind, TensorInfo
from ftckpt.checkpoint.computed import ComputedCheckpoint, computed
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.read_tensor import dense_strides, raw_dtype
from ftckpt.checkpoint.rounding import from_bfloat16
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.formats.pickles.walk import Path
from ftckpt.formats.state.coded_shards import CodedParts, HoldsCoded
from ftckpt.formats.state.paths import (
    HoldsInside,
    RecordedPaths,
    own_paths,
    recorded_items,
    recorded_paths,
)
from ftckpt.formats.torch_files.inner import inner_kind, inner_tensors, outer_view
from ftckpt.formats.torch_files.values import SubclassRef
from ftckpt.transfer.content import Shard, SourceBox
from ftckpt.transfer.read.elements import Gatherer

from .arithmetic import rounded

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_RUN = 1 << 18  # elements at once
_DATA, _SCALES, _FACTORS = "quantized_data", "quantized_scalers", "quantization_factor"
_MEAN, _TABLE = "scaler_mean", "nf4"
_PARTS = (_DATA, _SCALES, _FACTORS, _MEAN, _TABLE)
_CODES = 16


class Nf4Weight(NamedTuple):
    """A weight in NF4.

    Attributes:
        name: of the weight.
        parts: the tensors that it is made of, by what they are called in it.
        record: the object that is its record.
        shape: of the weight.
        dtype: that the tensor subclass shows; its scales have it too.
        block: elements of a scale.
        blocks: scales of a factor.
    """

    name: str
    parts: Mapping[str, TensorInfo]
    record: str
    shape: tuple[int, ...]
    dtype: DType
    block: int
    blocks: int


def without_codes(checkpoint: Checkpoint, dtype: DType) -> Checkpoint:
    """Return a checkpoint with its weights in NF4 in a floating type.

    Raises:
        UnsupportedError: a weight is another tensor subclass with codes, or one of several shards
            that cannot be joined, or its format does not say how large its blocks are.
        CorruptError: a part of a weight is lost, or does not fit.
    """
    coded = checkpoint.coded if isinstance(checkpoint, HoldsCoded) else {}
    records = {key: name for name, one in coded.items() for key in one.keys.values()}
    if isinstance(checkpoint, HoldsInside):
        records |= checkpoint.tensors_inside
    weights: dict[str, Nf4Weight] = {}
    for info in checkpoint.tensors.values():
        if info.component != "model" or info.dtype.family == "float":
            continue
        name, _, part = info.name.rpartition(".")
        stored = (info.stored_name or info.name).removesuffix(f".{part}")
        record = records.get(info.key, stored if stored in checkpoint.objects else "")
        others = (_beside(checkpoint, info, one) for one in (_SCALES, _TABLE))
        if part == _DATA and any(others):
            weights[info.key] = _weight(checkpoint, info, name, record, coded)
        elif record and inner_kind(part, Kind.OTHER) is Kind.PARAM:
            raise UnsupportedError(
                f"{name} is a tensor subclass whose {part} are codes: ftckpt computes torchao's"
                " NF4Tensor alone",
                hint="without --dtype every byte is kept as it is",
                tensor=info.key,
            )
    return _computed(checkpoint, weights, dtype) if weights else checkpoint


def _beside(checkpoint: Checkpoint, info: TensorInfo, part: str) -> TensorInfo | None:
    """Return another part of the weight whose codes `info` are."""
    return checkpoint.tensors.get(info.key.removesuffix(_DATA) + part)


def _weight(
    checkpoint: Checkpoint,
    info: TensorInfo,
    name: str,
    record: str,
    coded: Mapping[str, CodedParts],
) -> Nf4Weight:
    cut = coded[record].tensor if record in coded else None
    value = checkpoint.load_object(record) if record else None
    if cut is not None and cut.own:
        raise _unknown(info, name, f"its shards cannot be joined: {cut.why}")
    view = outer_view(value) if type(value) is SubclassRef else None
    if type(value) is not SubclassRef or view is None or type(value.state) is not dict:
        raise _unknown(info, name, f"a {checkpoint.format} checkpoint has no record of its blocks")
    inside = {suffix: ref.shape for suffix, ref in inner_tensors(value)}
    if cut is None and inside.get(f".{_DATA}") != info.shape:
        raise _unknown(info, name, f"a {checkpoint.format} checkpoint has the record of one shard")
    if not value.type_name.startswith("torchao.") or not value.type_name.endswith(".NF4Tensor"):
        raise _unknown(info, name, f"it is a {value.type_name}")
    shape, dtype = (cut.shape, cut.dtype) if cut is not None else view
    strides = value.base.parts.get("strides")
    if strides not in (None, dense_strides(view[0])):
        raise _unknown(info, name, "it is a transposed view")
    if dtype.name not in ("float32", "bfloat16", "float16"):
        raise _unknown(info, name, f"it shows {dtype.name}")
    parts = {part: one for part in _PARTS if (one := _beside(checkpoint, info, part)) is not None}
    block, blocks = (value.state.get(size) for size in ("block_size", "scaler_block_size"))
    if type(block) is not int or type(blocks) is not int or min(block, blocks) < 1 or block % 2:
        raise _wrong(info, name, f"its blocks are of {block!r} elements and {blocks!r} scales")
    for part in _PARTS:
        if part not in parts:
            raise CorruptError(f"{name} has no {part}", kind="missing-scale", tensor=info.key)
    numel, (scales, rest) = prod(shape), divmod(prod(shape), block)
    factors, more = divmod(scales, blocks)
    wanted: dict[str, tuple[tuple[int, ...], str]] = {
        _DATA: ((numel // 2,), "uint8"),
        _SCALES: ((scales,), "int8"),
        _FACTORS: ((factors,), dtype.name),
        _MEAN: ((), dtype.name),
        _TABLE: ((_CODES,), dtype.name),
    }
    for part, (size, kind) in wanted.items():
        one = parts[part]
        if (one.shape, one.dtype.name) != (size, kind) or rest or more:
            raise _wrong(
                info,
                name,
                f"of {list(shape)} in blocks of {block} elements and {blocks} scales it cannot have"
                f" {one.dtype.name}{list(one.shape)} as {part}",
            )
    return Nf4Weight(name, parts, record, shape, dtype, block, blocks)


def _unknown(info: TensorInfo, name: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} is in NF4 and cannot be computed: {why}",
        hint="without --dtype every byte is kept as it is; take --dtype where the weight's record"
        " is, in the files of torch",
        tensor=info.key,
    )


def _wrong(info: TensorInfo, name: str, why: str) -> CorruptError:
    return CorruptError(f"{name} is in NF4: {why}", kind="scale-shape", tensor=info.key)


@dataclass(kw_only=True, repr=False)
class DequantisedCheckpoint(ComputedCheckpoint):
    """A checkpoint of torch's files whose weights in NF4 are computed.

    What writers ask such a source for beyond its tensors stays as it is, without these weights.

    Attributes:
        weights: that are computed, by key.
        gone: keys of the tensors that they are made of.
    """

    weights: Mapping[str, Nf4Weight] = field(default_factory=dict)
    gone: Set[str] = frozenset()

    @property
    def coded(self) -> Mapping[str, CodedParts]:
        """The tensor subclasses that stay (see `HoldsCoded`)."""
        held = self.base.coded if isinstance(self.base, HoldsCoded) else {}
        return {name: one for name, one in held.items() if name in self.objects}

    @property
    def tensors_inside(self) -> Mapping[str, str]:
        """The tensors in records that stay (see `HoldsInside`)."""
        held = self.base.tensors_inside if isinstance(self.base, HoldsInside) else {}
        return {key: name for key, name in held.items() if name in self.objects}

    @property
    def elsewhere(self) -> Set[tuple[str, str]]:
        """Tensors that the files hold under other names (see `NamesElsewhere`)."""
        held: Set[tuple[str, str]] = getattr(self.base, "elsewhere", frozenset())
        return held

    @property
    def groups_number_states(self) -> bool:
        """See `HasGroups` of `formats.state.of_all_ranks`."""
        return bool(getattr(self.base, "groups_number_states", False))

    @property
    def shares_what_is_alike(self) -> bool:
        """See `HasGroups` of `formats.state.of_all_ranks`."""
        return bool(getattr(self.base, "shares_what_is_alike", False))

    def own_paths(self) -> Mapping[str, Path]:
        """Return where tensors of one rank alone stand (see `NestsOwn`)."""
        return own_paths(self.base)

    def recorded_paths(self) -> RecordedPaths:
        """Return where everything stands in the saved state (see `RecordsPaths`)."""
        held = recorded_paths(self.base)
        paths = {key: path for key, path in held.tensors.items() if key not in self.gone}
        for key, weight in self.weights.items():
            path = held.tensors.get(weight.parts[_DATA].key)
            if path is not None:
                *above, last = path
                paths[key] = (*above, str(last).removesuffix(f".{_DATA}"))
        objects = {name: path for name, path in held.objects.items() if name in self.objects}
        return held._replace(tensors=paths, objects=objects)

    def recorded_items(self) -> Mapping[str, tuple[str, ...]]:
        """Return the byte items that stay (see `RecordsPaths`)."""
        held = recorded_items(self.base).items()
        return {name: transforms for name, transforms in held if name in self.objects}


def _computed(
    checkpoint: Checkpoint, found: Mapping[str, Nf4Weight], dtype: DType
) -> DequantisedCheckpoint:
    gone = {part.key for weight in found.values() for part in weight.parts.values()}
    tensors: dict[str, TensorInfo] = {}
    weights: dict[str, Nf4Weight] = {}
    made_of: dict[str, Sequence[str]] = {}
    for key, info in checkpoint.tensors.items():
        if key in found:
            weight = found[key]
            stored = info.stored_name.removesuffix(f".{_DATA}")
            made = TensorInfo("model", weight.name, Kind.PARAM, weight.shape, dtype, ())
            made = made._replace(stored_name=stored)
            if made.key in checkpoint.tensors:
                raise CorruptError(
                    f"{weight.name} stands beside {info.name}, which is to become it",
                    kind="duplicate-tensor",
                    tensor=key,
                )
            tensors[made.key], weights[made.key] = made, weight
            made_of[made.key] = [part.key for part in weight.parts.values()]
        elif key not in gone:
            tensors[key] = info
    fill = Nf4Computer(checkpoint, weights, dtype).fill
    layer = computed(checkpoint, tensors, made_of, fill, {})
    records = {weight.record for weight in weights.values()}
    held = {one.name: getattr(layer, one.name) for one in fields(layer) if one.init}
    held["objects"] = {n: info for n, info in layer.objects.items() if n not in records}
    made_layer = DequantisedCheckpoint(**held, weights=weights, gone=gone)
    made_layer.step = checkpoint.step
    return made_layer


class Nf4Computer:
    """Computes bytes of weights; may be used from many threads.

    Args:
        checkpoint: that has the codes.
        weights: by their keys.
        dtype: of what is computed: float32, float16 or bfloat16.
    """

    def __init__(
        self, checkpoint: Checkpoint, weights: Mapping[str, Nf4Weight], dtype: DType
    ) -> None:
        self._gatherer = Gatherer(checkpoint)
        self._weights = weights
        self._dtype = dtype

    def fill(self, key: str, offset: int, view: memoryview) -> None:
        """Put the bytes of a weight that begin at `offset` of its dense C order into `view`."""
        import numpy as np

        weight, size = self._weights[key], self._dtype.itemsize
        out = np.frombuffer(view, np.uint8)
        at, end = offset, offset + len(out)
        with np.errstate(all="ignore"):
            table = self._numbers(weight, _TABLE, 0, _CODES)
            mean = self._numbers(weight, _MEAN, 0, 1)
            for first, stop in _runs(weight, at // size, -(-end // size)):
                made = self._blocks(weight, first, stop, table, mean).reshape(-1).view(np.uint8)
                begin = at - first * weight.block * size
                count = min(len(made) - begin, end - at)
                out[at - offset : at - offset + count] = made[begin : begin + count]
                at += count

    def _blocks(self, weight: Nf4Weight, first: int, stop: int, table: Array, mean: Array) -> Array:
        """Return raw items of blocks `first` to `stop`."""
        import numpy as np

        group, last = first // weight.blocks, -(-stop // weight.blocks)
        factors = np.repeat(self._numbers(weight, _FACTORS, group, last), weight.blocks)
        factors = factors[first - group * weight.blocks :][: stop - first]
        scales = self._read(weight, _SCALES, first, stop).view(np.int8).astype(np.float32)
        scales = _as_stored(scales / factors, weight.dtype)
        scales = _as_stored(scales + mean, weight.dtype)
        products = _as_stored(table * scales[:, None], weight.dtype)
        items = rounded(products, self._dtype)
        half = weight.block // 2
        codes = self._read(weight, _DATA, first * half, stop * half).reshape(-1, half)
        both = np.stack([codes >> 4, codes & 15], axis=2).reshape(-1, weight.block)
        return np.take_along_axis(items, both.astype(np.intp), axis=1)

    def _numbers(self, weight: Nf4Weight, part: str, first: int, stop: int) -> Array:
        """Return elements of a part as float32."""
        import numpy as np

        items, name = self._read(weight, part, first, stop), weight.dtype.name
        if name == "bfloat16":
            return from_bfloat16(items)
        return items.view(np.float16 if name == "float16" else np.float32).astype(np.float32)

    def _read(self, weight: Nf4Weight, part: str, first: int, stop: int) -> Array:
        """Return raw elements `first` to `stop` of a part."""
        import numpy as np

        info = weight.parts[part]
        whole = Box.whole(info.shape)
        shard = Shard(info.shape, info.dtype, (SourceBox(whole, info.key, whole),))
        raw = bytearray((stop - first) * info.dtype.itemsize)
        self._gatherer.fill(shard, first, stop, memoryview(raw))
        return np.frombuffer(raw, raw_dtype(info.dtype.itemsize))


def _runs(weight: Nf4Weight, first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield runs of blocks that hold elements `first` to `stop`."""
    step = max(1, _RUN // weight.block)
    at, end = first // weight.block, -(-stop // weight.block)
    while at < end:
        yield at, min(at + step, end)
        at += step


def _as_stored(values: Array, dtype: DType) -> Array:
    """Return float32 values as they are after a step in a type."""
    import numpy as np

    items = rounded(np.ascontiguousarray(values, np.float32), dtype)
    if dtype.name == "bfloat16":
        return from_bfloat16(items)
    return items.view(np.float16 if dtype.name == "float16" else np.float32).astype(np.float32)
