"""The answer of `diff` in words: tables everywhere, bars on a terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ftckpt.commands.cli.render import (
    human_bytes,
    human_duration,
    table,
    terminal_width,
)
from ftckpt.findings import counted

if TYPE_CHECKING:
    from ftckpt.comparison import DiffReport, StateDifference, Summary, TensorDifference, Tolerance
    from ftckpt.findings import Finding

_BAR = 20
_FIELDS = 6  # fields of one part of the state that are shown
# What a restart depends on first comes first.
_PARTS = ("step", "learning-rate", "scheduler", "data", "rng-torch", "rng-cuda", "rng-python",
          "rng-numpy", "scaler", "other", "settings", "layout")  # fmt: skip
_LAYOUT = "layout"
_RECORDED = "recorded as equal"
_DAMAGE = ("bad-crc", "bad-digest")  # of bytes that were read
_EVIDENCE = {
    "read": "read",
    "manifest": "recorded as equal by the digests of both manifests, not read",
    "digest": "recorded as equal by the digests of both deltas, not read",
    "crc32": "recorded as equal by the CRC-32s in both, not read",
    "tied": "tied to one that was compared",
    "headers": "by name, shape and type alone",
}


def text(report: DiffReport, tolerance: Tolerance | None, *, top: int) -> Iterator[str]:
    """Yield the lines of the answer, but for the verdict.

    Args:
        report: what was found.
        tolerance: which differences are none, where that was asked for.
        top: how many tensors are shown.
    """
    if tolerance is not None:
        yield f"close: |a-b| <= {tolerance.atol:g} + {tolerance.rtol:g} * |b|"
    if report.true_vocab_rows is not None:
        yield f"of vocabularies {counted(report.true_vocab_rows, 'row')}; the others are padding"
    if report.total.tensors:
        yield ""
        yield _summaries("component", report.components)
        changed = [one for one in report.layers if one.changed]
        if changed:
            yield ""
            yield _summaries("layer", changed, bars=terminal_width() is not None)
    differing = [one for one in report.tensors if one.status != _RECORDED]
    if differing and top:
        yield ""
        shown = differing[:top]
        yield f"{len(shown)} of {counted(len(differing), 'tensor')} that differ"
        yield table(
            ("tensor", "verdict", "changed>", "max abs>", "relative L2>", "cosine>", "ULP>",
             "NaN>"),
            [_tensor(one) for one in shown],
        )  # fmt: skip
    if tolerance is None and report.total.counts.get("other dtype"):
        yield "tensors of two types are compared by value where --rtol or --atol is given"
    if report.state:
        yield ""
        yield from _state(report.state, layout_counts=report.layout_counts)
    yield ""
    rests = [f"{report.evidence[k]} {words}" for k, words in _EVIDENCE.items()
             if report.evidence.get(k)]  # fmt: skip
    if rests:
        yield f"tensors: {'; '.join(rests)}"
    if report.bytes_read:
        rate = human_bytes(int(report.bytes_read / max(report.seconds, 1e-9)))
        took = f"{human_duration(report.seconds)} ({rate}/s)"
        yield f"read {human_bytes(report.bytes_read)} of both in {took}"


def verdict(report: DiffReport) -> str:
    """Return the verdict in one sentence."""
    total, fields = report.total, report.state_fields
    layout = [] if report.layout_counts else [one for one in report.state if one.layout]
    state = len(report.state) - len(layout)
    end = ""
    if layout:
        number = len(layout)
        verb = "follows" if number == 1 else "follow"
        end = f"; {counted(number, 'field')} that {verb} the grid of ranks"
    counts = {str(status): number for status, number in total.counts.items()}
    same, recorded = counts.pop("equal", 0), counts.pop(_RECORDED, 0)
    if not counts and not state and not report.findings:
        fields -= len({one.name for one in layout})
        end = f"{end} {'differs' if len(layout) == 1 else 'differ'}" if layout else ""
        if recorded:
            read = f"; equal: {_both(same, fields)}" if same or fields else ""
            return f"recorded as equal and not read: {counted(recorded, 'tensor')}{read}{end}"
        return f"equal: {_both(total.tensors, fields)}{end}"
    words = [f"{counted(number, 'tensor')} {status}" for status, number in counts.items()]
    words += [f"{counted(state, 'field')} of other state different"] * bool(state)
    words += [f"{counted(len(report.findings), 'finding')}"] * bool(report.findings)
    if same:
        words.append(f"{same} equal")
    if recorded:
        words.append(f"{recorded} {_RECORDED}")
    said = ", ".join(words) + end
    damaged = next((one for one in report.findings if one.kind in _DAMAGE), None)
    if damaged is not None:
        where = damaged.file or ""
        named = damaged.message if where in damaged.message else f"{damaged.message} ({where})"
        return f"damaged: {named}; {said}"
    if state or not set(counts) <= {"close", "unread"}:
        return f"different: {said}"
    if report.findings or "unread" in counts:
        return f"no difference in what could be read: {said}"
    return f"equal within the tolerances: {said}"


def unread(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield one finding for each reason why something was not read, with the first tensor."""
    alike: dict[tuple[object, ...], list[Finding]] = {}
    for one in findings:
        alike.setdefault((one.kind, one.file, one.message), []).append(one)
    for first, *more in alike.values():
        places = {(one.offset, one.length) for one in (first, *more)}
        name = f"{first.tensor} and {len(more)} more" if more else first.tensor
        named = replace(first, tensor=name)
        yield named if len(places) == 1 else replace(named, offset=None, length=None)


def _both(tensors: int, fields: int) -> str:
    said = [counted(tensors, "tensor")] * bool(tensors)
    said += [f"{counted(fields, 'field')} of other state"] * bool(fields)
    return " and ".join(said) or "nothing to compare"


def _summaries(title: str, rows: Sequence[Summary], *, bars: bool = False) -> str:
    """Return a table of sums; with a bar in each row where the terminal has room for it."""
    unread = any(row.counts.get("unread") for row in rows)
    headings = [title, "tensors>", *["unread>"] * unread, "not equal>", "changed>", "max abs>",
                "relative L2>"]  # fmt: skip
    cells = [_sums(row, unread=unread) for row in rows]
    plain = table(headings, cells)
    room = max(map(len, plain.split("\n"))) + 2 + _BAR
    if not bars or room > (terminal_width() or room):
        return plain
    lengths = [row.relative_l2 or 0.0 for row in rows]
    most = max((length for length in lengths if math.isfinite(length)), default=0.0)
    drawn = [(*line, _bar(length, most)) for line, length in zip(cells, lengths, strict=True)]
    return table([*headings, ""], drawn)


def _sums(row: Summary, *, unread: bool) -> tuple[object, ...]:
    lost, recorded = row.counts.get("unread", 0), row.counts.get(_RECORDED, 0)
    # What was not read has no number; a 0 would be one.
    numbers = ("", "", "") if lost + recorded == row.tensors else (
        _share(row.changed, row.elements), _number(row.max_abs), _number(row.relative_l2)
    )  # fmt: skip
    equal = row.counts.get("equal", 0)
    differ = row.tensors - lost - recorded - equal
    return (row.name, row.tensors, *[lost] * unread, differ, *numbers)


def _bar(value: float, most: float) -> str:
    """Return a bar; its length is linear in the value."""
    share = min(1.0, value / most) if most else 0.0
    if not _draws_blocks():
        return "#" * round(share * _BAR)
    eighths = round(share * _BAR * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _draws_blocks() -> bool:
    try:
        "█".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _tensor(one: TensorDifference) -> tuple[object, ...]:
    said = str(one.status)
    if said == "other shape":
        said = f"{list(one.shape_a or ())} -> {list(one.shape_b or ())}"
    elif said == "other dtype" or (one.dtype_a != one.dtype_b and one.dtype_a and one.dtype_b):
        said = f"{one.dtype_a} -> {one.dtype_b}"
    nan = "" if one.nan_a is None else f"{one.nan_a} -> {one.nan_b}"
    return (
        one.key,
        said,
        "" if one.changed is None else _share(one.changed, one.elements),
        _number(one.max_abs),
        _number(one.relative_l2),
        "" if one.cosine is None else f"{one.cosine:.6f}",
        "" if one.max_ulp is None else _number(one.max_ulp),
        "" if nan == "0 -> 0" else nan,
    )


def _state(state: Sequence[StateDifference], *, layout_counts: bool) -> Iterator[str]:
    """Yield what differs in other state: a line for fields that changed alike."""
    parts: dict[str, list[StateDifference]] = {}
    for one in state:
        parts.setdefault(_LAYOUT if one.layout else one.about, []).append(one)
    for key in sorted(parts, key=lambda k: _PARTS.index(k) if k in _PARTS else len(_PARTS)):
        groups: dict[tuple[object, ...], list[StateDifference]] = {}
        for one in parts[key]:
            groups.setdefault((one.status, one.a, one.b), []).append(one)
        lines = [_alike(group) for group in groups.values()]
        layout = "follows the grid of ranks" + (":" if layout_counts else ", does not count:")
        yield layout if key == _LAYOUT else f"{parts[key][0].title}:"
        yield from (f"  {line}" for line in lines[:_FIELDS])
        if len(lines) > _FIELDS:
            yield f"  and {len(lines) - _FIELDS} more, which --json lists"


def _alike(group: Sequence[StateDifference]) -> str:
    first = group[0]
    name = first.name if first.rank is None else f"{first.name} (rank {first.rank})"
    more = f" and {len(group) - 1} like it" if len(group) > 1 else ""
    if first.a is None:
        return f"{name}{more}: only in B: {first.b}"
    if first.b is None:
        return f"{name}{more}: only in A: {first.a}"
    return f"{name}{more}: {first.a} -> {first.b}"


def _share(part: int, whole: int) -> str:
    if not part or not whole:
        return "0"
    percent = 100 * part / whole
    if percent < 0.01:
        return f"{part} of {whole}"
    # A single element that stayed must not read as all.
    return "100 %" if part == whole else f"{min(percent, 99.99):.4g} %"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) or abs(value) >= 100_000 else str(value)
