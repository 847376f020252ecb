"""In what order a model of Megatron-Core registers its parameters, by their names on disk.

Buffers of the distributed optimizer follow this order and store no names. torch_dist spells all
parameters as Transformer Engine does, whatever implementation trained, and implementations differ:
the first norm is a module of the layer or is fused into the projection after it, and experts are
modules of their own or grouped by matrix. All orders that a set of names can have are returned.

Source: the constructors of `TransformerLayer`, `SelfAttention`, `MLP`, `MoELayer`,
`TransformerBlock` and `GPTModel` in megatron/core; `GroupedLinear` in Transformer Engine, which
registers each expert's weight and its bias together. `named_parameters` gives a module's own
parameters before those of its children.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import product
from typing import NamedTuple

from ftckpt.errors import UnsupportedError

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_BEFORE = (EMBEDDING, "embedding.position_embeddings.weight")
_AFTER = (
    "decoder.final_layernorm.weight", "decoder.final_layernorm.bias", "decoder.final_norm.weight",
    OUTPUT, "output_layer.bias",
)  # fmt: skip
_FIRST = ("input_layernorm.weight", "input_layernorm.bias")
_NORM = (
    "self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.layer_norm_bias",
)  # fmt: skip
_PROJECTION = ("self_attention.linear_proj.weight", "self_attention.linear_proj.bias")
_EXPERTS = "(experts)"
_REST = (
    "self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight", "self_attention.q_layernorm.bias",
    "self_attention.k_layernorm.weight", "self_attention.k_layernorm.bias",
    "pre_mlp_layernorm.weight", "pre_mlp_layernorm.bias",
    "mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.layer_norm_bias",
    "mlp.linear_fc1.weight", "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight", "mlp.linear_fc2.bias",
    "mlp.router.weight", "mlp.router.bias",
    _EXPERTS,
    "mlp.shared_experts.gate_weight",
    "mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc1.bias",
    "mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.linear_fc2.bias",
)  # fmt: skip
_SEPARATE = (*_FIRST, *_NORM, *_PROJECTION, *_REST)
_FUSED = (*_FIRST, *_PROJECTION, *_NORM, *_REST)
_LINEARS = ("linear_fc1", "linear_fc2")
_MEMBERS = ("weight", "bias")
_MATRICES = tuple(f"{linear}.{member}" for linear in _LINEARS for member in _MEMBERS)
_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
# Layers that predict further tokens, between the others and the output layer.
_FURTHER = re.compile(r"mtp\.layers\.(\d{1,6})\..+")
_EXPERT = re.compile(r"(?:.+\.)?mlp\.experts\.local_experts\.(\d{1,6})\.(.+)")
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d{1,6})")


class Registration(NamedTuple):
    """One order of the parameters of a whole model."""

    before: tuple[str, ...]  # what the first stage registers before its layers
    layers: tuple[tuple[str, ...], ...]  # of each layer, in its order
    after: tuple[str, ...]  # what the last stage registers after its layers

    def of(self, names: Collection[str]) -> Registration:
        """Return the order of some of the parameters; layers without any stay, empty."""
        layers = tuple(tuple(n for n in layer if n in names) for layer in self.layers)
        before = tuple(n for n in self.before if n in names)
        return Registration(before, layers, tuple(n for n in self.after if n in names))


def expert_of(name: str) -> int | None:
    """Return the number of the expert that a parameter is of; None for a dense one."""
    match = _EXPERT.fullmatch(name)
    return int(match[1]) if match else None


def constructed(names: Iterable[str]) -> list[str]:
    """Return parameters in the order in which their own model registers them.

    Args:
        names: in the spelling of the model, which shows whether norms are fused and experts
            grouped; on disk torch_dist shows neither (`registrations`).

    Raises:
        UnsupportedError: a name that is none of a GPT model of Megatron-Core.
    """
    return sorted(names, key=_constructed)


def unordered(names: Iterable[str]) -> str | None:
    """Return a name of those whose place among the parameters of their layer is not known."""
    return next((name for name in names if _constructed(name)[2] == len(_FUSED)), None)


def _constructed(name: str) -> tuple[int, int, int, int, int, int]:
    """Return what sorts the parameters of a model; those of a layer in no order come last there."""
    match = _LAYER.fullmatch(name)
    further = _FURTHER.fullmatch(name)
    if further is not None:
        return (2, int(further[1]), len(_FUSED), 0, 0, 0)
    if match is None:
        for place, known in ((0, _BEFORE), (3, _AFTER)):
            if name in known:
                return (place, 0, known.index(name), 0, 0, 0)
        raise UnsupportedError(
            f"{name} is not a parameter of a GPT model of Megatron-Core",
            hint="--names megatron translates the names of a family that ftckpt knows",
            kind="unknown-rule",
            tensor=name,
        )
    layer, inner = int(match[1]), match[2]
    grouped = _GROUPED.fullmatch(inner)
    inside = (len(_FUSED), 0, 0, 0)
    if grouped is not None:
        linear, member = _LINEARS.index(grouped[1]), _MEMBERS.index(grouped[2])
        inside = (_FUSED.index(_EXPERTS), linear, int(grouped[3]), member)
    elif _is_known(inner):
        inside = _place(inner, _FUSED, False)
    return (1, layer, *inside)


def registrations(names: Iterable[str]) -> list[Registration]:
    """Return every order that the parameters can have, each once.

    Raises:
        UnsupportedError: where a parameter stands is not known, or a layer is missing.
    """
    known = set(names)
    layers: dict[int, list[str]] = defaultdict(list)
    for name in sorted(known):
        match = _LAYER.fullmatch(name)
        if match is not None and _is_known(match[2]):
            layers[int(match[1])].append(match[2])
        elif name not in _BEFORE and name not in _AFTER:
            raise UnsupportedError(
                f"where {name} stands among the parameters is not known", tensor=name
            )
    if sorted(layers) != list(range(len(layers))):
        raise UnsupportedError("the model lacks a layer", tensor=f"decoder.layers.{len(layers)}")
    found: dict[Registration, None] = {}
    for order, grouped in product((_SEPARATE, _FUSED), (False, True)):
        ordered = tuple(
            tuple(
                f"decoder.layers.{number}.{name}"
                for name in sorted(names, key=lambda n: _place(n, order, grouped))
            )
            for number, names in sorted(layers.items())
        )
        before = tuple(name for name in _BEFORE if name in known)
        found[Registration(before, ordered, tuple(n for n in _AFTER if n in known))] = None
    return list(found)


def _place(name: str, order: tuple[str, ...], grouped: bool) -> tuple[int, int, int, int]:
    """Return what sorts a parameter of a layer; experts by expert or, grouped, by linear layer."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return (order.index(name), 0, 0, 0)
    expert, (linear, member) = int(match[1]), divmod(_MATRICES.index(match[2]), len(_MEMBERS))
    first, second = (linear, expert) if grouped else (expert, linear)
    return (order.index(_EXPERTS), first, second, member)


def _is_known(name: str) -> bool:
    """Say whether a parameter of a layer has a place in the orders."""
    match = _EXPERT.fullmatch(name)
    return name in _SEPARATE if match is None else match[2] in _MATRICES
