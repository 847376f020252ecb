"""The incidents of a run as one page that needs nothing else: no script, nothing loaded.

Pictures are made of HTML that is placed by percentages, so that their words stay as large as the
rest on a narrow screen. Each is one image for a screen reader, and a table below says the same.
Marks differ by shape and by colour (Okabe and Ito's, which the colour-blind tell apart).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.amounts import brief_duration
from ftckpt.commands.pictures import webpage
from ftckpt.commands.pictures.webpage import safe as _safe
from ftckpt.joblogs.grouping import iso_time

from .text import UNKNOWN, between, headline, notes_of, rows_of, seconds_of

if TYPE_CHECKING:
    from ftckpt.joblogs.grouping import Incident
    from ftckpt.joblogs.report import IncidentReport, Rate

_MOST_ROWS = 2000  # of the table of incidents; --json has all
_MOST_MARKS = 1500
_MOST_NODES = 25
_DAY = 86400.0
# Shape and name of the colour of each component.
_MARKS = {
    "gpu": "&#9679;", "hbm": "&#9650;", "nvlink": "&#9670;", "network": "&#9660;",
    "host": "&#9632;", "storage": "&#10010;", "software": "&#9733;", "scheduler": "&#9675;",
    UNKNOWN: "&#10005;",
}  # fmt: skip

_STYLE = """
:root { --band: #f4f4f4; --bar: #0072b2; --gpu: #b34700; --hbm: #a3437c; --nvlink: #8f6200;
  --network: #1f6f9f; --host: #00558a; --storage: #00694d; --software: #6b6100; --scheduler: #444;
  --unknown: #5a5a5a; }
@media (prefers-color-scheme: dark) { :root { --band: #222; --bar: #56b4e9; --gpu: #ff9a57;
  --hbm: #e8a5c9; --nvlink: #f0b94d; --network: #7cc8f2; --host: #5aa9e0; --storage: #3ccf9f;
  --software: #f0e442; --scheduler: #bbb; --unknown: #a8a8a8; } }
* { box-sizing: border-box; }
h3 { font-size: 1rem; margin: 1.2rem 0 .2rem; } dd { white-space: pre-line; }
table { width: 100%; margin: .4rem 0; } th { white-space: normal; }
th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
td.chart { width: 38%; min-width: 8rem; vertical-align: middle; }
.track { position: relative; height: 1.1rem; }
.track i { position: absolute; top: 50%; height: 2px; background: var(--bar); }
.track i::before, .track i::after { content: ""; position: absolute; top: -5px; width: 2px;
  height: 12px; background: var(--bar); } .track i::after { right: 0; }
.track b { position: absolute; top: 50%; width: .7rem; height: .7rem; border-radius: 50%;
  background: var(--bar); transform: translate(-50%, -40%); }
.plot { position: relative; height: 17rem; margin: 2rem 0 2.6rem 5rem; background: var(--band);
  border-left: 1px solid var(--faint); border-bottom: 1px solid var(--faint); }
.plot hr { position: absolute; left: 0; right: 0; margin: 0; border: 0;
  border-top: 1px solid var(--line); }
.plot .y, .plot .x { position: absolute; font-size: .8rem; color: var(--faint);
  white-space: nowrap; }
.plot .y { right: 100%; margin-right: .4rem; transform: translateY(50%); }
.plot .x { top: 100%; margin-top: .3rem; transform: translateX(-50%); }
.plot .x.from { transform: none; } .plot .x.to { transform: translateX(-100%); }
.plot .title { position: absolute; font-size: .8rem; color: var(--faint); }
.plot .title.v { bottom: 100%; left: -4.6rem;
  margin-bottom: .4rem; } .plot .title.h { top: 100%; right: 0;
  margin-top: 1.5rem; }
.plot s { position: absolute; text-decoration: none; transform: translate(-50%, 50%);
  font: 1rem/1 sans-serif; }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; padding: 0;
  margin: .3rem 0; font-size: .9rem; }
""" + "".join(f".{name} {{ color: var(--{name}); }}\n" for name in _MARKS) + """
.only { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
@media (max-width: 44rem) {
  .stack thead { position: absolute; width: 1px; height: 1px; overflow: hidden;
    clip-path: inset(50%); }
  .stack tr { display: block; border-bottom: 1px solid var(--line); padding: .4rem 0; }
  .stack th, .stack td { display: flex; gap: .8rem; border: 0; padding: .05rem 0; text-align: left;
    width: auto; } .stack td.chart { width: 100%; }
  .stack td::before { content: attr(data-of); color: var(--faint); flex: 0 0 7rem; }
  .stack td.chart::before { content: none; } .stack td.chart > div { flex: 1; }
  dl { grid-template-columns: 1fr; } dd { margin: 0 0 .4rem; } .plot { height: 14rem;
    margin-left: 4.4rem; } .x.mid { display: none; } }
@media print { .plot { break-inside: avoid; } }
"""  # fmt: skip


class _Tick(NamedTuple):
    """A place on an axis, as a fraction of it, and its label."""

    at: float
    label: str


class _Point(NamedTuple):
    """A mark in a picture: its place as fractions, and its component."""

    x: float
    y: float
    component: str


def write_page(path: str, report: IncidentReport, name: str) -> None:
    """Write the page to a file, replacing what is there.

    Raises:
        RefusedError, DeniedError, NoResourceError, NotFoundError: the file cannot be written.
    """
    from ftckpt.storage.local.atomic import write_over

    write_over(path, page(report, name).encode("utf-8", "backslashreplace"))


def page(report: IncidentReport, name: str) -> str:
    """Return the page."""
    said = headline(report)
    parts = [
        f"<h1>Incidents of {_safe(name)}</h1><p>{_safe(said)}.</p><dl>",
        *(f"<dt>{_safe(row)}<dd>{_safe(words)}" for row, words in rows_of(report)),
        "</dl>",
    ]
    notes = list(notes_of(report, "the zone that was given, or UTC"))
    if notes:
        parts += ["<h2>To know</h2><ul>", *(f"<li>{_safe(note)}." for note in notes), "</ul>"]
    if report.incidents:
        parts += _timeline(report)
        parts.append("<h2>How often</h2>")
        for what, rates in (
            ("class", report.classes),
            ("component", report.components),
            ("node", report.nodes[:_MOST_NODES]),
        ):
            parts += _rates(what, rates)
        if len(report.nodes) > _MOST_NODES:
            left = len(report.nodes) - _MOST_NODES
            parts.append(f"<p class=faint>And {left} nodes more: --json lists them.</p>")
    parts += _ranks(report)
    if report.incidents:
        parts += _table(report.incidents)
    return webpage.page(f"Incidents of {name}", *parts, style=_STYLE)


def _timeline(report: IncidentReport) -> Iterator[str]:
    """Yield the picture of recoveries over time."""
    yield "<h2>When, and for how long</h2>"
    timed = [one for one in report.incidents if one.time is not None][-_MOST_MARKS:]
    if not timed or report.began is None or report.ended is None:
        yield f"<p>When they struck is {UNKNOWN}.</p>"
        return
    left, right = report.began, max(report.ended, report.began + 1)
    known = [one.recovery_s for one in timed if one.recovery_s]
    low, high = (min(known), max(known)) if known else (60.0, 3600.0)
    ticks = [*_duration_ticks(low, high)]
    points = []
    for one in timed:
        assert one.time is not None
        y = 0.04 if not one.recovery_s else _log_place(one.recovery_s, low, high)
        points.append(_Point((one.time - left) / (right - left), y, one.fault.component))
    if any(not one.recovery_s for one in timed):
        ticks.insert(0, _Tick(0.04, UNKNOWN))
    yield from _plot(
        points,
        _time_ticks(left, right),
        ticks,
        across="time (UTC)",
        up="until training continued (logarithmic)",
        said=f"{len(timed)} incidents over time, by how long training was away. The table at the "
        "end says the same.",
    )
    used = dict.fromkeys(one.fault.component for one in timed)
    yield "<ul class=key>"
    for component in used:
        yield f"<li>{_mark(component)} {_safe(component)}"
    yield "</ul>"
    if len(report.incidents) > len(timed):
        yield f"<p class=faint>The last {len(timed)} of {len(report.incidents)} are drawn.</p>"


def _ranks(report: IncidentReport) -> Iterator[str]:
    """Yield the picture of step times by rank, and a table of the slow ones."""
    steps = report.steps
    if steps is None or len(steps.ranks) < 2:
        return
    yield "<h2>Steps by rank</h2>"
    slow = {one.rank for one in steps.stragglers}
    every = max(1, -(-len(steps.ranks) // _MOST_MARKS))
    shown = [one for n, one in enumerate(steps.ranks) if n % every == 0 or one.rank in slow]
    last = max(one.rank for one in shown) or 1
    top = 1.1 * max(one.p50 for one in shown)
    yield from _plot(
        [
            _Point(one.rank / last, one.p50 / top, "gpu" if one.straggler else "host")
            for one in shown
        ],
        [_Tick(0, "0"), _Tick(1, f"{last:,}")],
        [_Tick(share, seconds_of(share * top)) for share in (0, 0.25, 0.5, 0.75, 1)],
        across="rank",
        up="median step",
        said=f"Median step of {len(shown)} ranks; {len(slow)} are stragglers.",
    )
    yield f"<ul class=key><li>{_mark('host')} rank<li>{_mark('gpu')} straggler</ul>"
    rows = [
        (str(one.rank), seconds_of(one.p50), seconds_of(one.p99), f"{one.steps:,.0f}")
        for one in steps.stragglers
    ]
    if rows:
        yield from _rows("Stragglers", ("rank", "P50", "P99", "steps"), rows)


def _plot(
    points: Iterable[_Point],
    across_ticks: Sequence[_Tick],
    up_ticks: Sequence[_Tick],
    *,
    across: str,
    up: str,
    said: str,
) -> Iterator[str]:
    """Yield a picture of points; `across` and `up` name the axes, `said` is for a screen reader."""
    yield f"<div class=plot role=img aria-label='{_safe(said)}'>"
    for tick in up_ticks:
        yield f"<hr style='bottom:{100 * tick.at:.2f}%'>"
        yield f"<span class=y style='bottom:{100 * tick.at:.2f}%'>{_safe(tick.label)}</span>"
    for tick in across_ticks:
        side = "from" if tick.at <= 0 else "to" if tick.at >= 1 else "mid"
        yield f"<span class='x {side}' style='left:{100 * tick.at:.2f}%'>{_safe(tick.label)}</span>"
    yield f"<span class='title v'>{_safe(up)}</span><span class='title h'>{_safe(across)}</span>"
    for x, y, component in points:
        name = component if component in _MARKS else UNKNOWN
        x, y = (100 * min(max(place, 0.0), 1.0) for place in (x, y))
        yield f"<s class={name} style='left:{x:.2f}%;bottom:{y:.2f}%'>{_MARKS[name]}</s>"
    yield "</div>"


def _mark(component: str) -> str:
    name = component if component in _MARKS else UNKNOWN
    return f"<span class={name} aria-hidden=true>{_MARKS[name]}</span>"


def _log_place(value: float, low: float, high: float) -> float:
    """Return where a value lies on a logarithmic axis, between 0.12 and 0.94."""
    if high <= low * 1.001:
        return 0.5
    return 0.12 + 0.82 * math.log(value / low) / math.log(high / low)


def _duration_ticks(low: float, high: float) -> Iterator[_Tick]:
    """Yield round durations between two, and the two where there are none."""
    round_ones = (1, 10, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, _DAY, 7 * _DAY, 30 * _DAY)
    inside = [one for one in round_ones if low <= one <= high]
    if len(inside) < 2:
        inside = [low, high] if high > low * 1.001 else [low]
    for one in inside:
        yield _Tick(_log_place(one, low, high), brief_duration(one))


def _time_ticks(left: float, right: float) -> list[_Tick]:
    length = 10 if right - left > 3 * _DAY else 16
    return [
        _Tick(share, iso_time(left + share * (right - left))[:length].replace("T", " "))
        for share in (0.0, 0.5, 1.0)
    ]


def _rates(what: str, rates: Sequence[Rate]) -> Iterator[str]:
    """Yield a table with a bar for the limits of each rate."""
    most = max((one.high or 0.0 for one in rates), default=0.0)
    yield f"<h3>By {what}</h3><table class=stack role=table>"
    yield (
        "<caption>Failures a day; the bar spans the 95 % limits"
        f"{f', and ends at {most * _DAY:.3g} a day' if most else ''}.</caption>"
    )
    yield _heads((what, "incidents", "a day", "95 %", "one in", "limits, drawn"))
    for one in rates:
        if one.per_second is None or one.low is None or one.high is None:
            rate, limits, bar = UNKNOWN, UNKNOWN, ""
        else:
            rate = f"{one.per_second * _DAY:.3g}"
            limits = f"{one.low * _DAY:.3g} to {one.high * _DAY:.3g}"
            start, middle, end = (100 * x / most for x in (one.low, one.per_second, one.high))
            bar = (
                f"<div class=track aria-hidden=true><i style='left:{start:.2f}%;"
                f"width:{end - start:.2f}%'></i><b style='left:{middle:.2f}%'></b></div>"
            )
        cells = (
            ("incidents", str(one.incidents)), ("a day", rate), ("95 %", limits),
            ("one in", between(one)),
        )  # fmt: skip
        yield _row(one.name, cells) + f"<td role=cell class=chart>{bar}"
    yield "</tbody></table>"


def _table(incidents: Sequence[Incident]) -> Iterator[str]:
    yield "<h2>Every incident</h2>"
    shown = incidents[-_MOST_ROWS:]
    if len(shown) < len(incidents):
        yield f"<p class=faint>The last {len(shown)} of {len(incidents)}; --json has all.</p>"
    columns = ("time (UTC)", "class", "component", "node", "rank", "recovery", "steps again",
               "lines", "signs")  # fmt: skip
    rows = [
        (
            one.utc or UNKNOWN,
            one.fault.name,
            one.fault.component,
            one.node or UNKNOWN,
            UNKNOWN if one.rank is None else str(one.rank),
            UNKNOWN if one.recovery_s is None else brief_duration(one.recovery_s),
            UNKNOWN if one.rewound is None else f"{one.rewound:,}",
            f"{one.lines:,}",
            "; ".join(one.signs) or UNKNOWN,
        )
        for one in shown
    ]
    yield from _rows("In the order of their times", columns, rows)


def _rows(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"<table class=stack role=table><caption>{caption}.</caption>{_heads(columns)}"
    for first, *rest in rows:
        yield _row(first, zip(columns[1:], rest, strict=True))
    yield "</tbody></table>"


# Roles are written out, because a table whose rows are blocks on a narrow screen loses its own.
def _heads(columns: Iterable[str]) -> str:
    heads = "".join(f"<th scope=col role=columnheader>{_safe(column)}" for column in columns)
    return f"<thead role=rowgroup><tr role=row>{heads}</thead><tbody role=rowgroup>"


def _row(name: str, cells: Iterable[tuple[str, str]]) -> str:
    return f"<tr role=row><th scope=row role=rowheader>{_safe(name)}" + "".join(
        f"<td role=cell data-of='{_safe(column)}'>{_safe(cell)}" for column, cell in cells
    )
