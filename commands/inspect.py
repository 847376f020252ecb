"""`ftckpt inspect`: what a checkpoint holds."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Relay, Result
from ftckpt.commands.cli.render import human_bytes, human_count, printable
from ftckpt.findings import counted
from ftckpt.observer import Observer
from ftckpt.operations import looking

from .cli import render as render_

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftckpt.checkpoint import Checkpoint
    from ftckpt.findings import Finding
    from ftckpt.inspection.resume import ResumeItem
    from ftckpt.operations.looking import Inspected, ListedFile, ListedObject, ListedTensor

operation = looking.inspect

_WRONG = 5  # errors that are printed
_SIGNS = {"present": "+", "absent": "-", "cannot tell": "?"}


class _Listing(Relay):
    """Prints the checkpoints of a root before the newest of them is opened."""

    def report(self, **fields: Any) -> None:
        super().report(**fields)
        if "root" in fields:
            cells = [
                [row.path, "" if row.step is None else row.step, row.format, row.commit]
                for row in fields["root"].checkpoints
            ]
            columns = ["checkpoint", "step>", "format", "commit by names"]
            self.invocation.print(render_.table(columns, cells))
            self.invocation.print()


def observer(invocation: Invocation, _: Mapping[str, Any]) -> Observer:
    """Return what prints the checkpoints of a root."""
    return _Listing(invocation)


def render(invocation: Invocation, report: Inspected, given: Mapping[str, Any]) -> Result | None:
    """Print a summary, the resume check, and the lists that were asked for."""
    if invocation.json:
        pass
    elif report.tensor is not None:
        _print_tensors(invocation, report.tensor)
        return None
    else:
        invocation.print(render_.pairs(_summary(report)))
        invocation.print()
        said = _resume_text if given["resume"] else _resume_line
        invocation.print(said(report.resume))
        _print_notes(invocation, report.notes)
        if report.files.list is not None:
            invocation.print()
            invocation.print(_file_table(report.files.list))
        if report.object_list is not None:
            invocation.print()
            invocation.print(_object_table(report.object_list))
        if (listed := report.tensors.list) is not None:
            invocation.print()
            invocation.print(_tensor_table(listed))
            if given["match"]:
                invocation.print()
                invocation.print(_sums(report.checkpoint, listed))
    return Result(message=_sentence(report))


def _print_notes(invocation: Invocation, notes: Sequence[Finding]) -> None:
    """Print remarks, and the first few things that are wrong: one file may bring hundreds."""
    wrong = [note for note in notes if note.severity == "error"]
    for note in notes:
        if note.severity != "error":
            invocation.found(note)
    for note in wrong[:_WRONG]:
        invocation.found(note)
    if wrong:
        more = f"and {len(wrong) - _WRONG} more; " if len(wrong) > _WRONG else ""
        invocation.say(f"{more}what cannot be read is not shown; `ftckpt verify` says all")


def _shown_step(report: Inspected) -> object:
    if report.step_by == "content":
        return report.step
    by = "by its name" if report.step_by == "name" else "by the files around it"
    shown = "cannot tell" if report.step is None else f"{report.step} {by}"
    if report.optimizer_count is not None:
        shown += f"; the optimizer's own count is {report.optimizer_count}"
    return shown


def _summary(report: Inspected) -> list[tuple[str, object]]:
    known = report.topology
    parallel = [
        f"{name}={value}"
        for name, value in (("tp", known.tp), ("pp", known.pp), ("dp", known.dp), ("ep", known.ep))
        if value is not None
    ]
    world = "not recorded" if known.world_size is None else str(known.world_size)
    if known.evidence:
        world += f" ({known.evidence})"
    counts = report.bytes
    rows: list[tuple[str, object]] = [
        ("checkpoint", report.checkpoint.source.url),
        ("format", report.checkpoint.format + (f" ({report.dialect})" if report.dialect else "")),
        ("step", _shown_step(report)),
        ("commit", report.commit.state + (f" by {m}" if (m := report.commit.marker) else "")),
        ("world size", world),
        ("topology", " ".join(parallel) or "not recorded"),
        ("files", f"{report.files.count}, {human_bytes(counts.files)}"),
        (
            "tensors",
            f"{report.tensors.count} in {counted(report.tensors.pieces, 'piece')}, "
            f"{counted(report.objects, 'object')}",
        ),
        ("parameters", f"{human_count(report.parameters)} ({report.parameters})"),
        ("bytes", _shares(counts.by_kind, counts.total)),
        ("types", _shares(counts.by_dtype, counts.total)),
    ]
    if counts.per_parameter is not None:
        rows.append(("per parameter", f"{counts.per_parameter:.4g} bytes"))
    if report.adapter is not None:
        rows.append(("adapter", str(report.adapter)))
    if report.aliases:
        rows.append(("tied", render_.block(*(f"{a} = {b}" for a, b in report.aliases.items()))))
    return rows


def _shares(parts: Any, total: int) -> str:
    words = [f"{name} {human_bytes(count)}" for name, count in parts.items()]
    return ", ".join(words) + (f" = {human_bytes(total)}" if len(words) > 1 else "") or "none"


def _resume_line(items: tuple[ResumeItem, ...]) -> str:
    """Return the resume check in a few lines: which parts are there, and which are not."""
    there = [item.title for item in items if item.needed and item.presence == "present"]
    absent = [item.title for item in items if item.needed and item.presence == "absent"]
    unknown = [item.title for item in items if item.needed and item.presence == "cannot tell"]
    needed = [item for item in items if item.needed]
    alone = [item.key for item in needed if item.presence == "present"] == ["weights"]
    if alone and all(item.presence != "cannot tell" for item in needed if item.key == "moments"):
        return "for a restart: weights alone, without optimizer, step or RNG (--resume says more)"
    said = [("has", there), ("lacks", absent), ("cannot tell", unknown)]
    lines = render_.pairs([(word, ", ".join(titles)) for word, titles in said if titles])
    return render_.block("for a restart (--resume says more)", lines)


def _resume_text(items: tuple[ResumeItem, ...]) -> str:
    """Return the resume check, wrapped: what is there in one line, what is not with its price."""
    title = max(len(item.title) for item in items) + 2
    width = max(render_.text_width() - title - 2, 30)
    lines = ["for a restart"]
    for item in items:
        absent = item.presence != "present"
        word = "" if not absent else f"{item.presence}: " if item.needed else "not needed: "
        sign = _SIGNS[item.presence] if item.needed else "+"
        text = textwrap.wrap(word + item.reason, width)
        if absent and item.needed:
            text += textwrap.wrap("without it: " + item.consequence, width)
        lines.append(f"{sign} {item.title.ljust(title)}{text[0]}")
        lines += [" " * (title + 2) + line for line in text[1:]]
    return render_.block(*lines)


def _sums(checkpoint: Checkpoint, listed: Sequence[ListedTensor]) -> str:
    from ftckpt.inspection.usage import prefix_sums

    infos = [checkpoint.tensors[one.key] for one in listed]
    rows = [
        [human_bytes(one.bytes), one.tensors, render_.branch(one.component, one.prefix, one.depth)]
        for one in prefix_sums(infos, 2)
    ]
    return render_.table(["bytes>", "tensors>", "sum of"], rows)


def _tensor_table(listed: Sequence[ListedTensor]) -> str:
    rows = [
        [
            one.key, one.kind, list(one.shape), one.dtype, one.pieces,
            human_bytes(one.bytes) if one.alias_of is None else f"= {one.alias_of}",
        ]
        for one in listed
    ]  # fmt: skip
    return render_.table(["tensor", "kind", "shape", "type", "pieces>", "bytes>"], rows)


def _object_table(listed: Sequence[ListedObject]) -> str:
    ranks = any(one.rank is not None for one in listed)
    rows = [
        [o.name, *["" if o.rank is None else o.rank] * ranks, human_bytes(o.bytes), o.file]
        for o in listed
    ]
    return render_.table(["other state", *["rank>"] * ranks, "bytes>", "file"], rows)


def _file_table(listed: Sequence[ListedFile]) -> str:
    from ftckpt.own_files import is_own

    def role(one: ListedFile) -> str:
        if is_own(one.path):
            return "written by ftckpt"
        return "" if one.member else "part of nothing here"

    gathered = any(one.places is not None for one in listed)
    rows = [
        [one.path, human_bytes(one.bytes), role(one), *[", ".join(one.places or ())] * gathered]
        for one in listed
    ]
    return render_.table(["file", "bytes>", "", *["places"] * gathered], rows)


def _print_tensors(invocation: Invocation, found: Sequence[ListedTensor]) -> None:
    for one in found:
        assert isinstance(one.pieces, tuple)
        head = f"{one.key}: {one.kind}, {list(one.shape)} {one.dtype}"
        more = f", the same bytes as {one.alias_of}" if one.alias_of else ""
        invocation.print(printable(head + more))
        rows = [
            [
                list(p.offsets), list(p.sizes), "" if p.rank is None else p.rank,
                p.replica or "", p.file, p.offset, p.length,
            ]
            for p in one.pieces
        ]  # fmt: skip
        columns = ["offsets", "sizes", "rank>", "replica>", "file", "at>", "bytes>"]
        invocation.print(render_.table(columns, rows))


def _sentence(report: Inspected) -> str:
    step = "" if report.step is None else f", step {report.step}"
    tensors = counted(report.tensors.count, "tensor")
    files = counted(report.files.count, "file")
    return f"{report.checkpoint.format}{step}: {tensors} in {files}"
