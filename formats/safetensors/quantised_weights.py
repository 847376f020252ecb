"""The quantised weights of a folder: what belongs together, and the weights computed from it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

from ftckpt.checkpoint import Box, Checkpoint, Extent, Kind, Piece, Scalar, TensorInfo
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.quantised import QuantisedTensor
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.findings import Finding, as_error, counted, listed
from ftckpt.formats.huggingface.config import CONFIG, DTYPE_FIELDS, read_config
from ftckpt.formats.quantised.arithmetic import WeightComputer, require_decodable
from ftckpt.formats.quantised.method import MODELOPT, QuantMethod, read_method
from ftckpt.formats.quantised.pairing import (
    BlockState,
    Pair,
    Pairing,
    check,
    pair,
    read_states,
    weights,
)
from ftckpt.storage.computed import ComputedSource, Fill, computed_name
from ftckpt.storage.source import Source


class Recorded(NamedTuple):
    """A folder's method of quantisation, and the tensors that it concerns."""

    method: QuantMethod
    pairing: Pairing

    @property
    def said(self) -> str:
        """What is quantised, in words."""
        found = Counter(one.scheme.name for one in self.pairing.pairs.values())
        if not self.method.schemes:
            return f"quantised by {self.method.name}, which is not known"
        held = [f"{counted(n, 'weight')} in {name}" for name, n in found.most_common()]
        return f"quantised by {self.method.name}: {listed(held) or 'no weight'}"

    def kinds(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Return the tensors whose kind the method tells."""
        return {key: tensors[key]._replace(kind=kind) for key, kind in self.pairing.kinds()}

    def check(self) -> Iterator[Finding]:
        """Yield missing, misshapen and lone scales."""
        return check(self.pairing)

    def states(self, source: Source) -> Mapping[str, BlockState]:
        """Return bitsandbytes' states, by the key of the codes."""
        return read_states(source, self.pairing.pairs.values())

    def weights(self, source: Source) -> Mapping[str, QuantisedTensor]:
        """Return the weights that are whole, by the key of their codes."""
        return {one.key: one for one, _ in weights(self.pairing, self.states(source))}


def read_recorded(source: Source, tensors: Mapping[str, TensorInfo]) -> Recorded | None:
    """Return how a folder says that its weights are quantised; None where it says nothing.

    Raises:
        CorruptError, UnsafeError: a configuration file is damaged or hostile.
    """
    method = read_method(source)
    return None if method is None else Recorded(method, pair(method, tensors.values()))


@dataclass(kw_only=True, repr=False)
class ComputedCheckpoint(Checkpoint):
    """A folder with other tensors than it stores: they are computed when they are read.

    Attributes:
        stored_in: the folder as it is.
        made_of: keys of the stored tensors that a computed one is read from, by its key.
        replaced: small files that go with them, in place of the folder's own.
    """

    format: ClassVar[str] = "safetensors"

    stored_in: Checkpoint
    made_of: Mapping[str, Sequence[str]]
    replaced: Mapping[str, bytes]

    @property
    def as_stored(self) -> Checkpoint:
        """The folder as it is."""
        return self.stored_in

    @property
    def loads_at_any_world(self) -> bool:
        """It holds whole tensors."""
        return True

    @property
    def stored(self) -> Any:
        """How the folder keeps its objects (see `write_records`)."""
        return getattr(self.stored_in, "stored", None)

    def members(self) -> Iterable[str]:
        """Return the folder's files, without those that no longer hold."""
        return [name for name in self.stored_in.members() if name in self.source.entries]

    def load_object(self, name: str) -> Any:
        """Return an object of the folder."""
        return self.stored_in.load_object(name)

    def scalars(self, limit: int) -> Iterator[Scalar]:
        """Yield the folder's step."""
        return self.stored_in.scalars(limit)

    def extents_by_owner(self) -> Iterator[tuple[Extent, str, int | None]]:
        """Yield the stored bytes that each tensor is read from."""
        for key, info in self.tensors.items():
            for stored in self.made_of.get(key, ()):
                for piece in self.stored_in.tensors[stored].pieces:
                    yield piece.extent, key, piece.rank
            if key not in self.made_of:
                for piece in info.pieces:
                    yield piece.extent, key, piece.rank
        for name, item in self.objects.items():
            yield item.extent, name, item.rank


def computed(
    checkpoint: Checkpoint,
    tensors: Mapping[str, TensorInfo],
    made_of: Mapping[str, Sequence[str]],
    fill: Fill,
    beside: Mapping[str, bytes],
    without: Sequence[str] = (),
) -> ComputedCheckpoint:
    """Return a folder with other tensors.

    Args:
        checkpoint: the folder as it is.
        tensors: all that the result has; the computed ones have no pieces yet.
        made_of: see `ComputedCheckpoint`.
        fill: computes bytes of a tensor.
        beside: small files in place of the folder's own.
        without: files that no longer hold.
    """
    placed = {
        key: info._replace(
            pieces=(Piece(Box.whole(info.shape), Extent(computed_name(key), 0, info.nbytes)),)
        )
        if key in made_of
        else info
        for key, info in tensors.items()
    }
    kept = {name: e for name, e in checkpoint.source.entries.items() if name not in without}
    source = ComputedSource.over(replace(checkpoint.source, entries=kept), lambda: fill)
    held = {f.name: getattr(checkpoint, f.name) for f in fields(Checkpoint) if f.init}
    held |= {"source": source, "tensors": placed}
    held |= {
        "aliases": {k: o for k, o in checkpoint.aliases.items() if k in placed and o in placed}
    }
    return ComputedCheckpoint(**held, replaced=beside, stored_in=checkpoint, made_of=made_of)


def dequantise(checkpoint: Checkpoint, recorded: Recorded, dtype: DType) -> Checkpoint:
    """Return a folder with its quantised weights in a floating type, and without their scales.

    Raises:
        UnsupportedError: the method is not known, or only its names are.
        CorruptError: a weight lacks a scale, or one does not fit.
    """
    method = recorded.method
    if not method.schemes:
        raise UnsupportedError(
            f"{checkpoint.source.url} is quantised by {method.name}: how its values are computed is"
            " not known",
            hint="without --dtype every byte is kept as it is",
        )
    for found in recorded.check():
        raise as_error(found, hint="ftckpt verify names every weight that is damaged")
    states = recorded.states(checkpoint.source)
    found_pairs = list(weights(recorded.pairing, states))
    require_decodable(method, [one for _, one in found_pairs])
    tensors: dict[str, TensorInfo] = {}
    made_of: dict[str, Sequence[str]] = {}
    pairs: dict[str, tuple[QuantisedTensor, Pair]] = {}
    by_codes = {weight.key: (weight, one) for weight, one in found_pairs}
    for key, info in checkpoint.tensors.items():
        if key in by_codes:
            weight, one = by_codes[key]
            if weight.name != info.name and weight.name in checkpoint.tensors:
                raise CorruptError(
                    f"{weight.name} stands beside {info.name}, which is to become it",
                    kind="duplicate-tensor",
                    tensor=key,
                )
            made = TensorInfo("model", weight.name, Kind.PARAM, weight.shape, dtype, ())
            tensors[made.key] = made
            made_of[made.key] = [key, *weight.parts.values()]
            pairs[made.key] = weight, one
        elif info.kind is not Kind.SCALE:
            tensors[key] = info
    fill = WeightComputer(checkpoint.source, pairs, states, dtype).fill
    config = read_config(checkpoint)
    for field in ("quantization_config", "compression_config"):
        config.pop(field, None)
        if isinstance(text := config.get("text_config"), dict):
            text.pop(field, None)
    config |= {field: dtype.name for field in DTYPE_FIELDS if field in config}
    beside = {CONFIG: json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"}
    return computed(checkpoint, tensors, made_of, fill, beside if config else {}, (MODELOPT,))
