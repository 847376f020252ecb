"""`ftckpt plan sweep`: the best interval and its goodput over a range of inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import block, brief_duration, table
from ftckpt.errors import ExitCode, UsageError
from ftckpt.operations.definition import option
from ftckpt.planning import Plain, solve

from .axes import AXES, Axis, read_axis
from .inputs import read_question
from .json_document import split
from .notes import Notes
from .options import BoundOptions, CostOptions, FailureOptions
from .text import percent

if TYPE_CHECKING:
    from ftckpt.planning import Model

STORAGE = False
OPTIONS = (FailureOptions, CostOptions, BoundOptions)
EXAMPLES = (
    (
        "ftckpt plan sweep --over gpus=1k..128k --gpu-mtbf 50000h --save 60s --restart 8m",
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
)
CODES = {
    ExitCode.OK: "planned; points that cannot progress say so in their row",
    ExitCode.USAGE: "an option without its unit, or a range that is none",
    ExitCode.REFUSED: "a directory, or a file that is not the picture's, stands in the way",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "",
    ExitCode.UNSUPPORTED: "a picture without matplotlib",
}


# Points a side of a heat map.
_FINE = 41


def command(
    invocation: Invocation,
    over: Annotated[list[str], option("NAME=LOW..HIGH", f"One or two of {', '.join(AXES)}.")],
    number: Annotated[
        int, option("N", "Points of a range; 0: doublings, or 13.", "--points", min=0)
    ] = 0,
    plot: Annotated[str, option("FILE", "Picture: .png, .svg or .html.")] = "",
) -> Result:
    """Plan over a range of cluster sizes, save times or failure rates.

    Each point is planned by itself from all options, so that what depends on the swept input (the
    number of hosts, the time to write a checkpoint) follows it. Points are spaced evenly on a
    logarithmic scale.
    """
    if plot:
        from ftckpt.commands.pictures.drawing import check_path

        check_path(plot)
    if invocation.options(CostOptions).weights_between:
        raise UsageError("--weights-between is of one plan", hint="ftckpt plan, without a sweep")
    if len(over) > 2:
        raise UsageError("a sweep has one or two ranges", hint="--over gpus=1k..128k")
    axes = [read_axis(text, number) for text in over]
    if len({axis.name for axis in axes}) < len(axes):
        raise UsageError(f"--over {axes[0].name} is given twice")
    rows = _sweep(invocation, axes, compared=bool(plot))
    invocation.report(axes=[{"name": a.name, "unit": a.unit, "values": a.values} for a in axes])
    invocation.report(rows=rows)
    if not invocation.json:
        invocation.print(_matrix(axes, rows) if len(axes) == 2 else _table(axes[0], rows))
    refused = [row for row in rows if row["refused"]]
    if refused:
        invocation.say(f"note: {len(refused)} of {len(rows)} points: {refused[0]['refused']}")
    if plot:
        if len(axes) == 2:
            numbers = _heat(invocation, over, plot)
        else:
            numbers = _curve(axes[0], rows, plot)
        invocation.report(plot={"file": plot, "numbers": numbers})
        invocation.say(f"picture: {plot}; its numbers: {numbers}")
    return Result(ExitCode.OK, f"{len(rows)} points over {' and '.join(a.name for a in axes)}")


def _sweep(
    invocation: Invocation, axes: list[Axis], *, compared: bool = False
) -> list[dict[str, Any]]:
    """Plan each point, the first axis fastest; `compared` with what background saves would give."""
    options: dict[type[Any], Any] = {group: invocation.options(group) for group in OPTIONS}
    rows = []
    for second in range(len(axes[1].values) if len(axes) == 2 else 1):
        for first in range(len(axes[0].values)):
            point, values = dict(options), {}
            for axis, place in zip(axes, (first, second), strict=False):
                point[axis.group] = replace(point[axis.group], **{axis.field: axis.texts[place]})
                values[axis.name] = axis.values[place]
            rows.append(values | _planned(point, compared))
    return rows


def _planned(options: dict[type[Any], Any], compared: bool) -> dict[str, Any]:
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


def _table(axis: Axis, rows: list[dict[str, Any]]) -> str:
    head = [f"{axis.name}>", "fails every>", "stall>", "save after>", "goodput>", "saving>",
            "lost>", "detect, restart>"]  # fmt: skip
    cells = []
    for name, row in zip(axis.names, rows, strict=True):
        start = [name, brief_duration(row["mtbf_s"]), brief_duration(row["stall_s"])]
        goodput = row["goodput"]
        if goodput is None:
            cells.append([*start, *["-"] * 5])
            continue
        shares = (goodput[key] for key in ("value", "save", "lost", "detect_restart"))
        cells.append([*start, brief_duration(row["interval_s"]), *map(percent, shares)])
    return table(head, cells)


def _matrix(axes: list[Axis], rows: list[dict[str, Any]]) -> str:
    across, down = axes
    width = len(across.values)
    cells = []
    for place, name in enumerate(down.names):
        line = rows[place * width : (place + 1) * width]
        cells.append([name, *("-" if r["goodput"] is None else percent(r["goodput"]["value"])
                              for r in line)])  # fmt: skip
    corner = f"{down.name}, {across.name}"
    return block(
        "goodput at the best interval",
        table([f"{corner}>", *(f"{name}>" for name in across.names)], cells),
    )


def _curve(axis: Axis, rows: list[dict[str, Any]], path: str) -> str:
    from .pictures import SweepCurve, sweep_picture

    if not any(row["goodput"] for row in rows):
        raise UsageError("no point of the range can be planned", hint=rows[0]["refused"])
    lines = {"as given": [(row["interval_s"], _value(row)) for row in rows]}
    if all(row.get("background") for row in rows):
        both = [(r["background"]["interval_s"], r["background"]["goodput"]) for r in rows]
        lines["written in the background, at best"] = both
    curve = SweepCurve(
        title=f"Best interval and its goodput, by {axis.label}",
        label=axis.label,
        key=axis.key,
        xs=axis.values,
        names=axis.marks,
        intervals={name: [interval for interval, _ in line] for name, line in lines.items()},
        goodputs={name: [goodput for _, goodput in line] for name, line in lines.items()},
    )
    return sweep_picture(curve, path)


def _heat(invocation: Invocation, over: list[str], path: str) -> str:
    """Draw two ranges on a grid of its own, fine enough for smooth contours."""
    from .pictures import HeatMap, heat_picture

    across, down = (read_axis(text, _FINE) for text in over)
    rows = _sweep(invocation, [across, down])
    width = len(across.values)
    grid = [rows[k : k + width] for k in range(0, len(rows), width)]
    heat = HeatMap(
        title="Goodput at the best interval",
        axes=(across.label, down.label),
        keys=(across.key, down.key),
        xs=across.values,
        ys=down.values,
        x_names=across.marks,
        y_names=down.marks,
        goodput=[[_value(row) for row in line] for line in grid],
        intervals=[[row["interval_s"] for row in line] for line in grid],
    )
    return heat_picture(heat, path)


def _value(row: dict[str, Any]) -> float | None:
    return None if row["goodput"] is None else float(row["goodput"]["value"])
