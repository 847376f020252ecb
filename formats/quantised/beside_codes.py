"""Tell bitsandbytes' weights in a state dict, by the records that it puts beside their codes.

`Linear4bit` and `Linear8bitLt` write what they need to compute a weight under its name:

    0.weight                                  codes, two in a byte (int8: one)
    0.weight.absmax, .quant_map               the largest value of each block, the table of values
    0.weight.nested_absmax, .nested_quant_map the same of the largest values, if they are in codes
    0.weight.quant_state.bitsandbytes__nf4    JSON: shape, type, sizes of blocks
    0.SCB, 0.weight_format                    int8: the largest value of each row

No configuration lies beside a training state, so these names alone are what is recorded. Source:
`QuantState.as_dict` in bitsandbytes 0.50 `functional.py`, `Linear8bitLt._save_to_state_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ftckpt.checkpoint import Checkpoint, TensorInfo
from ftckpt.checkpoint.quantised import QuantisedTensor
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import UnsupportedError

from .method import QuantMethod
from .pairing import Pairing, pair, require_short, state_of, weights
from .schemes import BNB_INT8, bnb_4bit
from .unknown_codes import KEPT

_STATE = ".quant_state.bitsandbytes__"
_ROWS, _FORMAT = ".SCB", ".weight_format"


def paired(tensors: Mapping[str, TensorInfo]) -> tuple[Pairing | None, Mapping[str, TensorInfo]]:
    """Return bitsandbytes' weights and what belongs to them, None where there are none.

    The tensors come with the kinds that this shows: codes are weights, others are scales.
    """
    names = {info.name for info in tensors.values() if info.component == "model"}
    schemes = [bnb_4bit(kind) for kind in ("nf4", "fp4") if _any(names, _STATE + kind)]
    if any(name.removesuffix(_ROWS) + _FORMAT in names for name in names if name.endswith(_ROWS)):
        schemes.append(BNB_INT8)
    if not schemes:
        return None, tensors
    found = pair(QuantMethod("bitsandbytes", tuple(schemes)), tensors.values())
    # Other bytes are not taken for codes: their own record must stand beside them.
    pairs = {k: one for k, one in found.pairs.items() if {"state", "scale"} & one.parts.keys()}
    beside = {k: of for k, of in found.beside.items() if of in pairs}
    pairing = Pairing(pairs, beside, found.alone)
    kinds = {key: tensors[key]._replace(kind=kind) for key, kind in pairing.kinds()}
    return pairing, {**tensors, **kinds}


def _any(names: set[str], end: str) -> bool:
    return any(name.endswith(end) for name in names)


def weights_of(checkpoint: Checkpoint, pairing: Pairing) -> dict[str, QuantisedTensor]:
    """Return the weights that are whole, by the key of their codes; small reads.

    Raises:
        CorruptError: a state is not what bitsandbytes writes.
    """
    states = {}
    for one in pairing.pairs.values():
        if "state" in one.parts:
            require_short(one)
            raw = read_tensor(checkpoint, one.parts["state"].key)
            states[one.codes.key] = state_of(one, raw)
    return {one.key: one for one, _ in weights(pairing, states)}


def not_computed(checkpoint: Checkpoint, pairing: Pairing) -> UnsupportedError:
    """Return the error about another type for weights in codes: a cast would spoil their scales."""
    first = next(iter(pairing.pairs.values()))
    return UnsupportedError(
        f"{first.codes.name} is {first.scheme.name}: ftckpt computes such weights from a Hugging"
        f" Face folder alone, not from {checkpoint.format}",
        hint=KEPT,
        tensor=first.codes.key,
    )
