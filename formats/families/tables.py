"""The tables of model families: what each parameter is called by Megatron-core and by Hugging Face.

One TOML file in `families/` for each model type of Hugging Face's `config.json`, by its name:

    extends = "llama"            # the other's entries follow this table's own
    prefix = "model."            # what a model saved without its head lacks in every name

    [config]                     # constants of its config.json
    [arguments]                  # config.json's fields <- the arguments of Megatron that hold them
    [model]                      # what Megatron's arguments say of such a model

    [[tensor]]
    megatron = "decoder.layers.{layer}.self_attention.linear_qkv.weight"
    hf = ["….q_proj.weight", "….k_proj.weight", "….v_proj.weight"]
    join = "grouped"             # how the one is made of the others: `family_joins`
    transposed = true            # Hugging Face stores [in, out]
    vocabulary = true            # the rows may end in padding

    [[derived]]
    hf = "model.rotary_emb.inv_freq"     # follows from the configuration: left out

    [[maxtext]]                  # an array of MaxText: `maxtext` has the words
    name = "decoder.{layers}.self_attention.query.kernel"
    hf = "….q_proj.weight"
    axes = "hidden | heads width"

Where implementations of Megatron-core differ, `transformer_engine` and `local`, or `sequential` and
`grouped` experts, stand for `megatron`. `{layer}` and `{expert}` stand for numbers.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from ftckpt.errors import UsageError

from .joins import Join

SPELLINGS = ("megatron", "transformer_engine", "local", "sequential", "grouped")
_LAYERS = re.escape("{layers}")
_NUMBERS = re.compile(r"\{(layer|expert)\}")


class Name(NamedTuple):
    """A parameter's name with places for numbers."""

    text: str
    pattern: re.Pattern[str]

    @classmethod
    def of(cls, text: str) -> Name:
        """Return the name; `{layer}` and `{expert}` match numbers."""
        parts = _NUMBERS.split(text)
        pattern = "".join(
            rf"(?P<{part}>\d+)" if index % 2 else re.escape(part)
            for index, part in enumerate(parts)
        )
        return cls(text, re.compile(pattern))

    def numbers(self, name: str) -> Mapping[str, str] | None:
        """Return the numbers in `name`, or None where it is another's."""
        match = self.pattern.fullmatch(name)
        return None if match is None else match.groupdict()

    def fill(self, numbers: Mapping[str, str]) -> str:
        """Return the name with its numbers."""
        return _NUMBERS.sub(lambda match: numbers[match[1]], self.text)


class TableEntry(NamedTuple):
    """One parameter in both spellings.

    Attributes:
        megatron: by spelling, a key of `SPELLINGS`.
        hf: its parts on Hugging Face's side, in order.
        join: how the parts make the whole.
        transposed: whether Hugging Face stores the other axis first.
        vocabulary: whether its rows may end in padding.
    """

    megatron: Mapping[str, Name]
    hf: Sequence[Name]
    join: Join
    transposed: bool
    vocabulary: bool


class ArrayEntry(NamedTuple):
    """One array of MaxText.

    Attributes:
        pattern: of its name; a group `layer` where layers are not stacked.
        hf: the tensor, or tensors, of Hugging Face in it.
        axes: without that of stacked layers.
        inputs: number of axes, experts left out, that Hugging Face stores last.
        turned: whether axes change places, or become one.
        layered: whether every layer has one.
        rotated: whether the last axis is turned by the rotary embedding.
        scaled: whether it is stored divided by the root of a head's width.
        vocabulary: whether its rows may end in padding.
        output: whether a model whose embedding is tied has none.
    """

    pattern: re.Pattern[str]
    hf: Name
    axes: Sequence[str]
    inputs: int
    turned: bool
    layered: bool
    rotated: bool
    scaled: bool
    vocabulary: bool
    output: bool


class Family(NamedTuple):
    """A table, with those that it extends.

    Attributes:
        name: the model type of `config.json`.
        prefix: of Hugging Face's names, which those of a model without its head lack.
        entries: in the order in which they are asked.
        derived: names, in either spelling, of what follows from the configuration.
        config: constants of `config.json`.
        arguments: fields of `config.json`, and the arguments of Megatron that hold them.
        model: what Megatron's arguments say of such a model; empty where they cannot tell.
        constants: what they say of it in any case.
        arrays: of MaxText; none where nothing is known of them.
        rotates: whether MaxText's rotation works on neighbours.
    """

    name: str
    prefix: str
    entries: Sequence[TableEntry]
    derived: Sequence[Name]
    config: Mapping[str, Any]
    arguments: Mapping[str, Sequence[str]]
    model: Mapping[str, Any]
    constants: Mapping[str, Any]
    arrays: Sequence[ArrayEntry] = ()
    rotates: bool = False


def family_names() -> tuple[str, ...]:
    """Return the names of the families, sorted."""
    folder = files("ftckpt.formats") / "families"
    return tuple(sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".toml")))


@cache
def family(name: str) -> Family:
    """Return a family by its name.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in family_names():
        raise UsageError(
            f"no family is called {name!r}", hint=f"known: {', '.join(family_names())}"
        )
    path = files("ftckpt.formats") / "families" / f"{name}.toml"
    table = tomllib.loads(path.read_text("utf-8"))
    base = family(table["extends"]) if "extends" in table else None
    own = Family(
        name,
        table.get("prefix", "") if base is None else base.prefix,
        tuple(_entry(entry) for entry in table.get("tensor", ())),
        tuple(Name.of(text) for entry in table.get("derived", ()) for text in entry.values()),
        table.get("config", {}),
        table.get("arguments", {}),
        table.get("model", {}),
        table.get("model", {}),
        tuple(_array(entry) for entry in table.get("maxtext", ())),
        table.get("rotates", False),
    )
    if base is None:
        return own
    return Family(
        name,
        own.prefix,
        (*own.entries, *base.entries),
        (*own.derived, *base.derived),
        {**base.config, **own.config},
        {**base.arguments, **own.arguments},
        # Where a table has none, Megatron's arguments cannot tell it from the one it extends.
        {**base.model, **own.model} if own.model else {},
        {**base.constants, **own.constants},
        (*own.arrays, *_others(base.arrays, own.arrays, table.get("maxtext_without", ()))),
        own.rotates,
    )


def _others(
    base: Sequence[ArrayEntry], own: Sequence[ArrayEntry], without: Sequence[str]
) -> list[ArrayEntry]:
    """Return the rows of another table that are not replaced, and not said to be absent."""
    gone = {entry.pattern for entry in own} | {_pattern(name) for name in without}
    return [entry for entry in base if entry.pattern not in gone]


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(_LAYERS, r"(?:layers|layers_(?P<layer>\d+))"))


def _array(entry: Mapping[str, Any]) -> ArrayEntry:
    inputs, bar, outputs = entry["axes"].rpartition("|")
    leading = inputs.split()
    return ArrayEntry(
        _pattern(entry["name"]),
        Name.of(entry["hf"]),
        (*leading, *outputs.split()),
        sum(axis != "experts" for axis in leading),
        bool(bar),
        "{layers}" in entry["name"],
        entry.get("rotated", False),
        entry.get("scaled", False),
        entry.get("vocabulary", False),
        entry.get("output", False),
    )


def _entry(entry: Mapping[str, Any]) -> TableEntry:
    hf = entry["hf"]
    return TableEntry(
        {key: Name.of(entry[key]) for key in SPELLINGS if key in entry},
        tuple(Name.of(text) for text in ([hf] if isinstance(hf, str) else hf)),
        Join(entry.get("join", "whole")),
        entry.get("transposed", False),
        entry.get("vocabulary", False),
    )
