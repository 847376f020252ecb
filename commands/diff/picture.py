"""The picture of `diff`: how much each component of each layer changed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ftckpt.commands.cli.picture import FAINT, INK, canvas, save
from ftckpt.errors import UsageError

if TYPE_CHECKING:
    from ftckpt.comparison import DiffReport

_ROW = 0.26  # inches
_MARKS = 40  # layers that are named on the axis


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

    cells = report.cells
    if not cells:
        raise UsageError("--plot: no tensor was compared, so there is nothing to draw")
    layers = list(dict.fromkeys(cell.layer for cell in cells))
    parts = [one.name for one in report.components if any(c.part == one.name for c in cells)]
    grid = np.full((len(layers), len(parts)), np.nan)
    marks: list[tuple[int, int, str]] = []
    for cell in cells:
        row, column = layers.index(cell.layer), parts.index(cell.part)
        if cell.relative_l2 is not None and 0 < cell.relative_l2 < math.inf:
            grid[row, column] = cell.relative_l2
        else:  # equal; or integers alone, or from zero: those have no relative change
            marks.append((row, column, "\u2260" if cell.changed else "="))
    changed = grid[np.isfinite(grid)]
    numbers: dict[str, list[object]] = {
        "layer": [c.layer for c in cells],
        "component": [c.part for c in cells],
        "relative_l2": [c.relative_l2 for c in cells],
        "changed": [c.changed for c in cells],
    }
    height = min(14.0, 2.2 + _ROW * max(len(layers), 6))
    with canvas(figsize=(4.6 + 1.1 * len(parts), height)) as figure:
        axes = figure.subplots()
        axes.grid(visible=False)
        low, high = (changed.min(), changed.max()) if changed.size else (1e-3, 1.0)
        norm = LogNorm(low / 1.5 if low == high else low, high * 1.5 if low == high else high)
        shown = np.ma.masked_invalid(grid)
        image = axes.imshow(shown, aspect="auto", cmap="cividis", norm=norm)
        for row, column, mark in marks:
            axes.text(column, row, mark, ha="center", va="center", color=FAINT)
        every = math.ceil(len(layers) / _MARKS)
        axes.set_yticks(range(0, len(layers), every), layers[::every], fontsize=9)
        axes.set_xticks(range(len(parts)), parts, rotation=30, ha="right")
        axes.tick_params(length=0, colors=INK)
        axes.set_title(title, fontsize=13)
        bar = figure.colorbar(image, ax=axes, shrink=0.8)
        bar.set_label("relative L2 of the change")
        if marks:
            said = "=  equal     \u2260  changed (no norm: integer data)"
            axes.set_xlabel(said, color=FAINT, fontsize=10)
        return save(figure, path, numbers, title)
