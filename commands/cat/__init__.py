"""`ftckpt cat`: a tensor, a part of it, or other state."""

from __future__ import annotations

import json
import struct
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftckpt.commands.cli.bounds import MemoryOption, bound_memory
from ftckpt.commands.cli.invocation import Invocation, Result, invoked
from ftckpt.commands.cli.parameters import argument, option
from ftckpt.commands.cli.render import block, human_bytes, pairs, plain, table
from ftckpt.commands.cli.target import AlsoOption, PathArgument, open_checkpoint
from ftckpt.commands.cli.terminal import is_terminal, write_bytes
from ftckpt.errors import ExitCode, NoResourceError, UsageError

if TYPE_CHECKING:
    from ftckpt.comparison.part import TensorPart

EXAMPLES = (
    ("ftckpt cat run@1000 model.norm.weight --slice 0:8", "the first eight elements"),
    ("ftckpt cat run@1000 lm_head.weight --format hist", "how its values lie"),
    ("ftckpt cat s3://run7/ckpt@1000 exp_avg:lm_head.weight --format stats", "mean, norm, NaNs"),
    ("ftckpt cat run@1000 lm_head.weight --slice 0:4,: --format npy > x.npy", "for numpy.load"),
    ("ftckpt cat run@1000 optimizer.param_groups", "a subtree of other state, as JSON"),
)
CODES = {
    ExitCode.OK: "printed; the content was not checked",
    ExitCode.CORRUPT: "it is damaged, as far as it was read",
    ExitCode.INCOMPLETE: "not committed, or still being written",
    ExitCode.UNSAFE: "hostile or ambiguous content; nothing was executed",
    ExitCode.NOT_FOUND: "no checkpoint there, or nothing of that name",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "it does not fit into --max-memory: take a slice, stats, hist or npy",
    ExitCode.UNSUPPORTED: "a format that is not read, or elements that are no numbers",
}

_SHOWN = 8  # elements along an axis, where no slice was chosen
_BINS, _BAR = 20, 40
_WIDE = 64  # bytes that an element takes as a number of Python and as its text


class FormatChoice(StrEnum):
    """How it is printed."""

    TEXT = "text"
    NPY = "npy"
    JSON = "json"
    STATS = "stats"
    HIST = "hist"


def command(
    ctx: typer.Context,
    path: PathArgument,
    tensor: Annotated[str, argument("TENSOR", "A tensor, an object, or a subtree of state.")],
    slice_: Annotated[str, option("SLICE", "A part, as numpy: 0:4,: or -1.", "--slice")] = "",
    format_: Annotated[
        FormatChoice,
        typer.Option("--format", help="npy goes to a file or pipe; hist draws the values."),
    ] = FormatChoice.TEXT,
    also: AlsoOption = None,
    max_memory: MemoryOption = "1GiB",
) -> Result:
    """Print a tensor, a part of it, or other state, reading only what that needs.

    Without a slice, text shows the beginning along each axis. bfloat16 and 8-bit floats are shown
    by their values, and written to npy, which has no such types, as float32, which holds all of
    them. Other state is printed as JSON. Nothing is checked: that is for verify.
    """
    from ftckpt.comparison.part import state_at, view_of

    invocation = invoked(ctx)
    budget = bound_memory(max_memory)
    if format_ is FormatChoice.NPY and invocation.json:
        raise UsageError("npy and --json both take stdout", hint="choose one of them")
    checkpoint = open_checkpoint(invocation, path, also=also)
    usage = checkpoint.source.store.usage
    view = view_of(checkpoint, tensor, slice_)
    if view is None:
        if slice_ or format_ not in (FormatChoice.TEXT, FormatChoice.JSON):
            state_at(checkpoint, tensor)
            raise UsageError(f"{tensor} is other state: only JSON is printed of it")
        state = plain(state_at(checkpoint, tensor))
        invocation.report(name=tensor, state=state, bytes_read=usage().bytes_read)
        invocation.print(block(*json.dumps(state, indent=2).split("\n")))
        return Result(ExitCode.OK, f"{tensor}, other state")
    info = view.info
    if format_ is FormatChoice.TEXT and not slice_:
        view = view.first(_SHOWN)
        if view.box.sizes != info.shape:
            invocation.say(f"the beginning of {list(info.shape)}; --slice chooses another part")
    if format_ in (FormatChoice.TEXT, FormatChoice.JSON) and view.box.volume * _WIDE > budget:
        raise NoResourceError(
            f"{view.box.volume} elements do not fit into --max-memory",
            hint="take a --slice, or --format stats, hist or npy",
        )
    invocation.report(
        name=info.key, dtype=info.dtype.name, tensor_shape=info.shape, offsets=view.box.offsets,
        shape=view.shape,
    )  # fmt: skip
    _PRINTERS[format_](invocation, view)
    invocation.report(bytes_read=usage().bytes_read)
    return Result(ExitCode.OK, f"{_head(view)}, {human_bytes(view.nbytes)}")


def _head(view: TensorPart) -> str:
    info = view.info
    return f"{info.key}: {info.kind}, {list(view.shape)} of {list(info.shape)} {info.dtype.name}"


def _exact(view: TensorPart) -> Any:
    """Return the values in numpy's own types, which hold each of them."""
    family = view.info.dtype.family
    return view.array().astype({"int": "<i8", "uint": "<u8", "bool": "<u8"}.get(family, "<f8"))


def _text(invocation: Invocation, view: TensorPart) -> None:
    import numpy as np

    array = _exact(view)
    invocation.report(values=array.tolist())
    invocation.print(_head(view))
    shown = np.array2string(array, threshold=sys.maxsize, max_line_width=100)
    invocation.print(block(*shown.split("\n")))


def _json(invocation: Invocation, view: TensorPart) -> None:
    numbers = plain(_exact(view).tolist())
    invocation.report(values=numbers)
    invocation.print(json.dumps(numbers))


def _npy(invocation: Invocation, view: TensorPart) -> None:
    """Write numpy's file: its magic, a header of a multiple of 64 bytes, the elements."""
    if is_terminal(sys.stdout):
        raise UsageError("npy is binary, and stdout is a terminal", hint="> FILE.npy")
    dtype = view.info.dtype
    code = dtype.numpy or "<f4"
    if not dtype.numpy:
        if dtype.family != "float":
            raise UsageError(f"npy has no {dtype.name}", hint="--format json has its values")
        invocation.say(f"npy has no {dtype.name}: written as float32, which holds all its values")
    code = {"i1": "|i1", "u1": "|u1", "?": "|b1"}.get(code, code)
    header = f"{{'descr': '{code}', 'fortran_order': False, 'shape': {view.shape!r}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    write_bytes(sys.stdout, b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode())
    blocks = view.raw() if dtype.numpy else (b.astype("<f4").tobytes() for b in view.blocks())
    for data in blocks:
        write_bytes(sys.stdout, data)


def _stats(invocation: Invocation, view: TensorPart) -> None:
    found = view.statistics()
    invocation.report(statistics=found)
    invocation.print(_head(view))
    rows: list[tuple[str, object]] = [
        (name, "-" if value is None else value if isinstance(value, int) else f"{value:.8g}")
        for name, value in found._asdict().items()
    ]
    invocation.print(pairs(rows))


def _hist(invocation: Invocation, view: TensorPart) -> None:
    found = view.histogram(_BINS)
    invocation.report(histogram=found)
    invocation.print(_head(view))
    if not found.counts:
        invocation.print("no finite element")
        return
    most = max(found.counts)
    rows: list[list[Any]] = [
        [f"{low:.4g}", f"{high:.4g}", count, "#" * -(-_BAR * count // most)]
        for low, high, count in zip(found.edges, found.edges[1:], found.counts, strict=False)
    ]
    invocation.print(table(["from>", "to>", "elements>", ""], rows))


_PRINTERS = {
    FormatChoice.TEXT: _text,
    FormatChoice.JSON: _json,
    FormatChoice.NPY: _npy,
    FormatChoice.STATS: _stats,
    FormatChoice.HIST: _hist,
}
