"""From the options about failures to their rates.

What a plan was made from: remarks for its reader, numbers for JSON, measurements to fill in.

The options that `plan` and `plan sweep` share: what fails, what a save costs, what must hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from ftckpt.amounts import brief_duration
from ftckpt.errors import UsageError
from ftckpt.operations.definition import assumption, option
from ftckpt.planning import Counted, Failures, Remedy, combine, quantities, rates
from ftckpt.planning.presets import preset


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of a run, for whatever the options leave out; None for what was not.

    Attributes:
        source: what was measured.
        save: seconds that training waited, or at least waited, for a save.
        snapshot: seconds that it waited for a snapshot.
        flush: seconds that writing took in the background.
        nbytes: size of a checkpoint.
        detect: seconds until a failure was noticed.
        restart: seconds until training went on.
        step: seconds of a training step.
        failures: that were counted.
        exposed: whether their time is only that in which the job could fail, not the wall clock's.
        interval: seconds of work between two saves, as it is now.
        components: the counted failures by what failed; empty where the source does not say it.
        lemons: nodes that fail more often than chance explains: their failures, and those of a mean
            node.
        whole_recovery: whether `restart` was measured from the failure, detection included.
        dispersion: by how much the failures scatter more than independent ones would; >= 1.
    """

    source: str
    save: float | None = None
    snapshot: float | None = None
    flush: float | None = None
    nbytes: float | None = None
    detect: float | None = None
    restart: float | None = None
    step: float | None = None
    failures: quantities.ObservedFailures | None = None
    exposed: bool = False
    interval: float | None = None
    components: Mapping[str, int] = field(default_factory=dict)
    lemons: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    whole_recovery: bool = False
    dispersion: float = 1.0


@dataclass
class Notes:
    """Collected while options are read.

    Attributes:
        measured: of a run; empty where nothing was.
        remarks: sentences about what was taken from where.
        inputs: every number that the plan rests on, in seconds, bytes and fractions.
        remedies: further improvements to be planned.
    """

    measured: Measured = field(default_factory=lambda: Measured(source=""))
    remarks: list[str] = field(default_factory=list)
    inputs: dict[str, Any] = field(default_factory=dict)
    remedies: list[Remedy] = field(default_factory=list)


def positive(text: str, flag: str) -> float:
    """Return a duration above zero in seconds.

    Raises:
        UsageError: it is none.
    """
    seconds = quantities.duration(text, flag)
    if not seconds > 0:
        raise UsageError(f"{quantities.typed(flag, text)}: this must be above zero")
    return seconds


@dataclass(frozen=True, kw_only=True)
class FailureOptions:
    """What stops the job, and how often."""

    TITLE: ClassVar[str] = "Failures (RATE is 50000h, 9%/y, 2300FIT or 0.0065/node-day)"

    gpus: Annotated[str, option("N", "GPUs of the job: 16384 or 16k (k is 1024).")] = ""
    gpu_mtbf: Annotated[str, option("RATE", "Failures of one GPU.")] = ""
    gpus_per_node: Annotated[
        int, assumption("N", "GPUs per node, for rates of nodes and hosts.", min=1)
    ] = 8
    hosts: Annotated[str, assumption("N", "Hosts; by default GPUs / GPUs per node.")] = ""
    host_mtbf: Annotated[str, assumption("RATE", "Failures of one host.")] = ""
    switches: Annotated[str, assumption("N", "Network switches.")] = ""
    switch_mtbf: Annotated[str, assumption("RATE", "Failures of one switch.")] = ""
    nics: Annotated[str, assumption("N", "NICs; by default one a GPU.")] = ""
    nic_mtbf: Annotated[str, assumption("RATE", "Failures of one NIC.")] = ""
    psus: Annotated[str, assumption("N", "Power supplies; by default one a host.")] = ""
    psu_mtbf: Annotated[str, assumption("RATE", "Failures of one power supply.")] = ""
    hbm_mtbf: Annotated[
        str, assumption("RATE", "Failures of one GPU's memory, on top of --gpu-mtbf.")
    ] = ""
    component: Annotated[
        list[str] | None, option("NAME=N@RATE", "Any other part: cdu=64@20000h. Repeatable.")
    ] = None
    job_mtbf: Annotated[str, assumption("T", "Between failures of the job's own software.")] = ""
    mtbf: Annotated[str, option("T", "Time between failures of the whole job.")] = ""
    failures: Annotated[str, option("N/T", "Counted failures in a time: 419/54d.")] = ""
    preset: Annotated[str, option("NAME", "A published run: llama3, …; `list` shows them.")] = ""
    burn_in: Annotated[str, assumption("X", "Multiply the rate, for new machines: 1.3.")] = "1"


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """What a save and a failure cost."""

    TITLE: ClassVar[str] = "Costs"

    save: Annotated[str, option("T", "How long training waits for a save: 60s.")] = ""
    nbytes: Annotated[str, option("SIZE", "Size of a checkpoint: 5.7TB.", "--bytes")] = ""
    params: Annotated[str, option("N", "Parameters of the model: 405B or 405e9.")] = ""
    bytes_per_param: Annotated[
        str, assumption("X", "A number, or PRECISION-OPTIMIZER: see --preset list.")
    ] = "bf16-adamw"
    ranks: Annotated[str, assumption("N", "Ranks that write at once; by default the GPUs.")] = ""
    write_bw: Annotated[str, assumption("RATE", "Write rate of one rank: 5GB/s, 400Gb/s.")] = ""
    storage_bw: Annotated[str, option("RATE", "Write rate of the storage, all ranks: 80GB/s.")] = ""
    read_bw: Annotated[
        str, assumption("RATE", "Read rate of the storage, all ranks; adds the load.")
    ] = ""
    snapshot_bw: Annotated[
        str, assumption("RATE", "GPU to host memory of one rank; makes saves async.")
    ] = ""
    snapshot: Annotated[str, option("T", "Async: how long training waits for the snapshot.")] = ""
    flush: Annotated[str, option("T", "Async: how long writing takes in the background.")] = ""
    slowdown: Annotated[
        str, assumption("X", ("Async: how much slower training is meanwhile: 2%."))
    ] = "0%"
    tier: Annotated[
        list[str] | None,
        option(
            "KEY=V,...",
            "A place that saves go to: name=ram,cost=0.5s,restore=5s,covers=78%, or in place "
            "of covers, replicas=2,lost=3 (nodes at once). Repeatable, the fastest first.",
        ),
    ] = None
    detect: Annotated[str, option("T", "Time from a failure until a replacement is there.")] = ""
    restart: Annotated[
        str,
        option("T", "Time to start and load, until training goes on; with read-bw set, to start."),
    ] = ""
    notice: Annotated[str, assumption("T", "Spot: warning before a preemption: 120s.")] = ""
    preempt_mtbf: Annotated[str, assumption("T", "Spot: time between preemptions of the job.")] = ""
    notice_reliability: Annotated[
        str, assumption("X", "Spot: share of preemptions that are announced.")
    ] = "100%"
    silent_mtbf: Annotated[str, assumption("T", "Time between silent errors of the job.")] = ""
    verify_cost: Annotated[
        str, assumption("T", ("Checking for silent errors before each save."))
    ] = ""
    weights_between: Annotated[
        int, assumption("N", "Weights-only saves between two full ones.", min=0)
    ] = 0
    weights_save: Annotated[
        str, assumption("T", "Pause for one; else the weights' share of a save.")
    ] = ""
    rewarm: Annotated[
        str,
        assumption(
            "T", ("Work lost by a restart from weights alone, besides: 1h. Else none is made.")
        ),
    ] = ""
    step_time: Annotated[str, assumption("T", "One training step: 4.2s.")] = ""


@dataclass(frozen=True, kw_only=True)
class BoundOptions:
    """What must hold, and what is paid."""

    TITLE: ClassVar[str] = "Bounds, storage and money"

    max_loss: Annotated[str, option("T", "Lose no more work than this at a failure: 5m.")] = ""
    max_overhead: Annotated[str, assumption("X", "Spend no more on saving: 1%.")] = ""
    host_ram: Annotated[
        str, assumption("SIZE", ("Memory of a host for staging snapshots: 512GiB."))
    ] = ""
    buffers: Annotated[int, assumption("N", "Snapshots that are held at once.", min=1)] = 2
    detection_latency: Annotated[
        str, assumption("T", "How long a silent error stays unseen, on average.")
    ] = ""
    keep_last: Annotated[int, option("N", "Checkpoints that are kept.", min=1)] = 3
    keep_every: Annotated[int, option("N", "Keep every Nth for ever; 0 keeps none.", min=0)] = 0
    milestones: Annotated[int, assumption("N", "Others that are kept for ever.", min=0)] = 0
    run: Annotated[str, option("T", "Length of the run on the wall clock: 54d.")] = ""
    gpu_hour: Annotated[str, option("PRICE", "Price of a GPU-hour: 2.33 or 2.10EUR.")] = ""
    tb_month: Annotated[str, assumption("PRICE", "Price of a TB-month of storage.")] = ""


def read_gpus(options: FailureOptions) -> int | None:
    """Return the number of GPUs: as given, else the preset's.

    Raises:
        UsageError: a preset is a rate for each GPU, and nothing says how many there are.
    """
    if options.gpus:
        return quantities.count(options.gpus, "--gpus", kilo=1024)
    known = preset(options.preset).gpus if options.preset else None
    if options.preset and known is None:
        raise UsageError(
            f"--preset {options.preset} is a rate for each GPU", hint="say how many: --gpus 16k"
        )
    return known


def read_failures(
    options: FailureOptions, gpus: int | None, notes: Notes, *, detect: float
) -> Failures:
    """Return all that stops the job, added up.

    Args:
        options: as typed.
        gpus: of the job, where known.
        notes: told what was taken from where.
        detect: seconds in which nothing else can fail, after each failure that was counted on the
            wall clock.

    Raises:
        UsageError: an option cannot be understood, contradicts another, or nothing ever fails.
    """
    known = [*_parts(options, gpus)]
    counted = []
    whole = [name for name in ("mtbf", "failures", "preset") if getattr(options, name)]
    if len(whole) > 1:
        flags = " and ".join(f"--{name}" for name in whole)
        raise UsageError(f"{flags} each speak of the whole job", hint="give one of them")
    if whole and known:
        notes.remarks.append(f"--{whole[0]} speaks of the whole job; the other causes add to it")
    if options.mtbf:
        known.append(rates.Cause("job", 1 / positive(options.mtbf, "--mtbf")))
    if options.failures:
        told = quantities.observed(options.failures, "--failures")
        counted.append(Counted("counted", *told, detect=detect))
    if options.preset and gpus is not None:
        cause = _preset(options.preset, gpus, notes)
        counted += [cause] if isinstance(cause, Counted) else []
        known += [cause] if isinstance(cause, rates.Cause) else []
    seen = notes.measured.failures
    if not known and not counted and seen is not None:
        wall = not notes.measured.exposed
        counted += _seen(seen, notes, detect if wall else 0.0)
        notes.remarks.append(
            f"{seen.failures} interruptions in {brief_duration(seen.seconds)}"
            f"{'' if wall else ' in which the job could fail'}, counted in {notes.measured.source}"
        )
    if detect and any(cause.detect for cause in counted):
        notes.remarks.append(
            f"nothing else can fail in the {brief_duration(detect)} until a failure is noticed: "
            "this time is taken off the time in which failures were counted"
        )
    burn_in = quantities.factor(options.burn_in, "--set burn-in")
    notes.inputs |= {"gpus": gpus, "burn_in": burn_in, "counted": counted}
    return combine(known, counted, burn_in=burn_in)


# Below this share of all failures a component is not worth a line of its own.
_WORTH = 0.1


def _seen(seen: quantities.ObservedFailures, notes: Notes, detect: float) -> Iterator[Counted]:
    """Yield the counted failures by component, and note what fewer of them would bring."""
    parts, scatter = notes.measured.components, notes.measured.dispersion
    if scatter > 1:
        notes.remarks.append(
            f"failures come in clusters: their number scatters {scatter:.1f} times as much as that "
            f"of independent ones, so the limits are {math.sqrt(scatter):.1f} times as wide"
        )
    if not parts or set(parts) == {""}:
        yield Counted("counted", *seen, detect=detect, dispersion=scatter)
    else:
        for name, number in parts.items():
            yield Counted(name or "unknown", number, seen.seconds, detect, scatter)
            share = number / seen.failures
            if name and _WORTH <= share < 1:
                change = f"failures of {name} half as often"
                notes.remedies.append(Remedy(change, mtbf=1 / (1 - share / 2)))
    for node, (number, mean) in notes.measured.lemons.items():
        notes.remarks.append(
            f"{node} fails more often than chance explains: {number} of {seen.failures} failures, "
            f"where the mean of all nodes is {mean:.2g}"
        )
        better = seen.failures / max(1.0, seen.failures - number + mean)
        notes.remedies.append(Remedy(f"{node} replaced by a node like the others", mtbf=better))


def _preset(name: str, gpus: int, notes: Notes) -> Counted | rates.Cause:
    """Return the failures of a published run, scaled to the number of GPUs."""
    found = preset(name)
    notes.remarks.append(f"failures of {found.run}: {found.source}")
    if found.remark:
        notes.remarks.append(found.remark)
    if found.classes:
        most = sorted(found.classes.items(), key=lambda item: -item[1])[:5]
        total = sum(found.classes.values())
        causes = ", ".join(f"{cause} {100 * number / total:.0f} %" for cause, number in most)
        notes.remarks.append(f"its most frequent causes: {causes}")
    if found.failures is None or found.seconds is None or found.gpus is None:
        return rates.Cause(name, found.per_gpu * gpus)
    if gpus != found.gpus:
        notes.remarks.append(f"scaled from {found.gpus:,} to {gpus:,} GPUs in proportion")
    # This many failures would have taken this long on the cluster that is planned for.
    return Counted(name, found.failures, found.seconds * found.gpus / gpus)


def _parts(options: FailureOptions, gpus: int | None) -> Iterator[rates.Cause]:
    """Yield the causes that are parts, and the job's own software."""
    per_node = options.gpus_per_node
    hosts = None if gpus is None else -(-gpus // per_node)
    for name, flag, number, rate, default in (
        ("gpu", "--gpus", "", options.gpu_mtbf, gpus),
        ("hbm", "--gpus", "", options.hbm_mtbf, gpus),
        ("host", "--set hosts", options.hosts, options.host_mtbf, hosts),
        ("switch", "--set switches", options.switches, options.switch_mtbf, None),
        ("nic", "--set nics", options.nics, options.nic_mtbf, gpus),
        ("psu", "--set psus", options.psus, options.psu_mtbf, hosts),
    ):
        mtbf = "--gpu-mtbf" if name == "gpu" else f"--set {name}-mtbf"
        if number and not rate:
            raise UsageError(
                f"{flag} says how many there are, and nothing how often they fail",
                hint=quantities.typed(mtbf, "50000h"),
            )
        if not rate:
            continue
        many = quantities.count(number, flag, kilo=1024) if number else default
        if many is None:
            raise UsageError(
                f"{mtbf} is one's, and nothing says how many there are",
                hint=quantities.typed(flag, "1024"),
            )
        each = quantities.failure_rate(rate, mtbf, per_node=per_node)
        yield rates.Cause(name, each * many, many)
    for text in options.component or ():
        part = quantities.component(text, "--component", per_node=per_node)
        yield rates.Cause(part.name, part.rate * part.number, part.number)
    if options.job_mtbf:
        yield rates.Cause("software", 1 / positive(options.job_mtbf, "--set job-mtbf"))
