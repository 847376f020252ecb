"""The answer of `status` for a person.

The picture of `status`: saves over time, their sizes, how long they took, what is kept.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation
from ftckpt.commands.cli.render import (
    block,
    brief_duration,
    human_bytes,
    pairs,
    printable,
    terminal_width,
)
from ftckpt.commands.pictures.drawing import canvas, save
from ftckpt.commands.pictures.palette import BLUE, FAINT, GREEN, GROUND, INK, ORANGE, VERMILION
from ftckpt.errors import UsageError
from ftckpt.findings import counted
from ftckpt.retention.scan.entries import EntryClass

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ftckpt.health import Health, Scrubbed, Status, SurveyedEntry


_BARS = "▁▂▃▄▅▆▇█"
_NEWEST = 40  # saves in the line of write latencies
_NAMED = 5


def show(invocation: Invocation, found: Status) -> None:
    """Print what was found, run by run, alerts last: they are what was asked for."""
    for number, run in enumerate(found.runs):
        if number:
            invocation.print()
        if len(found.runs) > 1:
            invocation.print(run.survey.url)
        guard = [] if number or not found.guard else [("guard", _decision(found.guard, found.now))]
        invocation.print(pairs([*_rows(run), *guard]))
        for alert in run.alerts:
            invocation.print(f"{alert.kind}: {alert.message}")
            invocation.print(f"  {alert.hint}")
    doubted = [run for run in found.runs if run.doubt]
    for run in doubted:
        invocation.print(run.doubt_said)
    if not found.alerts and not doubted:
        invocation.print("ok: nothing to look at")


def _rows(run: Health) -> Iterator[tuple[str, object]]:
    yield "newest", _newest(run)
    if run.last is not run.newest:
        yield "last written", _save(run.last, run.age_s)
    verified = run.survey.verified
    yield (
        "verified",
        "none: no save is known to have passed a check of its content"
        if verified is None
        else _save(verified, run.verified_age_s),
    )
    if run.scrubbed is not None:
        yield "content", _scrub(run.scrubbed)
    yield "interval", _interval(run)
    yield "writing", _writing(run)
    if run.growth is not None:
        yield "growth", f"{human_bytes(int(run.growth))} a day, where nothing is dropped"
    for entry_class, count in run.counts.items():
        yield entry_class.lower(), _amount(entry_class, count, run)
    if run.thinned:
        sizes = [h.entry.contents.nbytes for h in run.thinned if h.entry.contents is not None]
        yield "thinned", f"{len(run.thinned)} of them to their weights, {human_bytes(sum(sizes))}"
    if run.survey.leftovers:
        files = counted(len(run.survey.leftovers), "temporary file")
        yield "left behind", f"{files} of killed runs of ftckpt"
    if run.survey.dead_parts:
        plans = counted(len(run.survey.dead_parts), "divided operation")
        yield "left behind", f"records of {plans} that nobody went on with: gc removes them"
    if run.survey.uploads:
        uploads = counted(len(run.survey.uploads), "upload")
        yield "left behind", f"{uploads} that nobody has finished for a day: gc purge aborts them"
    if run.survey.free is not None:
        yield "free", human_bytes(run.survey.free)
    if any(held.keep is not None for held in run.survey.held):
        stay = sum(held.keep is True for held in run.survey.held)
        go = sum(held.keep is False for held in run.survey.held)
        thins = sum(held.thin is True for held in run.survey.held)
        thinned = f", {thins} of them as weights alone" if thins else ""
        yield "policy", f"keeps {stay}{thinned}, drops {go}"
    if run.durable is not None:
        yield "second tier", _durable(run)


def _newest(run: Health) -> str:
    if run.newest is None and run.survey.doubt:
        return "not known"
    said = _save(run.newest, run.age_s if run.newest is run.last else None)
    return f"{said}; with {', '.join(run.newest_with)}" if run.newest_with else said


def _decision(guard: Mapping[str, object], now: float) -> str:
    from ftckpt.guard.journal import sentence

    age = now - float(str(guard["time"]))
    return f"{brief_duration(round(age))} ago: {sentence(guard)}" if age >= 0 else sentence(guard)


def _save(held: SurveyedEntry | None, age: float | None) -> str:
    if held is None:
        return "none"
    step = "" if held.entry.step is None else f"step {held.entry.step}"
    parts = [step, held.entry.name]
    if held.entry.contents is not None:
        parts.append(human_bytes(held.entry.contents.nbytes))
    if age is not None:
        parts.append(f"{brief_duration(round(age))} old")
    return ", ".join(part for part in parts if part)


def _scrub(scrubbed: Scrubbed) -> str:
    said = f"{scrubbed.read} of {counted(scrubbed.saves, 'save')} read since saved"
    if scrubbed.longest:
        name = scrubbed.longest.rpartition("/")[2]
        waits = scrubbed.unread_s
        since = "nobody knows when" if waits is None else f"{brief_duration(round(waits))} ago"
        said += f"; longest unread: {name}, {since}"
    if scrubbed.unproven:
        said += f"; {len(scrubbed.unproven)} without evidence of their content: ftckpt seal"
    return said


def _interval(run: Health) -> str:
    rhythm = run.rhythm
    said = []
    if rhythm.median_s is None:
        said.append(f"not known: {rhythm.reason}")
    else:
        said.append(f"median {brief_duration(round(rhythm.median_s))}")
    if rhythm.last_s is not None and rhythm.jitter_s is not None:
        said.append(f"last {brief_duration(round(rhythm.last_s))}")
        said.append(f"jitter {brief_duration(round(rhythm.jitter_s, 1))}")
    if rhythm.every_steps is not None:
        said.append(f"{rhythm.every_steps:g} step{'' if rhythm.every_steps == 1 else 's'}")
    if rhythm.expected_s is not None:
        said.append(f"expected {brief_duration(rhythm.expected_s)}")
    return ", ".join(said)


def _writing(run: Health) -> str:
    writing = run.writing
    if writing.last_s is None or writing.now_s is None:
        return "not known: a save is one file, or has no times"
    said = f"last {brief_duration(writing.last_s)}; recent median {brief_duration(writing.now_s)}"
    if writing.before_s is not None:
        said += f"; earlier {brief_duration(writing.before_s)}"
    held = [h.save for h in run.survey.of(EntryClass.COMMITTED)]
    took = [save.write_s for save in held if save is not None and save.write_s is not None]
    return f"{said}  {_line(took[-_NEWEST:])}".rstrip()


def _line(values: Sequence[float]) -> str:
    """Return one bar a value, the highest full; nothing where a terminal cannot show it."""
    top = max(values, default=0.0)
    if len(values) < 2 or top <= 0 or terminal_width() is None:
        return ""
    try:
        _BARS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return ""
    return "".join(_BARS[round(value / top * (len(_BARS) - 1))] for value in values)


def _amount(entry_class: EntryClass, count: int, run: Health) -> str:
    if entry_class not in run.nbytes:
        return str(count)
    halves = entry_class is EntryClass.COMMITTED and run.survey.together > 1
    files = f" files, {run.survey.together} of which make a save" if halves else ""
    return f"{count}{files}, {human_bytes(run.nbytes[entry_class])}"


def _durable(run: Health) -> str:
    assert run.durable is not None
    missing = [held.entry.name for held in run.durable.missing]
    said = f"newest there: {_save(run.durable.newest, None)}"
    if not missing:
        return f"{said}; it holds every save"
    names = ", ".join(missing[-_NAMED:])
    more = f" and {counted(len(missing) - _NAMED, 'older one')}" if len(missing) > _NAMED else ""
    return block(said, f"{counted(len(missing), 'save')} not there: {names}{more}")


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
