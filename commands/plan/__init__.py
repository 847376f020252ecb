"""`ftckpt plan`: how often to save, what it costs, and what to improve first?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import block, terminal_width
from ftckpt.commands.pictures.drawing import check_path
from ftckpt.errors import ExitCode, UsageError
from ftckpt.operations.definition import option, switch
from ftckpt.planning import IntervalRule, Plan, answer, around

from .curve import draw, in_terminal
from .inputs import currency, read_question
from .json_document import record, simulation_record
from .measured import measure
from .notes import positive
from .options import BoundOptions, CostOptions, FailureOptions
from .presets import show_presets
from .simulation import read_ageing, read_law, simulation_text
from .text import headline, text_of
from .weights import read_pause, read_weights, weights_record, weights_text

if TYPE_CHECKING:
    from ftckpt.planning.simulation import Simulated

OPTIONS = (FailureOptions, CostOptions, BoundOptions)
EXAMPLES = (
    (
        "ftckpt plan --gpus 16384 --gpu-mtbf 50000h --save 60s --restart 8m --detect 2m",
        "the interval, why, how sure, and what to improve first",
    ),
    (
        "ftckpt plan --preset llama3 --params 405B --storage-bw 2TB/s --step-time 4.2s "
        "--gpu-hour 2.33",
        "failures of a published run; the save from size and bandwidth; in steps, with money",
    ),
    (
        "ftckpt plan --failures 419/54d --snapshot 1.5s --flush 40s --slowdown 2% --simulate",
        "asynchronous saves, the error bars of a count, checked by simulation",
    ),
    (
        "ftckpt plan --mtbf 3h --tier name=ram,cost=1s,restore=10s,covers=80% "
        "--tier name=shared,cost=60s,restore=5m",
        "two tiers, each saved to at its own pace",
    ),
    ("ftckpt plan --from /ckpt/run7 --mtbf 3.1h", "size, pace and cost as a root shows them"),
    ("ftckpt plan --from-log run7.jsonl --plot waste.svg", "all from the run's log; a picture"),
    (
        "ftckpt plan --from-log slurm-42.out --from-log sacct.txt --params 405B --storage-bw 2TB/s "
        "--read-bw 4TB/s --restart 3m",
        "failures by component from a run's logs; save and load from the size",
    ),
    ("ftckpt plan --presets", "published failure rates with their sources; what is saved"),
)
CODES = {
    ExitCode.OK: "planned; constraints that do not hold are listed, and false in JSON",
    ExitCode.USAGE: "an option without its unit, a contradiction, or a job that cannot progress",
    ExitCode.UNSAFE: "the root of --from is ambiguous or holds hostile names",
    ExitCode.NOT_FOUND: "the root or log does not exist",
    ExitCode.UNAVAILABLE: "",
    ExitCode.REFUSED: "a directory, or a file that is not the picture's, stands in the way",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "",
    ExitCode.UNSUPPORTED: "a picture without matplotlib",
}


def command(
    invocation: Invocation,
    model: Annotated[
        IntervalRule, option("", "The formula of the interval and of the predicted goodput.")
    ] = IntervalRule.EXACT,
    interval: Annotated[
        str, option("T", "Use this interval between saves, not the best: 20m.")
    ] = "",
    from_: Annotated[
        str, option("ROOT", "Measure size, pace and save time of a root.", "--from")
    ] = "",
    from_log: Annotated[
        list[str] | None, option("FILE", "Measure costs and failures in a run's log. Repeatable.")
    ] = None,
    timezone: Annotated[str, option("ZONE", "Zone of a log's times without one: +02:00.")] = "UTC",
    simulate: Annotated[
        bool, switch("--simulate", "Check the answer by an independent simulation.")
    ] = False,
    law: Annotated[
        str, option("LAW", "Simulated failures: exponential, weibull:0.7, lognormal:2, trace:FILE.")
    ] = "exponential",
    ageing: Annotated[
        list[str] | None,
        option(
            "NAME=K", "Simulated parts age, new at first, each renewed alone: gpu=0.7. Repeatable."
        ),
    ] = None,
    runs: Annotated[int, option("N", "Runs to simulate.", min=2)] = 100,
    failures_per_run: Annotated[int, option("N", "Failures in each of them.", min=1)] = 1000,
    seed: Annotated[int, option("N", "Seed of the simulation.", min=0)] = 0,
    plot: Annotated[
        str, option("FILE", "Picture: .png, .svg, .html; - draws in the terminal.")
    ] = "",
    presets: Annotated[
        bool, switch("--presets", "List the presets and their sources, and stop.")
    ] = False,
) -> Result:
    """Compute how often to save, what it costs, and what to improve first.

    The answer is exact for exponential failures: expected goodput, not a sum of first-order losses.
    Every quantity needs its unit: s, m, h, d; GB, GiB, TB; GB/s, Gb/s. Error bars of failures that
    were counted are carried through to the interval.
    """
    if presets:
        return show_presets(invocation)
    if plot not in ("", "-"):
        check_path(plot)
    if law != "exponential" and not simulate:
        raise UsageError(f"--law {law} is of the simulation", hint="add --simulate")
    if ageing:
        _refuse_ageing(invocation, law, simulate=simulate)
    notes = measure(invocation, from_, from_log or (), timezone)
    failing, costs = invocation.options(FailureOptions), invocation.options(CostOptions)
    bounds = invocation.options(BoundOptions)
    question = replace(
        read_question(failing, costs, bounds, notes),
        rule=model,
        interval=positive(interval, "--interval") if interval else None,
    )
    pause = read_pause(costs, question.model)
    plan = answer(replace(question, pauses=costs.weights_between * pause))
    invocation.report(**record(plan, notes))
    parts = list(text_of(plan, notes, currency(bounds)))
    between = read_weights(costs, plan, pause)
    if between is not None:
        invocation.report(weights=weights_record(between))
        parts.append(weights_text(between))
    simulated: list[Simulated] = []
    if simulate:
        size = runs, failures_per_run, seed
        simulated = _simulate(invocation, plan, (law, ageing or ()), size, curve=plot)
        parts.append(simulation_text(simulated[0], float(plan.outcome.useful)))
    if plot == "-" or (not plot and terminal_width() is not None):
        parts.append(in_terminal(plan))
    invocation.print(block(*parts, between="\n\n"))
    if plot not in ("", "-"):
        numbers = draw(plan, plot, simulated)
        invocation.report(plot={"file": plot, "numbers": numbers})
        invocation.say(f"picture: {plot}; its numbers: {numbers}")
    broken = [constraint.name for constraint in plan.constraints if not constraint.ok]
    if broken:
        invocation.warn(f"warning: does not hold: {', '.join(broken)}")
    return Result(ExitCode.OK, headline(plan))


def _refuse_ageing(invocation: Invocation, law: str, *, simulate: bool) -> None:
    """Refuse what contradicts parts that age."""
    if not simulate:
        raise UsageError("--ageing is of the simulation", hint="add --simulate")
    if law != "exponential":
        raise UsageError(f"--ageing and --law {law} both say how failures come", hint="give one")
    if invocation.options(FailureOptions).burn_in != "1":
        raise UsageError("--ageing and --burn-in both make new parts fail more often")
    if invocation.options(CostOptions).preempt_mtbf:
        raise UsageError("--ageing and --preempt-mtbf are not simulated together")


def _simulate(
    invocation: Invocation,
    plan: Plan,
    failing: tuple[str, Sequence[str]],
    size: tuple[int, int, int],
    *,
    curve: str,
) -> list[Simulated]:
    """Simulate the interval that is advised, and for a picture some around it."""
    from ftckpt.planning.simulation import agreement
    from ftckpt.planning.trial import simulated

    model, chosen = plan.question.model, plan.interval.chosen_s
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
            counter=invocation.counter,
        )
        return made.with_pauses(interval, plan.question.pauses)

    found = at(chosen, seed)
    verdict = agreement(float(plan.outcome.useful), found)
    invocation.report(simulation=simulation_record(found, verdict))
    if curve in ("", "-"):
        return [found]
    # Each point has random numbers of its own: with shared ones all would err to one side.
    others = around(chosen, model.least_interval, (0.25, 0.5, 2.0, 4.0))
    return [found, *(at(one, seed + place) for place, one in enumerate(others, 1))]
