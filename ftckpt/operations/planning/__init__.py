"""How often to save, what that costs, and what to improve first: `plan` and `plan sweep`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

from ftckpt.errors import ExitCode, UsageError
from ftckpt.observer import SILENT, Observer
from ftckpt.operations.definition import assumption, operation, option, switch
from ftckpt.operations.opening import STORES, chosen
from ftckpt.planning import IntervalRule, Plain, Plan, Tiered, answer, around, solve
from ftckpt.reports import UNSAID, document
from ftckpt.storage import StoreOptions

from .axes import AXES, Axis, read_axis
from .costs import currency, read_pause, read_question, read_weights
from .failures import BoundOptions, CostOptions, FailureOptions, Notes, positive
from .measured import measure, read_ageing, read_law

if TYPE_CHECKING:
    from ftckpt.planning import Model
    from ftckpt.planning.models.weights_alone import WeightsOnly
    from ftckpt.planning.models.young_daly import Outcome
    from ftckpt.planning.presets import Preset
    from ftckpt.planning.question import Constraint
    from ftckpt.planning.simulation import Agreement, Simulated


class PlannedTier(NamedTuple):
    """A place that saves go to.

    Attributes:
        name: of it.
        used: whether saving there pays.
        interval_s: work between two saves there; None where it is not used.
        cost_s: of a save.
        restore_s: of a restart from it.
        covers: the share of failures that it survives.
    """

    name: str
    used: bool
    interval_s: Any
    cost_s: float
    restore_s: float
    covers: float


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """How often to save: all times in seconds, all shares as fractions, full precision.

    Attributes:
        plan: the answer itself.
        notes: what it was made from.
        currency: of the prices.
        between: what weights-only saves are worth.
        simulated: the simulation of the advised interval, then of others around it.
    """

    SAID = (
        "inputs", "remarks", "rates", "interval", "goodput", "waste_first_order", "rules", "tiers",
        "constraints", "improvements", "storage", "money", "weights", "simulation",
    )  # fmt: skip

    plan: Plan = field(metadata=UNSAID)
    notes: Notes = field(metadata=UNSAID)
    currency: str = field(metadata=UNSAID)
    between: WeightsOnly | None = field(default=None, metadata=UNSAID)
    simulated: Sequence[Simulated] = field(default=(), metadata=UNSAID)

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Every number that the plan rests on."""
        return self.notes.inputs

    @property
    def remarks(self) -> Sequence[str]:
        """What was taken from where."""
        return self.notes.remarks

    @property
    def rates(self) -> Mapping[str, Any]:
        """How often the job fails."""
        failures, limits = self.plan.question.failures, None
        if failures.confidence is not None:
            low, high = failures.mtbf_limits
            limits = {"confidence": failures.confidence, "low_mtbf_s": low, "high_mtbf_s": high}
        return {
            "total_per_s": failures.rates.per_second,
            "mtbf_s": failures.mtbf,
            "share": failures.rates.share,
            "ci": limits,
        }

    @property
    def interval(self) -> Any:
        """Useful work between two saves."""
        return self.plan.interval

    @property
    def goodput(self) -> Mapping[str, Any]:
        """Where the wall time goes."""
        limits, predicted = self.plan.goodput_limits, self.plan.predicted
        return split(self.plan.outcome) | {"ci": limits, "predicted": predicted}

    @property
    def waste_first_order(self) -> float | None:
        """What Young's rule predicts to be lost."""
        young = next((f for f in self.plan.forecasts if f.rule == IntervalRule.YOUNG), None)
        return None if young is None else 1 - young.predicted

    @property
    def rules(self) -> Any:
        """The rules beside each other."""
        return self.plan.forecasts

    @property
    def tiers(self) -> list[PlannedTier]:
        """Which save goes where."""
        model = self.plan.question.model
        if not isinstance(model, Tiered):
            return []
        gaps = {t.name: model.pattern.gap(place) for place, t in enumerate(model.pattern.tiers)}
        return [
            PlannedTier(
                one.name, one.name in gaps, gaps.get(one.name), one.cost, one.restart, one.covers
            )
            for one in model.tiers
        ]

    @property
    def constraints(self) -> Sequence[Constraint]:
        """What must hold, and whether it does."""
        return self.plan.constraints

    @property
    def improvements(self) -> Any:
        """What to improve first."""
        return self.plan.improvements

    @property
    def storage(self) -> Any:
        """What is kept, and written."""
        return self.plan.upkeep

    @property
    def money(self) -> Any:
        """What it costs."""
        return self.plan.money

    @property
    def weights(self) -> Mapping[str, Any] | None:
        """What weights-only saves are worth."""
        found = self.between
        return None if found is None else {**asdict(found), "worth": found.worth}

    @property
    def simulation(self) -> Mapping[str, Any] | None:
        """What the simulation says of the advised interval."""
        if not self.simulated:
            return None
        from ftckpt.planning.simulation import agreement

        found = self.simulated[0]
        return _simulation(found, agreement(float(self.plan.outcome.useful), found))


@dataclass(frozen=True, kw_only=True)
class PresetList:
    """Published failure rates, and the bytes of state of a parameter.

    Attributes:
        presets: with their sources.
        bytes_per_param: of each precision and optimizer.
    """

    presets: Sequence[Preset]
    bytes_per_param: Mapping[str, Mapping[str, int]]


def split(outcome: Outcome) -> dict[str, Any]:
    """Return where the wall time goes, in fractions of it."""
    return {
        "model": outcome.model,
        "value": outcome.useful,
        "save": outcome.save,
        "lost": outcome.lost,
        "detection": outcome.detection,
        "restart": outcome.restart,
        "detect_restart": outcome.detection + outcome.restart,
        "waiting": outcome.waiting,
    }


def _simulation(found: Simulated, verdict: Agreement) -> dict[str, Any]:
    return {
        "interval_s": found.outcome.interval,
        "law": found.law,
        "runs": found.runs,
        "failures": found.failures,
        "segments": found.segments,
        "unreached": found.unreached,
        "mean": found.mean,
        "se": found.error,
        "spread": found.spread,
        "p10": found.p10,
        "p90": found.p90,
        "split": split(found.outcome),
        "closed": verdict.closed,
        "z": verdict.z,
        "agrees": verdict.agrees,
    }


_FAILING, _COSTS, _BOUNDS = FailureOptions(), CostOptions(), BoundOptions()


@operation(
    examples=(
        (
            "ftckpt plan --gpus 16384 --gpu-mtbf 50000h --save 60s --restart 8m --detect 2m",
            "the interval, why, how sure, and what to improve first",
        ),
        (
            "ftckpt plan --preset llama3 --params 405B --storage-bw 2TB/s --set step-time=4.2s "
            "--gpu-hour 2.33",
            "failures of a published run; the save from size and bandwidth; in steps, with money",
        ),
        (
            (
                "ftckpt plan --failures 419/54d --snapshot 1.5s --flush 40s "
                "--set slowdown=2% --simulate"
            ),
            "asynchronous saves, the error bars of a count, checked by simulation",
        ),
        (
            "ftckpt plan --mtbf 3h --tier name=ram,cost=1s,restore=10s,covers=80% "
            "--tier name=shared,cost=60s,restore=5m",
            "two tiers, each saved to at its own pace",
        ),
        (
            "ftckpt plan --from /ckpt/run7 --mtbf 3.1h",
            "size, pace and cost as a root shows them",
        ),
        (
            "ftckpt plan --from-log run7.jsonl --plot waste.svg",
            "all from the run's log; a picture",
        ),
        (
            "ftckpt plan --from-log slurm-42.out --from-log sacct.txt --params 405B --storage-bw"
            " 2TB/s --set read-bw=4TB/s --restart 3m",
            "failures by component from a run's logs; save and load from the size",
        ),
        (
            "ftckpt plan --preset list",
            "published failure rates with their sources; what is saved",
        ),
    ),
    codes={
        ExitCode.OK: "planned; constraints that do not hold are listed, and false in JSON",
        ExitCode.USAGE: "an option without its unit, a contradiction, or a job that cannot"
        " progress",
        ExitCode.UNSAFE: "the root of --from is ambiguous or holds hostile names",
        ExitCode.NOT_FOUND: "the root or log does not exist",
        ExitCode.UNAVAILABLE: "",
        ExitCode.REFUSED: "a directory, or a file that is not the picture's, stands in the way",
        ExitCode.DENIED: "",
        ExitCode.NO_RESOURCE: "",
        ExitCode.UNSUPPORTED: "a picture without matplotlib",
    },
    everyday=(
        "--gpus",
        "--gpu-mtbf",
        "--mtbf",
        "--save",
        "--params",
        "--storage-bw",
        "--restart",
        "--from-log",
        "--from",
    ),
)
def plan(
    failing: FailureOptions = _FAILING,
    costs: CostOptions = _COSTS,
    bounds: BoundOptions = _BOUNDS,
    *,
    model: Annotated[
        IntervalRule | str, option("", "The formula of the interval and of the predicted goodput.")
    ] = IntervalRule.EXACT,
    interval: Annotated[
        str, option("T", "Use this interval between saves, not the best: 20m.")
    ] = "",
    from_: Annotated[
        str, option("ROOT", "Measure size, pace and save time of a root.", "--from")
    ] = "",
    from_log: Annotated[
        Sequence[str], option("FILE", "Measure costs and failures in a run's log. Repeatable.")
    ] = (),
    timezone: Annotated[str, option("ZONE", "Zone of a log's times without one: +02:00.")] = "UTC",
    simulate: Annotated[
        bool, switch("--simulate", "Check the answer by an independent simulation.")
    ] = False,
    law: Annotated[
        str, assumption("LAW", "Simulated failures: weibull:0.7, lognormal:2, trace:FILE.")
    ] = "exponential",
    ageing: Annotated[
        Sequence[str],
        assumption(
            "NAME=K", "Simulated parts age, new at first, each renewed alone: gpu=0.7. Repeatable."
        ),
    ] = (),
    runs: Annotated[int, option("N", "Runs to simulate.", min=2)] = 100,
    failures_per_run: Annotated[int, assumption("N", "Failures in each of them.", min=1)] = 1000,
    seed: Annotated[int, assumption("N", "Seed of the simulation.", min=0)] = 0,
    beside: Sequence[float] = (),
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> PlanReport:
    """Compute how often to save, what it costs, and what to improve.

    The answer is exact for exponential failures: expected goodput, not a sum of first-order losses.
    Every quantity needs its unit: s, m, h, d; GB, GiB, TB; GB/s, Gb/s. Error bars of failures that
    were counted are carried through to the interval.

    Returns:
        The plan; of the preset `list` a `PresetList`. `beside` are multiples of the interval that
        are simulated too.

    Raises:
        UsageError: an option cannot be understood, contradicts another, or one is missing.
        NotFoundError: the root or a log is not there.
    """
    if failing.preset == "list":
        return cast(PlanReport, _presets())
    if law != "exponential" and not simulate:
        raise UsageError(f"--set law={law} is of the simulation", hint="add --simulate")
    if ageing:
        _require_alone(law, failing, costs, simulate=simulate)
    notes = measure(from_, from_log, timezone, failing, costs, stores, on)
    question = replace(
        read_question(failing, costs, bounds, notes),
        rule=chosen(IntervalRule, model, "--model"),
        interval=positive(interval, "--interval") if interval else None,
    )
    pause = read_pause(costs, question.model)
    made = answer(replace(question, pauses=costs.weights_between * pause))
    report = PlanReport(
        plan=made, notes=notes, currency=currency(bounds),
        between=read_weights(costs, made, pause),
    )  # fmt: skip
    if not simulate:
        return report
    on.report(**document(report))  # known, should the simulation fail
    drawn = (law, ageing), (runs, failures_per_run, seed)
    return replace(report, simulated=_simulated(made, *drawn, beside, on))


def _presets() -> PresetList:
    from ftckpt.planning.presets import PRESETS
    from ftckpt.planning.state_size import OPTIMIZERS, PRECISIONS

    sizes = {
        "precisions": {name: sum(size for _, size in parts) for name, parts in PRECISIONS.items()},
        "optimizers": {name: sum(size for _, size in parts) for name, parts in OPTIMIZERS.items()},
    }
    return PresetList(presets=list(PRESETS.values()), bytes_per_param=sizes)


def _require_alone(
    law: str, failing: FailureOptions, costs: CostOptions, *, simulate: bool
) -> None:
    """Refuse what contradicts parts that age.

    Raises:
        UsageError: one of them.
    """
    if not simulate:
        raise UsageError("--set ageing is of the simulation", hint="add --simulate")
    if law != "exponential":
        raise UsageError(
            (f"--set ageing and --set law={law} both say how failures come"), hint="give one"
        )
    if failing.burn_in != "1":
        raise UsageError("--set ageing and --set burn-in both make new parts fail more often")
    if costs.preempt_mtbf:
        raise UsageError("--set ageing and --set preempt-mtbf are not simulated together")


def _simulated(
    plan: Plan,
    failing: tuple[str, Sequence[str]],
    size: tuple[int, int, int],
    beside: Sequence[float],
    on: Observer,
) -> list[Simulated]:
    """Simulate the interval that is advised, and others beside it."""
    from ftckpt.planning.trial import simulated

    model, advised = plan.question.model, plan.interval.chosen_s
    law, ageing = failing
    failures_of = plan.question.failures
    drawn = read_law(law, failures_of.mtbf)
    if ageing:
        drawn = read_ageing(ageing, failures_of.rates.causes)
    runs, failures, seed = size

    def at(interval: float, seed: int) -> Simulated:
        made = simulated(
            model,
            interval + plan.question.pauses,
            drawn,
            runs=runs,
            failures=failures,
            seed=seed,
            counter=on.counter,
        )
        return made.with_pauses(interval, plan.question.pauses)

    # Each point has random numbers of its own: with shared ones all would err to one side.
    others = around(advised, model.least_interval, beside) if beside else []
    return [at(advised, seed), *(at(one, seed + place) for place, one in enumerate(others, 1))]


class SweptAxis(NamedTuple):
    """A range of one input.

    Attributes:
        name: of the input.
        unit: of its values; "" for counts.
        values: ascending.
    """

    name: str
    unit: str
    values: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """A plan of each point of one range or two.

    Attributes:
        axes: the ranges.
        rows: the plans, the first range fastest.
        ranges: the ranges with all that a picture says of them.
        grid: the ranges with more points, and their rows, where a picture of two wants them.
    """

    axes: Sequence[SweptAxis]
    rows: Sequence[Mapping[str, Any]]
    ranges: Sequence[Axis] = field(metadata=UNSAID)
    grid: tuple[Sequence[Axis], Sequence[Mapping[str, Any]]] = field(
        default=((), ()), metadata=UNSAID
    )


@operation(
    examples=(
        (
            "ftckpt plan sweep --over gpus=1k..128k --gpu-mtbf 50000h --save 60s",
            "interval and goodput against the size of the cluster",
        ),
        (
            "ftckpt plan sweep --over save=1s..10m --mtbf 3h --plot save.svg",
            "what faster saves bring, as a picture with its numbers",
        ),
        (
            "ftckpt plan sweep --over mtbf=30m..2d --over save=1s..10m --plot heat.png",
            "a heat map of two inputs",
        ),
    ),
    codes={
        ExitCode.OK: "planned; points that cannot progress say so in their row",
        ExitCode.USAGE: "an option without its unit, or a range that is none",
        ExitCode.REFUSED: "a directory, or a file that is not the picture's, stands in the way",
        ExitCode.DENIED: "",
        ExitCode.NO_RESOURCE: "",
        ExitCode.UNSUPPORTED: "a picture without matplotlib",
    },
    everyday=("--over", "--gpu-mtbf", "--mtbf", "--save", "--restart", "--points", "--plot"),
)
def plan_sweep(
    failing: FailureOptions = _FAILING,
    costs: CostOptions = _COSTS,
    bounds: BoundOptions = _BOUNDS,
    *,
    over: Annotated[Sequence[str], option("NAME=LOW..HIGH", f"One or two of {', '.join(AXES)}.")],
    number: Annotated[
        int, option("N", "Points of a range; 0: doublings, or 13.", "--points", min=0)
    ] = 0,
    compared: bool = False,
    fine: int = 0,
    on: Observer = SILENT,
) -> SweepReport:
    """Plan over a range of cluster sizes, save times or failure rates.

    Each point is planned by itself from all options, so that what depends on the swept input (the
    number of hosts, the time to write a checkpoint) follows it. Points are spaced evenly on a
    logarithmic scale.

    Returns:
        The rows; with `compared`, what the same writes would give in the background, too. `fine` is
        the number of points a side of a further grid of two ranges.

    Raises:
        UsageError: an option cannot be understood, or a range is none.
    """
    if costs.weights_between:
        raise UsageError(
            ("--set weights-between is of one plan"), hint="ftckpt plan, without a sweep"
        )
    if len(over) > 2:
        raise UsageError("a sweep has one or two ranges", hint="--over gpus=1k..128k")
    axes = [read_axis(text, number) for text in over]
    if len({axis.name for axis in axes}) < len(axes):
        raise UsageError(f"--over {axes[0].name} is given twice")
    options = {type(group): group for group in (failing, costs, bounds)}
    report = SweepReport(
        axes=[SweptAxis(one.name, one.unit, one.values) for one in axes],
        rows=_swept(options, axes, compared=compared), ranges=axes,
    )  # fmt: skip
    if not fine or len(axes) < 2:
        return report
    finer = [read_axis(text, fine) for text in over]
    return replace(report, grid=(finer, _swept(options, finer)))


def _swept(
    options: Mapping[type[Any], Any], axes: Sequence[Axis], *, compared: bool = False
) -> list[dict[str, Any]]:
    """Plan each point, the first axis fastest; `compared` with what background saves would give."""
    rows = []
    for second in range(len(axes[1].values) if len(axes) == 2 else 1):
        for first in range(len(axes[0].values)):
            point, values = dict(options), {}
            for axis, place in zip(axes, (first, second), strict=False):
                point[axis.group] = replace(point[axis.group], **{axis.field: axis.texts[place]})
                values[axis.name] = axis.values[place]
            rows.append(values | _planned(point, compared))
    return rows


def _planned(options: Mapping[type[Any], Any], compared: bool) -> dict[str, Any]:
    """Plan one point; where the job cannot progress, the row says why."""
    question = read_question(
        options[FailureOptions], options[CostOptions], options[BoundOptions], Notes()
    )
    model = question.model
    row: dict[str, Any] = {"mtbf_s": model.mtbf, "stall_s": model.stall}
    try:
        best = solve(model)
    except UsageError as error:
        return row | {"interval_s": None, "goodput": None, "refused": error.message}
    row |= {"interval_s": best.interval, "goodput": split(best), "refused": ""}
    return row | {"background": _background(model)} if compared else row


def _background(model: Model) -> dict[str, float] | None:
    """Return what the same writes would give in the background, without any stall, at best."""
    if type(model) is not Plain or model.flush or not model.save:
        return None
    better = replace(model, save=0.0, flush=model.save)
    interval = better.optimum()
    return {"interval_s": interval, "goodput": float(better.outcome(interval).useful)}
