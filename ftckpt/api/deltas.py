"""What stores and restores differences: `delta pack`, `unpack`, `rebase`, `info`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Unpack, overload

from ftckpt.amounts import rate
from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import UsageError
from ftckpt.progress import NULL, Counter
from ftckpt.storage import StoreOptions, open_store
from ftckpt.workers import Work

from .opening import STORES, RunFlags, job_count, opened, rate_limit

if TYPE_CHECKING:
    from ftckpt.delta.pack.advice import Advice
    from ftckpt.delta.pack.report import PackReport
    from ftckpt.formats.delta.checkpoint import DeltaCheckpoint
    from ftckpt.formats.delta.pack import PackJob
    from ftckpt.formats.delta.rates import DecodeRates
    from ftckpt.formats.delta.survey import ChainSurvey
    from ftckpt.operations.transferring import WritingFlags
    from ftckpt.operations.writing import Means
    from ftckpt.transfer.layout import LayoutRequest
    from ftckpt.transfer.request.dry_run import Planned
    from ftckpt.transfer.run import TransferReport
    from ftckpt.verification import VerifyReport

    # Is told what the verification of a source found, before anything is written.
    Told = Callable[[Checkpoint, VerifyReport], None]


class PackingFlags(RunFlags, total=False):
    """How a delta is made.

    Attributes:
        level: 1 fast, 2 (the default), 3 small.
    """

    level: int


def delta_pack(
    base: Checkpoint | str | None,
    target: Checkpoint | str,
    out: str,
    *,
    rename: str = "",
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
    **flags: Unpack[PackingFlags],
) -> PackReport:
    """Write a checkpoint as its difference from another one, or compressed whole.

    Args:
        base: what it is packed against, opened or a path; None packs it whole.
        target: what is packed, opened or a path.
        out: a path or URL that does not exist yet.
        rename: a TOML file of other names for the parameters of `base`.
        stores: how to reach object stores.
        counter: is told of the work.
        flags: see `PackingFlags`.

    Raises:
        UsageError: names of a base are given, without a base; or the table does not fit it.
        NotFoundError: a checkpoint, or a base of its chain, is not there.
        CorruptError: a checkpoint is damaged, or the proof failed; nothing is visible.
        UnsupportedError: a delta cannot hold it.
        ExistsError: something stands at `out`.
    """
    if rename and base is None:
        raise UsageError("--rename gives names to the parameters of BASE, and there is none")
    packed = opened(target, stores)
    against = None if base is None else opened(base, stores)
    renamed = renamed_keys(against, rename) if against is not None and rename else {}
    return pack(packed, against, out, renamed, flags, stores=stores, counter=counter)


def delta_rebase(
    delta: Checkpoint | str,
    out: str,
    *,
    onto: Checkpoint | str = "",
    full: bool = False,
    base: Sequence[str] = (),
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
    **flags: Unpack[PackingFlags],
) -> PackReport:
    """Rewrite a delta against another base, or none; every bit stays.

    Without `onto` and `full` the result depends on the full checkpoint that the chain ends in.

    Args:
        delta: opened, or a path.
        out: a path or URL that does not exist yet.
        onto: the new base.
        full: make the result independent of any base.
        base: where bases of the chain lie now.
        stores: how to reach object stores.
        counter: is told of the work.
        flags: see `PackingFlags`.

    Raises:
        UsageError: it is not a delta, its chain cannot be shorter, or both `onto` and `full`.
        FtckptError: as `delta_pack` does.
    """
    if onto and full:
        raise UsageError("--onto names a base and --full wants none")
    target = require_delta(opened(delta, stores, bases=base), _PACKS_ANY)
    new = opened(onto, stores) if onto else None if full else end_of_chain(target)
    return pack(target, new, out, {}, flags, stores=stores, counter=counter)


_PACKS_ANY = "ftckpt delta pack packs any checkpoint"


@overload
def delta_unpack(
    delta: Checkpoint | str,
    destination: str,
    *,
    to: str = "",
    base: Sequence[str] = (),
    dry_run: Literal[False] = False,
    stores: StoreOptions = ...,
    counter: Counter = ...,
    **flags: Unpack[WritingFlags],
) -> TransferReport: ...


@overload
def delta_unpack(
    delta: Checkpoint | str,
    destination: str,
    *,
    to: str = "",
    base: Sequence[str] = (),
    dry_run: Literal[True],
    stores: StoreOptions = ...,
    counter: Counter = ...,
    **flags: Unpack[WritingFlags],
) -> Planned: ...


def delta_unpack(
    delta: Checkpoint | str,
    destination: str,
    *,
    to: str = "",
    base: Sequence[str] = (),
    dry_run: bool = False,
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
    **flags: Unpack[WritingFlags],
) -> TransferReport | Planned:
    """Write a delta as a full checkpoint, every tensor proven by its digest.

    The files come back as they were, byte for byte; with `to`, or with flags about another job, the
    state is laid out anew and is the same bit for bit.

    Args:
        delta: opened, or a path.
        destination: a path or URL that does not exist yet.
        to: the format to write; "" for what it was packed from.
        base: where bases of the chain lie now.
        dry_run: return what it would cost, and write nothing.
        stores: how to reach object stores.
        counter: is told of the work.
        flags: see `WritingFlags`.

    Raises:
        UsageError: it is not a delta.
        FtckptError: as `convert` does.
    """
    from ftckpt.operations.transferring import layout_request, write
    from ftckpt.operations.writing import prepare
    from ftckpt.transfer.content import Content

    request = layout_request(flags, None, stores)
    checkpoint = require_delta(
        opened(delta, stores, bases=base), "ftckpt convert writes any checkpoint in another format"
    )
    restored = restoration(checkpoint, request, to, destination)
    prepared = prepare(
        checkpoint, Content.of(checkpoint), restored.name, request, destination,
        jobs=job_count(flags.get("jobs", 0)), stores=stores, means=restored.means,
    )  # fmt: skip
    if dry_run:
        return prepared.plan(proof=not flags.get("no_proof", False))
    return write(prepared, flags, counter)


@dataclass(frozen=True, slots=True)
class DeltaReport:
    """A delta's chain, and what it costs.

    Attributes:
        chain: the delta, its bases, and what a restore reads and decodes.
        rates: what was measured here; None where no advice was asked for.
        advice: whether deltas pay, by these rates; None where no advice was asked for.
    """

    chain: ChainSurvey
    rates: DecodeRates | None = None
    advice: Advice | None = None


def delta_info(
    delta: Checkpoint | str,
    *,
    base: Sequence[str] = (),
    advise: bool = False,
    storage_rate: float | str = "",
    jobs: int = 0,
    stores: StoreOptions = STORES,
) -> DeltaReport:
    """Return a delta's content, its chain of bases, and the cost of a restore.

    Indexes and lists of files are read, tensors are not; with `advise` a sample is read, decoded
    and encoded. What is missing of the chain is part of the answer (`chain.broken`).

    Args:
        delta: opened, or a path.
        base: where bases of the chain lie now.
        advise: measure rates, and say when deltas pay.
        storage_rate: at which the storage is written, bytes a second or a text such as "2GB/s"; by
            default as fast as it was read.
        jobs: workers that are measured; 0 for one a processor.
        stores: how to reach object stores.

    Raises:
        UsageError: it is not a delta, or a rate is given and no advice asked for.
        FtckptError: it cannot be opened, or the sample cannot be read.
    """
    from ftckpt.formats.delta.survey import survey

    if storage_rate and not advise:
        raise UsageError("--storage-rate is for the advice", hint="add --advise")
    checkpoint = require_delta(
        opened(delta, stores, bases=base), "ftckpt inspect shows any checkpoint"
    )
    found = survey(checkpoint)
    if found.broken is not None or not advise:
        return DeltaReport(found)
    return DeltaReport(found, *_advice(checkpoint, found, storage_rate, job_count(jobs)))


def _advice(
    delta: DeltaCheckpoint, found: ChainSurvey, storage_rate: float | str, jobs: int
) -> tuple[DecodeRates, Advice]:
    from ftckpt.delta.pack.advice import advise
    from ftckpt.formats.delta.rates import measure

    if not any(tensor.nbytes for tensor in delta.index.tensors):
        raise UsageError(f"{delta.source.url} has no tensors to measure with")
    rates = measure(delta, jobs)
    written = rate(storage_rate) or rates.read
    advice = advise(
        ratio=found.links[0].ratio or 1.0,
        encode_rate=rates.encode,
        decode_rate=rates.decode,
        storage_write=written,
    )
    return rates, advice


def pack(
    target: Checkpoint,
    base: Checkpoint | None,
    out: str,
    renamed: Mapping[str, str],
    flags: PackingFlags,
    *,
    stores: StoreOptions,
    counter: Counter,
    told: Told | None = None,
) -> PackReport:
    """Pack what is open.

    Args:
        target: what is packed.
        base: what it is packed against; None packs it whole.
        out: where the delta goes.
        renamed: key in the target -> key in the base, where they differ.
        flags: how.
        stores: how to reach object stores.
        counter: is told of the work.
        told: is told what the verification of each source found.

    Raises:
        FtckptError: as `delta_pack` does.
    """
    from ftckpt.verification import verify

    work = packing_work(target, base, out, flags, stores, counter)

    def check(checkpoint: Checkpoint) -> VerifyReport:
        found = verify(checkpoint, work=replace(work, processes=work.threads))
        if told is not None:
            told(checkpoint, found)
        return found

    return packing(target, base, out, renamed, flags, stores=stores, work=work, check=check).write()


def packing_work(
    target: Checkpoint,
    base: Checkpoint | None,
    out: str,
    flags: PackingFlags,
    stores: StoreOptions,
    counter: Counter,
) -> Work:
    """Return by how many threads and processes a checkpoint is packed; see `pack`."""
    from ftckpt.delta.pack.worker_count import affordable

    limiter = rate_limit(flags.get("limit_rate", ""))
    sources = [one for one in (target, base) if one is not None]
    jobs, processes = affordable(
        job_count(flags.get("jobs", 0)),
        target.tensors.values(),
        local=open_store(out, stores).traits.local,
        chained=any(bool(one.decoding) for one in sources),
        sources=[one.source.store for one in sources],
    )
    # Copies of a process would share its connections.
    apart = limiter is None and all(one.is_local() for one in sources)
    return Work(threads=jobs, processes=processes if apart else 0, limiter=limiter, counter=counter)


def packing(
    target: Checkpoint,
    base: Checkpoint | None,
    out: str,
    renamed: Mapping[str, str],
    flags: PackingFlags,
    *,
    stores: StoreOptions,
    work: Work,
    check: Callable[[Checkpoint], VerifyReport],
) -> PackJob:
    """Put together what is needed to pack.

    Args:
        target: as in `pack`, like the next five.
        base: see there.
        out: see there.
        renamed: see there.
        flags: see there.
        stores: see there.
        work: of `packing_work`.
        check: verifies a source, where the flags want a proof.
    """
    from ftckpt.delta.pack.assemble import PackOptions
    from ftckpt.formats.delta.pack import pack_job

    proof = not flags.get("no_proof", False)
    return pack_job(
        target,
        base,
        out,
        options=PackOptions(
            level=flags.get("level", 2),
            work=work,
            proof=proof,
            restart=flags.get("restart", False),
            renamed=renamed,
        ),
        store_options=stores,
        check=check if proof else None,
    )


def renamed_keys(base: Checkpoint, table: str) -> dict[str, str]:
    """Return new key -> key in the base, by a TOML file of names.

    Raises:
        UsageError: the table cannot be read, or does not fit the base.
    """
    from ftckpt.operations.tables import read_renames
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.request.renaming import rename

    made = rename(Content.of(base), read_renames(table))
    return {key: wanted.copies[0].key for key, wanted in made.tensors.items() if wanted.copies}


def require_delta(checkpoint: Checkpoint, hint: str) -> DeltaCheckpoint:
    """Return an open checkpoint that is a delta.

    Raises:
        UsageError: it is not.
    """
    from ftckpt.formats.delta.checkpoint import DeltaCheckpoint

    if not isinstance(checkpoint, DeltaCheckpoint):
        raise UsageError(
            f"{checkpoint.source.url} is not a delta but {checkpoint.format}", hint=hint
        )
    return checkpoint


def end_of_chain(delta: DeltaCheckpoint) -> Checkpoint:
    """Return the full checkpoint that a chain ends in.

    Raises:
        UsageError: the delta depends on it already, or on nothing.
    """
    from ftckpt.formats.delta.chain import chain

    links = chain(delta)
    if len(links) < 3:
        depends = "on nothing" if len(links) == 1 else "directly on a full checkpoint"
        raise UsageError(
            f"{delta.source.url} depends {depends}: its chain cannot be shorter",
            hint="--full packs it whole, --onto BASE against another",
        )
    return links[-1]


@dataclass(frozen=True, slots=True)
class Restoration:
    """How a delta becomes a full checkpoint again.

    Attributes:
        name: the format that is written.
        means: by what it is written and proven.
        original: whether the files come back as they were.
    """

    name: str
    means: Means
    original: bool


def restoration(
    delta: DeltaCheckpoint, request: LayoutRequest, to: str, destination: str
) -> Restoration:
    """Choose how a delta is restored: in its own files where nothing else is asked for.

    Raises:
        UsageError, UnsupportedError: the format cannot be written under that name.
    """
    from ftckpt.formats.delta.original import (
        OriginalWriter,
        format_of,
        has_original,
        same_objects_there,
    )
    from ftckpt.formats.delta.prove_original import OriginalProof
    from ftckpt.formats.state.same_object import SameObject
    from ftckpt.formats.writers import format_and_writer
    from ftckpt.operations.writing import Means
    from ftckpt.transfer.layout import LayoutRequest
    from ftckpt.transfer.prove.against_digests import DigestProof

    name = to or delta.source_format
    if not to and request == LayoutRequest() and has_original(delta):
        writer = OriginalWriter(delta)
        means = Means(format_of(delta), writer, OriginalProof(writer), same_objects_there)
        return Restoration(name, means, original=True)
    prover = DigestProof(delta.decoding.digests())
    means = Means(*format_and_writer(name, request.rules, destination), prover, SameObject)
    return Restoration(name, means, original=False)
