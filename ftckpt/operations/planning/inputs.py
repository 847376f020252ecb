"""From the options of `plan` and `plan sweep` to the question that the core answers."""

from __future__ import annotations

from ftckpt.errors import UsageError
from ftckpt.planning import PlanBounds, Question, quantities
from ftckpt.planning.models.storage import staging_bytes

from .costs import read_detect, read_model, read_nbytes
from .failures import read_failures, read_gpus
from .notes import Notes, positive
from .options import BoundOptions, CostOptions, FailureOptions


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
    ranks = quantities.count(costs.ranks, "--ranks", kilo=1024) if costs.ranks else gpus
    nodes = None if gpus is None else -(-gpus // failing.gpus_per_node)
    late = bounds.detection_latency
    model = read_model(
        costs,
        failures,
        notes,
        nbytes=nbytes,
        ranks=ranks,
        nodes=nodes,
        latency=positive(late, "--detection-latency") if late else None,
        keep_last=bounds.keep_last,
    )
    measured_step = notes.measured.step
    question = Question(
        model=model,
        failures=failures,
        step=positive(costs.step_time, "--step-time") if costs.step_time else measured_step,
        limits=_limits(bounds, costs, nbytes, min(failing.gpus_per_node, ranks or 0), ranks),
        nbytes=nbytes,
        gpus=gpus,
        run=positive(bounds.run, "--run") if bounds.run else None,
        keep_every=bounds.keep_every,
        milestones=bounds.milestones,
        gpu_hour=_price(bounds.gpu_hour, "--gpu-hour"),
        tb_month=_price(bounds.tb_month, "--tb-month"),
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
    given = ((bounds.gpu_hour, "--gpu-hour"), (bounds.tb_month, "--tb-month"))
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
            "--host-ram needs the size of a checkpoint and the ranks that hold it",
            hint="--params 405B (or --bytes 5.7TB) and --ranks 16384",
        )
    overhead, latency = bounds.max_overhead, bounds.detection_latency
    return PlanBounds(
        max_loss=positive(bounds.max_loss, "--max-loss") if bounds.max_loss else None,
        max_overhead=quantities.share(overhead, "--max-overhead") if overhead else None,
        host_ram=quantities.size(bounds.host_ram, "--host-ram") if bounds.host_ram else None,
        staged=staged,
        keep_last=bounds.keep_last,
        detection_latency=positive(latency, "--detection-latency") if latency else None,
        storage_bw=(
            quantities.bandwidth(costs.storage_bw, "--storage-bw") if costs.storage_bw else None
        ),
    )


def _price(text: str, flag: str) -> float | None:
    return quantities.money(text, flag).amount if text else None
