"""`ftckpt convert`: the same state in another format."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from ftckpt.commands.cli.bounds import bound_memory
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.target import AlsoOption, open_checkpoint, open_other
from ftckpt.commands.cli.transfer_options import CODES as CODES
from ftckpt.commands.cli.transfer_options import (
    DestinationArgument,
    LayoutOptions,
    OnlyChoice,
    PartOptions,
    RunOptions,
    SourceArgument,
    carry_out,
    narrowed,
    read_text,
)
from ftckpt.formats.support import WRITTEN
from ftckpt.operations.definition import option, switch
from ftckpt.operations.many import Machines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftckpt.checkpoint import Checkpoint
    from ftckpt.formats.lora.merging import Merged
    from ftckpt.formats.quantised.quantise import Quantised
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.request.renaming import Rename

EXAMPLES = (
    ("ftckpt convert run/step-1000 hf --to safetensors", "weights for transformers, nothing lost"),
    ("ftckpt convert run/step-1000 hf --to safetensors --only model --dtype bf16", "weights alone"),
    (
        "ftckpt convert run/step-1000 hf --to safetensors --only model --dtype bf16 --from-master",
        "weights rounded once, from the fp32 masters",
    ),
    (
        "ftckpt convert base/ merged --to safetensors --adapter adapter/",
        "a LoRA merged into its base, proven",
    ),
    (
        "ftckpt convert run/step-1000 adapter --to safetensors --only adapter",
        "the LoRA adapter of a training state",
    ),
    ("ftckpt convert fp8/ bf16 --to safetensors --dtype bf16", "quantised weights as bfloat16"),
    (
        "ftckpt convert bf16/ fp8 --to safetensors --dtype fp8-block",
        "linear weights in FP8, a scale for 128 x 128, as DeepSeek's",
    ),
    (
        "ftckpt convert iter_0001000 hf --to safetensors --names hf --only model",
        "Megatron's weights for transformers, with a config.json",
    ),
    (
        "ftckpt convert run/1000 hf --to safetensors --names hf --only model --config config.json",
        "MaxText's or torchtitan's weights for transformers",
    ),
    (
        "ftckpt convert hf/ start/step-0 --to dcp --names torchtitan",
        "weights for a torchtitan job",
    ),
    (
        "ftckpt convert hf/ root/iter_0000000 --to megatron --names megatron --tp 2 --pp 4",
        "weights for Megatron-LM, with the arguments that build the model",
    ),
    ("ftckpt convert hf/ start/step-0 --to dcp --dp 64", "weights for an FSDP2 job of 64 ranks"),
    (
        "ftckpt convert run/step-1000 ds/global_step1000 --like ds/global_step0",
        "for a DeepSpeed job that has saved once",
    ),
    ("ftckpt convert run/step-1000 one.pt --to torchsave", "one file for torch.load"),
    (
        "ftckpt convert run/step-1000 one.safetensors --to safetensors --only model",
        "one file for safetensors' load_file",
    ),
    (
        "srun ftckpt convert run/step-9 hf --to safetensors --part auto --finish-last",
        "by all nodes",
    ),
)
OPTIONS = (PartOptions, LayoutOptions, RunOptions, Machines)


class DTypeChoice(StrEnum):
    """Types that weights can become."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8_BLOCK = "fp8-block"
    MXFP4 = "mxfp4"

    @property
    def quantises(self) -> bool:
        """Whether weights become codes with scales beside them."""
        return self in (DTypeChoice.FP8_BLOCK, DTypeChoice.MXFP4)


class NamesChoice(StrEnum):
    """Whose names the parameters get."""

    HF = "hf"
    MEGATRON = "megatron"
    TORCHTITAN = "torchtitan"
    META = "meta"
    PACKED = "packed"


class SpellingChoice(StrEnum):
    """Where implementations of Megatron-core differ: whose names are written."""

    TRANSFORMER_ENGINE = "transformer_engine"
    LOCAL = "local"
    SEQUENTIAL = "sequential"
    GROUPED = "grouped"


def command(
    invocation: Invocation,
    source: SourceArgument,
    destination: DestinationArgument,
    to: Annotated[
        str,
        option(
            "FORMAT",
            f"{', '.join(WRITTEN)}; without it that of --like, or SRC's own.",
            words=WRITTEN,
        ),
    ] = "",
    dtype: Annotated[
        DTypeChoice | None, option("", "Type of the model's floating-point weights.")
    ] = None,
    quantised: Annotated[
        list[str] | None, option("NAME", "Quantise this weight or module too. Repeatable.")
    ] = None,
    unquantised: Annotated[
        list[str] | None, option("NAME", "Leave this weight or module as it is. Repeatable.")
    ] = None,
    from_master: Annotated[
        bool, switch("--from-master", "Round the weights from their fp32 masters.")
    ] = False,
    names: Annotated[
        NamesChoice | None,
        option("", "Whose names and layout the parameters get; else kept."),
    ] = None,
    spelling: Annotated[
        list[SpellingChoice] | None,
        option(
            "NAME", "Megatron's: transformer_engine or local, sequential or grouped. Repeatable."
        ),
    ] = None,
    family: Annotated[
        str, option("NAME", "llama, mistral, … or a table's FILE.toml; else what SRC shows.")
    ] = "",
    config: Annotated[str, option("FILE", "config.json of the model, where SRC lacks it.")] = "",
    also: AlsoOption = None,
    adapter: Annotated[
        list[str] | None, option("PATH", "Merge this LoRA adapter of PEFT. Repeatable, in order.")
    ] = None,
    allow_gaps: Annotated[
        bool, switch("--allow-gaps", "Merge an adapter that lacks layers it names.")
    ] = False,
    beside: Annotated[
        str, option("DIR", "Take config.json, a tokenizer, ... from this folder.")
    ] = "",
    rename: Annotated[str, option("FILE.toml", "Other names for parameters.")] = "",
) -> Result:
    """Write a checkpoint in another format: whole, or one part of it.

    State that the target has no place for is named, and refused unless `--drop` names it. The
    result is read back and compared with the source before DST becomes visible.
    """
    from ftckpt.errors import UsageError
    from ftckpt.findings import counted
    from ftckpt.formats.writers import format_and_writer
    from ftckpt.transfer.content import Content

    part = invocation.options(PartOptions)
    request = invocation.options(LayoutOptions).request(invocation, part)
    if spelling and names is not NamesChoice.MEGATRON:
        raise UsageError("--spelling says which of Megatron's names", hint="--names megatron")
    if family and names is None:
        raise UsageError("--family says by whose table names are translated", hint="--names NAME")
    if config and names in (None, NamesChoice.MEGATRON):
        raise UsageError("--config says by which model names are translated", hint="--names hf")
    coded = dtype.value if dtype is not None and dtype.quantises else ""
    if coded:
        from ftckpt.formats.quantised.quantise import require_folder

        dtype = None  # of what is not quantised; `quantise` decides it
    elif quantised or unquantised:
        raise UsageError(
            "--quantised and --unquantised say which weights become codes", hint="--dtype fp8-block"
        )
    if allow_gaps and not adapter:
        raise UsageError("--allow-gaps is about an adapter", hint="--adapter PATH")
    if adapter and from_master:
        raise UsageError("--adapter changes the weights, and --from-master takes the masters")
    renames: Sequence[Rename] = ()
    if rename:
        from ftckpt.transfer.request.renaming import parse_renames

        renames = parse_renames(read_text(rename), rename)
    if request.like is not None:
        to = to or request.like.source_format
    if to:  # what cannot be written under that name is known before the source is opened
        format_and_writer(to, request.rules, destination)
    bound_memory(invocation.options(RunOptions).max_memory)
    checkpoint = open_checkpoint(invocation, source, newest=False, rules=request.rules, also=also)
    to = to or checkpoint.source_format
    if coded:
        require_folder(to, destination)
    if dtype is not None:
        from ftckpt.formats.quantised.dequantise import dequantised
        from ftckpt.transfer.request.change_dtype import retype, target_of

        checkpoint = dequantised(checkpoint, target_of(dtype.value))
    elif coded:
        from ftckpt.formats.quantised.dequantise import dequantised
        from ftckpt.transfer.request.change_dtype import target_of

        checkpoint = dequantised(checkpoint, target_of("bf16"))
    merged = None
    if adapter:
        merged = _merged(invocation, checkpoint, adapter, dtype, allow_gaps=allow_gaps)
        checkpoint = merged.checkpoint
    content = narrowed(Content.of(checkpoint), part, masters=from_master)
    if merged is not None:
        from ftckpt.formats.lora.merging import require_weights_alone

        require_weights_alone(content)
    if from_master and part.only is not OnlyChoice.ADAPTER:
        from ftckpt.transfer.request.from_masters import from_masters

        content, masters = from_masters(content)
        invocation.report(from_master=masters)
        invocation.say(f"from their masters: {counted(masters, 'weight')}")
    if dtype is not None:  # before the names: config.json says the type
        content = retype(content, dtype.value)
    rows = part.true_vocab_size
    said = None
    if config:
        from ftckpt.formats.huggingface.config import parsed_config

        said = parsed_config(read_text(config), config)
    if names is NamesChoice.HF:
        from ftckpt.formats.families import to_hugging_face

        content = to_hugging_face(content, family=family, true_vocab_size=rows, config=said)
    elif names is NamesChoice.MEGATRON:
        from ftckpt.formats.families import to_megatron
        from ftckpt.formats.families.translator import DEFAULT_SPELLINGS

        spellings = (*(spelling or ()), *DEFAULT_SPELLINGS)
        content = to_megatron(content, family=family, true_vocab_size=rows, spellings=spellings)
    elif names is not None:
        from ftckpt.formats.families import to_native

        content = to_native(content, names.value, family=family, true_vocab_size=rows, config=said)
    elif part.only is OnlyChoice.ADAPTER:
        from ftckpt.formats.lora.bridge import require_whole_modules

        require_whole_modules(content)
    if renames:
        from ftckpt.transfer.request.renaming import rename as renamed

        content = renamed(content, renames)
    if beside:
        content = _with_files_of(invocation, content, beside, to, destination)
    made = None
    if coded:
        from ftckpt.formats.quantised.quantise import quantise

        made = quantise(content, coded, more=quantised or (), fewer=unquantised or ())
        content, checkpoint = made.content, made.content.checkpoint
        invocation.report(quantised=list(made.names), unquantised=list(made.others))
        invocation.say(f"quantised: {counted(len(made.names), 'weight')} as {coded}")
    run = invocation.options(RunOptions)
    used = () if names is None else ("true_vocab_size",)
    measures = [one.weights for one in (merged, made) if one is not None]
    done = carry_out(
        invocation, checkpoint, content, to, request, destination, run, used=used, measures=measures
    )
    if merged is not None and not run.dry_run:
        _show_rounding(invocation, merged)
    if made is not None and not run.dry_run:
        _show_deviation(invocation, made)
    if to == "safetensors" and not run.dry_run:
        _say_what_is_lacking(invocation, content, destination, beside)
    return done


def _with_files_of(
    invocation: Invocation, content: Content, folder: str, to: str, destination: str
) -> Content:
    """Return a content with the configuration and the tokenizer of another folder."""
    from ftckpt.errors import UsageError
    from ftckpt.formats.huggingface.sidecar_files import taken_from
    from ftckpt.storage import open_store
    from ftckpt.storage.source import Source

    if to != "safetensors" or destination.endswith(".safetensors"):
        raise UsageError("--beside takes files for a folder of safetensors", hint="DST is a folder")
    invocation.report(beside=folder)
    return taken_from(content, Source.directory(open_store(folder, invocation.stores)))


def _say_what_is_lacking(
    invocation: Invocation, content: Content, destination: str, beside: str
) -> None:
    """Say what a loader of weights will miss in the folder, and what makes GGUF of it."""
    from ftckpt.errors import NotFoundError
    from ftckpt.findings import listed
    from ftckpt.formats.huggingface.sidecar_files import lacking
    from ftckpt.storage import open_store
    from ftckpt.storage.source import Source

    alone = all(wanted.component == "model" for wanted in content.tensors.values())
    if destination.endswith(".safetensors") or not alone or content.objects:
        return
    try:
        names = list(Source.directory(open_store(destination, invocation.stores)).entries)
    except NotFoundError:  # one of many machines shows nothing yet
        return
    lost = lacking(names)
    invocation.report(lacking=lost)
    if lost:
        hint = "" if beside else "; --beside DIR takes them from a folder that has them"
        invocation.say(f"not beside the weights: {listed(lost)}{hint}")
    elif "config.json" in names:
        invocation.say("for GGUF, llama.cpp's convert_hf_to_gguf.py reads this folder")


def _merged(
    invocation: Invocation,
    base: Checkpoint,
    adapters: Sequence[str],
    dtype: DTypeChoice | None,
    *,
    allow_gaps: bool,
) -> Merged:
    """Open adapters, and return the base with them merged into it."""
    from ftckpt.findings import counted
    from ftckpt.formats.lora.merging import merge
    from ftckpt.transfer.request.change_dtype import target_of

    others = [invocation.keep(open_other(invocation, one)) for one in adapters]
    target = target_of(dtype.value) if dtype is not None else None
    merged = merge(base, others, target, allow_gaps=allow_gaps)
    invocation.report(
        adapters=[one.source.url for one in others],
        merged=sorted(merged.found.targets),
        untied=merged.found.untied,
        untouched=list(merged.found.untouched),
    )
    changed = counted(len(merged.found.targets), "tensor")
    invocation.say(f"merged into {changed}: {', '.join(one.source.url for one in others)}")
    for note in merged.notes():
        invocation.say(f"note: {note}")
    return merged


def _show_rounding(invocation: Invocation, merged: Merged) -> None:
    """Report and print what rounding to the type of the result did."""
    largest, tensor, infinite = merged.rounding
    invocation.report(rounding={"largest": largest, "tensor": tensor, "infinite": infinite})
    if not tensor:
        return
    beyond = f"; {infinite:,} values are beyond the type and infinite" if infinite else ""
    invocation.print(
        f"rounded once from float32: at most {largest:.2g} of a value, in {tensor}{beyond}"
    )


def _show_deviation(invocation: Invocation, made: Quantised) -> None:
    """Report and print how far codes and scales are from the weights."""
    largest, tensor = made.deviation
    if not tensor:  # other machines have computed them, or all is zero
        return
    invocation.report(deviation={"largest": largest, "tensor": tensor})
    invocation.print(f"quantised: off by at most {largest:.2g} of a block's largest, in {tensor}")
