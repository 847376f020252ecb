"""Store checkpoints as differences, and restore them: `delta pack`, `unpack`, `info`, `rebase`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypedDict, Unpack, cast

from ftckpt import amounts
from ftckpt.errors import ExitCode, UsageError
from ftckpt.findings import counted
from ftckpt.formats.support import WRITTEN
from ftckpt.observer import SILENT, Observer
from ftckpt.reports import IF_ANY, UNSAID
from ftckpt.storage import StoreOptions, open_store
from ftckpt.workers import Work, limits

from . import opening, transferring
from .definition import argument, operation, option, switch
from .many import ALONE, Machines, PartReport, Session
from .opening import STORES, Jobs, opened
from .transferring import WritingFlags

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.delta.index import BaseName
    from ftckpt.delta.pack.report import Advice, Method, PackedShare, PackReport
    from ftckpt.findings import Finding
    from ftckpt.formats.delta.checkpoint import DeltaCheckpoint
    from ftckpt.formats.delta.pack import Check, PackJob
    from ftckpt.formats.delta.rates import DecodeRates
    from ftckpt.formats.delta.survey import ChainSurvey, Link
    from ftckpt.operations.writing import Means
    from ftckpt.transfer.layout import LayoutRequest
    from ftckpt.transfer.run import TransferReport
    from ftckpt.verification import VerifyReport
    from ftckpt.verification.seen import SeenBytes

_HOW = "How it is packed"
_ANY_STORAGE = 1e9  # bytes a second; what pays below which bandwidth does not depend on it

Memory = Annotated[amounts.Size, option("SIZE", "Memory limit.", "--max-memory", under=_HOW)]
StorageRate = Annotated[
    amounts.Rate,
    option("RATE", "Write rate of the storage, for the advice: 2GB/s.", under=_HOW),
]
Delta = Annotated["Checkpoint | str", argument("DELTA", "The delta: path, URL or ROOT@STEP.")]
DeltaSource = Annotated[
    "Checkpoint | str", argument("DELTA", "The delta to read: path, URL or ROOT@STEP.")
]
Places = Annotated[
    "Checkpoint | str | None",
    argument(
        "[BASE] TARGET OUT",
        "Three places: store TARGET against BASE. Two: compress TARGET whole.",
    ),
]
Onto = Annotated["Checkpoint | str", option("BASE", "New base of the result.")]
Out = Annotated[str, argument("OUT", "Where the result goes; it must not exist yet.")]
Bases = Annotated[Sequence[str], option("PATH", "Where a base of the chain lies now. Repeatable.")]


class PackingFlags(TypedDict, total=False):
    """How a delta is made."""

    level: Annotated[int, option("N", "1 fast, 2, 3 small.", min=1, max=3, default=2, under=_HOW)]
    no_proof: Annotated[
        bool,
        switch("--no-proof", "Skip the checks of the sources and of the result.", under=_HOW),
    ]
    restart: Annotated[
        bool, switch("--restart", "Discard what another run to OUT left.", under=_HOW)
    ]
    jobs: Annotated[
        int,
        option("N", "Workers; 0: one a processor.", "--jobs", "-j", min=0, under=_HOW, default=0),
    ]
    limit_rate: Annotated[
        amounts.Rate, option("RATE", "Read no faster: 200MiB/s.", under=_HOW, default="")
    ]


_CODES: Mapping[ExitCode, str] = {
    ExitCode.OK: "written, proven and visible",
    ExitCode.CORRUPT: "a checkpoint is damaged, a base is another, or the proof failed",
    ExitCode.INCOMPLETE: "a checkpoint is not committed, or changed meanwhile; parts missing",
    ExitCode.UNSAFE: "hostile or ambiguous content; nothing was executed",
    ExitCode.REFUSED: "OUT exists or lies in a checkpoint, or another run is writing it",
    ExitCode.NOT_FOUND: "a checkpoint, a base, or the directory around OUT is not there",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "disk full or memory budget too small; run it again to go on",
    ExitCode.UNSUPPORTED: "a delta cannot hold it",
}


@operation(
    examples=(
        (
            "ftckpt delta pack run/step-1000 run/step-1010 deltas/step-1010",
            "what ten steps changed",
        ),
        ("srun ftckpt delta pack A B out --part auto --finish-last", "by all nodes of a job"),
        (
            "ftckpt delta pack run/step-1000 archive/step-1000",
            "compressed whole, without a base",
        ),
        (
            "ftckpt delta pack s3://b/run/step-1000 run/step-1010 s3://b/run/step-1010",
            "on S3",
        ),
    ),
    codes=_CODES,
    everyday=("--level", "--rename", "--limit-rate"),
)
def delta_pack(
    *places: Places,
    rename: Annotated[str, option("FILE.toml", "Other names for the parameters of BASE.")] = "",
    storage_bw: StorageRate = "",
    max_memory: Memory = "1GiB",
    division: Machines = ALONE,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
    **flags: Unpack[PackingFlags],
) -> PackReport:
    """Write a checkpoint as its difference from another, or compressed.

    Nothing is lost. BASE and TARGET may be of any formats and topologies, and deltas themselves.
    OUT reads like any checkpoint, as long as its base is there. It is read back and compared with
    TARGET bit for bit before it becomes visible; a killed run goes on where it was. The sources
    are never written.

    Returns:
        What was written. None for BASE is as two places.

    Raises:
        UsageError: names of a base are given, without a base; or the table does not fit it.
        NotFoundError: a checkpoint, or a base of its chain, is not there.
        CorruptError: a checkpoint is damaged, or the proof failed; nothing is visible.
        UnsupportedError: a delta cannot hold it.
        ExistsError: something stands at OUT.
    """
    base, target, out = _three(places)
    if rename and base is None:
        raise UsageError("--rename gives names to the parameters of BASE, and there is none")
    packed = opened(target, stores, on)
    against = None if base is None else on.keep(opened(base, stores))
    renamed = _renamed_keys(against, rename) if against is not None and rename else {}
    session = Session("delta pack", division, stores, on)
    return _pack(session, packed, against, out, renamed, flags, storage_bw)


def _three(
    places: Sequence[Checkpoint | str | None],
) -> tuple[Checkpoint | str | None, Checkpoint | str, str]:
    """Return base, target and destination; None for no base.

    Raises:
        UsageError: not two places and not three.
    """
    if len(places) not in (2, 3):
        raise UsageError(
            f"{counted(len(places), 'place')} given: BASE TARGET OUT are three, TARGET OUT two",
            hint="ftckpt delta pack BASE TARGET OUT packs TARGET as what it adds to BASE",
        )
    base = places[0] if len(places) == 3 else None
    target, out = places[-2:]
    return base, cast("Checkpoint | str", target), cast(str, out)


def _renamed_keys(base: Checkpoint, table: str) -> dict[str, str]:
    """Return new key -> key in the base, by a TOML file of names.

    Raises:
        UsageError: the table cannot be read, or does not fit the base.
    """
    from ftckpt.operations.tables import read_renames
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.request.renaming import rename

    made = rename(Content.of(base), read_renames(table))
    return {key: wanted.copies[0].key for key, wanted in made.tensors.items() if wanted.copies}


@operation(
    examples=(
        (
            "ftckpt delta rebase run/step-1090 short/step-1090",
            "against the full one that its chain ends in",
        ),
        (
            "ftckpt delta rebase run/step-1090 full/step-1090 --onto none",
            "against none: compressed whole",
        ),
        (
            "ftckpt delta rebase run/step-1090 new/step-1090 --onto run/step-1050",
            "against another",
        ),
    ),
    codes=dict(_CODES)
    | {ExitCode.NOT_FOUND: "DELTA, a base of its chain, or the directory around OUT is not there"},
    everyday=("--onto", "--full", "--base"),
)
def delta_rebase(
    delta: Delta,
    out: Out,
    *,
    onto: Onto = "",
    base: Bases = (),
    storage_bw: StorageRate = "",
    max_memory: Memory = "1GiB",
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
    **flags: Unpack[PackingFlags],
) -> PackReport:
    """Rewrite a delta against another base, or none.

    Without --onto the result depends on the full checkpoint that the chain ends in, so
    that the deltas between are not needed any more. It is packed, proven and shown as by
    `ftckpt delta pack`; DELTA itself and its bases are never written.

    Raises:
        UsageError: it is not a delta or its chain cannot be shorter.
        FtckptError: as `delta_pack` does.
    """
    hint = "ftckpt delta pack packs any checkpoint"
    target = _require_delta(opened(delta, stores, on, bases=base), hint)
    new = None
    if not onto:
        new = _end_of_chain(target)
    elif onto != "none":
        new = on.keep(opened(onto, stores))
    return _pack(
        Session("delta rebase", ALONE, stores, on), target, new, out, {}, flags, storage_bw
    )


def _require_delta(checkpoint: Checkpoint, hint: str) -> DeltaCheckpoint:
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


def _end_of_chain(delta: DeltaCheckpoint) -> Checkpoint:
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
            hint="--onto none packs it whole, --onto BASE against another",
        )
    return links[-1]


def _pack(
    session: Session,
    target: Checkpoint,
    base: Checkpoint | None,
    out: str,
    renamed: Mapping[str, str],
    flags: PackingFlags,
    storage_bw: amounts.Rate,
) -> PackReport:
    """Pack what is open.

    Args:
        session: the run.
        target: what is packed.
        base: what it is packed against; None packs it whole.
        out: where the delta goes.
        renamed: key in the target -> key in the base, where they differ.
        flags: how.
        storage_bw: bytes a second that the storage takes, for the advice; 0 or "": not known.
    """
    from ftckpt.delta.pack.assemble import PackOptions
    from ftckpt.formats.delta.pack import pack_job
    from ftckpt.verification import VerifyOptions, verify

    storage, on, stores = amounts.rate(storage_bw), session.on, session.stores
    proof, level = not flags.get("no_proof", False), flags.get("level", 2)
    restart = flags.get("restart", False)
    if session.division.asked and restart:
        raise UsageError(
            "--restart would forget what other parts have built",
            hint="remove the records and the staging place of the parts instead",
        )
    work = _work(session, target, base, out, flags)

    def check(source: Checkpoint, work: Work, seen: SeenBytes | None = None) -> VerifyReport:
        options = VerifyOptions(seen=seen)
        return verify(source, options, work=replace(work, processes=work.threads))

    def told(source: Checkpoint, found: VerifyReport) -> None:
        if found.code is ExitCode.OK:
            on.note(f"{source.source.url}: {found.message}")
            return
        on.report(findings=found.findings)
        for one in found.findings:
            on.found(one)

    def job(checked: Check) -> PackJob:
        options = PackOptions(level=level, work=work, proof=proof, restart=restart, renamed=renamed)
        return pack_job(
            target, base, out, options=options, store_options=stores,
            check=checked if proof else None,
        )  # fmt: skip

    def alone(source: Checkpoint, seen: SeenBytes | None) -> VerifyReport:
        found = check(source, work, seen)
        if seen is None or seen.ended or found.code is not ExitCode.OK:  # else more comes later
            told(source, found)
        return found

    if session.division.asked:
        from .many.packing import DividedPack

        decided = {"level": level, "renamed": dict(renamed)}
        divided = DividedPack(session, work, proof, out, target, base, decided, job, check, told)
        report = divided.run()
        if isinstance(report, PartReport):
            return cast("PackReport", report)
    else:
        report = job(alone).write()
    if base is not None:
        _say_what_keeps(base, out, stores, on)
    made: PackReport = _advised(report, storage)
    if made.already_there:  # no more is known of it
        on.report(
            destination=made.url, base=made.base, already_there=True, taken_over=made.taken_over,
            proof=made.proof, seconds=made.seconds,
        )  # fmt: skip
    return made


def _work(
    session: Session, target: Checkpoint, base: Checkpoint | None, out: str, flags: PackingFlags
) -> Work:
    """Return by how many threads and processes a checkpoint is packed; see `_pack`."""
    from ftckpt.delta.pack.worker_count import affordable

    sources = [one for one in (target, base) if one is not None]
    jobs, processes = affordable(
        flags.get("jobs", 0) or limits.jobs(),
        target.tensors.values(),
        local=open_store(out, session.stores).traits.local,
        chained=any(bool(one.decoding) for one in sources),
        sources=[one.source.store for one in sources],
    )
    work = Work.of(jobs, flags.get("limit_rate", ""), session.on.counter)
    # Copies of a process would share its connections.
    apart = work.limiter is None and all(one.is_local() for one in sources)
    return replace(work, processes=processes if apart else 0)


def _say_what_keeps(base: Checkpoint, out: str, stores: StoreOptions, on: Observer) -> None:
    """Say how the base stays where gc of its root does not look among what depends on it."""
    from ftckpt.storage.remotes import split
    from ftckpt.transfer.places import absolute, place_of

    store = open_store(out, stores)
    delta = absolute(store) if store.traits.local else store.url.rstrip("/")
    root, name = split(place_of(base.source))
    if root != split(delta)[0]:
        pin = shlex.join(["ftckpt", "pin", root, name, "--reason", "base of a delta"])
        on.note(f"gc of {root} alone does not see what depends on {name}: {pin} keeps it")


def _advised(report: PackReport, storage: float | None) -> PackReport:
    """Return a report with when it is worth it, by what was just measured."""
    from ftckpt.delta.pack.report import advise

    if report.proof is None or not report.ratio or report.already_there:
        return report
    advice = advise(
        ratio=report.ratio,
        encode_rate=report.bytes_in / report.seconds["encode"],
        decode_rate=report.bytes_in / report.seconds["prove"],
        storage_write=storage or _ANY_STORAGE,
    )
    if storage is not None:
        return replace(report, advice=advice)
    return replace(report, break_even=advice.break_even or None)


@operation(
    examples=(
        (
            "ftckpt delta unpack deltas/step-1010 restored/step-1010",
            "in the format it was packed from",
        ),
        (
            "ftckpt delta unpack deltas/step-1010 out --base s3://b/run/step-1000",
            "the base has moved",
        ),
        ("ftckpt delta unpack deltas/step-1010 hf --to safetensors", "in another format"),
        (
            "ftckpt convert deltas/step-1010 hf --to safetensors --only model",
            "a part of it: convert and reshard read a delta like anything else",
        ),
    ),
    codes=dict(transferring.CODES)
    | {
        ExitCode.CORRUPT: "DELTA is damaged, a base is another, or the proof failed",
        ExitCode.NOT_FOUND: "DELTA or a base is not there",
    },
    everyday=("--to", "--base", "--dry-run"),
)
def delta_unpack(
    delta: DeltaSource,
    destination: transferring.Destination,
    *,
    to: Annotated[
        str, option("FORMAT", f"{', '.join(WRITTEN)}; without it what it was.", words=WRITTEN)
    ] = "",
    base: Bases = (),
    dry_run: transferring.DryRun = False,
    max_memory: transferring.Memory = "1GiB",
    division: Machines = ALONE,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
    **flags: Unpack[WritingFlags],
) -> TransferReport:
    """Write a delta as a full checkpoint, every tensor proven.

    The files come back as they were, byte for byte. With --to, or with options for another job, the
    state is laid out anew, and is the same bit for bit. DST becomes visible by one last act; a
    killed run goes on where it was.

    Raises:
        UsageError: it is not a delta.
        FtckptError: as `convert` does.
    """
    from ftckpt.formats.writers import format_and_writer
    from ftckpt.transfer.content import Content

    request = transferring.layout_request(flags, None, stores, on=on)
    if to:  # what cannot be written under that name is known before the source is opened
        format_and_writer(to, request.rules, destination)
    checkpoint = _require_delta(
        opened(delta, stores, on, bases=base),
        "ftckpt convert writes any checkpoint in another format",
    )
    name, means, original = _restoration(checkpoint, request, to, destination)
    on.report(original=original)
    if not original:
        on.note("the files are laid out anew; tensors and other state stay bit for bit")
    asked = cast("transferring.TransferFlags", {**flags, "dry_run": dry_run})
    session = Session("delta unpack", division, stores, on)
    content = Content.of(checkpoint)
    report = transferring.carry_out(
        session, checkpoint, content, name, request, destination, asked, means
    )
    if not isinstance(report, PartReport):  # which says nothing of the whole
        on.report(content=checkpoint.index.content())
    return report


def _restoration(
    delta: DeltaCheckpoint, request: LayoutRequest, to: str, destination: str
) -> tuple[str, Means, bool]:
    """Choose how a delta is restored: in its own files where nothing else is asked for.

    Returns:
        The format that is written, by what it is written and proven, and whether the files come
        back as they were.

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
        return name, means, True
    prover = DigestProof(delta.decoding.digests())
    means = Means(*format_and_writer(name, request.rules, destination), prover, SameObject)
    return name, means, False


class RestoreCost(NamedTuple):
    """What restoring a delta takes.

    Attributes:
        bytes_read: over the whole chain.
        blocks: that are decoded.
    """

    bytes_read: int
    blocks: int


@dataclass(frozen=True, kw_only=True)
class DeltaReport:
    """A delta's content, its chain, and what it costs.

    Attributes:
        step: of the delta.
        source_format: of what was packed.
        created: when it was packed.
        content: the digest of the content.
        base: how it knows its base; None of one that was packed whole.
        chain: the delta, its base, and so on, as far as they were found.
        broken: why the chain goes no further, or what the delta itself lacks; None where nothing
            is missing.
        followed: whether the chain was followed to its full checkpoint.
        ratio: bytes of what was packed over bytes stored; None where it cannot be told.
        components: what the delta holds, by component and kind; `objects` is what lay beside the
            tensors.
        methods: the same, by method.
        restore: what it takes to restore.
        rates: what was measured here; None where no advice was asked for.
        advice: whether deltas pay, by these rates; None where no advice was asked for.
        workers: with how many was measured.
    """

    step: int | None
    source_format: str
    created: str
    content: str
    base: BaseName | None
    chain: tuple[Link, ...]
    broken: Finding | None
    followed: bool = field(metadata=UNSAID)
    ratio: float | None
    components: Mapping[str, PackedShare]
    methods: Mapping[Method, PackedShare]
    restore: RestoreCost
    rates: DecodeRates | None = field(default=None, metadata=IF_ANY)
    advice: Advice | None = field(default=None, metadata=IF_ANY)
    workers: int = field(default=0, metadata=UNSAID)

    @property
    def code(self) -> ExitCode:
        """What a break of the chain causes."""
        return ExitCode.OK if self.broken is None else self.broken.code

    @property
    def message(self) -> str:
        """What breaks the chain, or ""."""
        return "" if self.broken is None else self.broken.message


@operation(
    examples=(
        (
            "ftckpt delta info deltas/step-1030",
            "the chain, where each base is, the cost of a restore",
        ),
        (
            "ftckpt delta info deltas/step-1030 --advise --storage-bw 2GB/s",
            "whether deltas pay there, and how many to put on a full checkpoint",
        ),
        (
            "ftckpt delta info deltas/step-1030 --base s3://b/run/step-1000",
            "where a base has moved",
        ),
    ),
    codes={
        ExitCode.OK: "the chain is whole, as far as can be told without reading tensors",
        ExitCode.CORRUPT: "an index is damaged, or a base holds other content",
        ExitCode.UNSAFE: "hostile or ambiguous content; nothing was executed",
        ExitCode.NOT_FOUND: "DELTA or a base of the chain is not there",
        ExitCode.UNAVAILABLE: "",
        ExitCode.DENIED: "",
        ExitCode.NO_RESOURCE: "decoding so long a chain needs more than --max-memory",
        ExitCode.UNSUPPORTED: "the chain is too long, or of another version",
    },
    everyday=("--base", "--advise", "--storage-rate"),
)
def delta_info(
    delta: Delta,
    *,
    base: Bases = (),
    advise: Annotated[bool, switch("--advise", "Measure rates, and say when deltas pay.")] = False,
    storage_bw: Annotated[amounts.Rate, option("RATE", "Write rate of the storage: 2GB/s.")] = "",
    jobs: Jobs = 0,
    max_memory: opening.Memory = "1GiB",
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> DeltaReport:
    """Show a delta's content, its bases, and the cost of a restore.

    Each checkpoint of the chain with its size and how it is known to be the right one; the ratio by
    component and by method; bytes that a restore reads and blocks that it decodes. Reads indexes
    and lists of files alone, but with --advise, which reads, decodes and encodes a sample.

    Returns:
        What is missing of the chain is part of it (`broken`).

    Raises:
        UsageError: it is not a delta, or a rate is given and no advice asked for.
        FtckptError: it cannot be opened, or the sample cannot be read.
    """
    from ftckpt.formats.delta.survey import survey

    if storage_bw and not advise:
        raise UsageError("--storage-bw is for the advice", hint="add --advise")
    checkpoint = _require_delta(
        opened(delta, stores, on, newest=True, bases=base), "ftckpt inspect shows any checkpoint"
    )
    index, found, workers = checkpoint.index, survey(checkpoint), jobs or limits.jobs()
    report = DeltaReport(
        step=index.step,
        source_format=index.source_format,
        created=index.created,
        content=index.content(),
        base=index.base,
        chain=found.links,
        broken=found.broken,
        followed=found.followed,
        ratio=found.links[0].ratio,
        components=found.components,
        methods=found.methods,
        restore=RestoreCost(found.read, found.blocks),
        workers=workers,
    )
    if found.broken is not None or not advise:
        return report
    rates, advice = _advice(checkpoint, found, storage_bw, workers)
    return replace(report, rates=rates, advice=advice)


def _advice(
    delta: DeltaCheckpoint, found: ChainSurvey, storage_bw: amounts.Rate, jobs: int
) -> tuple[DecodeRates, Advice]:
    from ftckpt.delta.pack.report import advise
    from ftckpt.formats.delta.rates import measure

    if not any(tensor.nbytes for tensor in delta.index.tensors):
        raise UsageError(f"{delta.source.url} has no tensors to measure with")
    written = amounts.rate(storage_bw)
    rates = measure(delta, jobs)
    advice = advise(
        ratio=found.links[0].ratio or 1.0,
        encode_rate=rates.encode,
        decode_rate=rates.decode,
        storage_write=written or rates.read,
    )
    return rates, advice
