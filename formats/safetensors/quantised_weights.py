"""The quantised weights of a folder: what belongs together, and the weights computed from it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, Kind, TensorInfo
from ftckpt.checkpoint.computed import computed
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.quantised import QuantisedTensor
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.findings import Finding, as_error, counted, listed
from ftckpt.formats.huggingface.config import CONFIG, DTYPE_FIELDS, read_config
from ftckpt.formats.quantised.arithmetic import WeightComputer, require_decodable
from ftckpt.formats.quantised.method import MODELOPT, OWN_FILES, QuantMethod, read_method
from ftckpt.formats.quantised.pairing import (
    BlockState,
    Pair,
    Pairing,
    check,
    pair,
    read_states,
    weights,
)
from ftckpt.formats.quantised.schemes import KEPT, UnknownCodes, check_siblings, unknown_codes
from ftckpt.storage.source import Source

UNRECORDED = QuantMethod("", ())


class Recorded(NamedTuple):
    """A folder's method of quantisation, and the tensors that it concerns.

    Attributes:
        method: as it is recorded; `UNRECORDED` where only the tensors show that there is one.
        pairing: the tensors that it explains.
        unknown: codes that it does not explain.
    """

    method: QuantMethod
    pairing: Pairing
    unknown: Sequence[UnknownCodes] = ()

    @property
    def said(self) -> str:
        """What is quantised, in words."""
        found = Counter(one.scheme.name for one in self.pairing.pairs.values())
        if self.method is UNRECORDED:
            return f"{counted(len(self.unknown), 'tensor')} of codes, by no method that is recorded"
        if not self.method.schemes:
            return f"quantised by {self.method.name}, which is not known"
        held = [f"{counted(n, 'weight')} in {name}" for name, n in found.most_common()]
        return f"quantised by {self.method.name}: {listed(held) or 'no weight'}"

    def kinds(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Return the tensors whose kind the method tells."""
        return {key: tensors[key]._replace(kind=kind) for key, kind in self.pairing.kinds()}

    def check(self, read: Callable[[], object]) -> Iterator[Finding]:
        """Yield missing, misshapen and lone scales; `read` reads bitsandbytes' states."""
        yield from check(self.pairing, read)
        yield from check_siblings(self.unknown)

    def states(self, source: Source) -> Mapping[str, BlockState]:
        """Return bitsandbytes' states, by the key of the codes."""
        return read_states(source, self.pairing.pairs.values())

    def weights(self, source: Source) -> Mapping[str, QuantisedTensor]:
        """Return the weights that are whole, by the key of their codes."""
        return {one.key: one for one, _ in weights(self.pairing, self.states(source))}


def read_recorded(source: Source, tensors: Mapping[str, TensorInfo]) -> Recorded | None:
    """Return how weights are quantised; None where neither records nor tensors show that they are.

    Raises:
        CorruptError, UnsafeError: a configuration file is damaged or hostile.
    """
    method = (None if source.single else read_method(source)) or UNRECORDED
    found = pair(method, tensors.values())
    unknown = unknown_codes(tensors.values(), {*found.pairs, *found.beside})
    recorded = method is not UNRECORDED
    return Recorded(method, found, unknown) if recorded or unknown else None


def dequantise(checkpoint: Checkpoint, recorded: Recorded, dtype: DType) -> Checkpoint:
    """Return a folder with its quantised weights in a floating type, and without their scales.

    Raises:
        UnsupportedError: the method is not known, or only its names are.
        CorruptError: a weight lacks a scale, or one does not fit.
    """
    method = recorded.method
    if method is UNRECORDED:
        return checkpoint  # `dequantised` refuses it, as it refuses such codes in any format
    if not method.schemes:
        raise UnsupportedError(
            f"{checkpoint.source.url} is quantised by {method.name}: how its values are computed is"
            " not known",
            hint=KEPT,
        )
    strange = recorded.pairing.stranger
    if strange is not None and strange.misshapen is not None:
        shapes = f"{list(strange.misshapen.shape)} beside {list(strange.codes.shape)}"
        raise UnsupportedError(
            f"{strange.codes.name} is stored in another layout of {method.name} than the one that"
            f" is known: {strange.misshapen.name} is {shapes}",
            hint=KEPT,
            tensor=strange.codes.key,
        )
    states: dict[str, BlockState] = {}
    for found in recorded.check(lambda: states.update(recorded.states(checkpoint.source))):
        raise as_error(found, hint="ftckpt verify names every weight that is damaged")
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
    there = bool(config)
    for field in ("quantization_config", "compression_config", "quantization"):
        config.pop(field, None)
        if isinstance(text := config.get("text_config"), dict):
            text.pop(field, None)
    config |= {field: dtype.name for field in DTYPE_FIELDS if field in config}
    beside = {CONFIG: json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"}
    return computed(
        checkpoint, tensors, made_of, fill, beside if there else {}, without=(MODELOPT, *OWN_FILES)
    )
