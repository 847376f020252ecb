"""Translate a model of several parts: the language model by its table, towers by their names.

`config.json` of such a model has `text_config` and `vision_config`; a table with `[[part]]` rows
says how the names of each part begin in each layout (`parts`). The tensors of the language model
are translated as if they were alone, under a `config.json` made of `text_config`; those of towers
and projectors get another beginning, or are translated by a table of their own (`tower_tables`).
What a layout cannot hold is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ftckpt.checkpoint import Kind
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.findings import counted, listed
from ftckpt.formats.huggingface.config import CONFIG, DTYPE_FIELDS, weights_dtype
from ftckpt.formats.state.transposing import transposed
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.request.renaming import parameter_names, parted

from .parts import LAYOUTS, ModelPart, layouts_of, part_of
from .tables import Family, family, family_names
from .tower_tables import has_layout, is_published, require_tower, tower_from, tower_to
from .translator import DEFAULT_SPELLINGS
from .views import FlatState

_FLOATS = ("float64", "float32", "float16", "bfloat16")

Translate = Callable[[Content, str, Mapping[str, Any]], Content]


class SplitModel(NamedTuple):
    """A model of several parts.

    Attributes:
        layout: whose names it has, of `parts.LAYOUTS`.
        language: its language model, under the names of its own table in that layout.
        towers: everything else, under Hugging Face's names.
    """

    layout: str
    language: Content
    towers: Content


def tower_family(config: Mapping[str, Any], name: str = "") -> Family | None:
    """Return the table of a model with towers; None where it has none.

    Args:
        config: the `config.json` of a model; empty where nothing is known.
        name: of the family, where the user says it.

    Raises:
        UsageError: `config.json` is of another family.
    """
    said = name or str(config.get("model_type"))
    if not config or (not said.endswith(".toml") and said not in family_names()):
        return None
    found = family(said)
    if not found.parts:
        return None
    if config.get("model_type") not in (found.name, found.config.get("model_type")):
        raise UsageError(
            f"{CONFIG} says that the model is a {config.get('model_type')}, not a {found.name}"
        )
    return found


def language_of(table: Family, config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the family of a language model and its `config.json`; "" where no table has it.

    The fields stand in `text_config`, or at the top as in Qwen2-VL's first releases. Whether output
    and embedding are one, transformers 5 asks the top first.

    Args:
        table: of the whole model.
        config: of the whole model.

    Raises:
        UsageError: `text_config` is not a map of fields, or of a model that no table has.
    """
    inner = config.get("text_config", {})
    if not isinstance(inner, dict):
        raise UsageError(f"{CONFIG} says text_config = {inner!r}, not a map of fields")
    if not table.languages:
        return "", {**inner}
    kind = str(inner.get("model_type") or next(iter(table.languages)))
    name = table.languages.get(kind, kind)
    if name not in family_names() or family(name).parts:
        raise UnsupportedError(
            f"no table exists for the language model of the {table.name}, which is a {kind}",
            hint=f"known: {', '.join(sorted(set(table.languages.values())))}",
            kind="unknown-rule",
        )
    flat = {key: value for key, value in config.items() if not key.endswith("_config")}
    tied = config.get("tie_word_embeddings", inner.get("tie_word_embeddings", table.tied))
    made = {**(inner or flat), "tie_word_embeddings": tied}
    return name, {**made, "model_type": family(name).config.get("model_type", name)}


def to_hugging_face_parts(
    content: Content,
    table: Family,
    config: Mapping[str, Any],
    rows: int | None,
    translate: Translate,
) -> Content:
    """Return the content under the names of Hugging Face's files.

    Args:
        content: of the whole model, in any layout.
        table: of the whole model.
        config: of the whole model.
        rows: of the vocabulary that are no padding, where the user says so.
        translate: the language model, to Hugging Face's names.

    Raises:
        UnsupportedError, UsageError: as of a translation; a tower that is not what `config` says.
    """
    made = _translated(content, table, config, "hf", translate)
    _require_towers(made, table, config)
    return replace(made, beside={**made.beside, CONFIG: _said(config, made, rows)})


def from_hugging_face_parts(
    content: Content,
    table: Family,
    config: Mapping[str, Any],
    layout: str,
    translate: Translate,
    spellings: Sequence[str] = DEFAULT_SPELLINGS,
) -> Content:
    """Return the content under the names of another layout.

    Args:
        content: of the whole model.
        table: of the whole model.
        config: of the whole model.
        layout: `megatron`, or a dialect of native rows.
        translate: the language model, to that layout.
        spellings: of Megatron-core, where its implementations differ.

    Raises:
        UnsupportedError, UsageError: as of a translation; a part that the layout cannot hold.
    """
    made = _translated(content, table, config, layout, translate, spellings)
    if layout in ("packed", "torchtitan"):  # a plain model that torch saved
        made = replace(made, checkpoint=FlatState.of(made.checkpoint, made.tensors))
    return made


def _translated(
    content: Content,
    table: Family,
    config: Mapping[str, Any],
    layout: str,
    translate: Translate,
    spellings: Sequence[str] = DEFAULT_SPELLINGS,
) -> Content:
    name, inner = language_of(table, config)
    split = _split(content, table, config)
    _require_place(split, table, layout)
    if layout != "hf":  # the result is held to it otherwise
        _require_towers(split.towers, table, config, whole=False)
    towers = _placed(split.towers, table, config, layout, spellings)
    language = replace(split.language, checkpoint=towers.checkpoint)
    if language.tensors and name:
        language = translate(language, name, inner)
    elif language.tensors and not any(layout in part.beginnings for part in table.parts):
        raise UnsupportedError(
            f"no table says how {layout} stores {table.name}", kind="unknown-rule"
        )
    elif language.tensors and "megatron" in (layout, split.layout) != (layout, layout):
        raise UnsupportedError(
            f"no table says how Megatron-core stores {table.name}", kind="unknown-rule"
        )
    tensors = dict(towers.tensors)
    parameters = parameter_names(language.tensors.values())
    for wanted in language.tensors.values():
        parameter, rest = parted(wanted, parameters)
        new = wanted._replace(name=_outer(parameter, table, layout) + rest)
        if new.key in tensors:
            raise UnsupportedError(f"two tensors of the source become {new.key}", tensor=new.key)
        tensors[new.key] = new
    return replace(language, tensors=tensors)


def _split(content: Content, table: Family, config: Mapping[str, Any]) -> SplitModel:
    """Sort the tensors of a model into its parts.

    Raises:
        UnsupportedError: a name that no layout has, or names of two layouts.
    """
    parameters = parameter_names(content.tensors.values())
    layout = _layout_of(parameters, table)
    language: list[TargetTensor] = []
    towers: list[TargetTensor] = []
    turned: list[TargetTensor] = []
    apart: dict[str, list[TargetTensor]] = {}
    for wanted in content.tensors.values():
        if wanted.component.startswith("extra:"):
            towers.append(wanted)
            continue
        parameter, more = parted(wanted, parameters)
        found = part_of(table.parts, parameter, layout)
        if found is None:
            raise UnsupportedError(
                f"{table.name} has no part that {parameter} is of",
                hint="--rename gives it another name first, --drop leaves it out",
                kind="unknown-rule",
                tensor=parameter,
            )
        part, rest = found
        if part.language is not None:
            language.append(wanted._replace(name=part.language + rest + more))
            continue
        named = part.beginnings["hf"][0] + rest
        of_table = layout != "hf" and part.table and has_layout(part.table, layout)
        if of_table and not is_published(named, part.table, layout):
            apart.setdefault(part.table, []).append(wanted)
            continue
        new = wanted._replace(name=named + more)
        if layout == "hf":  # what one file calls it, another need not
            new = wanted
        towers.append(new)
        if layout in part.transposed and len(wanted.shape) == 2:
            turned.append(new)
    aside = transposed(content.with_tensors(towers), {w.key: w for w in turned})
    for name, tensors in apart.items():
        there = partial(tower_from, name=name, config=config, layout=layout)
        aside = _beside(aside, tensors, there)
    return SplitModel(layout, content.with_tensors(language), aside)


def _beside(
    content: Content, tensors: Sequence[TargetTensor], translate: Callable[[Content], Content]
) -> Content:
    """Return a content with others beside its own, which are translated before.

    Raises:
        UnsupportedError: two tensors have one name.
    """
    made = translate(content.with_tensors(tensors))
    twice = next((key for key in made.tensors if key in content.tensors), None)
    if twice is not None:
        raise UnsupportedError(f"two tensors of the source become {twice}", tensor=twice)
    return replace(made, tensors={**content.tensors, **made.tensors})


def _layout_of(names: frozenset[str], table: Family) -> str:
    """Return the layout that all names can be of.

    Raises:
        UnsupportedError: there is none.
    """
    possible = set(LAYOUTS)
    first: dict[str, str] = {}
    for name in sorted(names):
        found = list(layouts_of(table.parts, name))
        best = max((length for length, _ in found), default=0)
        mine = {layout for length, layout in found if length in (0, best)}  # 0: of any name
        if found and not possible & mine:
            other = next(iter(first[one] for one in first if one not in mine), name)
            raise UnsupportedError(
                f"{other} and {name} are names of two layouts of {table.name}",
                hint="--rename brings them to one",
                tensor=name,
            )
        if found:
            possible &= mine
            first |= dict.fromkeys(mine - first.keys(), name)
    return next(layout for layout in LAYOUTS if layout in possible)


def _require_place(split: SplitModel, table: Family, layout: str) -> None:
    """Refuse what a layout has no place for.

    Raises:
        UnsupportedError: the first few are named.
    """
    if layout == "hf":
        return
    lost: dict[str, ModelPart] = {}
    for wanted in split.towers.tensors.values():
        found = part_of(table.parts, wanted.name, "hf")
        if found is not None and layout not in found[0].beginnings:
            lost.setdefault(wanted.name, found[0])
    if lost:
        begun = dict.fromkeys(part.beginnings[split.layout][0] for part in lost.values())
        raise UnsupportedError(
            f"{layout} has no place for {counted(len(lost), 'tensor')} of {table.name}:"
            f" {listed(sorted(lost), 3)}",
            hint=" ".join(f"--drop '{one}*'" for one in begun) + " leaves them out",
            kind="unknown-rule",
            tensor=min(lost),
        )


def _placed(
    towers: Content,
    table: Family,
    config: Mapping[str, Any],
    layout: str,
    spellings: Sequence[str],
) -> Content:
    """Return towers under the names of a layout."""
    if layout == "hf":
        return towers
    parameters = parameter_names(towers.tensors.values())
    made: list[TargetTensor] = []
    apart: dict[str, list[TargetTensor]] = {}
    turned: dict[str, TargetTensor] = {}
    for wanted in towers.tensors.values():
        parameter, more = parted(wanted, parameters)
        found = part_of(table.parts, parameter, "hf")
        if wanted.component.startswith("extra:") or found is None:
            made.append(wanted)
            continue
        part, rest = found
        if part.table and has_layout(part.table, layout):
            apart.setdefault(part.table, []).append(wanted)
            continue
        new = wanted._replace(name=part.beginnings[layout][0] + rest + more)
        made.append(new)
        if layout in part.transposed and len(new.shape) == 2:
            turned[new.key] = new
    placed = transposed(towers.with_tensors(made), turned)
    for name, tensors in apart.items():
        there = partial(tower_to, name=name, config=config, layout=layout, spellings=spellings)
        placed = _beside(placed, tensors, there)
    return placed


def _outer(name: str, table: Family, layout: str) -> str:
    """Return a language model's name as the whole model has it.

    Raises:
        UnsupportedError: the layout has no place for it.
    """
    if not any(layout in part.beginnings for part in table.parts):
        return name  # the layout of the language model alone
    found = [
        part
        for part in table.parts
        if part.language is not None and layout in part.beginnings
        and name.startswith(part.language)
    ]  # fmt: skip
    if not found:
        raise UnsupportedError(
            f"{table.name} has no part for {name} in the layout {layout}",
            kind="unknown-rule",
            tensor=name,
        )
    part = max(found, key=lambda one: len(one.language or ""))
    return part.beginnings[layout][0] + name[len(part.language or "") :]


def _require_towers(
    content: Content, table: Family, config: Mapping[str, Any], *, whole: bool = True
) -> None:
    """Refuse a tower that is absent, or has other blocks than `config.json` says.

    Where no table gives its shapes, blocks are counted, and each has what its neighbour has. Where
    the user may have dropped a tower (not `whole`), one that is absent is none.

    Raises:
        UsageError: the first such part.
    """
    weights = [w.name for w in content.tensors.values() if _is_weight(w)]
    if not weights:  # an optimizer alone
        return
    held: dict[str, dict[str, tuple[int, ...]]] = {}
    for one in content.tensors.values():
        of = part_of(table.parts, one.name, "hf") if _is_weight(one) else None
        if of is not None and of[0].table:
            held.setdefault(of[0].table, {})[one.name] = one.shape
    for name, tensors in held.items():
        require_tower(tensors, name, config)
    for part in table.parts:
        if "hf" not in part.beginnings or (part.language is not None and not part.blocks):
            continue
        mine = [
            name for name in weights
            if (found := part_of(table.parts, name, "hf")) is not None and found[0] is part
        ]  # fmt: skip
        where = part.beginnings["hf"][0]
        if not mine and not part.optional and whole:
            raise UsageError(
                f"the model is not the {table.name} that {CONFIG} describes: nothing is called"
                f" {where}… in it",
                hint="--config FILE with its text_config alone is for a language model alone",
            )
        if not part.blocks or not mine:
            continue
        wanted = _field(config, part.told_by)
        blocks = part.numbers(mine)
        if sorted(blocks) != list(range(wanted)):
            raise UsageError(
                f"the model is not the {table.name} that {CONFIG} describes: it has"
                f" {counted(len(blocks), 'block')} of {where}{part.blocks}, and {part.told_by} ="
                f" {wanted}",
                tensor=mine[0],
            )
        if part.language is None:
            _require_alike(blocks, f"{where}{part.blocks}")


def _is_weight(wanted: TargetTensor) -> bool:
    return wanted.component == "model" and wanted.kind is Kind.PARAM


def _require_alike(blocks: Mapping[int, set[str]], where: str) -> None:
    first = next(iter(blocks.values()), set())
    for number, held in blocks.items():
        odd = sorted(first ^ held)
        if odd:
            has = "has" if odd[0] in held else "lacks"
            raise UsageError(
                f"block {number} of {where} {has} {odd[0]}, unlike another block",
                tensor=f"{where}.{number}.{odd[0]}",
            )


def _field(config: Mapping[str, Any], path: str) -> int:
    value: Any = config
    for word in path.split("."):
        value = value.get(word) if isinstance(value, Mapping) else None
    if type(value) is not int or not 0 < value < 1_000_000:
        raise UsageError(f"{CONFIG} says {path} = {value!r}, and the table needs a number")
    return value


def _said(config: Mapping[str, Any], content: Content, rows: int | None) -> bytes:
    """Return a `config.json` that says the weights' type, and how many rows a vocabulary has."""
    said: dict[str, Any] = {**config}
    if dtype := weights_dtype(content):
        said = {key: value for key, value in said.items() if key not in DTYPE_FIELDS}
        said["torch_dtype"] = dtype
        for key, inner in config.items():
            if key.endswith("_config") and isinstance(inner, dict):
                typed = {f: dtype for f in DTYPE_FIELDS if inner.get(f) in _FLOATS}
                said[key] = {**inner, **typed}
    if rows:
        inner = said.get("text_config")
        if isinstance(inner, dict):
            said["text_config"] = {**inner, "vocab_size": rows}
        else:
            said["vocab_size"] = rows
    return json.dumps(said, indent=2, sort_keys=True).encode() + b"\n"
