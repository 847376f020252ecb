"""`ftckpt plan sweep`: the best interval and its goodput over a range of inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import block, brief_duration, table
from ftckpt.errors import ExitCode, UsageError
from ftckpt.operations import planning
from ftckpt.operations.definition import option

from .text import percent

if TYPE_CHECKING:
    from ftckpt.operations.planning import SweepReport
    from ftckpt.operations.planning.axes import Axis

operation = planning.plan_sweep
Rows: TypeAlias = Sequence[Mapping[str, Any]]

# Points a side of a heat map.
_FINE = 41


@dataclass(frozen=True, kw_only=True)
class SweepPicture:
    """How the answer is drawn."""

    TITLE: ClassVar[str] = "Options"

    plot: Annotated[str, option("FILE", "Picture: .png, .svg or .html.")] = ""


OPTIONS = (SweepPicture,)


def check(invocation: Invocation, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuse a picture that cannot be drawn, and ask for what it shows.

    Raises:
        UsageError, RefusedError: the file cannot be written, or stands there.
    """
    plot = invocation.options(SweepPicture).plot
    if not plot:
        return given
    from ftckpt.commands.pictures.drawing import check_path

    check_path(plot)
    return {**given, "compared": True, "fine": _FINE}


def render(invocation: Invocation, report: SweepReport, _: Mapping[str, Any]) -> Result:
    """Print a table of one range or of two, and draw it."""
    axes, rows, plot = report.ranges, report.rows, invocation.options(SweepPicture).plot
    if not invocation.json:
        invocation.print(_matrix(axes, rows) if len(axes) == 2 else _table(axes[0], rows))
    refused = [row for row in rows if row["refused"]]
    if refused:
        invocation.say(f"note: {len(refused)} of {len(rows)} points: {refused[0]['refused']}")
    if plot:
        numbers = _heat(*report.grid, plot) if len(axes) == 2 else _curve(axes[0], rows, plot)
        invocation.report(plot={"file": plot, "numbers": numbers})
        invocation.say(f"picture: {plot}; its numbers: {numbers}")
    return Result(ExitCode.OK, f"{len(rows)} points over {' and '.join(a.name for a in axes)}")


def _table(axis: Axis, rows: Rows) -> str:
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


def _matrix(axes: Sequence[Axis], rows: Rows) -> str:
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


def _curve(axis: Axis, rows: Rows, path: str) -> str:
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


def _heat(axes: Sequence[Axis], rows: Rows, path: str) -> str:
    """Draw two ranges on a grid of its own, fine enough for smooth contours."""
    from .pictures import HeatMap, heat_picture

    across, down = axes
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


def _value(row: Mapping[str, Any]) -> float | None:
    return None if row["goodput"] is None else float(row["goodput"]["value"])
