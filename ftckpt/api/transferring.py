"""What writes the state of a checkpoint anew: `convert`, `reshard`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack, cast, overload

from ftckpt.amounts import size as size_in_bytes
from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import UsageError
from ftckpt.operations.tables import read_renames, read_rules, read_text
from ftckpt.progress import NULL, Counter
from ftckpt.storage import StoreOptions
from ftckpt.workers import Work

from .opening import STORES, RunFlags, job_count, opened, rate_limit

if TYPE_CHECKING:
    from ftckpt.checkpoint.rules import Rules
    from ftckpt.operations.writing import LaidOut
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.layout import LayoutRequest
    from ftckpt.transfer.request.dry_run import Planned
    from ftckpt.transfer.run import TransferReport
    from ftckpt.verification import VerifyReport


class LayoutFlags(TypedDict, total=False):
    """For which job a result is laid out, and in files of which size; None where not given.

    Attributes:
        tp, pp, vp, dp, ep: tensor-parallel ranks, pipeline stages, virtual stages of each, data-
            and expert-parallel ranks.
        zero_stage: DeepSpeed's.
        max_shard_size: bytes, or a text such as "5GB".
        like: a checkpoint of the target job, opened or its path.
    """

    tp: int | None
    pp: int | None
    vp: int | None
    dp: int | None
    ep: int | None
    zero_stage: int | None
    max_shard_size: int | str
    like: Checkpoint | str


def layout_flags(flags: Mapping[str, object]) -> LayoutFlags:
    """Return those of some flags that say how a result is laid out."""
    keys = LayoutFlags.__annotations__
    return cast("LayoutFlags", {name: value for name, value in flags.items() if name in keys})


class WritingFlags(LayoutFlags, RunFlags, total=False):
    """How a result is laid out, written and proven.

    Attributes:
        device: `cpu`, `cuda`, `cuda:N` or `auto`.
    """

    device: str


class PartFlags(WritingFlags, total=False):
    """Which part of the source is written, and how.

    Attributes:
        only: `model`, `optimizer`, or (of convert) `adapter`.
        drop: state to leave out, by name or pattern.
        also: directories with more files of the source (see `open_checkpoint`).
        rules: a TOML file, or a family's name, of how tensors are divided over ranks.
        true_vocab_size: rows of the vocabulary that are no padding.
    """

    only: str
    drop: Sequence[str]
    also: Sequence[str]
    rules: str
    true_vocab_size: int | None


@overload
def reshard(
    source: Checkpoint | str,
    destination: str,
    *,
    dry_run: Literal[False] = False,
    stores: StoreOptions = ...,
    counter: Counter = ...,
    **flags: Unpack[PartFlags],
) -> TransferReport: ...


@overload
def reshard(
    source: Checkpoint | str,
    destination: str,
    *,
    dry_run: Literal[True],
    stores: StoreOptions = ...,
    counter: Counter = ...,
    **flags: Unpack[PartFlags],
) -> Planned: ...


def reshard(
    source: Checkpoint | str,
    destination: str,
    *,
    dry_run: bool = False,
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
    **flags: Unpack[PartFlags],
) -> TransferReport | Planned:
    """Write a checkpoint for another number of ranks, optimizer included.

    Args:
        source: opened, or a path as `open_checkpoint` takes it.
        destination: a path or URL that does not exist yet.
        dry_run: return what it would cost, and write nothing.
        stores: how to reach object stores.
        counter: is told of the work.
        flags: see `PartFlags`.

    Raises:
        FtckptError: as `convert` does.
    """
    rules = read_rules(flags.get("rules", ""))
    checkpoint = opened(source, stores, rules=rules, also=flags.get("also", ()))
    if flags.get("only") == "adapter":
        raise UsageError("an adapter is taken out by convert")
    content = narrowed(checkpoint, flags)
    request = _request(flags, rules, stores)
    name = checkpoint.source_format
    laid_out = _laid_out(checkpoint, content, name, request, destination, flags, stores)
    return plan(laid_out, flags) if dry_run else write(laid_out, flags, counter)


@overload
def convert(
    source: Checkpoint | str,
    destination: str,
    to: str = ...,
    *,
    dtype: str = ...,
    quantised: Sequence[str] = ...,
    unquantised: Sequence[str] = ...,
    from_master: bool = ...,
    adapter: Sequence[str] = ...,
    allow_gaps: bool = ...,
    beside: str = ...,
    names: str = ...,
    spelling: Sequence[str] = ...,
    family: str = ...,
    config: str = ...,
    rename: str = ...,
    derive: Callable[[Content], Content] | None = ...,
    request: LayoutRequest | None = ...,
    dry_run: Literal[False] = False,
    stores: StoreOptions = ...,
    counter: Counter = ...,
    **flags: Unpack[PartFlags],
) -> TransferReport: ...


@overload
def convert(
    source: Checkpoint | str,
    destination: str,
    to: str = ...,
    *,
    dtype: str = ...,
    quantised: Sequence[str] = ...,
    unquantised: Sequence[str] = ...,
    from_master: bool = ...,
    adapter: Sequence[str] = ...,
    allow_gaps: bool = ...,
    beside: str = ...,
    names: str = ...,
    spelling: Sequence[str] = ...,
    family: str = ...,
    config: str = ...,
    rename: str = ...,
    derive: Callable[[Content], Content] | None = ...,
    request: LayoutRequest | None = ...,
    dry_run: Literal[True],
    stores: StoreOptions = ...,
    counter: Counter = ...,
    **flags: Unpack[PartFlags],
) -> Planned: ...


def convert(
    source: Checkpoint | str,
    destination: str,
    to: str = "",
    *,
    dtype: str = "",
    quantised: Sequence[str] = (),
    unquantised: Sequence[str] = (),
    from_master: bool = False,
    adapter: Sequence[str] = (),
    allow_gaps: bool = False,
    beside: str = "",
    names: str = "",
    spelling: Sequence[str] = (),
    family: str = "",
    config: str = "",
    rename: str = "",
    derive: Callable[[Content], Content] | None = None,
    request: LayoutRequest | None = None,
    dry_run: bool = False,
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
    **flags: Unpack[PartFlags],
) -> TransferReport | Planned:
    """Write a checkpoint in another format: whole, or the part that is asked for.

    Args:
        source: opened, or a path as `open_checkpoint` takes it.
        destination: a path or URL that does not exist yet; `NAME.safetensors` is one file.
        to: the format to write; "" for that of `like`, else the source's own.
        dtype: `bf16`, `fp16` or `fp32`, of the model's floating-point weights; `fp8-block` or
            `mxfp4` to quantise linear weights; "" as they are.
        quantised: weights or modules that are quantised whatever their names say.
        unquantised: weights or modules that are not.
        from_master: whether weights are rounded from their fp32 masters.
        adapter: LoRA adapters of PEFT that are merged into the weights, in order.
        allow_gaps: whether an adapter may lack layers that its configuration names.
        beside: a folder from which `config.json`, a tokenizer and the like are taken.
        names: `hf`, `megatron`, `torchtitan`, `meta` or `packed`: whose names the parameters get;
            "" as they are.
        spelling: Megatron's: `transformer_engine` or `local`, `sequential` or `grouped`.
        family: the model (`llama`, `mistral`, ...), or the path of a table; "" for what it shows.
        config: the `config.json` of a model that the source does not describe, a path.
        rename: a TOML file of other names for parameters.
        derive: makes what is written of what is there, where no flag does.
        request: what is asked of the layout, in place of the flags about it.
        dry_run: return what it would cost, and write nothing.
        stores: how to reach object stores.
        counter: is told of the work.
        flags: see `PartFlags`.

    Raises:
        UsageError: a wish that a shape cannot grant.
        UnsupportedError: the format cannot be written, or has no place for something.
        ExistsError: something stands at the destination.
        RefusedError: it lies inside a checkpoint, or another run is writing there.
        CorruptError: the source or the example is damaged, or the proof failed; nothing is visible.
    """
    from ftckpt.formats.families import to_hugging_face, to_megatron, to_native
    from ftckpt.formats.families.translator import DEFAULT_SPELLINGS
    from ftckpt.formats.huggingface.config import parsed_config
    from ftckpt.formats.quantised.dequantise import dequantised
    from ftckpt.formats.quantised.quantise import SCHEMES, quantise, require_folder
    from ftckpt.formats.writers import format_and_writer
    from ftckpt.transfer.request.change_dtype import retype, target_of
    from ftckpt.transfer.request.from_masters import from_masters
    from ftckpt.transfer.request.renaming import rename as renamed

    known = ("hf", "megatron", "torchtitan", "meta", "packed")
    if names not in ("", *known):
        raise UsageError(f"--names {names!r} is not known", hint=", ".join(known))
    if spelling and names != "megatron":
        raise UsageError("--spelling says which of Megatron's names", hint="--names megatron")
    if config and names in ("", "megatron"):
        raise UsageError("--config says by which model names are translated", hint="--names hf")
    if family and not names:
        raise UsageError("--family says by whose table names are translated", hint="--names NAME")
    coded = dtype if dtype in SCHEMES else ""
    if coded:
        dtype = ""
    elif quantised or unquantised:
        raise UsageError("quantised= and unquantised= say which weights dtype='fp8-block' changes")
    if allow_gaps and not adapter:
        raise UsageError("--allow-gaps is about an adapter", hint="--adapter PATH")
    if adapter and from_master:
        raise UsageError("--adapter changes the weights, and --from-master takes the masters")
    renames = read_renames(rename)
    request = request or _request(flags, read_rules(flags.get("rules", "")), stores)
    to = to or (request.like.source_format if request.like is not None else "")
    if to:  # what cannot be written under that name is known before the source is opened
        format_and_writer(to, request.rules, destination)
    checkpoint = opened(source, stores, rules=request.rules, also=flags.get("also", ()))
    to = to or checkpoint.source_format
    if coded:
        require_folder(to, destination)
    if dtype or coded:
        checkpoint = dequantised(checkpoint, target_of(dtype or "bf16"))
    if adapter:
        from ftckpt.formats.lora.merging import merge

        others = [opened(one, stores) for one in adapter]
        target = target_of(dtype) if dtype else None
        checkpoint = merge(checkpoint, others, target, allow_gaps=allow_gaps).checkpoint
    content = narrowed(checkpoint, flags, masters=from_master)
    if adapter:
        from ftckpt.formats.lora.merging import require_weights_alone

        require_weights_alone(content)
    if from_master and flags.get("only") != "adapter":
        content = from_masters(content).content
    if dtype:  # before the names: config.json says the type
        content = retype(content, dtype)
    rows = flags.get("true_vocab_size")
    said = parsed_config(read_text(config), config) if config else None
    if names == "hf":
        content = to_hugging_face(content, family=family, true_vocab_size=rows, config=said)
    elif names == "megatron":
        spellings = (*spelling, *DEFAULT_SPELLINGS)
        content = to_megatron(content, family=family, true_vocab_size=rows, spellings=spellings)
    elif names:
        content = to_native(content, names, family=family, true_vocab_size=rows, config=said)
    elif flags.get("only") == "adapter":
        from ftckpt.formats.lora.bridge import require_whole_modules

        require_whole_modules(content)
    if renames:
        content = renamed(content, renames)
    if derive is not None:
        content = derive(content)
    if beside:
        from ftckpt.formats.huggingface.sidecar_files import taken_from
        from ftckpt.storage import open_store
        from ftckpt.storage.source import Source

        if to != "safetensors" or destination.endswith(".safetensors"):
            raise UsageError("beside= takes files for a folder of safetensors")
        content = taken_from(content, Source.directory(open_store(beside, stores)))
    if coded:
        content = quantise(content, coded, more=quantised, fewer=unquantised).content
        checkpoint = content.checkpoint
    used = ("true_vocab_size",) if names else ()
    laid_out = _laid_out(checkpoint, content, to, request, destination, flags, stores, used=used)
    return plan(laid_out, flags) if dry_run else write(laid_out, flags, counter)


def narrowed(checkpoint: Checkpoint, flags: PartFlags, *, masters: bool = False) -> Content:
    """Return the part of a checkpoint that is asked for, from its masters if asked.

    Raises:
        NotFoundError: it has nothing of that part, or a weight as its master alone.
        UsageError: a name to drop matches nothing.
    """
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.request.narrowing import Only, drop, only

    from .opening import chosen

    content = Content.of(checkpoint)
    gone = flags.get("drop")
    if flags.get("only") == "adapter":
        from ftckpt.formats.lora.training_states import adapter_alone

        return adapter_alone(drop(content, list(gone)) if gone else content, masters=masters)
    if part := flags.get("only"):
        content = only(content, chosen(Only, part, "--only"), masters=masters)
    return drop(content, list(gone)) if gone else content


def _request(flags: PartFlags, rules: Rules | None, stores: StoreOptions) -> LayoutRequest:
    return layout_request(flags, rules, stores, flags.get("true_vocab_size"))


def layout_request(
    flags: LayoutFlags,
    rules: Rules | None,
    stores: StoreOptions,
    true_vocab_size: int | None = None,
) -> LayoutRequest:
    """Return what is asked of a layout; an example is opened.

    Raises:
        UsageError: a size that is none, or the example is a root.
        FtckptError: the example cannot be opened.
    """
    from ftckpt.transfer.layout import LayoutRequest

    like, size = flags.get("like", ""), flags.get("max_shard_size") or None
    return LayoutRequest(
        tp=flags.get("tp"),
        pp=flags.get("pp"),
        vp=flags.get("vp"),
        dp=flags.get("dp"),
        ep=flags.get("ep"),
        zero_stage=flags.get("zero_stage"),
        max_shard_size=None if size is None else size_in_bytes(size),
        rules=rules,
        true_vocab_size=true_vocab_size,
        like=opened(like, stores, rules=rules) if like else None,
    )


def _laid_out(
    checkpoint: Checkpoint,
    content: Content,
    name: str,
    request: LayoutRequest,
    destination: str,
    flags: WritingFlags,
    stores: StoreOptions,
    *,
    used: Collection[str] = (),
) -> LaidOut:
    from ftckpt.operations.writing import prepare

    return prepare(
        checkpoint, content, name, request, destination,
        jobs=job_count(flags.get("jobs", 0)), stores=stores, used=used,
    )  # fmt: skip


def plan(laid_out: LaidOut, flags: WritingFlags) -> Planned:
    """Return what it would cost to write what is laid out (see `LaidOut.plan`)."""
    return laid_out.plan(proof=not flags.get("no_proof", False))


def write(laid_out: LaidOut, flags: WritingFlags, counter: Counter) -> TransferReport:
    """Write and prove what is laid out, the source verified first (see `LaidOut.write`)."""
    from ftckpt.operations.writing import verified

    jobs, limiter = laid_out.jobs, rate_limit(flags.get("limit_rate", ""))
    work = Work(threads=jobs, processes=jobs, limiter=limiter, counter=counter)

    def check() -> VerifyReport:
        return verified(laid_out.checkpoint, laid_out.content, work)

    return laid_out.write(
        check=None if flags.get("no_proof", False) else check,
        work=work,
        device=flags.get("device", "cpu"),
        restart=flags.get("restart", False),
    )
