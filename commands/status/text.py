"""The answer of `status` for a person."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ftckpt.commands.cli.invocation import Invocation
from ftckpt.commands.cli.render import block, brief_duration, human_bytes, pairs, terminal_width
from ftckpt.findings import counted
from ftckpt.retention.scan.entries import EntryClass

if TYPE_CHECKING:
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
    unknown = [run for run in found.runs if run.newest is None and run.survey.doubt]
    for run in unknown:
        invocation.print(f"cannot tell which save is the newest: {run.survey.doubt}")
    if not found.alerts and not unknown:
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
