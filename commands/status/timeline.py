"""The picture of `status`: saves over time, their sizes, how long they took, what is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.render import printable
from ftckpt.commands.pictures.drawing import canvas, save
from ftckpt.commands.pictures.palette import BLUE, FAINT, GREEN, GROUND, INK, ORANGE, VERMILION
from ftckpt.errors import UsageError
from ftckpt.retention.scan.entries import EntryClass

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ftckpt.health import Status, SurveyedEntry

_COLORS = {
    EntryClass.COMMITTED: BLUE,
    EntryClass.STAGING: ORANGE,
    EntryClass.ABANDONED: VERMILION,
    EntryClass.CORRUPT: VERMILION,
    EntryClass.TRASH: FAINT,
}
_MARKERS = {EntryClass.ABANDONED: "v", EntryClass.CORRUPT: "X", EntryClass.TRASH: "x"}
_GIB = 1 << 30
_MIB = 1 << 20
_MANY = 200  # marks that still stand apart


def draw(found: Status, path: str) -> str:
    """Write a timeline, and its numbers beside it; return where those are.

    Args:
        found: the status.
        path: `.png`, `.svg` or `.html`.

    Raises:
        UsageError: nothing has a time.
        DeniedError, NoResourceError, UnavailableError: it cannot be written.
    """
    shown = [
        held
        for run in found.runs
        for held in run.survey.held
        if held.finished is not None and held.entry.entry_class in _COLORS
    ]
    if not shown:
        raise UsageError("--plot: no entry of the root has a time, so there is nothing to draw")
    shown.sort(key=lambda held: held.finished or 0.0)
    from matplotlib.dates import ConciseDateFormatter

    with canvas(figsize=(11.0, 6.4)) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        _silences(above, found)
        _sizes(above, shown)
        _writes(below, found)
        above.set_title(printable(f"Saves of {found.url}"))
        above.axvline(_date(found.now), color=INK, lw=1, ls=(0, (2, 3)))
        above.annotate(
            "now ", (_date(found.now), 1), xycoords=("data", "axes fraction"), ha="right", va="top"
        )
        dates: Any = ConciseDateFormatter  # matplotlib does not say its types
        below.xaxis.set_major_formatter(dates(below.xaxis.get_major_locator()))
        figure.legend(loc="outside lower center", ncols=3)
        numbers = _numbers(shown)
        return save(figure, path, numbers, f"Saves of {found.url}", _said(shown, found))


def _said(shown: Sequence[SurveyedEntry], found: Status) -> str:
    """Return in words what the picture shows."""
    counts = Counter(_words(held) for held in shown)
    listed = "; ".join(f"{count} {words}" for words, count in counts.items())
    return (
        f"Saves by the time at which they finished, {_date(shown[0].finished):%Y-%m-%d %H:%M} to"
        f" {_date(shown[-1].finished):%Y-%m-%d %H:%M} UTC: {listed}. Above their sizes, below how"
        " long writing took."
    )


def _words(held: SurveyedEntry) -> str:
    words = held.entry.entry_class.lower()
    if held.keep is not None and held.entry.entry_class is EntryClass.COMMITTED:
        words += ", kept" if held.keep else ", dropped"
    return words


def _sizes(axes: Axes, shown: Sequence[SurveyedEntry]) -> None:
    """One mark a save: its class by colour and shape, hollow where a policy drops it."""
    unit, name = (_GIB, "GiB") if max(map(_nbytes, shown)) >= _GIB else (_MIB, "MiB")
    for entry_class in _COLORS:
        for stays in (True, False):
            chosen = [
                held
                for held in shown
                if held.entry.entry_class is entry_class and (held.keep is not False) is stays
            ]
            if not chosen:
                continue
            color = _COLORS[entry_class]
            if chosen[0].keep and entry_class is EntryClass.COMMITTED:
                color = GREEN
            fill: Any = color if stays else GROUND
            axes.plot(
                [_date(held.finished) for held in chosen],
                [_nbytes(held) / unit for held in chosen],
                ls="none",
                marker=_MARKERS.get(entry_class, "o"),
                color=color,
                markerfacecolor=fill,
                markersize=7 if len(shown) < _MANY else 3,
                label=f"{_words(chosen[0])} ({len(chosen)})",
            )
    axes.set_ylabel(f"size, {name}")
    axes.set_ylim(0, 1.25 * max(map(_nbytes, shown)) / unit or 1)


def _silences(axes: Axes, found: Status) -> None:
    """Shade what is longer than two intervals without a save."""
    words: str | None = "two intervals or more without a save"
    for run in found.runs:
        interval = run.rhythm.interval_s
        if interval is None:
            continue
        times = sorted(
            h.finished for h in run.survey.of(EntryClass.COMMITTED) if h.finished is not None
        )
        for start, end in pairwise([*times, found.now]):
            if end - start > 2 * interval:
                where = _date(start), _date(end)
                axes.axvspan(*where, color=VERMILION, alpha=0.10, lw=0, label=words)
                words = None


def _writes(axes: Axes, found: Status) -> None:
    for run in found.runs:
        saves = [held.save for held in run.survey.of(EntryClass.COMMITTED)]
        known = [s for s in saves if s is not None and s.write_s is not None]
        known.sort(key=lambda s: s.finished or 0.0)
        label = run.survey.url.rstrip("/").rpartition("/")[2] if len(found.runs) > 1 else None
        axes.plot(
            [_date(s.finished) for s in known],
            [s.write_s or 0.0 for s in known],
            marker=".",
            lw=1.2,
            label=label,
            color=None if len(found.runs) > 1 else BLUE,
        )
    axes.set_ylabel("writing, s")
    axes.set_xlabel("finished (UTC)")
    axes.set_ylim(bottom=0)


def _numbers(shown: Sequence[SurveyedEntry]) -> dict[str, list[object]]:
    columns: dict[str, list[object]] = {
        "name": [held.entry.name for held in shown],
        "step": [held.entry.step for held in shown],
        "class": [held.entry.entry_class.value for held in shown],
        "began": [held.began for held in shown],
        "finished": [held.finished for held in shown],
        "bytes": [_nbytes(held) for held in shown],
    }
    if any(held.keep is not None for held in shown):
        columns["keep"] = [int(held.keep is not False) for held in shown]
    return columns


def _nbytes(held: SurveyedEntry) -> int:
    return held.nbytes or 0


def _date(seconds: float | None) -> Any:
    return datetime.fromtimestamp(seconds or 0.0, UTC)
