"""Show a MaxText model's arrays as the tensors of Hugging Face, by a family's table.

MaxText stacks layers along the second axis (`scan_layers`) or names them `layers_3`, stacks experts
along the first, and keeps heads and their width apart. A table's rows say of each array

    name = "decoder.{layers}.self_attention.query.kernel"
    hf = "model.layers.{layer}.self_attn.q_proj.weight"
    axes = "hidden | heads width"     # the second group becomes rows, the first columns
    rotated = true, stored = "divided"

so that a tensor of Hugging Face is a view: strides change, bytes do not move. Two things are more
than that. Llama 3.1's rotation works on neighbours in MaxText and on halves in transformers, so
`rotated` axes show every other element. Queries are stored divided by the root of a head's width,
Gemma's embedding multiplied, its norms with one added: such tensors are computed, in float32 and
rounded once. Where layers take turns, MaxText makes one of several: two of Gemma 2 are one, in
`mlp_local` and `mlp_global`; six of Gemma 3 are `layers_0` to `layers_5` of a stack, and those that
are left over are in `layers_remainder`.

Source: MaxText `checkpoint_conversion/utils/param_mapping.py`, `layers/attentions.py`.

Translate an adapter of Megatron-core's modules: joined matrices have one in each part.

A is shared by the parts, B and DoRA's magnitudes have the rows of the weight and are cut as it is
(`_get_fused_adapter_linear_out_slices` of Megatron-Bridge).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.checkpoint import Box, Checkpoint, Extent, Kind, Piece, TensorInfo
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.read_tensor import read_box
from ftckpt.checkpoint.rounding import from_bfloat16, to_bfloat16
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.findings import listed
from ftckpt.formats.huggingface.config import ADAPTER_CONFIG, CONFIG, weights_dtype
from ftckpt.formats.lora.bridge import configuration, part_of, read_adapter
from ftckpt.formats.lora.tensors import PREFIX
from ftckpt.storage.computed import ComputedSource, computed_name
from ftckpt.transfer.content import Content, Copy, TargetTensor

from .facts import ModelFacts
from .tables import ArrayEntry, Family
from .translator import Naming, Translator
from .views.arrays import ArrayView
from .views.joins import part_rows

if TYPE_CHECKING:
    import numpy as np


_TOP = "params."
_FLOATS = ("float32", "bfloat16", "float16")


def is_maxtext(content: Content) -> bool:
    """Say whether the model's weights have MaxText's names."""
    return any(_bare(w.name).startswith("decoder.decoder_norm.") for w in content.tensors.values())


def _bare(name: str) -> str:
    return name.removeprefix(_TOP)


def from_maxtext(content: Content, family: Family, config: Mapping[str, Any]) -> Content:
    """Return the weights as Hugging Face names and shapes them, with their `config.json`.

    Args:
        content: MaxText's weights, and nothing of the optimizer.
        family: whose table.
        config: the model's `config.json`: the checkpoint does not say how it rotates and norms.

    Raises:
        UnsupportedError: an array that the family lacks or that is stored so that no view shows it,
            or state of an optimizer.
        UsageError: shapes contradict `config`, or an array is missing.
    """
    if not family.arrays:
        raise UnsupportedError(
            f"no table says how MaxText stores {family.name}", kind="unknown-rule"
        )
    others = [k for k, w in content.tensors.items() if w.component != "model"]
    if others:
        raise UnsupportedError(
            f"only weights are translated from MaxText's names, and {listed(others, 2)} are not",
            hint="--only model",
        )
    view = _Shown(ArrayView.of(content.checkpoint), {}, config)
    sizes = _sizes(config, content)
    made: dict[str, TargetTensor] = {}
    padding: list[str] = []
    for key, wanted in content.tensors.items():
        entry, layers = _entry(family, wanted, sizes)
        info = content.checkpoint.tensors[key]
        if wanted.copies != (Copy(Box.whole(info.shape), key, Box.whole(info.shape)),):
            raise UnsupportedError(f"{key} was changed before it was translated", tensor=key)
        for one in _slices(entry, info, layers, sizes):
            name = view.show(entry, info, one, family.rotates)
            shown = view.view.shown[name]
            rows = min(shown.shape[0], sizes["vocabulary"]) if entry.vocabulary else shown.shape[0]
            if rows < shown.shape[0]:
                padding.append(
                    f"{shown.shape[0] - rows} rows of padding of the vocabulary in {key}"
                )
            box = Box((0,) * len(shown.shape), (rows, *shown.shape[1:]))
            made[name] = TargetTensor(
                "model", name, Kind.PARAM, box.sizes, wanted.dtype, (Copy(box, name, box),)
            )
    _require_all(family, made, sizes, config)
    found = replace(
        content, checkpoint=view.finished(), tensors=made, aliases={}, objects={},
        dropped=(*content.dropped, *padding),
    )  # fmt: skip
    said = {**config, "torch_dtype": weights_dtype(found)}
    said.pop("dtype", None)
    text = json.dumps(said, indent=2, sort_keys=True).encode() + b"\n"
    return replace(found, beside={**found.beside, CONFIG: text})


def _sizes(config: Mapping[str, Any], content: Content) -> dict[str, int]:
    """Return the sizes of axes that `config.json` gives."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    width = config.get("head_dim")
    if width is None and type(heads) is int and heads and type(hidden) is int:
        width = hidden // heads
    found = {
        "hidden": hidden,
        "heads": heads,
        "groups": config.get("num_key_value_heads") or heads,
        "width": width,
        "inner": config.get("intermediate_size"),
        "narrow": config.get("moe_intermediate_size"),
        "experts": config.get("num_local_experts") or config.get("num_experts"),
        "routes": config.get("num_local_experts") or config.get("num_experts"),
        "vocabulary": config.get("vocab_size"),
        "layers": config.get("num_hidden_layers"),
    }
    known = {name: size for name, size in found.items() if type(size) is int and size > 0}
    absent = {"hidden", "heads", "width", "vocabulary", "layers"} - known.keys()
    if absent:
        raise UsageError(
            f"the {CONFIG} for {content.checkpoint.source.url} gives no {', '.join(sorted(absent))}"
        )
    return known


class _Layers(NamedTuple):
    """The layers in an array: `first`, and where they are stacked each `step` from there."""

    first: int
    step: int
    stacked: bool


def _entry(
    family: Family, wanted: TargetTensor, sizes: Mapping[str, int]
) -> tuple[ArrayEntry, _Layers | None]:
    """Return the row of an array, and its layers where it holds some."""
    for entry in family.arrays:
        match = entry.pattern.fullmatch(_bare(wanted.name))
        if match is not None:
            found = _layers(entry, match.groupdict(), sizes["layers"]) if entry.layered else None
            if found is not None and found.first >= sizes["layers"]:
                has = sizes["layers"]
                raise UsageError(f"{wanted.key} is of layer {found.first}, and {CONFIG} says {has}")
            return entry, found
    raise UnsupportedError(
        f"{family.name} has no array that MaxText calls {wanted.name}",
        hint="--drop leaves it out",
        kind="unknown-rule",
        tensor=wanted.key,
    )


def _layers(entry: ArrayEntry, found: Mapping[str, str | None], count: int) -> _Layers:
    """Return the layers that the numbers in an array's name stand for."""
    number, turn, left = (found.get(word) for word in ("layer", "turn", "left"))
    every = len(entry.turns) or 1
    if left is not None:
        return _Layers(count // every * every + int(left), 1, stacked=False)
    first = 0 if turn is None else entry.turns.index(turn)
    if number is None:
        return _Layers(first, every, stacked=True)
    return _Layers(int(number) * (1 if turn is None else every) + first, 1, stacked=False)


class _Slice(NamedTuple):
    """The part of an array that is one tensor.

    Attributes:
        numbers: of its layer and its expert, for its name.
        fixed: axis of the array -> the index along it.
    """

    numbers: Mapping[str, str]
    fixed: Mapping[int, int]


def _slices(
    entry: ArrayEntry, info: TensorInfo, layers: _Layers | None, sizes: Mapping[str, int]
) -> Iterator[_Slice]:
    """Yield the tensors in an array, once its shape is what the configuration says."""
    axes = list(entry.axes)
    stacked = layers is not None and layers.stacked
    if layers is not None and stacked:
        axes.insert(1, "layers")
        sizes = {**sizes, "layers": sizes["layers"] // layers.step}
    wanted = [sizes.get(axis, -1) for axis in axes]
    padded = [axis == "vocabulary" for axis in axes]
    fits = len(axes) == len(info.shape) and all(
        has == size or (more and has > size)
        for has, size, more in zip(info.shape, wanted, padded, strict=True)
    )
    if not fits:
        raise UsageError(
            f"{info.key} has the shape {list(info.shape)}, and {CONFIG} says"
            f" {', '.join(f'{axis} {size}' for axis, size in zip(axes, wanted, strict=True))}",
            hint="layers are expected on the second axis (param_scan_axis: 1)" if stacked else "",
        )
    each = [(n, axis) for n, axis in enumerate(axes) if axis in ("layers", "experts")]
    for numbers in product(*(range(info.shape[n]) for n, _ in each)):
        named = {axis[:-1]: str(k) for (_, axis), k in zip(each, numbers, strict=True)}
        if layers is not None:
            named["layer"] = str(layers.first + layers.step * int(named.get("layer", "0")))
        yield _Slice(named, {n: k for (n, _), k in zip(each, numbers, strict=True)})


def _require_all(
    family: Family,
    made: Mapping[str, TargetTensor],
    sizes: Mapping[str, int],
    config: Mapping[str, Any],
) -> None:
    """Refuse a model that lacks a tensor."""
    for entry in family.arrays:
        if entry.output and config.get("tie_word_embeddings", False) is True:
            continue
        layers = range(sizes["layers"]) if entry.layered else range(1)
        experts = range(sizes.get("experts", 1)) if "experts" in entry.axes else range(1)
        for layer, expert in product(layers, experts):
            name = entry.hf.fill({"layer": str(layer), "expert": str(expert)})
            if name not in made:
                raise UsageError(f"the checkpoint has nothing that becomes {name}", tensor=name)


# --- the view -----------------------------------------------------------------------------------


class _Shown(NamedTuple):
    """A view of MaxText's arrays, in the making.

    Attributes:
        view: shows the parts.
        changed: how each tensor that is computed is stored, and by what number.
        config: the model's `config.json`.
    """

    view: ArrayView
    changed: dict[str, tuple[str, float]]
    config: Mapping[str, Any]

    def show(self, entry: ArrayEntry, info: TensorInfo, one: _Slice, rotates: bool) -> str:
        """Add the view of a part of an array; return its name."""
        name = entry.hf.fill(one.numbers)
        left = [n for n in range(len(info.shape)) if n not in one.fixed]
        inputs = left[: entry.inputs] if entry.turned else []
        groups = [left[len(inputs) :], inputs] if entry.turned else [[n] for n in left]
        rotated = entry.rotated and rotates
        self.view.show(name, info, one.fixed, [g for g in groups if g], neighbours=rotated)
        if entry.stored:
            self.changed[name] = entry.stored, self._number(entry.stored, info)
        return name

    def _number(self, stored: str, info: TensorInfo) -> float:
        if stored == "divided":
            # Gemma 2 divides by the root of another width where its configuration names one.
            return sqrt(self.config.get("query_pre_attn_scalar") or info.shape[-1])
        if stored == "one more":
            return 1.0
        root = sqrt(info.shape[-1])
        return _as_bfloat16(root) if stored == "multiplied bfloat16" else root

    def finished(self) -> Checkpoint:
        """Return the checkpoint with all that was shown, changed tensors computed."""
        view = self.view.finished()
        if not self.changed:
            return view
        made = dict(view.tensors)
        for name in self.changed:
            info = view.shown[name]
            if info.dtype.name not in _FLOATS:
                raise UnsupportedError(f"{name} is {info.dtype.name}: it cannot be computed")
            whole = Piece(Box.whole(info.shape), Extent(computed_name(name), 0, info.nbytes))
            made[name] = info._replace(pieces=(whole,))

        def fill(name: str, offset: int, out: memoryview) -> None:
            info = view.shown[name]
            row = info.dtype.nbytes(prod(info.shape[1:]))
            first, last = offset // row, -(-(offset + len(out)) // row)
            box = Box((first, *(0 for _ in info.shape[1:])), (last - first, *info.shape[1:]))
            data = _restored(read_box(view, info, box), info.dtype, *self.changed[name])
            begin = offset - first * row
            out[:] = data[begin : begin + len(out)]

        result = replace(view, tensors=made, source=ComputedSource.over(view.source, lambda: fill))
        result.step = view.base.step
        return result


def _restored(values: np.ndarray[Any, Any], dtype: DType, stored: str, number: float) -> bytes:
    """Return elements as Hugging Face has them, computed as MaxText does: rounded once."""
    import numpy as np

    kept = np.ascontiguousarray(values)
    narrow = dtype.name == "bfloat16"
    wide = from_bfloat16(kept.view(np.uint16)) if narrow else kept.view(np.dtype(dtype.name))
    wide, by = wide.astype(np.float32, copy=False), np.float32(number)
    made = wide * by if stored == "divided" else wide - by if stored == "one more" else wide / by
    return (to_bfloat16(made) if narrow else made.astype(np.dtype(dtype.name))).tobytes()


def _as_bfloat16(number: float) -> float:
    import numpy as np

    return float(from_bfloat16(to_bfloat16(np.array([number], np.float32)))[0])


def adapter_to_hugging_face(content: Content, model: ModelFacts) -> Content:
    """Return an adapter of Bridge under the names that PEFT gives it for Hugging Face's model.

    Raises:
        UnsupportedError: a module that the family does not have, or whose weight is turned there.
        UsageError: rows that do not fit the heads.
    """
    translator = Translator(model.family, model.heads, config=model.config)
    made: dict[str, TargetTensor] = {}
    for wanted in content.tensors.values():
        module, _, end = wanted.name.removeprefix(PREFIX).partition(".lora_")
        module, part = part_of(module)
        found = translator.find(f"{module}.weight", Naming.MEGATRON)
        if found is None or found.entry.transposed:
            raise UnsupportedError(
                f"{module} has no adapter in Hugging Face's {model.family.name}: its weight is"
                " stored otherwise"
            )
        entry = found.entry
        if part >= len(entry.hf):
            raise UnsupportedError(f"{module} of {model.family.name} is not joined of {part + 1}")
        if part >= 0:
            _require_rows(model, wanted, end, entry.join, part, len(entry.hf))
            pairs = [(entry.hf[part], wanted)]
        elif end == "A.weight":
            pairs = [(one, wanted) for one in entry.hf]
        else:
            pairs = list(zip(entry.hf, translator.parts(wanted, entry), strict=True))
        for known, tensor in pairs:
            name = known.fill(found.numbers).removesuffix(".weight")
            new = tensor._replace(name=f"{PREFIX}{name}.lora_{end}")
            made[new.key] = new
    adapter = read_adapter(content.checkpoint)
    beside = dict(content.beside)
    if adapter is not None:
        beside[ADAPTER_CONFIG] = configuration(adapter, [one.name for one in made.values()])
    return replace(content, tensors=made, beside=beside)


def _require_rows(
    model: ModelFacts, wanted: TargetTensor, end: str, join: object, part: int, parts: int
) -> None:
    """Refuse queries, keys or values of another number of rows than the heads have."""
    from .views.joins import Join

    if join is not Join.GROUPED or end == "A.weight":
        return
    sizes = part_rows(Join.GROUPED, parts, model.heads.rows, model.heads)
    if sizes is None or sizes[part] != wanted.shape[0]:
        raise UsageError(f"{wanted.name} has {wanted.shape[0]} rows, which the heads do not have")
