"""The picture of `diff`: how much each component of each layer changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.commands.cli.render import printable
from ftckpt.commands.pictures.drawing import canvas, save
from ftckpt.commands.pictures.palette import FAINT, INK
from ftckpt.errors import UsageError

if TYPE_CHECKING:
    from ftckpt.comparison import DiffReport
    from ftckpt.comparison.report import Cell

_ROW = 0.26  # inches, for a line of text
_ROWS = 140  # the layers of the largest dense models have one each; of more some share a row
_COLUMNS = 24


class Grid(NamedTuple):
    """The cells of the picture: of layers that share a row, the one that changed most.

    Attributes:
        rows: what they are called, from the top.
        parts: the columns.
        size: layers a row.
        cells: by row and column.
    """

    rows: Sequence[str]
    parts: Sequence[str]
    size: int
    cells: dict[tuple[int, int], Cell]


def gridded(report: DiffReport) -> Grid:
    """Return at most `_ROWS` by `_COLUMNS` cells of a comparison."""
    layers = list(dict.fromkeys(cell.layer for cell in report.cells))
    known = {cell.part for cell in report.cells}
    parts = [one.name for one in report.components if one.name in known][:_COLUMNS]
    size = -(-len(layers) // _ROWS)
    bands = [layers[start : start + size] for start in range(0, len(layers), size)]
    row_of = {layer: row for row, band in enumerate(bands) for layer in band}
    column_of = {part: column for column, part in enumerate(parts)}
    cells: dict[tuple[int, int], Cell] = {}
    for cell in report.cells:
        if cell.part in column_of:
            place = row_of[cell.layer], column_of[cell.part]
            cells[place] = max(cells.get(place, cell), cell, key=_weight)
    names = [band[0] if len(band) == 1 else f"{band[0]} to {band[-1]}" for band in bands]
    return Grid(names, parts, size, cells)


def draw(report: DiffReport, path: str, title: str) -> str:
    """Write a heat map of relative change, and its numbers beside it; return where those are.

    Args:
        report: what was found.
        path: `.png`, `.svg` or `.html`.
        title: what was compared.

    Raises:
        UsageError: no tensor was compared.
        DeniedError, NoResourceError, UnavailableError: it cannot be written.
    """
    import numpy as np
    from matplotlib.colors import LogNorm

    if not report.cells:
        raise UsageError("--plot: no tensor was compared, so there is nothing to draw")
    grid = gridded(report)
    rows, parts = grid.rows, grid.parts
    change = np.full((len(rows), len(parts)), np.nan)
    marks: list[tuple[int, int, str]] = []
    for (row, column), cell in grid.cells.items():
        if cell.relative_l2 is not None and 0 < cell.relative_l2 < math.inf:
            change[row, column] = cell.relative_l2
        else:  # equal; or integers alone, or from zero: those have no relative change
            marks.append((row, column, "\u2260" if cell.changed else "="))
    changed = change[np.isfinite(change)]
    height = 3.0 + _ROW * max(len(rows), 8)
    with canvas(figsize=(5.2 + 0.05 * max(map(len, rows)) + 1.0 * len(parts), height)) as figure:
        axes = figure.subplots()
        axes.grid(visible=False)
        low, high = (changed.min(), changed.max()) if changed.size else (1e-3, 1.0)
        norm = LogNorm(low / 1.5 if low == high else low, high * 1.5 if low == high else high)
        shown = np.ma.masked_invalid(change)
        image = axes.imshow(shown, aspect="auto", cmap="cividis", norm=norm)
        for row, column, mark in marks:
            axes.text(column, row, mark, ha="center", va="center", color=FAINT)
        axes.set_yticks(range(len(rows)), [printable(row) for row in rows])
        axes.set_ylabel("layer")
        # Above, where a reader of many rows begins.
        names = [printable(part) for part in parts]
        axes.set_xticks(range(len(parts)), names, rotation=30, ha="left")
        axes.tick_params(length=0, colors=INK, labeltop=True, labelbottom=False)
        bar = figure.colorbar(
            image, ax=axes, location="top", aspect=40, fraction=0.3 / height, pad=0.2 / height
        )
        bar.set_label("relative L2 of the change")
        ticks = _ticks(norm.vmin or low, norm.vmax or high)
        bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
        bar.minorticks_off()
        figure.suptitle(printable(title), x=0.01, ha="left", wrap=True)
        if marks:
            signs = "=  equal     \u2260  changed (no norm: integer data)"
            axes.set_xlabel(signs, color=FAINT)
        numbers, largest = _numbers(report.cells), sorted(report.cells, key=_weight, reverse=True)
        return save(figure, path, numbers, title, _said(report, grid), shown=_numbers(largest))


def _ticks(low: float, high: float) -> list[float]:
    """Return powers of ten, at most six; where there are not two of them, four even steps."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    if last > first:
        return [10.0**power for power in range(first, last + 1, -(-(last - first + 1) // 6))]
    return [low * (high / low) ** (part / 3) for part in range(4)]


def _numbers(cells: Sequence[Cell]) -> dict[str, list[object]]:
    return {
        "layer": [c.layer for c in cells],
        "component": [c.part for c in cells],
        "relative_l2": [c.relative_l2 for c in cells],
        "changed": [c.changed for c in cells],
    }


def _said(report: DiffReport, grid: Grid) -> str:
    """Return in words what the picture shows."""
    most = max(report.cells, key=_weight)
    unlike = sum(cell.changed > 0 for cell in report.cells)
    words = f"Change of each component of each layer: {unlike:,} of {len(report.cells):,} changed."
    if most.relative_l2 is not None and unlike:
        words += (
            f" The largest change is that of {most.part} in {most.layer}, with a relative L2 of"
            f" {most.relative_l2:.3g}."
        )
    if grid.size > 1:
        words += f" {grid.size} layers share a row, which shows the largest change among them."
    left = len({cell.part for cell in report.cells}) - len(grid.parts)
    if left:
        words += f" {left} more components are in the numbers alone."
    return words


def _weight(cell: Cell) -> tuple[float, float]:
    """Return what puts cells into order: relative change, then the share that changed."""
    return (0.0 if cell.relative_l2 is None else cell.relative_l2, cell.changed)
