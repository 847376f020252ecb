"""Read the LoRA that Megatron-Bridge saves: its names, and `peft` in `run_config.yaml`.

Bridge wraps a linear layer and stores `MODULE.adapter.linear_in.weight` (A), `linear_out.weight`
(B) and DoRA's `weight_magnitude`; canonical LoRA has one adapter for each part of a joined matrix
(`MODULE.adapter.adapter_q.linear_in.weight`). With `peft` configured, its checkpoints hold the
adapter alone. Source: `megatron/bridge/peft/`, 0.3 to 0.6.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ftckpt.checkpoint import Checkpoint, Kind
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.findings import listed
from ftckpt.formats.dcp.names import RUN_CONFIG
from ftckpt.strict_json import shown
from ftckpt.transfer.content import Content

_NAME = re.compile(
    r"(?P<module>.+)\.adapter\.(?:(?P<part>adapter_\w+)\.)?"
    r"(?P<end>linear_in\.weight|linear_out\.weight|weight_magnitude)"
)
_ENDS = {
    "linear_in.weight": "lora_A.weight",
    "linear_out.weight": "lora_B.weight",
    "weight_magnitude": "lora_magnitude_vector",
}
# Parts of a joined matrix that canonical LoRA adapts by themselves, in the order of its rows.
PARTS = {
    "linear_qkv": ("adapter_q", "adapter_k", "adapter_v"),
    "linear_fc1": ("adapter_gate", "adapter_up"),
}
_KINDS = {
    "megatron.bridge.peft.lora.LoRA": "LoRA",
    "megatron.bridge.peft.lora.VLMLoRA": "LoRA",
    "megatron.bridge.peft.canonical_lora.CanonicalLoRA": "canonical LoRA",
    "megatron.bridge.peft.dora.DoRA": "DoRA",
}
# What says nothing about the weights, whatever it holds; what is of experts is refused by name.
_NOTES = re.compile(
    r"_target_|alpha|dim|target_modules|exclude_modules|canonical_mapping|dropout|dropout_position|"
    r"lora_[AB]_init_method|lora_dtype|params_to_save|a2a_experimental|freeze_\w+|"
    r"sequence_parallel_input_regather|normalize_moe_lora|share_expert_adapters|"
    r"experts_shared_outer_loras"
)
_NOTHING = ("null", "false", "[]", "{}", "''", "", "!!set {}")
_MAX_SIZE = 16 << 20  # bytes
_KEY = re.compile(r"(?P<indent> {0,2})(?P<key>[A-Za-z_]\w*):(?: (?P<value>.*))?")


class BridgeAdapter(NamedTuple):
    """What `run_config.yaml` says of an adapter.

    Attributes:
        kind: `LoRA`, `canonical LoRA` or `DoRA`.
        rank, alpha: of every module.
        targets: modules that were named; a name with `*` is a pattern.
        dropout: while it was trained.
        tp: tensor-parallel ranks of the job; 0 where it is not said.
        gated: whether `linear_fc1` joins a gate and a layer.
    """

    kind: str
    rank: int
    alpha: float
    targets: Sequence[str]
    dropout: float
    tp: int
    gated: bool


def peft_name(name: str) -> str:
    """Return the name of a tensor of Bridge's adapter as PEFT spells it; "" for another tensor."""
    match = _NAME.fullmatch(name)
    if match is None:
        return ""
    part = f".{match['part']}" if match["part"] else ""
    return f"{match['module']}{part}.{_ENDS[match['end']]}"


def part_of(module: str) -> tuple[str, int]:
    """Return the module that a part of canonical LoRA belongs to, and which part it is; or -1."""
    whole, _, last = module.rpartition(".")
    parts = PARTS.get(whole.rpartition(".")[2], ())
    return (whole, parts.index(last)) if last in parts else (module, -1)


def has_adapter(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint holds an adapter of Bridge."""
    names = (info.name for info in checkpoint.tensors.values())
    return any(".adapter." in name and _NAME.fullmatch(name) for name in names)


def is_alone(checkpoint: Checkpoint) -> bool:
    """Return whether it holds the adapter and no other weight."""
    weights = (i for i in checkpoint.tensors.values() if i.component == "model")
    return all(_NAME.fullmatch(info.name) for info in weights if info.kind is Kind.PARAM)


def read_adapter(checkpoint: Checkpoint) -> BridgeAdapter | None:
    """Return what a checkpoint of Bridge says of its adapter; None where it says nothing.

    Raises:
        CorruptError: `run_config.yaml` is damaged.
        UnsupportedError: it names another way to adapt than is known.
    """
    source = checkpoint.source
    if source.single or RUN_CONFIG not in source.entries or source.size(RUN_CONFIG) > _MAX_SIZE:
        return None
    where = f"{RUN_CONFIG} of {source.url}"
    blocks = _blocks(source.read(RUN_CONFIG).decode(errors="replace"), where)
    said, model = blocks.get("peft", {}), blocks.get("model", {})
    if not said:
        return None
    target = str(said.get("_target_"))
    if target not in _KINDS:
        raise UnsupportedError(f"{where} says peft = {shown(target)}: that is not known")
    odd = [k for k, v in said.items() if not _NOTES.fullmatch(k) and v not in (*_NOTHING, [])]
    if odd:
        raise UnsupportedError(f"{where} says {listed(odd)} of its adapter, which is not known")
    targets = said.get("target_modules", [])
    tp = _number(model.get("tensor_model_parallel_size", "0"), where)
    rank, alpha = _number(said.get("dim"), where), _number(said.get("alpha"), where)
    if rank < 1 or rank != int(rank) or not isinstance(targets, list):
        raise _bad(where, "dim or target_modules", said.get("dim"))
    return BridgeAdapter(
        _KINDS[target], int(rank), alpha, targets, _number(said.get("dropout", "0"), where),
        int(tp), model.get("gated_linear_unit") == "true",
    )  # fmt: skip


def _bad(where: str, name: str, value: object) -> CorruptError:
    return CorruptError(
        f"{where} says {name} = {shown(str(value))}", kind="bad-metadata", file=RUN_CONFIG
    )


def _number(value: object, where: str) -> float:
    try:
        found = float(str(value))
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise _bad(where, "a number", value)
    return found


def _blocks(text: str, where: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the fields of the blocks at the first level: texts, and lists of texts.

    What Bridge writes is `yaml.safe_dump`: a key a line, two spaces a level, a list under its key.
    """
    found: dict[str, dict[str, Any]] = {}
    block: dict[str, Any] = {}
    key = ""
    for line in text.splitlines():
        match = _KEY.fullmatch(line)
        if match is None or len(match["indent"]) == 1:
            if line.startswith("  - ") and isinstance(block.get(key), list):
                block[key].append(line[4:].strip().strip("'\""))
            continue
        name, value = match["key"], match["value"]
        if not match["indent"]:
            if name in found:
                raise _bad(where, name, "two values")
            block, key = found.setdefault(name, {}), ""
            continue
        if name in block:
            raise _bad(where, name, "two values")
        key = name
        block[name] = [] if value is None or value == "[]" else value.strip()
    return found


def require_readable(
    adapter: BridgeAdapter | None, checkpoint: Checkpoint, names: Iterable[str]
) -> None:
    """Refuse an adapter whose tensors do not say what they are for.

    Args:
        adapter: what the configuration says.
        checkpoint: that holds it.
        names: of the adapter's tensors, as Bridge has them.

    Raises:
        CorruptError: one of two matrices, or a rank that the configuration contradicts.
        UnsupportedError: experts, rows whose order depends on the job's ranks, or weights that were
            trained whole.
    """
    where = checkpoint.source.url
    found: dict[str, dict[str, Sequence[int]]] = {}
    shapes = {i.name: i.shape for i in checkpoint.tensors.values() if i.component == "model"}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        module = f"{match['module']}.{match['part'] or ''}"
        found.setdefault(module, {})[match["end"]] = shapes.get(name, ())
    for name, parts in found.items():
        module, _, part = name.rpartition(".")
        last = module.rpartition(".")[2]
        if ".experts." in f".{module}.":
            raise UnsupportedError(
                f"{module} of {where}: Megatron-Bridge stores one adapter for the experts of all"
                " ranks, so which expert it is of cannot be told"
            )
        if part and part not in PARTS.get(last, ()):
            raise UnsupportedError(f"{module} of {where} has {part}, of which no use is known")
        dora = "weight_magnitude" in parts
        if not parts.keys() >= {"linear_in.weight", "linear_out.weight"}:
            raise CorruptError(
                f"{module} of {where} has {listed(sorted(parts))} alone: the rest was lost",
                kind="missing-tensor",
            )
        if any(len(parts[end]) != 2 for end in ("linear_in.weight", "linear_out.weight")):
            raise CorruptError(
                f"{module} of {where} has a matrix that is none", kind="bad-metadata"
            )
        tp = 0 if adapter is None else adapter.tp
        gated = adapter is not None and adapter.gated
        ordered = tp == 1 or (gated and not part and not dora)
        if last == "linear_fc1" and not ordered:
            raise UnsupportedError(
                f"{module} of {where}: the job had {tp or 'an unknown number of'} tensor"
                " ranks, and Megatron-Bridge stores rows of such an adapter in an order that"
                " depends on them",
                hint="save it with tensor_model_parallel_size 1",
            )
        if adapter is None:
            continue
        ranks = {parts["linear_in.weight"][0], parts["linear_out.weight"][-1]}
        if ranks != {adapter.rank} or dora != (adapter.kind == "DoRA"):
            raise CorruptError(
                f"{module} of {where} has the rank {listed(sorted(map(str, ranks)))}"
                f"{' and a magnitude' if dora else ''}, and is {adapter.kind} of rank"
                f" {adapter.rank} by {RUN_CONFIG}",
                kind="bad-metadata",
                file=RUN_CONFIG,
            )
    whole = {name for name in shapes if not _NAME.fullmatch(name)}
    if whole and not any(f"{name.rpartition('.')[0]}.weight" in whole for name in found):
        raise UnsupportedError(
            f"{where} holds {listed(sorted(whole))} beside the adapter and not the base: what was"
            " trained whole is not taken out"
        )


def require_whole_modules(content: Content) -> None:
    """Refuse canonical LoRA under Megatron's names: PEFT has no adapter of a part of a matrix.

    Raises:
        UnsupportedError: it has one.
    """
    modules = (wanted.name.partition(".lora_")[0] for wanted in content.tensors.values())
    parts = sorted({one for one in modules if part_of(one)[1] >= 0})
    if parts:
        raise UnsupportedError(
            f"{content.checkpoint.source.url} adapts parts of joined matrices ({listed(parts)}):"
            " only Hugging Face's names have a module for each",
            hint="--names hf --config FILE: the config.json of the base",
        )


def configuration(adapter: BridgeAdapter, names: Iterable[str]) -> bytes:
    """Return the `adapter_config.json` of PEFT.

    Args:
        adapter: what Bridge says of it.
        names: of the tensors, as PEFT spells them.
    """
    modules = sorted({name.partition(".lora_")[0].removeprefix("base_model.model.")
                      for name in names if ".lora_" in name})  # fmt: skip
    if not any("*" in one for one in adapter.targets):  # every layer has the modules that it names
        modules = sorted({one.rpartition(".")[2] for one in modules})
    alpha = int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha
    said = {
        "base_model_name_or_path": None, "bias": "none", "fan_in_fan_out": False,
        "inference_mode": True, "init_lora_weights": True, "lora_alpha": alpha,
        "lora_dropout": adapter.dropout, "modules_to_save": None, "peft_type": "LORA",
        "r": adapter.rank, "target_modules": modules, "task_type": "CAUSAL_LM",
        "use_dora": adapter.kind == "DoRA", "use_rslora": False,
    }  # fmt: skip
    return json.dumps(said, indent=2, sort_keys=True).encode() + b"\n"
