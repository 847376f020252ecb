"""Find the tensors of each quantised weight, and what is missing or misshapen.

Tell bitsandbytes' weights in a state dict, by the records that it puts beside their codes.

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

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, Kind, TensorInfo
from ftckpt.checkpoint.quantised import QuantisedTensor
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.findings import Finding, finding, from_error
from ftckpt.storage.source import Source

from .method import QuantMethod
from .schemes import BNB_INT8, KEPT, OTHER_SCALES, Arithmetic, Scheme, bnb_4bit

_SEVERAL = 3  # weights
_MAX_STATE = 4096  # bytes of bitsandbytes' state of one weight


class Pair(NamedTuple):
    """The codes of a weight and what stands beside them.

    Attributes:
        scheme: how it is stored.
        codes: the tensor of codes.
        name: of the weight.
        parts: by role, those that are there.
        missing: suffixes of the parts that it needs and has not.
    """

    scheme: Scheme
    codes: TensorInfo
    name: str
    parts: Mapping[str, TensorInfo]
    missing: tuple[str, ...]

    @property
    def misshapen(self) -> TensorInfo | None:
        """The first part whose shape does not fit the codes."""
        return next((self.parts[role] for role, _ in self._unlike()), None)

    @property
    def needed(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of which `misshapen` has none."""
        return next((shapes for _, shapes in self._unlike()), ())

    def _unlike(self) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
        held = {role: info.shape for role, info in self.parts.items()}
        for role, allowed in self.scheme.part_shapes(self.codes.shape, held).items():
            if role in held and allowed and held[role] not in allowed:
                yield role, allowed


class Pairing(NamedTuple):
    """What a method's names say of the tensors of a model.

    Attributes:
        pairs: by key of the codes.
        beside: keys of scales and the like, and of the codes that each belongs to; "" for those of
            activations.
        alone: scales that stand beside no codes.
    """

    pairs: Mapping[str, Pair]
    beside: Mapping[str, str]
    alone: tuple[TensorInfo, ...]

    @property
    def stranger(self) -> Pair | None:
        """A pair, where the shapes of none are those of its scheme: they are in another layout.

        Damage does not reach every weight, and a method has more layouts than its record names.
        """
        pairs = [one for one in self.pairs.values() if not one.missing]
        strange = len(pairs) >= _SEVERAL and all(one.misshapen is not None for one in pairs)
        return pairs[0] if strange else None

    def kinds(self) -> Iterator[tuple[str, Kind]]:
        """Yield the kinds of tensors that names and types alone do not show."""
        for key in self.pairs:
            yield key, Kind.PARAM
        for key in self.beside:
            yield key, Kind.SCALE
        for info in self.alone:
            yield info.key, Kind.SCALE


def pair(method: QuantMethod, tensors: Iterable[TensorInfo]) -> Pairing:
    """Pair the tensors of a model by the names that its method uses."""
    model = {info.name: info for info in tensors if info.component == "model"}
    pairs: dict[str, Pair] = {}
    beside: dict[str, str] = {}
    for name, info in model.items():
        found = _best(method.schemes, name, info, model)
        if found is not None:
            pairs[info.key] = found
            beside |= {part.key: info.key for part in found.parts.values()}
    alone = []
    suffixes = tuple({p.suffix for scheme in method.schemes for p in scheme.parts if p.required})
    for name, info in model.items():
        if info.key in pairs or info.key in beside:
            continue
        if method.schemes and name.endswith(OTHER_SCALES):
            beside[info.key] = ""
        elif suffixes and name.endswith(suffixes):
            alone.append(info)
    return Pairing(pairs, beside, tuple(alone))


def _best(
    schemes: Iterable[Scheme], name: str, info: TensorInfo, model: Mapping[str, TensorInfo]
) -> Pair | None:
    """Return the pair of the scheme that fits best; the first that fits at all, else None."""
    found: Pair | None = None
    for scheme in schemes:
        if not name.endswith(scheme.suffix) or info.dtype.name not in scheme.dtypes:
            continue
        stem = name.removesuffix(scheme.suffix)
        if scheme.module not in ("", stem):
            continue
        parts = {p.role: model[stem + p.suffix] for p in scheme.parts if stem + p.suffix in model}
        missing = tuple(p.suffix for p in scheme.parts if p.required and p.role not in parts)
        one = Pair(scheme, info, stem + scheme.weight, parts, missing)
        if not missing and one.misshapen is None:
            return one
        if found is None or len(missing) < len(found.missing):
            found = one
    return found


def check(pairing: Pairing, read: Callable[[], object]) -> Iterator[Finding]:
    """Yield weights without their scales, parts of a wrong shape or type, and lone scales.

    Args:
        pairing: what belongs together.
        read: reads what bitsandbytes says of its weights, and raises CorruptError for damage.
    """
    strange = pairing.stranger is not None
    for found in pairing.pairs.values():
        file = found.codes.pieces[0].extent.file
        for suffix in found.missing:
            yield finding(
                "missing-scale",
                f"{found.codes.name} is stored as {found.scheme.name} and lacks its"
                f" {suffix.lstrip('._')}: its values are lost",
                file=file,
                tensor=found.codes.key,
            )
        wrong = None if strange else found.misshapen
        if wrong is not None:
            allowed = " or ".join(str(list(shape)) for shape in found.needed[:2])
            yield finding(
                "scale-shape",
                f"{wrong.name} is {list(wrong.shape)}, and {found.scheme.name} of"
                f" {list(found.codes.shape)} needs {allowed}",
                file=wrong.pieces[0].extent.file,
                tensor=wrong.key,
            )
        for part in found.scheme.parts:
            held = found.parts.get(part.role)
            if held is not None and part.dtypes and held.dtype.name not in part.dtypes:
                yield finding(
                    "scale-shape",
                    f"{held.name} is {held.dtype.name}, and {found.scheme.name} has"
                    f" {' or '.join(sorted(part.dtypes))} there",
                    file=held.pieces[0].extent.file,
                    tensor=held.key,
                )
    for info in pairing.alone:
        yield finding(
            "lone-scale",
            f"{info.name} is a scale, and no quantised weight stands beside it",
            file=info.pieces[0].extent.file,
            tensor=info.key,
        )
    try:
        read()
    except CorruptError as error:
        yield from_error(error)


class BlockState(NamedTuple):
    """What bitsandbytes keeps of a weight beside its tensors.

    Attributes:
        shape: of the weight.
        block: elements that share an absolute maximum.
        nested_block: of the absolute maxima; 0 where they are not quantised.
        nested_offset: is added to them.
    """

    shape: tuple[int, ...]
    block: int
    nested_block: int = 0
    nested_offset: float = 0.0


def read_states(source: Source, pairs: Iterable[Pair]) -> dict[str, BlockState]:
    """Return the states of bitsandbytes' weights, by the key of their codes; small reads.

    Raises:
        CorruptError: one is not of that form (`bad-metadata`).
    """
    wanted = [p for p in pairs if p.scheme.arithmetic is Arithmetic.BLOCKS and "state" in p.parts]
    extents = [p.parts["state"].pieces[0].extent for p in wanted]
    for one in wanted:
        require_short(one)
    texts = source.read_many(extents)
    return {p.codes.key: state_of(p, raw) for p, raw in zip(wanted, texts, strict=True)}


def require_short(one: Pair) -> None:
    """Refuse a state of bitsandbytes that is longer than any that it writes.

    Raises:
        CorruptError: it is (`bad-metadata`).
    """
    if one.parts["state"].nbytes > _MAX_STATE:
        raise _no_state(one, "it is too long")


def state_of(one: Pair, raw: bytes) -> BlockState:
    """Parse what bitsandbytes keeps of one weight.

    Raises:
        CorruptError: it is not of that form (`bad-metadata`), or a tensor beside the codes, or they
            themselves, are of another size than it says (`scale-shape`).
    """
    try:
        said = json.loads(raw)
        shape, block = said["shape"], said["blocksize"]
        nested, offset = said.get("nested_blocksize", 0), float(said.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise _no_state(one, "it is not the JSON that bitsandbytes writes") from None
    sizes = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    counts = type(block) is int and block > 0 and type(nested) is int and nested >= 0
    if not sizes or not counts:
        raise _no_state(one, "its shape or block size is none")
    state = BlockState(tuple(shape), block, nested, offset)
    _require_sizes(one, state)
    return state


def _require_sizes(one: Pair, state: BlockState) -> None:
    """Refuse codes and scales that are not as many as the state says.

    Source: `quantize_4bit` in bitsandbytes 0.50 `functional.py`; codes are two in a byte, and words
    of `bnb_4bit_quant_storage` hold whole bytes of them.
    """
    count, word = prod(state.shape), one.codes.dtype.itemsize
    blocks = -(-count // state.block)
    needed = {"scale": blocks, "map": 16}
    nested = {"nested", "nested_map"} & one.parts.keys()
    if nested or state.nested_block:
        if len(nested) < 2 or not state.nested_block:
            raise _no_state(one, "of its absolute maxima, which are in codes, a part is not there")
        needed |= {"nested": -(-blocks // state.nested_block), "nested_map": 256}
    sizes = [(part, needed.get(role, part.numel)) for role, part in one.parts.items()]
    sizes.append((one.codes, (count + 1) // (2 * word)))
    wrong = [(info, size) for info, size in sizes if info.numel != size]
    for info, size in wrong[:1]:
        raise CorruptError(
            f"{info.name} has {info.numel:,} elements, and {one.scheme.name} of"
            f" {list(state.shape)} needs {size:,}",
            kind="scale-shape",
            file=info.pieces[0].extent.file,
            tensor=info.key,
        )


def _no_state(one: Pair, why: str) -> CorruptError:
    info = one.parts["state"]
    return CorruptError(
        f"{info.name} does not say how {one.codes.name} is quantised: {why}",
        kind="bad-metadata",
        file=info.pieces[0].extent.file,
        tensor=info.key,
    )


def weights(
    pairing: Pairing, states: Mapping[str, BlockState]
) -> Iterator[tuple[QuantisedTensor, Pair]]:
    """Yield each weight that is whole: its shape is known and its parts are there."""
    if pairing.stranger is not None:
        return
    for key, one in pairing.pairs.items():
        state = states.get(key)
        shape = one.scheme.weight_shape(one.codes.shape) if state is None else state.shape
        if one.missing or shape is None:
            continue
        rules = {p.role: p.rule for p in one.scheme.parts}
        yield (
            QuantisedTensor(
                one.scheme.name,
                key,
                one.name,
                shape,
                {role: info.key for role, info in one.parts.items()},
                {info.key: rules[role] for role, info in one.parts.items()},
            ),
            one,
        )


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
