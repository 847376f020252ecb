"""From the options about costs to the model of the job, and to weights-only saves between two.

From the options of `plan` and `plan sweep` to the question that the core answers.
"""

from __future__ import annotations

import math
from typing import Any

from ftckpt.amounts import brief_duration, human_count
from ftckpt.errors import UsageError
from ftckpt.operations.definition import taken
from ftckpt.planning import (
    Failures,
    Latent,
    Model,
    Plain,
    Plan,
    PlanBounds,
    Question,
    Remedy,
    Silent,
    Spot,
    Tiered,
    quantities,
)
from ftckpt.planning.models import storage
from ftckpt.planning.models.spot import CopyTier, Preemption
from ftckpt.planning.models.storage import staging_bytes
from ftckpt.planning.models.tiers import survival
from ftckpt.planning.models.weights_alone import WeightsOnly, weights_only
from ftckpt.planning.state_size import bytes_per_parameter, state_parts

from .failures import (
    BoundOptions,
    CostOptions,
    FailureOptions,
    Notes,
    positive,
    read_failures,
    read_gpus,
)


def read_nbytes(costs: CostOptions, notes: Notes) -> float | None:
    """Return the size of a checkpoint in bytes, None where nothing says it.

    Raises:
        UsageError: an option cannot be understood, or two contradict each other.
    """
    if costs.nbytes and costs.params:
        raise UsageError("--bytes and --params both say how large a checkpoint is")
    if costs.nbytes:
        return quantities.size(costs.nbytes, "--bytes")
    if not costs.params:
        return notes.measured.nbytes
    params, recipe = quantities.count(costs.params, "--params"), costs.bytes_per_param
    if recipe.replace(".", "", 1).isdecimal():
        each = quantities.factor(recipe, "--set bytes-per-param")
        notes.remarks.append(f"{human_count(params)} parameters of {each:g} bytes")
    else:
        each = float(bytes_per_parameter(recipe))
        notes.remarks.append(f"{human_count(params)} parameters of {each:g} bytes ({recipe})")
    return float(storage.state_bytes(params, each))


def read_detect(costs: CostOptions, notes: Notes) -> float:
    """Return the seconds from a failure until it is noticed, 0 where nothing says it.

    Raises:
        UsageError: the option cannot be understood.
    """
    return _duration(costs.detect, "--detect", notes.measured.detect)


def read_model(
    costs: CostOptions,
    failures: Failures,
    notes: Notes,
    *,
    nbytes: float | None,
    ranks: int | None,
    nodes: int | None,
    latency: float | None = None,
    keep_last: int = 1,
) -> Model:
    """Return the model that fits what is known of the job.

    Args:
        costs: as typed.
        failures: what stops the job.
        notes: told what was taken from where.
        nbytes: size of a checkpoint.
        ranks: that write it.
        nodes: of the cluster.
        latency: mean seconds until a silent error is noticed.
        keep_last: number of kept copies.

    Raises:
        UsageError: an option cannot be understood, contradicts another, or one is missing.
    """
    detect = read_detect(costs, notes)
    restart = _restart(costs, notes, nbytes)
    common: dict[str, Any] = {"mtbf": failures.mtbf, "detect": detect}
    notes.inputs |= {"detect_s": detect, "restart_s": restart}
    slowdown = quantities.share(costs.slowdown, "--set slowdown")
    if costs.tier:
        _alone("tier", costs, "save", "snapshot", "snapshot_bw", "flush", "silent_mtbf", "notice")
        last = len(costs.tier) - 1
        tiers = tuple(
            _tier(text, last=place == last, nodes=nodes, restart=restart)
            for place, text in enumerate(costs.tier)
        )
        notes.inputs["tiers"] = tiers
        return Tiered(**common, tiers=tiers)
    save, flush = _save(costs, nbytes, ranks, notes)
    if flush and slowdown == 1:
        raise UsageError(
            "--set slowdown=100%: a flush for which training stands still is a blocking save",
            hint="give the whole time as --save",
        )
    common |= {"save": save, "restart": restart}
    notes.inputs |= {"save_s": save, "flush_s": flush, "slowdown": slowdown if flush else 0.0}
    if costs.silent_mtbf or costs.verify_cost:
        _alone("silent_mtbf", costs, "snapshot", "snapshot_bw", "flush", "preempt_mtbf")
        if not costs.silent_mtbf:
            raise UsageError(
                "--set verify-cost needs --set silent-mtbf: how often is there an error?"
            )
        silent_rate = 1 / positive(costs.silent_mtbf, "--set silent-mtbf")
        if latency is not None and not costs.verify_cost:
            notes.inputs |= {"silent_per_s": silent_rate, "latency_s": latency}
            return Latent(**common, silent_rate=silent_rate, latency=latency, keep_last=keep_last)
        verify = _duration(costs.verify_cost, "--set verify-cost", None)
        notes.inputs |= {"silent_per_s": silent_rate, "verify_s": verify}
        return Silent(**common, verify=verify, silent_rate=silent_rate)
    common |= {"flush": flush, "slowdown": slowdown if flush else 0.0}
    if not costs.preempt_mtbf and not costs.notice:
        return Plain(**common)
    if not costs.preempt_mtbf:
        raise UsageError("--set notice needs --set preempt-mtbf: how often is there a preemption?")
    preemption = Preemption(
        rate=1 / positive(costs.preempt_mtbf, "--set preempt-mtbf"),
        notice=_duration(costs.notice, "--set notice", None),
        reliability=quantities.share(costs.notice_reliability, "--set notice-reliability"),
    )
    notes.inputs["preemption"] = preemption
    return Spot(**common, preemption=preemption)


def read_pause(costs: CostOptions, model: Model) -> float:
    """Return the seconds that one of them stops the training; 0 where none are made.

    Raises:
        UsageError: an option cannot be understood, contradicts another, or one is missing.
    """
    if not costs.weights_between:
        for flag, text in (
            (("--set weights-save"), costs.weights_save),
            ("--set rewarm", costs.rewarm),
        ):
            if text:
                raise UsageError(f"{flag} needs --set weights-between: how many are there?")
        return 0.0
    if isinstance(model, Tiered):
        raise UsageError("--tier and --set weights-between are not planned for together")
    if costs.weights_save:
        return quantities.duration(costs.weights_save, "--set weights-save")
    return model.stall * _weights_share(costs)


def read_weights(costs: CostOptions, plan: Plan, pause: float) -> WeightsOnly | None:
    """Return what they are worth at the interval of a plan; None where none are made."""
    if not costs.weights_between:
        return None
    model = plan.question.model
    return weights_only(
        plan.interval.chosen_s,
        model.rollback_mtbf,
        costs.weights_between,
        pause,
        quantities.duration(costs.rewarm, "--set rewarm") if costs.rewarm else None,
        model.outcome,
        full=model.stall,
    )


def _weights_share(costs: CostOptions) -> float:
    """Return the weights' share of the bytes of a checkpoint."""
    recipe = costs.bytes_per_param
    if recipe.replace(".", "", 1).isdecimal():
        raise UsageError(
            "nothing says what a weights-only save costs",
            hint="--set weights-save=8s, or --set bytes-per-param=bf16-adamw",
        )
    parts = state_parts(recipe)
    return parts[0][1] / sum(size for _, size in parts)


def _restart(costs: CostOptions, notes: Notes, nbytes: float | None) -> float:
    """Return the seconds from the replacement until training goes on: start, and load.

    A load takes the bytes of a checkpoint over the bandwidth at which all ranks together read it.
    """
    measured = notes.measured
    known = measured.restart
    if known is not None and measured.whole_recovery and costs.detect:
        known = max(0.0, known - quantities.duration(costs.detect, "--detect"))
    restart = _duration(costs.restart, "--restart", known)
    if not costs.read_bw:
        return restart
    if known is not None and not costs.restart:
        raise UsageError(
            f"{measured.source} says how long restarts take, with their "
            "loads; --set read-bw would add "
            "a second one",
            hint="give --restart, the time to start without the load, too",
        )
    if nbytes is None:
        raise UsageError("--set read-bw needs the size of a checkpoint", hint="--params 405B")
    pace = quantities.bandwidth(costs.read_bw, "--set read-bw")
    load = float(storage.transfer_seconds(nbytes, pace))
    notes.remarks.append(
        f"a recovery is detection, {brief_duration(restart)} to start and {brief_duration(load)} "
        "to load"
    )
    notes.inputs |= {"start_s": restart, "load_s": load}
    notes.remedies.append(Remedy("reading twice as fast", sooner=load / 2))
    return restart + load


def _save(
    costs: CostOptions, nbytes: float | None, ranks: int | None, notes: Notes
) -> tuple[float, float]:
    """Return the seconds that training stands still for a save, and those of its flush."""
    measured = notes.measured
    in_background = bool(costs.snapshot or costs.snapshot_bw or costs.flush)
    if costs.save and in_background:
        raise UsageError(
            "--save is a blocking save; --snapshot and --flush are one in the background",
            hint="give --save 60s, or --snapshot 2s --flush 60s",
        )
    if costs.save:
        return quantities.duration(costs.save, "--save"), 0.0
    if not in_background and not costs.write_bw and not costs.storage_bw:
        if measured.snapshot is not None:
            notes.remarks.append(f"snapshot and flush as in {measured.source}")
            return measured.snapshot, measured.flush or 0.0
        if measured.save is not None:
            notes.remarks.append(f"a save takes as long as in {measured.source}")
            return measured.save, 0.0
    if costs.flush:
        written = quantities.duration(costs.flush, "--flush")
    else:
        written = _written(costs, nbytes, ranks, notes)
    if not in_background:
        return written, 0.0
    if costs.snapshot:
        return quantities.duration(costs.snapshot, "--snapshot"), written
    if not costs.snapshot_bw:
        raise UsageError(
            "--flush needs the snapshot before it",
            hint=("--snapshot 2s, or --set snapshot-bw=20GB/s"),
        )
    if nbytes is None or ranks is None:
        raise UsageError(
            "--set snapshot-bw needs the size of a checkpoint and the ranks that hold it",
            hint="--params 405B (or --bytes 5.7TB) and --set ranks=16384",
        )
    return nbytes / ranks / quantities.bandwidth(costs.snapshot_bw, "--set snapshot-bw"), written


def _written(costs: CostOptions, nbytes: float | None, ranks: int | None, notes: Notes) -> float:
    """Return the seconds in which all ranks together write a checkpoint."""
    if not costs.write_bw and not costs.storage_bw:
        raise UsageError(
            "nothing says what a save costs",
            hint="--save 60s, --snapshot 2s --flush 60s, or --params 405B --storage-bw 80GB/s",
        )
    if nbytes is None:
        raise UsageError("a bandwidth needs the size of a checkpoint", hint="--params 405B")
    total = ceiling = math.inf
    if costs.storage_bw:
        total = ceiling = quantities.bandwidth(costs.storage_bw, "--storage-bw")
    if costs.write_bw:
        if ranks is None:
            raise UsageError("--set write-bw is one rank's", hint="say how many: --set ranks=2048")
        each = quantities.bandwidth(costs.write_bw, "--set write-bw")
        total = float(storage.bandwidth(ranks, each, ceiling))
        slowest = "the storage" if total == ceiling else f"{ranks:,} ranks"
        notes.remarks.append(f"{slowest} set the pace of writing: {total / 1e9:.4g} GB/s in all")
    return float(storage.transfer_seconds(nbytes, total))


_TIER_KEYS = frozenset({"name", "cost", "restore", "covers", "replicas", "lost"})


def _tier(text: str, *, last: bool, nodes: int | None, restart: float) -> CopyTier:
    """Return the tier of `name=ram,cost=0.5s,restore=5s,covers=78%`."""
    form = "name=ram,cost=0.5s,restore=5s,covers=78%"
    values = dict(part.partition("=")[::2] for part in text.split(","))
    if not {"name", "cost"} <= values.keys() <= _TIER_KEYS or not all(values.values()):
        raise UsageError(f"--tier {text}: this is not a tier", hint=f"write {form}")
    flag = f"--tier {values['name']}:"
    if "covers" in values:
        covers = quantities.share(values["covers"], f"{flag} covers")
    elif "replicas" in values:
        if nodes is None:
            raise UsageError(f"{flag} replicas need the number of nodes", hint="--gpus 16384")
        copies = quantities.count(values["replicas"], f"{flag} replicas")
        lost = quantities.count(values.get("lost", "2"), f"{flag} lost")
        covers = survival(nodes - nodes % copies, copies, lost)
    elif last:
        covers = 1.0
    else:
        raise UsageError(f"{flag} which failures does it survive?", hint=f"write {form}")
    restore = _duration(values.get("restore", ""), f"{flag} restore", restart)
    cost = quantities.duration(values["cost"], f"{flag} cost")
    return CopyTier(values["name"], cost, restore, covers)


def _duration(text: str, flag: str, measured: float | None) -> float:
    return quantities.duration(text, flag) if text else measured or 0.0


def _alone(name: str, costs: CostOptions, *others: str) -> None:
    """Refuse options that the model of an option does not know."""
    for other in others:
        if getattr(costs, other):
            assumed = {one.name for one in taken(CostOptions) if one.opt.assumed}
            flags = (
                f"--{'set ' * (one in assumed)}{one.replace('_', '-')}" for one in (name, other)
            )
            raise UsageError(f"{' and '.join(flags)} are not planned for together")


def read_question(
    failing: FailureOptions, costs: CostOptions, bounds: BoundOptions, notes: Notes
) -> Question:
    """Read all options; `notes` is told what was taken from where.

    Raises:
        UsageError: an option cannot be understood, contradicts another, or one is missing.
    """
    gpus = read_gpus(failing)
    failures = read_failures(failing, gpus, notes, detect=read_detect(costs, notes))
    nbytes = read_nbytes(costs, notes)
    ranks = quantities.count(costs.ranks, "--set ranks", kilo=1024) if costs.ranks else gpus
    nodes = None if gpus is None else -(-gpus // failing.gpus_per_node)
    late = bounds.detection_latency
    model = read_model(
        costs,
        failures,
        notes,
        nbytes=nbytes,
        ranks=ranks,
        nodes=nodes,
        latency=positive(late, "--set detection-latency") if late else None,
        keep_last=bounds.keep_last,
    )
    measured_step = notes.measured.step
    question = Question(
        model=model,
        failures=failures,
        step=positive(costs.step_time, "--set step-time") if costs.step_time else measured_step,
        limits=_limits(bounds, costs, nbytes, min(failing.gpus_per_node, ranks or 0), ranks),
        nbytes=nbytes,
        gpus=gpus,
        run=positive(bounds.run, "--run") if bounds.run else None,
        keep_every=bounds.keep_every,
        milestones=bounds.milestones,
        gpu_hour=_price(bounds.gpu_hour, "--gpu-hour"),
        tb_month=_price(bounds.tb_month, "--set tb-month"),
        remedies=tuple(notes.remedies),
    )
    if bounds.gpu_hour and gpus is None:
        raise UsageError("--gpu-hour needs the number of GPUs", hint="--gpus 16384")
    notes.inputs |= {
        "ranks": ranks,
        "bytes": nbytes,
        "step_s": question.step,
        "run_s": question.run,
        "keep_last": bounds.keep_last,
        "keep_every": bounds.keep_every,
        "milestones": bounds.milestones,
        "gpu_hour": question.gpu_hour,
        "tb_month": question.tb_month,
        "currency": currency(bounds),
    }
    return question


def currency(bounds: BoundOptions) -> str:
    """Return the currency of the prices.

    Raises:
        UsageError: they are in two.
    """
    given = ((bounds.gpu_hour, "--gpu-hour"), (bounds.tb_month, "--set tb-month"))
    found = {quantities.money(text, flag).currency for text, flag in given if text}
    if len(found) > 1:
        raise UsageError(f"the prices are in {' and '.join(sorted(found))}")
    return found.pop() if found else "USD"


def _limits(
    bounds: BoundOptions, costs: CostOptions, nbytes: float | None, together: int, ranks: int | None
) -> PlanBounds:
    """Return what must hold; `together` is how many ranks share a host."""
    staged = None
    if nbytes is not None and ranks is not None:
        staged = float(staging_bytes(nbytes, ranks, bounds.buffers)) * together
    if bounds.host_ram and staged is None:
        raise UsageError(
            "--set host-ram needs the size of a checkpoint and the ranks that hold it",
            hint="--params 405B (or --bytes 5.7TB) and --set ranks=16384",
        )
    overhead, latency = bounds.max_overhead, bounds.detection_latency
    return PlanBounds(
        max_loss=positive(bounds.max_loss, "--max-loss") if bounds.max_loss else None,
        max_overhead=quantities.share(overhead, "--set max-overhead") if overhead else None,
        host_ram=quantities.size(bounds.host_ram, "--set host-ram") if bounds.host_ram else None,
        staged=staged,
        keep_last=bounds.keep_last,
        detection_latency=positive(latency, "--set detection-latency") if latency else None,
        storage_bw=(
            quantities.bandwidth(costs.storage_bw, "--storage-bw") if costs.storage_bw else None
        ),
    )


def _price(text: str, flag: str) -> float | None:
    return quantities.money(text, flag).amount if text else None
