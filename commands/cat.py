"""`ftckpt cat`: a tensor, a part of it, or other state."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ftckpt import amounts
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import block, human_bytes, pairs, plain, table
from ftckpt.commands.cli.terminal import is_terminal, write_bytes
from ftckpt.errors import NoResourceError, UsageError
from ftckpt.operations import looking
from ftckpt.operations.definition import option

if TYPE_CHECKING:
    from ftckpt.comparison.part import TensorPart

operation = looking.cat

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


@dataclass(frozen=True, kw_only=True)
class CatOptions:
    """What is shown of it."""

    TITLE: ClassVar[str] = "Options"

    format_: Annotated[
        FormatChoice, option("", "npy goes to a file or pipe; hist draws the values.")
    ] = FormatChoice.TEXT


OPTIONS = (CatOptions,)


def check(invocation: Invocation, given: Mapping[str, Any]) -> None:
    """Refuse npy inside a JSON document.

    Raises:
        UsageError: both take stdout.
    """
    shown = invocation.options(CatOptions).format_
    if shown is FormatChoice.NPY and invocation.json:
        raise UsageError("npy and --json both take stdout", hint="choose one of them")


def render(invocation: Invocation, report: TensorPart | Any, given: Mapping[str, Any]) -> Result:
    """Print the values, or numbers about them.

    Raises:
        UsageError: other state has no values.
        NoResourceError: they do not fit into memory as text.
    """
    from ftckpt.comparison.part import TensorPart

    format_, sliced = invocation.options(CatOptions).format_, bool(given["slice_"])
    if not isinstance(report, TensorPart):
        if sliced or format_ not in (FormatChoice.TEXT, FormatChoice.JSON):
            raise UsageError(f"{given['name']} is other state: only JSON is printed of it")
        invocation.print(block(*json.dumps(plain(report), indent=2).split("\n")))
        return Result(message=f"{given['name']}, other state")
    view, info = report, report.info
    if format_ is FormatChoice.TEXT and not sliced:
        view = view.first(_SHOWN)
        if view.box.sizes != info.shape:
            invocation.say(f"the beginning of {list(info.shape)}; --slice chooses another part")
    as_text = format_ in (FormatChoice.TEXT, FormatChoice.JSON)
    if as_text and view.box.volume * _WIDE > amounts.size(given["max_memory"]):
        raise NoResourceError(
            f"{view.box.volume} elements do not fit into --max-memory",
            hint="take a --slice, or --format stats, hist or npy",
        )
    invocation.report(
        name=info.key, dtype=info.dtype.name, tensor_shape=info.shape, offsets=view.box.offsets,
        shape=view.shape,
    )  # fmt: skip
    _PRINTERS[format_](invocation, view)
    invocation.report(bytes_read=view.checkpoint.source.store.usage().bytes_read)
    return Result(message=f"{_head(view)}, {human_bytes(view.nbytes)}")


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
