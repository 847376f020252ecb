"""Judge a family's table without a checkpoint: by the model that a `config.json` describes.

The tensors that Hugging Face has of it are imagined, translated to each side and back by the code
that translates real ones. So whatever would be refused there is found here: a name that no row
has, two rows for one, parts that make no whole, heads that no rotation fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, ClassVar, NamedTuple

from ftckpt.checkpoint import Box, Checkpoint, Extent, Kind, Piece, TensorInfo
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.errors import FtckptError, NotFoundError, UsageError
from ftckpt.findings import listed
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from ftckpt.transfer.content import Content

from .facts import configured_model
from .native import NativeTranslator
from .shapes import ShapeRule
from .tables import DIALECTS, OF_EXPERTS, NativeEntry, TableEntry, family
from .towers import language_of
from .translator import DEFAULT_SPELLINGS, Naming, Translator

Shapes = Mapping[str, tuple[int, ...]]


class CheckedRow(NamedTuple):
    """A tensor of Hugging Face's and what it is on another side.

    Attributes:
        hf: its name, `{layer}` and `{expert}` for numbers.
        shape: of it.
        tensors: how many the model has.
        name: of the whole on the other side.
        whole: the shape of that.
        how: what is done on the way; "" where it only has another name.
    """

    hf: str
    shape: tuple[int, ...]
    tensors: int
    name: str
    whole: tuple[int, ...]
    how: str


class CheckedSide(NamedTuple):
    """One side of a table.

    Attributes:
        side: `megatron` or a dialect.
        rows: what fits, in the order of the shapes.
        problems: why the table does not fit the model, in words; none where it does.
    """

    side: str
    rows: list[CheckedRow]
    problems: list[str]


class _There(NamedTuple):
    """What a tensor is on another side: the name in the table, the name of one, what is done."""

    text: str
    name: str
    how: str


_PLACE = "imagined"


class _Imagined(Checkpoint):
    format: ClassVar[str] = _PLACE

    def members(self) -> tuple[str, ...]:
        return ()

    def load_object(self, name: str) -> Any:
        raise NotFoundError(f"an imagined checkpoint has no {name}")


def check_family(name: str, config: Mapping[str, Any], side: str = "") -> list[CheckedSide]:
    """Return what becomes of a model's tensors on each side that a table has.

    Args:
        name: of a built-in table, or the path of another.
        config: the `config.json` of a model of it.
        side: the one that is tried; "" for all that the table has.

    Raises:
        UsageError: the table does not exist or has no shapes, or `config` does not give them.
    """
    table = family(name)
    if table.parts:
        name, config = language_of(table, config)
        if not name:
            raise UsageError(
                f"the table of {table.name} carries every tensor by its name: there are no shapes"
                " to judge"
            )
        table = family(name)
    if table.shapes is None:
        raise UsageError(
            f"the table of {table.name} has no shapes, so that it cannot be judged",
            hint="[shapes] gives the shape of each tensor by the fields of config.json",
        )
    shapes = table.shapes.tensors(config)
    if not shapes:
        raise UsageError(f"the table of {table.name} gives such a model no tensors")
    content = _content(shapes)
    heads = configured_model(config, name, content.checkpoint).heads
    rules = list(table.shapes.rules.values())
    found = []
    if table.entries and side in ("", "megatron"):
        one = Translator(table, heads, config=config)
        problems, made = _tried(content, one.to_megatron, one.to_hugging_face)
        rows = _rows(rules, content, made, partial(_of_megatron, one), problems)
        found.append(CheckedSide("megatron", rows, _once(problems)))
    for dialect in DIALECTS:
        known = any(dialect in entry.names for entry in table.natives)
        if known and side in ("", dialect):
            native = NativeTranslator(table, heads, config)
            there = partial(native.from_hugging_face, dialect=dialect)
            problems, made = _tried(content, there, native.to_hugging_face)
            rows = _rows(rules, content, made, partial(_of_native, native, dialect), problems)
            if dialect in OF_EXPERTS:  # all others are what they are
                rows = [row for row in rows if "{expert}" in row.hf or row.hf != row.name]
            found.append(CheckedSide(dialect, rows, _once(problems)))
    if side and not found:
        raise UsageError(f"the table of {table.name} has no rows of {side}")
    return found


def _content(shapes: Shapes) -> Content:
    """Return a model of these tensors, none of whose bytes exist.

    All lie in one place, so that an output layer may be the embedding.
    """
    dtype = DTYPES["bfloat16"]
    tensors = {}
    for name, shape in shapes.items():
        piece = Piece(Box.whole(shape), Extent(_PLACE, 0, dtype.nbytes(prod(shape))))
        tensors[name] = TensorInfo("model", name, Kind.PARAM, shape, dtype, (piece,))
    source = Source(open_store("."), "", {})
    return Content.of(_Imagined(source=source, tensors=tensors, objects={}))


def _tried(
    content: Content, there: Callable[[Content], Content], back: Callable[[Content], Content]
) -> tuple[list[str], Shapes]:
    """Translate a model there and back; return what is wrong, and the shapes there."""
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        made = there(content)
        shapes = {wanted.name: wanted.shape for wanted in made.tensors.values()}
        again = {w.name: w.shape for w in back(_content(shapes)).tensors.values()}
    except FtckptError as error:
        return [error.message], shapes
    before = {w.name: w.shape for w in content.tensors.values()}
    lost = [name for name, shape in before.items() if again.get(name) != shape]
    return ([f"there and back does not give {listed(lost, 3)}"] if lost else []), shapes


def _rows(
    rules: Sequence[ShapeRule],
    content: Content,
    shapes: Shapes,
    find: Callable[[str], _There | None],
    problems: list[str],
) -> list[CheckedRow]:
    rows = []
    for rule in rules:
        mine = [key for key in content.tensors if rule.name.numbers(key) is not None]
        if not mine:
            continue
        try:
            found = find(mine[0])
        except FtckptError as error:
            problems.append(error.message)
            continue
        if found is None:
            problems.append(f"{mine[0]} is left out, as if it followed from the configuration")
            continue
        shape, whole = content.tensors[mine[0]].shape, shapes.get(found.name, ())
        rows.append(CheckedRow(rule.name.text, shape, len(mine), found.text, whole, found.how))
    return rows


def _once(problems: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(problems))


def _of_megatron(translator: Translator, name: str) -> _There | None:
    found = translator.find(name, Naming.HUGGING_FACE)
    if found is None:
        return None
    spelled = found.entry.megatron
    text = next(spelled[key] for key in DEFAULT_SPELLINGS if key in spelled)
    how = _how(found.entry, found.part)
    if found.entry.stacked:
        how = ", ".join(filter(None, (how, "experts apart")))
    if found.entry.stored:
        how = found.entry.stored
    return _There(text.text, text.fill({"expert": "0", **found.numbers}), how)


def _of_native(translator: NativeTranslator, dialect: str, name: str) -> _There | None:
    found = translator.hugging_face(name, dialect)
    if found is None:
        return None
    how = _how(found.entry, found.part)
    if found.entry.rotated:
        how = ", ".join(filter(None, (how, f"rows of {found.entry.rotated} turned")))
    if found.entry.stacked:
        how = ", ".join(filter(None, (how, "experts stacked")))
    if found.entry.share:
        how = ", ".join(filter(None, (how, f"{found.entry.share.parts} parts apart")))
    own = found.entry.names[dialect][0]
    return _There(own.text, own.fill(found.numbers), how)


def _how(entry: TableEntry | NativeEntry, part: int) -> str:
    said = []
    if len(entry.hf) > 1:
        said.append(f"part {part + 1} of {len(entry.hf)}, {entry.join}")
    elif entry.join != "whole":
        said.append(str(entry.join))
    if entry.transposed:
        said.append("transposed")
    return ", ".join(said)
