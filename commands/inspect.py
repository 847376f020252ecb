"""`ftckpt inspect`: what a checkpoint holds."""

from __future__ import annotations

import textwrap
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ftckpt.commands.cli.bounds import MemoryOption, bound_memory
from ftckpt.commands.cli.invocation import Invocation, Result, invoked
from ftckpt.commands.cli.parameters import option, switch
from ftckpt.commands.cli.render import human_bytes, human_count, printable
from ftckpt.commands.cli.target import AlsoOption, PathArgument, open_from, open_target
from ftckpt.errors import ExitCode, NotFoundError
from ftckpt.findings import counted

from .cli import render

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftckpt.checkpoint import Checkpoint, TensorInfo
    from ftckpt.discovery.resolve import Target
    from ftckpt.findings import Finding
    from ftckpt.formats.lora.summary import AdapterDescription
    from ftckpt.inspection import Inspection
    from ftckpt.inspection.resume import ResumeItem

EXAMPLES = (
    ("ftckpt inspect /ckpt/run7/step-1000", "what it is, and what a restart from it lacks"),
    ("ftckpt inspect /ckpt/run7/step-1000 --resume", "the same, and what follows of each lack"),
    ("ftckpt inspect model/ --match '*.mlp.*' --sort bytes", "some tensors, the largest first"),
    ("ftckpt inspect /ckpt/run7", "the checkpoints of a root, and the newest of them"),
    ("ftckpt inspect s3://run7/ckpt@1000 --tensors", "every tensor: shape, type, pieces"),
    ("ftckpt inspect model.safetensors --tensor lm_head.weight", "where one tensor's bytes lie"),
)
CODES = {
    ExitCode.OK: "readable; the content was not checked",
    ExitCode.CORRUPT: "its headers or metadata are damaged",
    ExitCode.INCOMPLETE: "not committed, or still being written",
    ExitCode.UNSAFE: "its headers or metadata are hostile or ambiguous; nothing was executed",
    ExitCode.NOT_FOUND: "no checkpoint there, or no tensor of that name",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "the metadata needs more than --max-memory",
    ExitCode.UNSUPPORTED: "",
}

_WRONG = 5  # errors that are printed
_SIGNS = {"present": "+", "absent": "-", "cannot tell": "?"}


class SortChoice(StrEnum):
    """Orders of tensors."""

    NAME = "name"
    BYTES = "bytes"
    DTYPE = "dtype"
    PIECES = "pieces"


def command(
    ctx: typer.Context,
    path: PathArgument,
    tensors: Annotated[bool, switch("--tensors", "List every tensor.")] = False,
    files: Annotated[bool, switch("--files", "List every file.")] = False,
    tensor: Annotated[
        str, option("GLOB", "Show tensors of this name and where their pieces lie.")
    ] = "",
    match: Annotated[str, option("GLOB", "List tensors of this name, with sums by prefix.")] = "",
    sort: Annotated[
        SortChoice | None, typer.Option(help="Order of the listed tensors; else as stored.")
    ] = None,
    resume: Annotated[
        bool, switch("--resume", "Say what a restart lacks, and what follows of it.")
    ] = False,
    also: AlsoOption = None,
    max_memory: MemoryOption = "1GiB",
) -> Result | None:
    """Show what a checkpoint holds, from headers alone.

    Format, step, topology, bytes by kind and type, and the resume check: which parts of the
    training state are present, absent, or cannot be told, by names and by content, and what goes
    wrong without them. With --resume it also says where the files of it are missing or cut. Never
    reads tensor bytes and never runs code from a file.
    """
    from ftckpt.formats.state import state_contents
    from ftckpt.inspection import inspect, matching

    invocation = invoked(ctx)
    bound_memory(max_memory)
    target = open_target(invocation, path, also=also)
    _show_root(invocation, target)
    checkpoint = open_from(invocation, target)
    if tensor:
        _show_tensor(invocation, checkpoint, tensor, sort)
        return None
    listed = _sorted(matching(checkpoint, match), sort) if match or tensors else None
    result = inspect(checkpoint, state_contents)
    if resume:
        from ftckpt.verification.structure import with_structure

        result = with_structure(result, checkpoint)
    adapter = _adapter_of(checkpoint)
    known = _known_step(invocation, target, checkpoint, result)
    _report(invocation, checkpoint, result, known, listed, with_files=files)
    if adapter is not None:
        invocation.report(adapter=adapter._asdict())
    if not invocation.json:
        invocation.print(render.pairs(_summary(checkpoint, result, known, adapter)))
        invocation.print()
        invocation.print(_resume_text(result.resume) if resume else _resume_line(result.resume))
        _print_notes(invocation, result.notes)
        if files:
            invocation.print()
            invocation.print(_file_table(checkpoint))
        if listed is not None:
            invocation.print()
            invocation.print(_tensor_table(checkpoint, listed))
        if match and listed:
            invocation.print()
            invocation.print(_sums(listed))
    return Result(ExitCode.OK, _sentence(result, known))


def _adapter_of(checkpoint: Checkpoint) -> AdapterDescription | None:
    """Describe the adapter in a checkpoint; nothing is imported for one without."""
    names = (info.name for info in checkpoint.tensors.values())
    if not any(".lora_" in name or ".adapter." in name for name in names):
        return None
    from ftckpt.formats.lora.summary import describe

    return describe(checkpoint)


def _print_notes(invocation: Invocation, notes: Sequence[Finding]) -> None:
    """Print remarks, and the first few things that are wrong: one file may bring hundreds."""
    wrong = [note for note in notes if note.severity == "error"]
    for note in notes:
        if note.severity != "error":
            invocation.find(note)
    for note in wrong[:_WRONG]:
        invocation.find(note)
    if wrong:
        more = f"and {len(wrong) - _WRONG} more; " if len(wrong) > _WRONG else ""
        invocation.say(f"{more}what cannot be read is not shown; `ftckpt verify` says all")


def _show_root(invocation: Invocation, target: Target) -> None:
    """List the checkpoints of a root; the newest is then shown like any checkpoint."""
    root = target.root
    if root is None or target.place.which:
        return
    # Most commands name one checkpoint.
    from ftckpt.discovery.candidates import steps_of
    from ftckpt.discovery.roots import saves_among

    children = saves_among(root.children())
    steps = steps_of(root, children)
    rows = [
        {
            "path": root.url_of(child.candidate),
            "step": steps[child.candidate.path],
            "format": child.part.format.name,
            "commit": child.part.recognition.commit,
        }
        for child in children
    ]
    invocation.report(root={"path": root.url, "checkpoints": rows, "pointers": root.pointers})
    cells = [
        [row["path"], "" if row["step"] is None else row["step"], row["format"], row["commit"]]
        for row in rows
    ]
    invocation.print(render.table(["checkpoint", "step>", "format", "names say"], cells))
    invocation.print()


def _report(
    invocation: Invocation,
    checkpoint: Checkpoint,
    result: Inspection,
    known: _KnownStep,
    shown: Sequence[TensorInfo] | None,
    *,
    with_files: bool,
) -> None:
    usage = checkpoint.source.store.usage()
    listed: dict[str, Any] = {"count": result.tensors, "pieces": result.pieces}
    if shown is not None:
        listed["list"] = [
            _tensor_record(i.key, i) | {"alias_of": checkpoint.aliases.get(i.key)} for i in shown
        ]
    invocation.report(
        dialect=result.dialect,
        step=known.step,
        step_by=known.by,
        optimizer_count=result.optimizer_count,
        commit=result.commit,
        topology=result.topology,
        world_size=result.topology.world_size,
        bytes=result.bytes,
        parameters=result.parameters,
        tensors=listed,
        objects=result.objects,
        files={"count": result.files, "bytes": result.bytes.files}
        | ({"list": _file_records(checkpoint)} if with_files else {}),
        aliases=result.aliases,
        resume=result.resume,
        notes=result.notes,
        requests=usage.requests,
        bytes_read=usage.bytes_read,
    )


class _KnownStep(NamedTuple):
    """The step, and what says it: the content, the name, or what lies around it."""

    step: int | None
    by: str | None


def _known_step(
    invocation: Invocation, target: Target, checkpoint: Checkpoint, result: Inspection
) -> _KnownStep:
    """Return the step as `latest` takes it."""
    from ftckpt.discovery.step_names import step_in_name

    if result.step is not None:
        return _KnownStep(result.step, "content")
    named = step_in_name(checkpoint.source.name)
    if named is not None:
        return _KnownStep(named, "name")
    from ftckpt.discovery.step_around import step_around  # most say it themselves

    found = step_around(checkpoint.source.url, target.formats, invocation.stores)
    return _KnownStep(found, None if found is None else "siblings")


def _shown_step(known: _KnownStep, result: Inspection) -> object:
    if known.by == "content":
        return known.step
    by = "by its name" if known.by == "name" else "by the files around it"
    shown = "cannot tell" if known.step is None else f"{known.step} {by}"
    if result.optimizer_count is not None:
        shown += f"; the optimizer's own count is {result.optimizer_count}"
    return shown


def _summary(
    checkpoint: Checkpoint,
    result: Inspection,
    step: _KnownStep,
    adapter: AdapterDescription | None,
) -> list[tuple[str, object]]:
    known = result.topology
    parallel = [
        f"{name}={value}"
        for name, value in (("tp", known.tp), ("pp", known.pp), ("dp", known.dp), ("ep", known.ep))
        if value is not None
    ]
    world = "not recorded" if known.world_size is None else str(known.world_size)
    if known.evidence:
        world += f" ({known.evidence})"
    counts = result.bytes
    rows: list[tuple[str, object]] = [
        ("checkpoint", checkpoint.source.url),
        ("format", result.format + (f" ({result.dialect})" if result.dialect else "")),
        ("step", _shown_step(step, result)),
        ("commit", result.commit.state + (f" by {m}" if (m := result.commit.marker) else "")),
        ("world size", world),
        ("topology", " ".join(parallel) or "not recorded"),
        ("files", f"{result.files}, {human_bytes(counts.files)}"),
        (
            "tensors",
            f"{result.tensors} in {counted(result.pieces, 'piece')}, "
            f"{counted(result.objects, 'object')}",
        ),
        ("parameters", f"{human_count(result.parameters)} ({result.parameters})"),
        ("bytes", _shares(counts.by_kind, counts.total)),
        ("types", _shares(counts.by_dtype, counts.total)),
    ]
    if counts.per_parameter is not None:
        rows.append(("per parameter", f"{counts.per_parameter:.4g} bytes"))
    if adapter is not None:
        rows.append(("adapter", str(adapter)))
    if result.aliases:
        rows.append(("tied", render.block(*(f"{a} = {b}" for a, b in result.aliases.items()))))
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
    lines = render.pairs([(word, ", ".join(titles)) for word, titles in said if titles])
    return render.block("for a restart (--resume says more)", lines)


def _resume_text(items: tuple[ResumeItem, ...]) -> str:
    """Return the resume check, wrapped: what is there in one line, what is not with its price."""
    title = max(len(item.title) for item in items) + 2
    width = max(render.text_width() - title - 2, 30)
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
    return render.block(*lines)


def _tensor_record(key: str, info: TensorInfo) -> dict[str, Any]:
    return {
        "key": key,
        "name": info.name,
        "component": info.component,
        "kind": info.kind,
        "shape": info.shape,
        "dtype": info.dtype.name,
        "bytes": info.nbytes,
        "pieces": len(info.pieces),
    }


def _sorted(infos: Sequence[TensorInfo], order: SortChoice | None) -> Sequence[TensorInfo]:
    """Return tensors in an order; the largest first where it is one of numbers."""
    from ftckpt.inspection.usage import natural

    if order is None:
        return infos
    keys: dict[SortChoice, Callable[[TensorInfo], Any]] = {
        SortChoice.NAME: lambda info: (natural(info.name), info.key),
        SortChoice.BYTES: lambda info: -info.nbytes,
        SortChoice.DTYPE: lambda info: info.dtype.name,
        SortChoice.PIECES: lambda info: -len(info.pieces),
    }
    return sorted(infos, key=keys[order])


def _sums(infos: Sequence[TensorInfo]) -> str:
    from ftckpt.inspection.usage import prefix_sums

    rows = [
        [human_bytes(one.bytes), one.tensors, render.branch(one.component, one.prefix, one.depth)]
        for one in prefix_sums(infos, 2)
    ]
    return render.table(["bytes>", "tensors>", "sum of"], rows)


def _tensor_table(checkpoint: Checkpoint, infos: Sequence[TensorInfo]) -> str:
    rows = [
        [
            info.key,
            info.kind,
            list(info.shape),
            info.dtype.name,
            len(info.pieces),
            f"= {checkpoint.aliases[info.key]}" if info.key in checkpoint.aliases
            else human_bytes(info.nbytes),
        ]
        for info in infos
    ]  # fmt: skip
    return render.table(["tensor", "kind", "shape", "type", "pieces>", "bytes>"], rows)


def _file_records(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    members, source = set(checkpoint.members()), checkpoint.source
    gathered = len(source.store.parts()) > 1
    return [
        {"path": name, "bytes": entry.size, "mtime": entry.mtime, "member": name in members}
        | ({"places": source.store.places_of(entry.path)} if gathered else {})
        for name, entry in source.entries.items()
    ]


def _file_table(checkpoint: Checkpoint) -> str:
    from ftckpt.own_files import is_own

    def role(record: dict[str, Any]) -> str:
        if is_own(record["path"]):
            return "written by ftckpt"
        return "" if record["member"] else "part of nothing here"

    rows = [
        [
            r["path"],
            human_bytes(r["bytes"]),
            role(r),
            *(", ".join(r[k]) for k in r if k == "places"),
        ]
        for r in _file_records(checkpoint)
    ]
    gathered = len(checkpoint.source.store.parts()) > 1
    return render.table(["file", "bytes>", "", *(["places"] * gathered)], rows)


def _show_tensor(
    invocation: Invocation, checkpoint: Checkpoint, name: str, sort: SortChoice | None
) -> None:
    from ftckpt.inspection import find_tensors
    from ftckpt.storage.suggestions import hint_for_name

    found = _sorted(find_tensors(checkpoint, name), sort)
    if not found:
        near = hint_for_name(name, checkpoint.tensors)
        raise NotFoundError(
            f"{checkpoint.source.url} has no tensor {name}",
            hint=near or "ftckpt inspect PATH --tensors lists the names",
            tensor=name,
        )
    records = []
    for info in found:
        pieces = [
            {
                "offsets": p.box.offsets,
                "sizes": p.box.sizes,
                "flat": p.flat,
                "rank": p.rank,
                "replica": p.replica,
                "file": p.extent.file,
                "offset": p.extent.offset,
                "length": p.extent.length,
            }
            for p in info.pieces
        ]
        alias = checkpoint.aliases.get(info.key)
        record = _tensor_record(info.key, info)
        records.append(record | {"pieces": pieces, "alias_of": alias})
        head = f"{info.key}: {info.kind}, {list(info.shape)} {info.dtype.name}"
        more = f", the same bytes as {alias}" if alias else ""
        invocation.print(printable(head + more))
        rows = [
            [
                list(p.box.offsets), list(p.box.sizes), "" if p.rank is None else p.rank,
                p.replica or "", p.extent.file, p.extent.offset, p.extent.length,
            ]
            for p in info.pieces
        ]  # fmt: skip
        columns = ["offsets", "sizes", "rank>", "replica>", "file", "at>", "bytes>"]
        invocation.print(render.table(columns, rows))
    invocation.report(tensor=records)


def _sentence(result: Inspection, known: _KnownStep) -> str:
    step = "" if known.step is None else f", step {known.step}"
    tensors, files = counted(result.tensors, "tensor"), counted(result.files, "file")
    return f"{result.format}{step}: {tensors} in {files}"
