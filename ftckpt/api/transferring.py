"""What writes another checkpoint: `convert`, `reshard`, `copy`, `repair`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack, overload

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import UsageError
from ftckpt.progress import NULL, Counter
from ftckpt.storage import StoreOptions
from ftckpt.workers.limits import parse_bytes

from .opening import STORES, job_count, opened, rate_limit
from .tables import read_renames, read_rules

if TYPE_CHECKING:
    from ftckpt.checkpoint.rules import Rules
    from ftckpt.replication.copy import CopyReport
    from ftckpt.replication.options import ReplicationOptions
    from ftckpt.replication.repair import RepairReport
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.layout import LayoutRequest
    from ftckpt.transfer.request.dry_run import Planned
    from ftckpt.transfer.run import TransferReport
    from ftckpt.verification import VerifyReport

    from .writing import LaidOut

# Requests to an object store have a latency to hide, whatever processors there are.
_REQUESTS = 8


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


class WritingFlags(LayoutFlags, total=False):
    """How a result is laid out, written and proven.

    Attributes:
        no_proof: check neither the source nor, read back, the result.
        restart: forget what another transfer to the destination has left.
        device: `cpu`, `cuda`, `cuda:N` or `auto`.
        jobs: threads; 0 for one a processor.
        limit_rate: bytes a second, or a text such as "200MB/s".
    """

    no_proof: bool
    restart: bool
    device: str
    jobs: int
    limit_rate: float | str


class PartFlags(WritingFlags, total=False):
    """Which part of the source is written, and how.

    Attributes:
        only: `model` or `optimizer`.
        drop: state to leave out, by name or pattern.
        rules: a TOML file, or a family's name, of how tensors are divided over ranks.
        true_vocab_size: rows of the vocabulary that are no padding.
    """

    only: str
    drop: Sequence[str]
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
    checkpoint = opened(source, stores, rules=rules)
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
    names: str = ...,
    spelling: Sequence[str] = ...,
    family: str = ...,
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
    names: str = ...,
    spelling: Sequence[str] = ...,
    family: str = ...,
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
    names: str = "",
    spelling: Sequence[str] = (),
    family: str = "",
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
        dtype: `bf16`, `fp16` or `fp32`, of the model's floating-point weights; "" as they are.
        names: `hf` or `megatron`: whose names the parameters get; "" as they are.
        spelling: Megatron's: `transformer_engine` or `local`, `sequential` or `grouped`.
        family: the model (`llama`, `mistral`, ...); "" for what it shows.
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
    from ftckpt.formats.families import to_hugging_face, to_megatron
    from ftckpt.formats.families.translator import DEFAULT_SPELLINGS
    from ftckpt.formats.writers import format_and_writer
    from ftckpt.transfer.request.change_dtype import retype
    from ftckpt.transfer.request.renaming import rename as renamed

    if names not in ("", "hf", "megatron"):
        raise UsageError(f"--names {names!r} is not known", hint="hf, megatron")
    if spelling and names != "megatron":
        raise UsageError("--spelling says which of Megatron's names", hint="--names megatron")
    if family and not names:
        raise UsageError("--family says by whose table names are translated", hint="--names NAME")
    renames = read_renames(rename)
    request = request or _request(flags, read_rules(flags.get("rules", "")), stores)
    to = to or (request.like.source_format if request.like is not None else "")
    if to:  # what cannot be written under that name is known before the source is opened
        format_and_writer(to, request.rules, destination)
    checkpoint = opened(source, stores, rules=request.rules)
    to = to or checkpoint.source_format
    content = narrowed(checkpoint, flags)
    rows = flags.get("true_vocab_size")
    if names == "hf":
        content = to_hugging_face(content, family=family, true_vocab_size=rows)
    elif names == "megatron":
        spellings = (*spelling, *DEFAULT_SPELLINGS)
        content = to_megatron(content, family=family, true_vocab_size=rows, spellings=spellings)
    if renames:
        content = renamed(content, renames)
    if dtype:
        content = retype(content, dtype)
    if derive is not None:
        content = derive(content)
    used = ("true_vocab_size",) if names else ()
    laid_out = _laid_out(checkpoint, content, to, request, destination, flags, stores, used=used)
    return plan(laid_out, flags) if dry_run else write(laid_out, flags, counter)


def narrowed(checkpoint: Checkpoint, flags: PartFlags) -> Content:
    """Return the part of a checkpoint that is asked for.

    Raises:
        NotFoundError: it has nothing of that part.
        UsageError: a name to drop matches nothing.
    """
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.request.narrowing import Only, drop, only

    from .opening import chosen

    content = Content.of(checkpoint)
    if part := flags.get("only"):
        content = only(content, chosen(Only, part, "--only"))
    gone = flags.get("drop")
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
        max_shard_size=parse_bytes(size) if isinstance(size, str) else size,
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
    from .writing import prepare

    return prepare(
        checkpoint, content, name, request, destination,
        jobs=job_count(flags.get("jobs", 0)), stores=stores, used=used,
    )  # fmt: skip


def plan(laid_out: LaidOut, flags: WritingFlags) -> Planned:
    """Return what it would cost to write what is laid out (see `LaidOut.plan`)."""
    return laid_out.plan(proof=not flags.get("no_proof", False))


def write(laid_out: LaidOut, flags: WritingFlags, counter: Counter) -> TransferReport:
    """Write and prove what is laid out, the source verified first (see `LaidOut.write`)."""
    from ftckpt.verification import VerifyOptions, verify

    limiter = rate_limit(flags.get("limit_rate", ""))

    def check() -> VerifyReport:
        options = VerifyOptions(jobs=laid_out.jobs, processes=laid_out.jobs, limiter=limiter)
        return verify(laid_out.checkpoint, options, counter=counter)

    return laid_out.write(
        check=None if flags.get("no_proof", False) else check,
        limiter=limiter,
        device=flags.get("device", "cpu"),
        restart=flags.get("restart", False),
        counter=counter,
    )


def copy(
    source: Checkpoint | str,
    destination: str,
    *,
    include_bases: bool = False,
    unmanaged: bool = False,
    no_proof: bool = False,
    restart: bool = False,
    jobs: int = 0,
    limit_rate: float | str = "",
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
) -> CopyReport:
    """Copy a checkpoint to another tier; see `ftckpt.replication.copy.copy`.

    Args:
        source: opened, or a path as `open_checkpoint` takes it.
        destination: path or URL of the copy; `DIR/` for its own name in DIR.
        include_bases: copy what a delta depends on first, beside it.
        unmanaged: copy files too that do not belong to the checkpoint.
        no_proof: do not read back what was written.
        restart: forget what another run to the destination has left.
        jobs: blocks in flight; 0: one a processor, 8 to or from an object store.
        limit_rate: bytes a second, or a text such as "200MB/s".
        stores: how to reach object stores.
        counter: is told of the work.

    Raises:
        CorruptError: the source is damaged, or what stands there already, or the proof failed.
        ExistsError: something else stands at the destination.
        RefusedError: it lies inside a checkpoint, or another run is writing there.
        IncompleteError: the source is not committed, or changed meanwhile.
    """
    from ftckpt.replication.copy import copy as copied
    from ftckpt.replication.places import destination_of, is_local

    checkpoint = opened(source, stores)
    destination = destination_of(checkpoint.source, destination)
    options = replication_options(
        near=checkpoint.source.store.traits.local, writes_local=is_local(destination, stores),
        jobs=jobs, limit_rate=limit_rate, proof=not no_proof, restart=restart, beside=unmanaged,
    )  # fmt: skip
    for base, place in bases_beside(checkpoint, destination) if include_bases else ():
        copied(base, place, options=options, stores=stores, counter=counter)
    return copied(checkpoint, destination, options=options, stores=stores, counter=counter)


def bases_beside(checkpoint: Checkpoint, destination: str) -> list[tuple[Checkpoint, str]]:
    """Return what a delta depends on, the full checkpoint first, and where each goes: beside it.

    A reader looks for a base where it was, seen from the delta, and then among its siblings.
    Nothing for a full checkpoint.

    Raises:
        FtckptError: a base is missing, wrong, or cannot be opened.
    """
    from ftckpt.formats.delta.chain import chain
    from ftckpt.formats.delta.checkpoint import DeltaCheckpoint
    from ftckpt.replication.places import destination_of
    from ftckpt.transfer.places import around

    if not isinstance(checkpoint, DeltaCheckpoint):
        return []
    beside = around(destination) or "./"
    return [(base, destination_of(base.source, beside)) for base in reversed(chain(checkpoint)[1:])]


def replication_options(
    *,
    near: bool,
    writes_local: bool,
    jobs: int,
    limit_rate: float | str,
    proof: bool,
    restart: bool,
    beside: bool = False,
) -> ReplicationOptions:
    """Return how a replica is made, with as many blocks in flight as memory allows.

    Args:
        near: whether everything that is read is on this machine.
        writes_local: whether the replica is.
        jobs: blocks in flight; 0: one a processor, 8 to or from an object store.
        limit_rate: bytes a second, or a text.
        proof: read back what was written.
        restart: forget what another run has left.
        beside: whether files that do not belong to the checkpoint are carried too.

    Raises:
        UsageError: a rate that is none.
        NoResourceError: the memory budget does not hold one block.
    """
    from ftckpt.replication.options import ReplicationOptions
    from ftckpt.transfer.request.dry_run import affordable_jobs

    wanted = jobs or max(job_count(0), 0 if near and writes_local else _REQUESTS)
    return ReplicationOptions(
        jobs=affordable_jobs(wanted, local=writes_local),
        limiter=rate_limit(limit_rate),
        proof=proof,
        restart=restart,
        beside=beside,
    )


def repair(
    path: str,
    replica: str,
    *,
    to: str = "",
    dry_run: bool = False,
    no_proof: bool = False,
    restart: bool = False,
    jobs: int = 0,
    limit_rate: float | str = "",
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
) -> RepairReport:
    """Mend a damaged checkpoint with the blocks of a replica.

    Args:
        path: the damaged one; it need not open.
        replica: another copy of it (the flag is `--from`).
        to: path or URL of the mended one; "" for the place of the damaged one.
        dry_run: look for damage, and do no more.
        no_proof: do not read back what was written.
        restart: forget what another run has left.
        jobs: blocks in flight; 0: one a processor, 8 to or from an object store.
        limit_rate: bytes a second, or a text such as "200MB/s".
        stores: how to reach object stores.
        counter: is told of the work.

    Raises:
        CorruptError: a block is damaged in both.
        RefusedError: the replica is of another checkpoint.
        UnverifiedError: nothing says which of two bytes is right.
        UsageError: it lies in an object store and `to` is not given.
    """
    from functools import partial

    from ftckpt.discovery.resolve import files_at, open_source
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.replication.places import is_local
    from ftckpt.replication.repair import repair as repaired
    from ftckpt.replication.repair import settle

    settle(files_at(path, FORMATS, stores))
    damaged = files_at(path, FORMATS, stores)  # as it is now
    other = files_at(replica, FORMATS, stores)
    local = damaged.store.traits.local
    options = replication_options(
        near=local and other.store.traits.local,
        writes_local=is_local(to, stores) if to else local,
        jobs=jobs, limit_rate=limit_rate, proof=not no_proof, restart=restart,
    )  # fmt: skip
    return repaired(
        damaged,
        other,
        opened=partial(open_source, formats=FORMATS),
        to=to,
        dry_run=dry_run,
        options=options,
        stores=stores,
        counter=counter,
    )
