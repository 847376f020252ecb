"""Give a whole GPT model Megatron-Core's names, as Megatron's writers need it.

Whatever format holds it: files of ranks and torch_dist alike need the arguments of a job, with
which Megatron builds the model before it loads it. They are those that the source carries along, or
follow from the `config.json` that its names were translated by. The order of the parameters is that
of Megatron's constructors.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ftckpt.checkpoint import Kind, Topology
from ftckpt.checkpoint.dtypes import DType
from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.formats.families.arguments import arguments_of_config, flags_beside
from ftckpt.formats.families.facts import ModelFacts, arguments_of, model_of
from ftckpt.formats.families.sections import joined_sections
from ftckpt.formats.families.translator import Translator
from ftckpt.formats.huggingface.config import read_config
from ftckpt.formats.megatron.rank_files.grid import Arguments
from ftckpt.formats.megatron.rank_files.tensor_names import expert_of, tied_to
from ftckpt.formats.megatron.torch_dist.from_store import layout_of
from ftckpt.formats.megatron.torch_dist.legacy_names import SECTIONS, own_name
from ftckpt.formats.pickles.inert import Inert
from ftckpt.formats.pickles.walk import leaves
from ftckpt.formats.state.stored_names import is_common
from ftckpt.formats.torch_files.table import TABLE
from ftckpt.formats.torch_files.values import Composite, SubclassRef, TensorRef
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.request.renaming import parted

from .common_state import job_state
from .layout import JobState, MegatronJob
from .registration import EMBEDDING, OUTPUT, constructed

_TENSORS = (TensorRef, SubclassRef, Composite)
# What Megatron reads of a checkpoint beside its model, and what is written of it here.
VERSION = 3.0
_OURS = re.compile(r"(?:rank_\d+\.)?(?:args|iteration|checkpoint_version)")
_EXTRA = "._extra_state"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_GROUPED = ".experts.linear_fc"
_LOCAL = re.compile(r"decoder\.layers\.\d+\.(?:input_layernorm|norm)\.weight")
# Latent attention has that norm in both makes, and the one of its small matrices apart in one.
_LOCAL_LATENT = re.compile(r"decoder\.layers\.\d+\.self_attention\.kv_layernorm\.weight")
_ONE_MAKE = re.compile(r"decoder\.layers\.\d+\.(?:mixer|self_attention)\.in_proj\.weight")
_MTP = re.compile(r"mtp\.layers\.(\d+)\.eh_proj\.weight")
_MTP_LAYER = re.compile(r"(mtp\.layers\.\d+)\.(?:transformer_layer|mtp_model_layer)\.(.+)")
# The sizes of a job without a layout; how many data-parallel ranks it has is open.
_ONE_RANK = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "context_parallel_size",
)  # fmt: skip


def whole_model(content: Content, *, state: bool = False) -> MegatronJob:
    """Return the job of a content whose model has all its parts, under Megatron-Core's names.

    Args:
        content: of any format.
        state: whether the state beside the model is wanted without that of an optimizer too.

    Raises:
        UnsupportedError: another name, a model with a gap, or one that arguments cannot describe.
        UsageError: nothing says what the model is, or it has no weights.
        CorruptError, UnsafeError: what says what the model is, is damaged or hostile.
    """
    given, carried = content, arguments_of(content.checkpoint)
    content = joined_sections(content, SECTIONS)
    model, tied = model_and_copies(content)
    unplaced = [key for key in content.tensors if key not in model]
    unplaced += [name for name in content.objects if not is_ours(content, name)]
    if carried.get("untie_embeddings_and_output_weights") is False:
        # A format without aliases holds the copy too; nothing here shows that it is one.
        copies = [k for k, w in model.items() if tied_to(w.name) in model and k not in tied]
        tied += copies
        unplaced += copies
    owned = {w.name: own_name(w.name, carried) for k, w in model.items() if k not in tied}
    named = {
        owned[w.name]: w._replace(name=owned[w.name]) for k, w in model.items() if k not in tied
    }
    names = constructed(named)
    derived = carried.record is None
    described = _described(content) if derived else None
    args = Arguments(_derived(described, named) if described else plain_arguments(carried))
    differ = described is not None and bool(described.family.written)
    _require_whole(names, args.count("num_layers"), alike=derived and not differ)
    if described is not None and differ:
        _require_described(named, described)
    whole = replace(
        content.with_tensors(named[name] for name in names),
        objects={},
        aliases={},
        topology=Topology() if derived else content.topology,
    )
    rows = args.count("vocab_size") if derived else 0
    notes = [_beside(args)] if derived else []
    trained = _with_masters(dict(trained_tensors(content, owned)), named, owned)
    return MegatronJob(
        given=given,
        content=whole,
        layout=layout_of(whole, args),
        state=job_state(given) if trained or state else JobState(),
        trained=trained,
        names=unplaced,
        notes=notes,
        rows=rows or None,
    )


def model_and_copies(content: Content) -> tuple[dict[str, TargetTensor], list[str]]:
    """Return the model's tensors by key, and the keys of copies of the embedding among them."""
    model = {key: w for key, w in content.tensors.items() if w.component == "model"}
    tied = (key for key, owner in content.aliases.items() if tied_to(key) == owner)
    return model, [key for key in tied if key in model]


def trained_tensors(
    content: Content, owned: Mapping[str, str]
) -> Iterator[tuple[str, TargetTensor]]:
    """Yield what an optimizer keeps of tensors, under their own names, by the source's keys.

    Args:
        content: of which.
        owned: by the source's name of a tensor: its own.
    """
    for key, wanted in content.tensors.items():
        if wanted.component != "optimizer":
            continue
        name, leaf = parted(wanted, owned.keys())
        if name in owned:
            yield key, wanted._replace(name=owned[name] + leaf)


def _with_masters(
    trained: dict[str, TargetTensor],
    named: Mapping[str, TargetTensor],
    owned: Mapping[str, str],
) -> Mapping[str, TargetTensor]:
    """Return an optimizer's state with fp32 weights as masters of their own, if it has none.

    Megatron-FSDP keeps a weight once, in the optimizer's type.

    Args:
        trained: the state by the source's keys.
        named: the weights by their own names.
        owned: a weight's own name by the source's.
    """
    masters = {wanted.name for wanted in trained.values() if wanted.kind is Kind.MASTER}
    moments = {wanted.name for wanted in trained.values() if wanted.kind is Kind.EXP_AVG}
    if masters:
        return trained
    return trained | {
        stored: named[name]._replace(component="optimizer", kind=Kind.MASTER)
        for stored, name in owned.items()
        if name in moments and named[name].dtype.name == "float32"
    }


def namespace(values: Mapping[str, Any]) -> Inert:
    """Return arguments as Megatron pickles them: an `argparse.Namespace`, inert."""
    made: Inert = TABLE["argparse.Namespace"]()
    made.called = False
    made.state = dict(values)
    return made


def _require_whole(names: Iterable[str], layers: int, *, alike: bool) -> None:
    """Refuse a model with a gap: Megatron would begin at random what it does not find.

    Args:
        names: of the model's tensors.
        layers: how many the arguments say; 0 where they do not.
        alike: whether all layers have the same tensors.

    Raises:
        UnsupportedError: the embedding, a layer, or a tensor that other layers have is not there.
    """
    held: dict[int, set[str]] = defaultdict(set)
    embedded = False
    for name in names:
        match = _LAYER.fullmatch(name)
        if match is not None:
            held[int(match[1])].add(match[2])
        embedded = embedded or name == EMBEDDING
    if not embedded:
        raise _lacking(EMBEDDING)
    if layers and max(held, default=-1) >= layers:
        what = f"the model has a layer {max(held)}, and its arguments count {layers} layers"
        raise UnsupportedError(what)
    every = set().union(*held.values()) if alike else set()
    for number in range(layers or max(held, default=-1) + 1):
        lost = every - held[number]
        if lost or not held[number]:
            raise _lacking(f"decoder.layers.{number}.{min(lost, default='*')}")


def _lacking(name: str) -> UnsupportedError:
    what = f"the model lacks {name}, which Megatron would begin at random"
    return UnsupportedError(what, tensor=name)


def _require_last(named: Iterable[str]) -> None:
    """Refuse a further layer that is unlike the last of the others, as which Megatron builds it."""
    layers: dict[int, set[str]] = defaultdict(set)
    further: dict[str, set[str]] = defaultdict(set)
    for name in named:
        if (match := _LAYER.fullmatch(name)) is not None:
            layers[int(match[1])].add(match[2])
        elif (match := _MTP_LAYER.fullmatch(name)) is not None:
            further[match[1]].add(match[2])
    last = max(layers, default=0)
    for at, held in further.items():
        other = held ^ layers[last]
        if other:
            raise UnsupportedError(
                f"Megatron builds {at} as it builds decoder.layers.{last}, and only one of the two"
                f" has {min(other)}",
                hint="--drop leaves out what predicts further tokens",
                tensor=at,
            )


def _beside(args: Arguments) -> Finding:
    what = (
        "the arguments follow from config.json: start Megatron with --use-checkpoint-args"
        f" {flags_beside(args.record)}"
    )
    return finding("note", what.rstrip())


def is_ours(content: Content, name: str) -> bool:
    """Return whether an object says what the result says in its own way, or nothing."""
    if _OURS.fullmatch(name) or is_common(name):
        return True
    return _EXTRA in name and content.checkpoint.load_object(name) in (None, [None])


def plain_arguments(carried: Arguments) -> dict[str, Any]:
    """Return arguments that a source carries along.

    Raises:
        UnsupportedError: they are no namespace and no dict, or hold tensors.
    """
    record = carried.record
    known = record.state if isinstance(record, Inert) else record
    if not isinstance(known, dict) or any(isinstance(v, _TENSORS) for _, v in leaves(known)):
        raise UnsupportedError("the arguments of the job (args) are no namespace of plain values")
    return known


def _described(content: Content) -> ModelFacts:
    """Return what `config.json` says of a model that no job of Megatron has trained."""
    if not read_config(content.checkpoint):
        raise UnsupportedError(
            f"a {content.checkpoint.format} checkpoint without the arguments of a Megatron job"
            " (args) and without a config.json does not say what Megatron is to build",
            hint="put the model's config.json beside its weights",
        )
    return model_of(content.checkpoint)


def _require_described(named: Mapping[str, TargetTensor], model: ModelFacts) -> None:
    """Refuse a model without a tensor that its `config.json` describes; the output may be tied.

    Raises:
        UnsupportedError: the tensor's name.
    """
    family, config = model.family, model.config
    if family.shapes is None:
        return
    translator = Translator(family, model.heads, config=config)
    for name in family.shapes.tensors(config):
        for spelled in translator.spellings(name):
            if OUTPUT not in spelled and not any(one in named for one in spelled):
                raise _lacking(spelled[0])


def _derived(model: ModelFacts, named: Mapping[str, TargetTensor]) -> dict[str, Any]:
    """Return the arguments of a model that no job of Megatron has trained."""
    said = arguments_of_config(model)
    _require_last(named)
    experts = [found[1] for name in named if (found := expert_of(name))]
    grouped = any(_GROUPED in name for name in named)
    latent = said.get("multi_latent_attention", False)
    local = any(map((_LOCAL_LATENT if latent else _LOCAL).fullmatch, named))
    if local and any(map(_ONE_MAKE.fullmatch, named)):
        raise UnsupportedError(
            "Megatron-core has linear attention and state-space layers of Transformer Engine's make"
            " alone, and the norms are those of its own layers",
            hint="--spelling transformer_engine",
        )
    if grouped and local:
        raise UnsupportedError(
            "experts that are grouped by matrix, a weight each, are Transformer Engine's, and the"
            " norms are those of Megatron's own layers",
            hint="--spelling local or --spelling grouped, not both",
        )
    dtype = _dtype(named)
    rows = named[EMBEDDING].shape[0] if EMBEDDING in named else None
    return said | dict.fromkeys(_ONE_RANK, 1) | {
        "virtual_pipeline_model_parallel_size": None,
        "num_experts": max(experts) + 1 if experts else None,
        "mtp_num_layers": sum(_MTP.fullmatch(name) is not None for name in named) or None,
        "moe_grouped_gemm": grouped,
        "transformer_impl": "local" if local else "transformer_engine",
        "untie_embeddings_and_output_weights": any(tied_to(name) for name in named),
        "vocab_size": rows,
        "padded_vocab_size": rows,
        "make_vocab_size_divisible_by": 128,
        "params_dtype": dtype,
        "bf16": dtype is not None and dtype.name == "bfloat16",
        "fp16": dtype is not None and dtype.name == "float16",
        "ckpt_format": "torch",
        "use_dist_ckpt": False,
    }  # fmt: skip


def _dtype(named: Mapping[str, TargetTensor]) -> DType | None:
    """Return the type of the weights, by the embedding."""
    found = named.get(EMBEDDING) or next(iter(named.values()), None)
    return found.dtype if found is not None else None
