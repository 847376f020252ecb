"""Show a MaxText model's arrays as the tensors of Hugging Face, by a family's table.

MaxText stacks layers along the second axis (`scan_layers`) or names them `layers_3`, stacks experts
along the first, and keeps heads and their width apart. A table's rows say of each array

    name = "decoder.{layers}.self_attention.query.kernel"
    hf = "model.layers.{layer}.self_attn.q_proj.weight"
    axes = "hidden | heads width"     # the second group becomes rows, the first columns
    rotated = true, scaled = true

so that a tensor of Hugging Face is a view: strides change, bytes do not move. Two things are more
than that. Llama 3.1's rotation works on neighbours in MaxText and on halves in transformers, so
`rotated` axes show every other element. Queries are stored divided by the root of a head's width,
so `scaled` tensors are computed: a product in float32, rounded once.

Source: MaxText `checkpoint_conversion/utils/param_mapping.py`, `layers/attentions.py`.
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
from ftckpt.formats.huggingface.config import CONFIG, weights_dtype
from ftckpt.storage.computed import ComputedSource, computed_name
from ftckpt.transfer.content import Content, Copy, TargetTensor

from .array_view import ArrayView
from .tables import ArrayEntry, Family

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
    view = _Shown(ArrayView.of(content.checkpoint), {})
    sizes = _sizes(config, content)
    made: dict[str, TargetTensor] = {}
    for key, wanted in content.tensors.items():
        entry, layer = _entry(family, wanted)
        info = content.checkpoint.tensors[key]
        if wanted.copies != (Copy(Box.whole(info.shape), key, Box.whole(info.shape)),):
            raise UnsupportedError(f"{key} was changed before it was translated", tensor=key)
        for one in _slices(entry, info, layer, sizes):
            name = view.show(entry, info, one, family.rotates)
            shown = view.view.shown[name]
            rows = min(shown.shape[0], sizes["vocabulary"]) if entry.vocabulary else shown.shape[0]
            box = Box((0,) * len(shown.shape), (rows, *shown.shape[1:]))
            made[name] = TargetTensor(
                "model", name, Kind.PARAM, box.sizes, wanted.dtype, (Copy(box, name, box),)
            )
    _require_all(family, made, sizes, config)
    found = replace(content, checkpoint=view.finished(), tensors=made, aliases={}, objects={})
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


def _entry(family: Family, wanted: TargetTensor) -> tuple[ArrayEntry, int | None]:
    """Return the row of an array, and its layer where it holds one."""
    for entry in family.arrays:
        match = entry.pattern.fullmatch(_bare(wanted.name))
        if match is not None:
            number = match.groupdict().get("layer")
            return entry, None if number is None else int(number)
    raise UnsupportedError(
        f"{family.name} has no array that MaxText calls {wanted.name}",
        hint="--drop leaves it out",
        kind="unknown-rule",
        tensor=wanted.key,
    )


class _Slice(NamedTuple):
    """The part of an array that is one tensor.

    Attributes:
        numbers: of its layer and its expert, for its name.
        fixed: axis of the array -> the index along it.
    """

    numbers: Mapping[str, str]
    fixed: Mapping[int, int]


def _slices(
    entry: ArrayEntry, info: TensorInfo, layer: int | None, sizes: Mapping[str, int]
) -> Iterator[_Slice]:
    """Yield the tensors in an array, once its shape is what the configuration says."""
    axes = list(entry.axes)
    stacked = entry.layered and layer is None
    if stacked:
        axes.insert(1, "layers")
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
    if entry.pattern.groupindex and layer is not None and not layer < sizes["layers"]:
        raise UsageError(f"{info.key} is of layer {layer}, and {CONFIG} says {sizes['layers']}")
    for numbers in product(*(range(info.shape[n]) for n, _ in each)):
        named = {axis[:-1]: str(k) for (_, axis), k in zip(each, numbers, strict=True)}
        if layer is not None:
            named["layer"] = str(layer)
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
        factors: of each tensor that is computed.
    """

    view: ArrayView
    factors: dict[str, float]

    def show(self, entry: ArrayEntry, info: TensorInfo, one: _Slice, rotates: bool) -> str:
        """Add the view of a part of an array; return its name."""
        name = entry.hf.fill(one.numbers)
        left = [n for n in range(len(info.shape)) if n not in one.fixed]
        inputs = left[: entry.inputs] if entry.turned else []
        groups = [left[len(inputs) :], inputs] if entry.turned else [[n] for n in left]
        rotated = entry.rotated and rotates
        self.view.show(name, info, one.fixed, [g for g in groups if g], neighbours=rotated)
        if entry.scaled:
            self.factors[name] = sqrt(info.shape[-1])
        return name

    def finished(self) -> Checkpoint:
        """Return the checkpoint with all that was shown, scaled tensors computed."""
        view = self.view.finished()
        if not self.factors:
            return view
        made = dict(view.tensors)
        for name in self.factors:
            info = view.shown[name]
            if info.dtype.name not in _FLOATS:
                raise UnsupportedError(f"{name} is {info.dtype.name}: it cannot be scaled")
            whole = Piece(Box.whole(info.shape), Extent(computed_name(name), 0, info.nbytes))
            made[name] = info._replace(pieces=(whole,))

        def fill(name: str, offset: int, out: memoryview) -> None:
            info = view.shown[name]
            row = info.dtype.nbytes(prod(info.shape[1:]))
            first, last = offset // row, -(-(offset + len(out)) // row)
            box = Box((first, *(0 for _ in info.shape[1:])), (last - first, *info.shape[1:]))
            data = _scaled(read_box(view, info, box), info.dtype, self.factors[name])
            begin = offset - first * row
            out[:] = data[begin : begin + len(out)]

        result = replace(view, tensors=made, source=ComputedSource.over(view.source, lambda: fill))
        result.step = view.base.step
        return result


def _scaled(values: np.ndarray[Any, Any], dtype: DType, factor: float) -> bytes:
    """Return elements times a factor, as MaxText computes it: in float32, rounded once."""
    import numpy as np

    if dtype.name == "bfloat16":
        wide = from_bfloat16(np.ascontiguousarray(values).view(np.uint16))
        return to_bfloat16(wide * np.float32(factor)).tobytes()
    numbers = np.ascontiguousarray(values).view(np.dtype(dtype.name)).astype(np.float32)
    return (numbers * np.float32(factor)).astype(np.dtype(dtype.name)).tobytes()
