"""Translate legacy tensor names of Megatron-Core to torch_dist's.

On disk the names are Transformer Engine's, whatever implementation trained, so that either loads:

    decoder.layers.0.input_layernorm.weight       self_attention.linear_qkv.layer_norm_weight
    decoder.layers.0.pre_mlp_layernorm.weight     mlp.linear_fc1.layer_norm_weight
    …mlp.experts.linear_fc1.weight3               …mlp.experts.local_experts.3.linear_fc1.weight
    mtp.layers.0.mtp_model_layer.…                mtp.layers.0.transformer_layer.…

The first two hold for `--transformer-impl local` and plain attention. Transformer Engine itself has
a norm apart where no linear layer follows it (before experts, in latent attention), and there the
names on disk are the model's.

Source: `sharded_state_dict_keys_map` in megatron/core/models/gpt/gpt_layer_specs.py,
`TEGroupedMLP.sharded_state_dict`, `MultiTokenPredictionLayer.sharded_state_dict` (core 0.9-0.19).

Take packed projections apart, as torch_dist stores them: each part of the rows is a tensor.

    decoder.layers.0.self_attention.in_proj.weight     … .in_proj.weight.query, .key, .value, .z, …
    decoder.layers.0.mixer.conv1d.weight               … .conv1d.weight.x, .B, .C

Since core 0.18 a state-space layer calls its convolution `mixer.conv1d_weight`; on disk it has the
older name. `families.sections` puts the parts together again.

Source: `_split_tensor_factory` in megatron/core/ssm/{gated_delta_net,mamba_mixer}.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ftckpt.checkpoint import Box
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.megatron.job.rules import block_sizes
from ftckpt.formats.megatron.rank_files.grid import Arguments
from ftckpt.transfer.content import TargetTensor

_CONVOLUTION = re.compile(r"(.*\.mixer\.conv1d)_(weight|bias)")
_KEYS, _VALUES, _VALUE_HEADS = "delta_keys", "delta_values", "delta_heads"
_INNER, _GROUPS, _HEADS = "mamba_inner", "mamba_groups", "mamba_heads"


class _Packed(NamedTuple):
    """Tensors of one kind: their names, and the parts of their rows with the size of each."""

    names: re.Pattern[str]
    parts: tuple[tuple[str, str], ...]


_PACKED = (
    _Packed(
        re.compile(r".*\.mixer\.in_proj\.weight"),
        (("z", _INNER), ("x", _INNER), ("B", _GROUPS), ("C", _GROUPS), ("dt", _HEADS)),
    ),
    _Packed(
        re.compile(r".*\.mixer\.conv1d\.(?:weight|bias)"),
        (("x", _INNER), ("B", _GROUPS), ("C", _GROUPS)),
    ),
    _Packed(
        re.compile(r".*\.self_attention\.in_proj\.weight"),
        (
            ("query", _KEYS), ("key", _KEYS), ("value", _VALUES), ("z", _VALUES),
            ("beta", _VALUE_HEADS), ("alpha", _VALUE_HEADS),
        ),
    ),
    _Packed(
        re.compile(r".*\.self_attention\.conv1d\.(?:weight|bias)"),
        (("query", _KEYS), ("key", _KEYS), ("value", _VALUES)),
    ),
)  # fmt: skip
# How the parts are put together again.
SECTIONS = tuple((one.names.fullmatch, [part for part, _ in one.parts]) for one in _PACKED)


class PackedTensors:
    """The packed projections of one job."""

    def __init__(self, args: Arguments) -> None:
        self._sizes: Mapping[str, int] = block_sizes(args)

    def parts(self, stored: str, wanted: TargetTensor) -> Iterator[tuple[str, TargetTensor]]:
        """Yield what a tensor is on disk: its parts with what follows its name, or itself with "".

        Args:
            stored: the name on disk of the weight that it is, or is state of in its shape.
            wanted: the tensor.

        Raises:
            UnsupportedError: the arguments do not record the sizes of the parts.
            UsageError: the parts make another number of rows.
        """
        found = next((one.parts for one in _PACKED if one.names.fullmatch(stored)), None)
        if found is None:
            yield "", wanted
            return
        if any(size not in self._sizes for _, size in found):
            raise UnsupportedError(
                f"{stored} is stored in parts, and the job's arguments do not record their sizes",
                tensor=stored,
            )
        rows = [self._sizes[size] for _, size in found]
        if not wanted.shape or sum(rows) != wanted.shape[0]:
            raise UsageError(
                f"{stored} of {list(wanted.shape)} is not made of parts of {rows} rows, as the"
                " job's arguments have them",
                tensor=stored,
            )
        rest = wanted.shape[1:]
        first = 0
        for (part, _), count in zip(found, rows, strict=True):
            box = Box((first, *(0 for _ in rest)), (count, *rest))
            first += count
            copies = tuple(wanted.moved(box, 0))
            yield f".{part}", wanted._replace(shape=(count, *rest), copies=copies)


def on_disk(name: str) -> str:
    """Return a name with the older one of a state-space layer's convolution, which is on disk."""
    match = _CONVOLUTION.fullmatch(name)
    return f"{match[1]}.{match[2]}" if match else name


_NORM = re.compile(r"(.*\.layers\.\d+\.(?:transformer_layer\.)?)(input|pre_mlp)_layernorm\.(\w+)")
_INTO = {
    "input": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp": "mlp.linear_fc1.layer_norm_",
}
_GROUPED = re.compile(r"(.*\.experts\.)(linear_fc[12]\.)(weight|bias)(\d+)")
_FROM = {into: norm for norm, into in _INTO.items()}
_FUSED_NORM = re.compile(
    rf"(.*\.layers\.\d+\.(?:transformer_layer\.)?)({'|'.join(map(re.escape, _FROM))})(weight|bias)"
)
_EXPERT = re.compile(r"(.*\.experts\.)local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))")
_FUSED = (".linear_qkv.layer_norm_weight", ".linear_fc1.layer_norm_weight")
_LATENT = ".linear_kv_down_proj.weight"
# What torch_dist stores in another shape than the model has it, and why that is not done here.
_OTHERWISE = (
    (re.compile(r".*\.experts\.weight[12]"), "all experts of a rank in one matrix"),
    (re.compile(r"language_model\..*|.*\.query_key_value\..*"), "names of before Megatron-Core"),
)


class JobNames:
    """The names of one job."""

    def __init__(self, names: Iterable[str], args: Arguments) -> None:
        """Find out which implementation trained.

        Args:
            names: of the model's tensors.
            args: of the job.

        Raises:
            UnsupportedError: it cannot be told whether norms are inside linear layers.
        """
        known = set(names)
        norms = any(map(_NORM.fullmatch, known))
        fused = any(name.endswith(_FUSED) for name in known)
        latent = any(name.endswith(_LATENT) for name in known)
        said = args.get("transformer_impl")
        self._fuse = norms and not latent and not fused
        if self._fuse and said is None and not any(".input_layernorm." in n for n in known):
            raise UnsupportedError(
                "the arguments do not record transformer_impl, and the names do not show whether"
                " Transformer Engine or Megatron's own layers trained, which call norms otherwise"
            )
        if said is not None:
            self._fuse = norms and not latent and said == "local"

    def stored(self, name: str) -> str:
        """Return what a tensor is called on disk, with numbers for layers and experts.

        Raises:
            UnsupportedError: it is stored in another shape, which this does not make.
        """
        for pattern, what in _OTHERWISE:
            if pattern.fullmatch(name):
                raise UnsupportedError(
                    f"{name}: the source has {what}, which torch_dist stores otherwise",
                    hint="load it with Megatron-LM and save it with --ckpt-format torch_dist",
                    tensor=name,
                )
        name = on_disk(name.replace(".mtp_model_layer.", ".transformer_layer."))
        match = _GROUPED.fullmatch(name)
        if match:
            head, linear, leaf, number = match.groups()
            name = f"{head}local_experts.{number}.{linear}{leaf}"
        match = _NORM.fullmatch(name) if self._fuse else None
        return f"{match[1]}{_INTO[match[2]]}{match[3]}" if match else name


def own_name(name: str, args: Arguments) -> str:
    """Return what the job's own model calls a tensor that torch_dist calls so.

    The inverse of `JobNames.stored`; of a name that is the model's already, the same.

    Args:
        name: with numbers for layers and experts.
        args: of the job.
    """
    if args.get("transformer_impl") == "local":
        match = _FUSED_NORM.fullmatch(name)
        return f"{match[1]}{_FROM[match[2]]}_layernorm.{match[3]}" if match else name
    grouped = args.flag("moe_grouped_gemm") and not args.flag("moe_use_legacy_grouped_gemm")
    match = _EXPERT.fullmatch(name) if grouped else None
    return f"{match[1]}{match[3]}{match[2]}" if match else name
