"""Write the state of a checkpoint anew: `convert`, `reshard`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypedDict, Unpack, cast

from ftckpt import amounts
from ftckpt.errors import ExitCode, NotFoundError, UsageError
from ftckpt.findings import KINDS, Severity, counted, described, listed
from ftckpt.formats.support import WRITTEN
from ftckpt.observer import SILENT, Observer
from ftckpt.progress import Counter
from ftckpt.storage import StoreOptions
from ftckpt.workers import Work, limits

from .definition import argument, operation, option, switch
from .many import ALONE, Machines, Session
from .opening import STORES, Also, Source, chosen, opened
from .tables import read_renames, read_rules, read_text

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.checkpoint.sharding import Rules
    from ftckpt.formats.lora.merging import Merged
    from ftckpt.operations.many.transferring import Measures
    from ftckpt.operations.writing import LaidOut, Means
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.layout import LayoutRequest
    from ftckpt.transfer.run import TransferReport
    from ftckpt.verification import VerifyReport
    from ftckpt.verification.seen import SeenBytes

_WHAT, _FOR, _HOW = "What is written", "For whom it is laid out", "How it is done"

CODES: Mapping[ExitCode, str] = {
    ExitCode.OK: "written, proven and visible",
    ExitCode.CORRUPT: "the source is damaged, or the proof failed; nothing is visible",
    ExitCode.INCOMPLETE: "the source is not committed, or changed meanwhile",
    ExitCode.UNSAFE: "hostile or ambiguous content; nothing was executed",
    ExitCode.REFUSED: "DST exists or lies in a checkpoint, or another run is writing it",
    ExitCode.NOT_FOUND: "no checkpoint there, or DST looks like a mistyped URL",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "disk full or memory budget too small; run it again to go on",
    ExitCode.UNSUPPORTED: "the format cannot hold it, or no rule says how a tensor is divided",
}


DryRun = Annotated[
    bool, switch("--dry-run", "Print the files and the cost; write nothing.", under=_HOW)
]


class OnlyPart(StrEnum):
    """Which part is wanted."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    ADAPTER = "adapter"


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


_Example = Annotated[
    "Checkpoint | str",
    option(
        "EXAMPLE", "Use the layout of this checkpoint of the target job.", under=_FOR, default=""
    ),
]


class LayoutFlags(TypedDict, total=False):
    """For which job a result is laid out, and in files of which size; None where not given."""

    tp: Annotated[int | None, option("N", "Tensor-parallel ranks.", min=1, under=_FOR)]
    pp: Annotated[int | None, option("N", "Pipeline stages.", min=1, under=_FOR)]
    vp: Annotated[
        int | None, option("N", "Virtual stages of each pipeline stage.", min=1, under=_FOR)
    ]
    dp: Annotated[int | None, option("N", "Data-parallel (ZeRO, FSDP) ranks.", min=1, under=_FOR)]
    ep: Annotated[int | None, option("N", "Expert-parallel ranks.", min=1, under=_FOR)]
    zero_stage: Annotated[
        int | None, option("N", "DeepSpeed's ZeRO stage.", min=1, max=3, under=_FOR)
    ]
    max_shard_size: Annotated[
        int | str,
        option("SIZE", "Largest file, if the format allows a choice.", under=_FOR, default=""),
    ]
    like: _Example


def layout_flags(flags: Mapping[str, object]) -> LayoutFlags:
    """Return those of some flags that say how a result is laid out."""
    keys = LayoutFlags.__annotations__
    return cast("LayoutFlags", {name: value for name, value in flags.items() if name in keys})


class WritingFlags(LayoutFlags, total=False):
    """For which job a result is laid out, and how it is written and proven."""

    no_proof: Annotated[
        bool, switch("--no-proof", "Skip the checks of the source and of the result.", under=_HOW)
    ]
    restart: Annotated[
        bool, switch("--restart", "Discard what another transfer to DST left.", under=_HOW)
    ]
    device: Annotated[
        str,
        option(
            "DEVICE", "cpu, cuda, cuda:N; auto measures and chooses.", under=_HOW, default="cpu"
        ),
    ]
    jobs: Annotated[
        int,
        option("N", "Workers; 0: one a processor.", "--jobs", "-j", min=0, under=_HOW, default=0),
    ]
    limit_rate: Annotated[
        amounts.Rate, option("RATE", "Read no faster: 200MiB/s.", under=_HOW, default="")
    ]


class PartFlags(TypedDict, total=False):
    """Which part of the source is written."""

    only: Annotated[
        OnlyPart | str | None,
        option("", "The weights, the optimizer's state, or a LoRA adapter alone.", under=_WHAT),
    ]
    drop: Annotated[
        Sequence[str],
        option("NAME", "Leave out state by name or pattern. Repeatable.", under=_WHAT, default=()),
    ]
    rules: Annotated[
        str,
        option(
            "FILE.toml", "Table of how tensors divide over ranks, or a name: llama, …", under=_WHAT,
            default="",
        ),
    ]  # fmt: skip
    true_vocab_size: Annotated[
        int | None, option("N", "Rows of the vocabulary without padding.", min=1, under=_WHAT)
    ]


class TransferFlags(PartFlags, WritingFlags, total=False):
    """Which part of the source is written, for whom, and how it is done."""

    dry_run: DryRun


Memory = Annotated[amounts.Size, option("SIZE", "Memory limit.", "--max-memory", under=_HOW)]
Destination = Annotated[str, argument("DST", "Where the result goes; it must not exist yet.")]


_RESHARD = (
    (
        "ftckpt reshard run/step-1000 run-64/step-1000 --dp 64",
        "DCP: a file for each of 64 ranks",
    ),
    (
        "ftckpt reshard ckpt/iter_0001000 out/iter_0001000 --tp 4 --pp 1",
        "Megatron, other TP and PP",
    ),
    (
        "ftckpt reshard run/global_step900 new/global_step900 --dp 2",
        "DeepSpeed ZeRO on 2 ranks",
    ),
    (
        "ftckpt reshard run/global_step900 new/global_step900 --like new/global_step0",
        "DeepSpeed for the ranks and stages of a job that has saved once",
    ),
    (
        "ftckpt reshard run/step-900 tp4/step-900 --tp 4 --rules mine.toml",
        "shards that a trainer saved by hand, cut by a table of rules",
    ),
    ("ftckpt reshard SRC DST --tp 4 --dry-run", "print the files and what it costs"),
    ("srun ftckpt reshard SRC DST --dp 64 --part auto --finish-last", "by all nodes of a job"),
)


@operation(
    examples=_RESHARD,
    codes=CODES,
    everyday=("--tp", "--pp", "--dp", "--like", "--only", "--dry-run"),
)
def reshard(
    source: Source,
    destination: Destination,
    *,
    also: Also = (),
    max_memory: Memory = "1GiB",
    division: Machines = ALONE,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
    **flags: Unpack[TransferFlags],
) -> TransferReport:
    """Write a checkpoint for another number of ranks.

    The result is built beside DST, read back, compared with the source bit for bit, and shown by
    one last act. Killed at any instant, DST is absent or whole; the same command goes on where it
    was. The source is never written.

    Raises:
        FtckptError: as `convert` does.
    """
    if flags.get("only") == "adapter":
        raise UsageError("an adapter is taken out by convert", hint="ftckpt convert --only adapter")
    request = _request(flags, stores, on)
    held = opened(source, stores, on, rules=request.rules, also=also)
    content = narrowed(held, flags)
    session = Session("reshard", division, stores, on)
    return carry_out(session, held, content, held.source_format, request, destination, flags)


_CONVERT = (
    (
        "ftckpt convert run/step-1000 hf --to safetensors",
        "weights for transformers, nothing lost",
    ),
    (
        "ftckpt convert run/step-1000 hf --to safetensors --only model --dtype bf16",
        "weights alone",
    ),
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
    (
        "ftckpt convert hf/ start/step-0 --to dcp --dp 64",
        "weights for an FSDP2 job of 64 ranks",
    ),
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


@operation(
    examples=_CONVERT,
    codes=CODES,
    everyday=("--to", "--only", "--dtype", "--names"),
)
def convert(
    source: Source,
    destination: Destination,
    to: Annotated[
        str,
        option(
            "FORMAT",
            f"{', '.join(WRITTEN)}; else that of --like or SRC.",
            words=WRITTEN,
        ),
    ] = "",
    *,
    dtype: Annotated[
        DTypeChoice | str | None, option("", "Type of the model's floating-point weights.")
    ] = None,
    quantised: Annotated[
        Sequence[str], option("NAME", "Quantise this weight or module too. Repeatable.")
    ] = (),
    unquantised: Annotated[
        Sequence[str], option("NAME", "Leave this weight or module as it is. Repeatable.")
    ] = (),
    from_master: Annotated[
        bool, switch("--from-master", "Round the weights from their fp32 masters.")
    ] = False,
    names: Annotated[
        NamesChoice | str | None,
        option("", "Whose names and layout the parameters get; else kept."),
    ] = None,
    spelling: Annotated[
        Sequence[str],
        option(
            "NAME",
            "Megatron's: transformer_engine or local, sequential or grouped. Repeatable.",
            words=tuple(SpellingChoice),
        ),
    ] = (),
    family: Annotated[
        str, option("NAME", "llama, mistral, … or a table's FILE.toml; else what SRC shows.")
    ] = "",
    config: Annotated[str, option("FILE", "config.json of the model, where SRC lacks it.")] = "",
    also: Also = (),
    adapter: Annotated[
        Sequence[str], option("PATH", "Merge this LoRA adapter of PEFT. Repeatable, in order.")
    ] = (),
    allow_gaps: Annotated[
        bool, switch("--allow-gaps", "Merge an adapter that lacks layers it names.")
    ] = False,
    beside: Annotated[
        str, option("DIR", "Take config.json, a tokenizer, ... from this folder.")
    ] = "",
    rename: Annotated[str, option("FILE.toml", "Other names for parameters.")] = "",
    derive: Callable[[Content], Content] | None = None,
    request: LayoutRequest | None = None,
    max_memory: Memory = "1GiB",
    division: Machines = ALONE,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
    **flags: Unpack[TransferFlags],
) -> TransferReport:
    """Write a checkpoint in another format: whole, or one part of it.

    State that the target has no place for is named, and refused unless `--drop` names it. The
    result is read back and compared with the source before DST becomes visible.

    Returns:
        What was written, or its `plan`. `derive` makes what is written of what is there, where no
        flag does; `request` says what is asked of the layout, in place of the flags about it.

    Raises:
        UsageError: a wish that a shape cannot grant.
        UnsupportedError: the format cannot be written, or has no place for something.
        ExistsError: something stands at the destination.
        RefusedError: it lies inside a checkpoint, or another run is writing there.
        CorruptError: the source or the example is damaged, or the proof failed; nothing is visible.
    """
    from ftckpt.formats.writers import format_and_writer

    kind = chosen(DTypeChoice, dtype, "--dtype") if dtype else None
    whose = chosen(NamesChoice, names, "--names") if names else None
    spellings = [chosen(SpellingChoice, one, "--spelling") for one in spelling]
    if spelling and whose is not NamesChoice.MEGATRON:
        raise UsageError("--spelling says which of Megatron's names", hint="--names megatron")
    if family and whose is None:
        raise UsageError("--family says by whose table names are translated", hint="--names NAME")
    if config and whose in (None, NamesChoice.MEGATRON):
        raise UsageError("--config says by which model names are translated", hint="--names hf")
    coded = kind.value if kind is not None and kind.quantises else ""
    if coded:
        kind = None  # of what is not quantised; `quantise` decides it
    elif quantised or unquantised:
        raise UsageError(
            "--quantised and --unquantised say which weights become codes", hint="--dtype fp8-block"
        )
    if allow_gaps and not adapter:
        raise UsageError("--allow-gaps is about an adapter", hint="--adapter PATH")
    if adapter and from_master:
        raise UsageError("--adapter changes the weights, and --from-master takes the masters")
    renames = read_renames(rename)
    request = request or _request(flags, stores, on)
    if request.like is not None:
        to = to or request.like.source_format
    if to:  # what cannot be written under that name is known before the source is opened
        format_and_writer(to, request.rules, destination)
    held = opened(source, stores, on, rules=request.rules, also=also)
    to = to or held.source_format
    if coded:
        from ftckpt.formats.quantised.quantise import require_folder

        require_folder(to, destination)
    if kind is not None or coded:
        from ftckpt.formats.quantised.dequantise import dequantised
        from ftckpt.transfer.request.change_dtype import target_of

        held = dequantised(held, target_of("bf16" if kind is None else kind.value))
    merged = None
    if adapter:
        merged = _merged(held, adapter, kind, stores, on, allow_gaps=allow_gaps)
        held = merged.checkpoint
    content = narrowed(held, flags, masters=from_master)
    if merged is not None:
        from ftckpt.formats.lora.merging import require_weights_alone

        require_weights_alone(content)
    if from_master and flags.get("only") != "adapter":
        from ftckpt.transfer.request.change_dtype import from_masters

        content, masters = from_masters(content)
        on.report(from_master=masters)
        on.note(f"from their masters: {counted(masters, 'weight')}")
    if kind is not None:  # before the names: config.json says the type
        from ftckpt.transfer.request.change_dtype import retype

        content = retype(content, kind.value)
    content = _translated(
        content, whose, spellings, family, config, flags.get("true_vocab_size"),
        adapter_alone=flags.get("only") == "adapter",
    )  # fmt: skip
    if renames:
        from ftckpt.transfer.request.renaming import rename as renamed

        content = renamed(content, renames)
    if derive is not None:
        content = derive(content)
    if beside:
        content = _with_files_of(content, beside, to, destination, stores, on)
    made = None
    if coded:
        from ftckpt.formats.quantised.quantise import quantise

        made = quantise(content, coded, more=quantised, fewer=unquantised)
        content, held = made.content, made.content.checkpoint
        on.report(quantised=list(made.names), unquantised=list(made.others))
        on.note(f"quantised: {counted(len(made.names), 'weight')} as {coded}")
    report = carry_out(
        Session("convert", division, stores, on), held, content, to, request, destination, flags,
        used=() if whose is None else ("true_vocab_size",),
        measures=[one.weights for one in (merged, made) if one is not None],
    )  # fmt: skip
    if flags.get("dry_run"):
        return report
    if merged is not None:
        largest, tensor, infinite = merged.rounding
        on.report(rounding={"largest": largest, "tensor": tensor, "infinite": infinite})
    if made is not None and made.deviation[1]:  # else others have computed them, or all is zero
        largest, tensor = made.deviation
        on.report(deviation={"largest": largest, "tensor": tensor})
    if to == "safetensors":
        _say_what_is_lacking(content, destination, beside, stores, on)
    return report


def _translated(
    content: Content,
    whose: NamesChoice | None,
    spellings: Sequence[str],
    family: str,
    config: str,
    rows: int | None,
    *,
    adapter_alone: bool,
) -> Content:
    """Return a content under the names that are asked for."""
    if whose is None:
        if adapter_alone:
            from ftckpt.formats.lora.bridge import require_whole_modules

            require_whole_modules(content)
        return content
    from ftckpt.formats.families import to_hugging_face, to_megatron, to_native
    from ftckpt.formats.families.translator import DEFAULT_SPELLINGS
    from ftckpt.formats.huggingface.config import parsed_config

    said = parsed_config(read_text(config), config) if config else None
    if whose is NamesChoice.HF:
        return to_hugging_face(content, family=family, true_vocab_size=rows, config=said)
    if whose is NamesChoice.MEGATRON:
        ordered = (*spellings, *DEFAULT_SPELLINGS)
        return to_megatron(content, family=family, true_vocab_size=rows, spellings=ordered)
    return to_native(content, whose.value, family=family, true_vocab_size=rows, config=said)


def narrowed(checkpoint: Checkpoint, flags: PartFlags, *, masters: bool = False) -> Content:
    """Return the part of a checkpoint that is asked for, from its masters if asked.

    Raises:
        NotFoundError: it has nothing of that part, or a weight as its master alone.
        UsageError: a name to drop matches nothing.
    """
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.request.narrowing import Only, drop, only

    content, gone = Content.of(checkpoint), list(flags.get("drop") or ())
    part = flags.get("only")
    if part == "adapter":
        from ftckpt.formats.lora.tensors import adapter_alone

        return adapter_alone(drop(content, gone) if gone else content, masters=masters)
    if part:
        content = only(content, chosen(Only, part, "--only"), masters=masters)
    return drop(content, gone) if gone else content


def _request(flags: TransferFlags, stores: StoreOptions, on: Observer) -> LayoutRequest:
    rules = read_rules(flags.get("rules", ""))
    return layout_request(flags, rules, stores, flags.get("true_vocab_size"), on)


def layout_request(
    flags: LayoutFlags,
    rules: Rules | None,
    stores: StoreOptions,
    true_vocab_size: int | None = None,
    on: Observer = SILENT,
) -> LayoutRequest:
    """Return what is asked of a layout; an example is opened.

    Raises:
        UsageError: a size that is none, or the example is a root.
        FtckptError: the example cannot be opened.
    """
    from ftckpt.transfer.layout import LayoutRequest

    like, size = flags.get("like", ""), flags.get("max_shard_size") or None
    example = opened(like, stores, rules=rules) if like else None
    if example is not None:
        on.report(like=example.source.url)
    return LayoutRequest(
        tp=flags.get("tp"),
        pp=flags.get("pp"),
        vp=flags.get("vp"),
        dp=flags.get("dp"),
        ep=flags.get("ep"),
        zero_stage=flags.get("zero_stage"),
        max_shard_size=None if size is None else amounts.size(size),
        rules=rules,
        true_vocab_size=true_vocab_size,
        like=example,
    )


def carry_out(
    session: Session,
    checkpoint: Checkpoint,
    content: Content,
    name: str,
    request: LayoutRequest,
    destination: str,
    flags: TransferFlags,
    means: Means | None = None,
    *,
    used: Collection[str] = (),
    measures: Sequence[Measures] = (),
    verify: Callable[[Checkpoint, Content, Work, SeenBytes | None], VerifyReport] | None = None,
) -> TransferReport:
    """Lay out, then either plan, or write, prove and show the result.

    Args:
        session: the run.
        checkpoint: the source; its own evidence is checked first, because what is written gets new
            checksums, which would hide damage that the old ones show.
        content: what is written.
        name: of the target format.
        request: what the user asks of the layout.
        destination: where it goes.
        flags: how it is done.
        means: by what it is written and proven; by default the format's own writer, and a
            comparison of every bit.
        used: options that the operation itself uses; others that the writer does not use are
            refused.
        measures: what is measured of values that are computed.
        verify: verifies the source (see `writing.verified`, which does by default).
    """
    from ftckpt.operations.writing import prepare, verified
    from ftckpt.transfer.request.dry_run import box_copies
    from ftckpt.transfer.run import TransferReport

    on = session.on
    prepared = prepare(
        checkpoint, content, name, request, destination,
        jobs=flags.get("jobs", 0) or limits.jobs(), stores=session.stores, means=means, used=used,
    )  # fmt: skip
    layout = prepared.layout
    on.report(
        destination=destination, to=name, dropped=content.dropped,
        notes=[note.message for note in layout.notes], bytes=layout.nbytes,
    )  # fmt: skip
    for gone in content.dropped:
        on.note(f"left out: {gone}")
    for note in layout.notes:
        on.note(f"note: {note.message}")
    proof = not flags.get("no_proof", False)
    if flags.get("dry_run", False):
        plan = prepared.plan(proof=proof)
        copies = tuple(box_copies(layout, checkpoint))
        on.report(plan=plan, copies=copies)
        return TransferReport(
            destination, name, len(plan.files), plan.nbytes, plan=plan, copies=copies
        )
    work = replace(
        Work.of(prepared.jobs, flags.get("limit_rate", ""), on.counter), processes=prepared.jobs
    )

    def check(how: Work, seen: SeenBytes | None = None) -> VerifyReport:
        return (verify or verified)(checkpoint, content, how, seen)

    def checked(seen: SeenBytes | None = None) -> VerifyReport:
        found = check(work, seen)
        more = seen is not None and not seen.ended and found.code is ExitCode.OK
        return found if more else told(found)  # the content comes later

    def told(found: VerifyReport) -> VerifyReport:
        on.report(evidence=found.evidence, findings=found.findings)
        if found.code is ExitCode.OK:
            on.note(f"the source: {found.message}")
            for one in found.findings:
                if one.severity is Severity.WARNING and KINDS[one.kind].severity is Severity.ERROR:
                    on.warn(f"{described(one)}; the first one is written")
        else:
            for one in found.findings:
                on.found(one)
        return found

    device = flags.get("device", "cpu")
    if session.division.asked:
        from ftckpt.operations.many.transferring import DividedTransfer

        if flags.get("restart", False):
            raise UsageError(
                "--restart would forget what other parts have built",
                hint="remove the records and the staging place of the parts instead",
            )
        divided = DividedTransfer(
            session, work, proof, prepared.destination, prepared, name, device, check, told,
            measures,
        )  # fmt: skip
        done: TransferReport = divided.run()
        return done
    return prepared.write(
        check=checked if proof else None, work=work, device=device,
        restart=flags.get("restart", False),
    )  # fmt: skip


def _with_files_of(
    content: Content, folder: str, to: str, destination: str, stores: StoreOptions, on: Observer
) -> Content:
    """Return a content with the configuration and the tokenizer of another folder."""
    from ftckpt.formats.huggingface.sidecar_files import taken_from
    from ftckpt.storage import open_store
    from ftckpt.storage.source import Source as Folder

    if to != "safetensors" or destination.endswith(".safetensors"):
        raise UsageError("--beside takes files for a folder of safetensors", hint="DST is a folder")
    on.report(beside=folder)
    return taken_from(content, Folder.directory(open_store(folder, stores)))


def _say_what_is_lacking(
    content: Content, destination: str, beside: str, stores: StoreOptions, on: Observer
) -> None:
    """Say what a loader of weights will miss in the folder, and what makes GGUF of it."""
    from ftckpt.formats.huggingface.sidecar_files import lacking
    from ftckpt.storage import open_store
    from ftckpt.storage.source import Source as Folder

    alone = all(wanted.component == "model" for wanted in content.tensors.values())
    if destination.endswith(".safetensors") or not alone or content.objects:
        return
    try:
        names = list(Folder.directory(open_store(destination, stores)).entries)
    except NotFoundError:  # one of many machines shows nothing yet
        return
    lost = lacking(names)
    on.report(lacking=lost)
    if lost:
        hint = "" if beside else "; --beside DIR takes them from a folder that has them"
        on.note(f"not beside the weights: {listed(lost)}{hint}")
    elif "config.json" in names:
        on.note("for GGUF, llama.cpp's convert_hf_to_gguf.py reads this folder")


def _merged(
    base: Checkpoint,
    adapters: Sequence[str],
    kind: DTypeChoice | None,
    stores: StoreOptions,
    on: Observer,
    *,
    allow_gaps: bool,
) -> Merged:
    """Open adapters, and return the base with them merged into it."""
    from ftckpt.formats.lora.merging import merge
    from ftckpt.transfer.request.change_dtype import target_of

    others = [on.keep(opened(one, stores)) for one in adapters]
    target = target_of(kind.value) if kind is not None else None
    merged = merge(base, others, target, allow_gaps=allow_gaps)
    on.report(
        adapters=[one.source.url for one in others],
        merged=sorted(merged.found.targets),
        untied=merged.found.untied,
        untouched=list(merged.found.untouched),
    )
    changed = counted(len(merged.found.targets), "tensor")
    on.note(f"merged into {changed}: {', '.join(one.source.url for one in others)}")
    for note in merged.notes():
        on.note(f"note: {note}")
    return merged


def write(laid_out: LaidOut, flags: WritingFlags, counter: Counter) -> TransferReport:
    """Write and prove what is laid out, the source verified first (see `LaidOut.write`)."""
    from ftckpt.operations.writing import verified

    work = replace(
        Work.of(laid_out.jobs, flags.get("limit_rate", ""), counter), processes=laid_out.jobs
    )

    def check(seen: SeenBytes | None = None) -> VerifyReport:
        return verified(laid_out.checkpoint, laid_out.content, work, seen)

    return laid_out.write(
        check=None if flags.get("no_proof", False) else check,
        work=work,
        device=flags.get("device", "cpu"),
        restart=flags.get("restart", False),
    )
