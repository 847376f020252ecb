"""The pictures of `plan` and `plan sweep`: waste against interval, a sweep, a heat map."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftckpt.commands.cli.render import brief_duration
from ftckpt.commands.pictures.drawing import canvas, save
from ftckpt.commands.pictures.palette import (
    BLUE,
    DARK_ON_FIELD,
    FAINT,
    GREEN,
    GROUND,
    INK,
    LIGHT_ON_FIELD,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
)

from .text import SHARES

if TYPE_CHECKING:
    from matplotlib.axis import XAxis, YAxis

# Of the shares in `text`, bottom to top.
_COLORS = {
    "save": BLUE,
    "lost": VERMILION,
    "detection": ORANGE,
    "restart": PURPLE,
    "waiting": SKY,
}

# Marks of a time axis, in seconds: what people would say and not powers of ten.
_TIMES = (
    0.1, 0.3, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400,
    2 * 86400, 5 * 86400, 10 * 86400, 30 * 86400, 100 * 86400,
)  # fmt: skip


# Contours of goodput, in percent.
_LEVELS = (10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 99.5)


@dataclass(frozen=True)
class WasteCurve:
    """Where the wall time goes, against the interval.

    Attributes:
        title: in one line, what is planned.
        intervals: seconds of useful work between saves, ascending.
        shares: fractions of wall time by the keys of `SHARES`, each as long as `intervals`.
        optimum: the best interval and its waste.
        others: other intervals, by their names.
        points: (interval, waste, standard error) of simulations.
        label: of the x axis.
        levels: waste of other ways to save, by what they are called.
    """

    title: str
    intervals: Sequence[float]
    shares: Mapping[str, Sequence[float]]
    optimum: tuple[float, float]
    others: Mapping[str, float]
    points: Sequence[tuple[float, float, float]] = ()
    label: str = "useful work between two saves"
    levels: Mapping[str, float] = field(default_factory=dict)

    def numbers(self) -> dict[str, list[object]]:
        """Return the columns of the table beside the picture."""
        columns: dict[str, list[object]] = {"interval_s": list(self.intervals)}
        columns |= {name: list(self.shares[name]) for name in SHARES if name in self.shares}
        columns["waste"] = [sum(row) for row in zip(*self.shares.values(), strict=True)]
        simulated = {interval: (waste, error) for interval, waste, error in self.points}
        if simulated:
            rows = [simulated.get(interval, (None, None)) for interval in self.intervals]
            columns["simulated_waste"] = [waste for waste, _ in rows]
            columns["simulated_se"] = [error for _, error in rows]
        return columns

    def said(self) -> str:
        """Return in words what the picture shows."""
        best, least = self.optimum
        parts = {n: self._at_best(n) for n in SHARES if n in self.shares}
        listed = ", ".join(f"{SHARES[n][0]} {100 * v:.2f} %" for n, v in parts.items() if v > 0)
        return (
            f"Wall time that is not useful work, against the {self.label}:"
            f" {brief_duration(self.intervals[0])} to {brief_duration(self.intervals[-1])}."
            f" The best is {brief_duration(best)}, with {100 * least:.2f} % waste: {listed}."
        )

    def _at_best(self, name: str) -> float:
        near = min(self.intervals, key=lambda interval: abs(interval - self.optimum[0]))
        return self.shares[name][list(self.intervals).index(near)]


def waste_picture(curve: WasteCurve, path: str) -> str:
    """Draw the split of waste against the interval; return the path of its numbers."""
    with canvas() as figure:
        axes = figure.add_subplot()
        names = [n for n in SHARES if n in curve.shares and any(v > 0 for v in curve.shares[n])]
        axes.stackplot(
            curve.intervals,
            [[100 * v for v in curve.shares[n]] for n in names],
            labels=[SHARES[n][0] for n in names],
            colors=[_COLORS[n] for n in names],
            alpha=0.85,
            linewidth=0,
        )
        best, least = curve.optimum
        # Behind the shares: what counts is how little the curve above it rises.
        band = "half to twice the best"
        axes.axvspan(best / 2, best * 2, color=INK, alpha=0.08, lw=0, zorder=0.5, label=band)
        axes.axvline(best, color=INK, lw=1.4)
        if curve.points:
            axes.errorbar(
                [p[0] for p in curve.points],
                [100 * p[1] for p in curve.points],
                yerr=[200 * p[2] for p in curve.points],
                fmt="o",
                color=INK,
                markerfacecolor=GROUND,
                markersize=6,
                capsize=3,
                lw=1.4,
                label="simulated, ± 2 standard errors",
            )
        waste = [100 * sum(row) for row in zip(*curve.shares.values(), strict=True)]
        top = min(100.0, max(2.8 * 100 * least, 1.15 * min(waste[0], waste[-1])))
        top = min(100.0, max([top, *(120 * level for level in curve.levels.values())]))
        axes.set_ylim(0, top)
        for name, level in curve.levels.items():
            words = f"{name}: {100 * level:.2f} %"
            axes.axhline(100 * level, color=INK, lw=1.4, ls=(0, (6, 3)), label=words)
        axes.annotate(
            f"best {brief_duration(best)}\n{100 * least:.2f} % waste",
            (best, 100 * least),
            xytext=(0, 46),
            textcoords="offset points",
            ha="center",
            fontweight="bold",
            arrowprops={"arrowstyle": "-|>", "color": INK},
            bbox={"boxstyle": "round,pad=0.35", "fc": GROUND, "ec": FAINT},
        )
        for place, (name, interval) in enumerate(sorted(curve.others.items())):
            if curve.intervals[0] <= interval <= curve.intervals[-1]:
                axes.axvline(interval, color=FAINT, lw=1.2, ls=(0, (4, 3)))
                axes.annotate(
                    f" {name} {brief_duration(interval)}",
                    (interval, 0.97 - 0.06 * place),
                    xycoords=("data", "axes fraction"),
                    color=INK,
                    fontsize=12,
                )
        axes.set_xscale("log")
        axes.set_xlim(curve.intervals[0], curve.intervals[-1])
        _time_ticks(axes.xaxis, curve.intervals[0], curve.intervals[-1])
        axes.set_xlabel(curve.label)
        axes.set_ylabel("wall time that is not useful work (%)")
        axes.set_title(curve.title)
        figure.legend(loc="outside lower center", ncols=3)
        return save(figure, path, curve.numbers(), curve.title, curve.said())


@dataclass(frozen=True)
class SweepCurve:
    """The best interval and its goodput against one input.

    Attributes:
        title: in one line.
        label: of the x axis.
        key: heads the input's column of numbers.
        xs: values of the input, ascending.
        names: of the values, for the axis: `16,384`; None where they are seconds.
        intervals: best seconds of useful work between saves, by the name of the variant; None
            where the job cannot progress.
        goodputs: fractions of wall time, likewise.
    """

    title: str
    label: str
    key: str
    xs: Sequence[float]
    names: Sequence[str] | None
    intervals: Mapping[str, Sequence[float | None]]
    goodputs: Mapping[str, Sequence[float | None]]

    def numbers(self) -> dict[str, Sequence[object]]:
        """Return the columns of the table beside the picture."""
        columns: dict[str, Sequence[object]] = {self.key: list(self.xs)}
        for name in self.intervals:
            columns[f"interval_s {name}"] = self.intervals[name]
            columns[f"goodput {name}"] = self.goodputs[name]
        return columns

    def said(self) -> str:
        """Return in words what the picture shows."""
        ends = [
            f"{name}, from {_spoken(line[0])} to {_spoken(line[-1])}"
            for name, line in self.goodputs.items()
        ]
        return (
            f"Goodput and the best useful work between two saves, against the {self.label}."
            f" Goodput {'; '.join(ends)}."
        )


def sweep_picture(curve: SweepCurve, path: str) -> str:
    """Draw goodput above, the best interval below; return the path of the numbers."""
    with canvas(figsize=(10.0, 7.0)) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        styles = zip(curve.goodputs, (BLUE, VERMILION, GREEN, PURPLE, ORANGE), strict=False)
        for (name, color), dash in zip(styles, ("-", "--", "-.", ":", "-"), strict=False):
            upper.plot(
                curve.xs, [_percent(v) for v in curve.goodputs[name]], dash, c=color, label=name
            )
            lower.plot(
                curve.xs,
                [math.nan if v is None else v for v in curve.intervals[name]],
                dash,
                c=color,
            )
        upper.set_ylabel("goodput (% of wall time)")
        upper.set_ylim(top=100)
        upper.set_title(curve.title)
        lower.set_ylabel("useful work\nbetween two saves")
        lower.set_yscale("log")
        known = [v for line in curve.intervals.values() for v in line if v is not None]
        _time_ticks(lower.yaxis, min(known), max(known))
        lower.set_xlabel(curve.label)
        lower.set_xscale("log")
        lower.set_xlim(curve.xs[0], curve.xs[-1])
        _ticks(lower.xaxis, curve.xs, curve.names)
        figure.align_ylabels()
        if len(curve.goodputs) > 1:
            upper.legend(loc="lower left")
        return save(figure, path, curve.numbers(), curve.title, curve.said())


@dataclass(frozen=True)
class HeatMap:
    """The best goodput against two inputs.

    Attributes:
        title: in one line.
        axes: labels of x and y.
        keys: head their columns of numbers.
        xs: values along x, ascending.
        ys: values along y, ascending.
        x_names: of the values of `xs`; None where they are seconds.
        y_names: of the values of `ys`, likewise.
        goodput: fractions, one row for each of `ys`; None where the job cannot progress.
        intervals: seconds, the same shape.
    """

    title: str
    axes: tuple[str, str]
    keys: tuple[str, str]
    xs: Sequence[float]
    ys: Sequence[float]
    x_names: Sequence[str] | None
    y_names: Sequence[str] | None
    goodput: Sequence[Sequence[float | None]]
    intervals: Sequence[Sequence[float | None]]

    def numbers(self) -> dict[str, Sequence[object]]:
        """Return the columns of the table beside the picture, one row a cell."""
        cells = [(x, y, i, j) for j, y in enumerate(self.ys) for i, x in enumerate(self.xs)]
        return {
            self.keys[0]: [x for x, _, _, _ in cells],
            self.keys[1]: [y for _, y, _, _ in cells],
            "interval_s": [self.intervals[j][i] for _, _, i, j in cells],
            "goodput": [self.goodput[j][i] for _, _, i, j in cells],
        }

    def said(self) -> str:
        """Return in words what the picture shows."""
        known = [v for row in self.goodput for v in row if v is not None]
        return (
            f"The best goodput as colour, against the {self.axes[0]} and the {self.axes[1]}:"
            f" {_spoken(min(known))} to {_spoken(max(known))} of wall time."
        )


def heat_picture(heat: HeatMap, path: str) -> str:
    """Draw goodput as colour over two inputs; return the path of the numbers."""
    from matplotlib.patheffects import AbstractPathEffect, withStroke

    with canvas(figsize=(10.0, 6.4)) as figure:
        axes = figure.add_subplot()
        percent = [[_percent(v) for v in row] for row in heat.goodput]
        # cividis reads the same with every kind of colour vision.
        # As one image: as triangles the same field takes 10 MB.
        mesh = axes.pcolormesh(
            heat.xs, heat.ys, percent, cmap="cividis", shading="gouraud", rasterized=True
        )
        axes.set_xscale("log")
        axes.set_yscale("log")
        lines = axes.contour(
            heat.xs, heat.ys, percent, _LEVELS, colors=LIGHT_ON_FIELD, linewidths=1.6
        )
        outline: list[AbstractPathEffect] = [
            withStroke(linewidth=3, foreground=DARK_ON_FIELD, alpha=0.55)
        ]
        lines.set_path_effects(outline)
        for label in axes.clabel(lines, fmt="%g %%", fontsize=12):
            label.set_path_effects(outline)
        for axis, values, names in (
            (axes.xaxis, heat.xs, heat.x_names),
            (axes.yaxis, heat.ys, heat.y_names),
        ):
            _ticks(axis, values, names)
        axes.grid(visible=False)
        axes.set_xlabel(heat.axes[0])
        axes.set_ylabel(heat.axes[1])
        axes.set_title(heat.title)
        figure.colorbar(mesh, ax=axes, label="goodput (% of wall time)")
        return save(figure, path, heat.numbers(), heat.title, heat.said())


def _spoken(share: float | None) -> str:
    return "no progress" if share is None else f"{100 * share:.1f} %"


def _percent(share: float | None) -> float:
    return math.nan if share is None else 100 * share


def _ticks(axis: XAxis | YAxis, values: Sequence[float], names: Sequence[str] | None) -> None:
    """Mark a logarithmic axis with the names of its values; with durations where there are none."""
    from matplotlib.ticker import NullLocator

    if names is None:
        _time_ticks(axis, min(values), max(values))
        return
    every = max(1, -(-len(values) // 9))
    axis.set_ticks(list(values[::every]), labels=list(names[::every]))
    axis.set_minor_locator(NullLocator())


def _time_ticks(axis: XAxis | YAxis, low: float, high: float) -> None:
    """Mark a logarithmic axis with durations, from `low` to `high`."""
    from matplotlib.ticker import NullLocator

    marks: list[float] = []
    nearest = (high / low) ** 0.1  # labels would touch where two marks are nearer than this
    for mark in _TIMES:
        if low <= mark <= high and (not marks or mark >= nearest * marks[-1]):
            marks.append(mark)
    axis.set_ticks(marks, labels=[brief_duration(mark) for mark in marks])
    axis.set_minor_locator(NullLocator())
