"""The tables of model families: what each parameter is called by Megatron-core and by Hugging Face.

One TOML file in `families/` for each model type of Hugging Face's `config.json`, by its name:

    extends = "llama"            # the other's entries follow this table's own
    extends_native = ["meta"]    # and so do its rows for this other model code
    extends_arguments = false    # and Megatron's arguments do not: they cannot make this model
    prefix = "model."            # what a model saved without its head lacks in every name

    [config]                     # constants of its config.json
    [arguments]                  # config.json's fields <- the arguments of Megatron that hold them
    [model]                      # what Megatron's arguments say of such a model
    [megatron]                   # arguments that config.json alone gives, one way: `written`
    [required]                   # fields of config.json that no argument can say in another way
    unbuilt = "…"                # why no arguments make such a model

    [[tensor]]
    megatron = "decoder.layers.{layer}.self_attention.linear_qkv.weight"
    hf = ["….q_proj.weight", "….k_proj.weight", "….v_proj.weight"]
    join = "grouped"             # how the one is made of the others: `family_joins`
    transposed = true            # Hugging Face stores [in, out]
    vocabulary = true            # the rows may end in padding
    stored = "one less"          # than Hugging Face's elements; a word of `OFFSETS`
    sections = ["query", "key"]  # torch_dist has these parts of it in tensors of their own

    [[derived]]
    hf = "model.rotary_emb.inv_freq"     # follows from the configuration: left out

    maxtext_turns = ["local", "global"]  # layers of which MaxText makes one: {turn} in its names,
                                 # or else layers_0, layers_1, … in a stack and some left over
    [[maxtext]]                  # an array of MaxText: `maxtext` has the words
    name = "decoder.{layers}.self_attention.query.kernel"
    hf = "….q_proj.weight"
    axes = "hidden | heads width"
    stored = "divided"           # a word of `STORED`

    [[native]]                   # a tensor of other model code: `native` has the words
    torchtitan = "layers.{layer}.attention.qkv_linear.wq.weight"
    hf = "….q_proj.weight"
    rotated = "queries"

    [shapes]                     # of Hugging Face's tensors: `shapes`

    languages = {qwen3_vl_text = "qwen3"}  # of a model with towers: whose table its text_config has
    [mtp]                        # layers that predict further tokens: `mtp`
    [[part]]                     # names that share a beginning: `parts` has the words
    hf = "model.visual."
    megatron = "vision_model."

Where implementations of Megatron-core differ, `transformer_engine` and `local`, or `sequential` and
`grouped` experts, stand for `megatron`. `{layer}` and `{expert}` stand for numbers. Where `hf` has
no `{expert}` and the other names have, Hugging Face's tensor has all experts along its first axis.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ftckpt.errors import UsageError

from .one_way_arguments import WrittenArgument
from .parts import ModelPart
from .shapes import Name, ShapeRule, ShapeTable
from .views.joins import Join
from .views.shares import Share

# Whose model code `[[native]]` rows are about.
DIALECTS = ("torchtitan", "meta", "packed", "autoep")
# Those that have names of their own for experts and routers alone.
OF_EXPERTS = ("packed", "autoep")
# How an array of MaxText differs from Hugging Face's tensor: not; divided by the root of a head's
# width; multiplied by that of the hidden width, in float32 or as bfloat16 rounds it; one added.
STORED = ("", "divided", "multiplied", "multiplied bfloat16", "one more")
# What Megatron-core adds to Hugging Face's elements.
OFFSETS = {"": 0.0, "one less": -1.0}
SPELLINGS = ("megatron", "transformer_engine", "local", "sequential", "grouped")
_FLAGS = ("hf", "join", "transposed", "vocabulary")
_ENTRY_KEYS = frozenset((*SPELLINGS, *_FLAGS, "layers", "stored", "sections"))
_NATIVE_KEYS = frozenset((*DIALECTS, *_FLAGS, "rotated", "output", "share", "flat"))
# Whose rows are in the order of another rotation; `halves` of a share where files have neighbours.
_ROTATED = ("", "queries", "keys", "halves")
_KEYS = frozenset(
    ("extends", "prefix", "config", "arguments", "model", "tensor", "derived", "maxtext",
     "maxtext_turns", "maxtext_without", "rotates", "native", "extends_native",
     "extends_arguments", "defaults", "counts", "shapes", "languages", "part", "mtp", "megatron",
     "required", "unbuilt")
)  # fmt: skip
_MAPS = (
    "config", "arguments", "model", "defaults", "counts", "shapes", "languages", "mtp", "megatron",
    "required",
)  # fmt: skip
_TEXTS = ("extends", "prefix", "unbuilt")
_ROWS = ("tensor", "derived", "maxtext", "native", "part")
_MTP_KEYS = frozenset(("count", "copies", "layers", "names", "swapped", "kind"))
_MOST = 1 << 20  # bytes of a table
_LAYERS, _TURN = re.escape("{layers}"), "{turn}"


class TableEntry(NamedTuple):
    """One parameter in both spellings.

    Attributes:
        megatron: by spelling, a key of `SPELLINGS`.
        hf: its parts on Hugging Face's side, in order.
        join: how the parts make the whole.
        transposed: whether Hugging Face stores the other axis first.
        vocabulary: whether its rows may end in padding.
        layers: which layers have it, as a rule of shapes says it; "" for all that it fits.
        stored: how Megatron's elements differ from Hugging Face's, a word of `OFFSETS`.
        sections: what follows its name where parts of its rows are tensors of their own, in order.
    """

    megatron: Mapping[str, Name]
    hf: Sequence[Name]
    join: Join
    transposed: bool
    vocabulary: bool
    layers: str = ""
    stored: str = ""
    sections: Sequence[str] = ()

    @property
    def stacked(self) -> bool:
        """Whether Hugging Face's tensor holds all experts, each of which is one of Megatron's."""
        return "expert" not in self.hf[0].words and any(
            "expert" in name.words for name in self.megatron.values()
        )


class ArrayEntry(NamedTuple):
    """One array of MaxText.

    Attributes:
        pattern: of its name; a group `layer` where layers are not stacked.
        hf: the tensor, or tensors, of Hugging Face in it.
        axes: without that of stacked layers.
        inputs: number of axes, experts left out, that Hugging Face stores last.
        turned: whether axes change places, or become one.
        layered: whether every layer has one.
        turns: what `turn` in the pattern may be, in the order of layers; empty where layers are
            stacked and counted one by one.
        rotated: whether the last axis is turned by the rotary embedding.
        stored: how its elements differ from Hugging Face's, a word of `STORED`.
        vocabulary: whether its rows may end in padding.
        output: whether a model whose embedding is tied has none.
    """

    pattern: re.Pattern[str]
    hf: Name
    axes: Sequence[str]
    inputs: int
    turned: bool
    layered: bool
    turns: Sequence[str]
    rotated: bool
    stored: str
    vocabulary: bool
    output: bool


class NativeEntry(NamedTuple):
    """One tensor of other model code than Hugging Face's and Megatron-core's.

    Attributes:
        names: by dialect; all are read, and the first of a dialect is written.
        hf: its parts on Hugging Face's side, in order, one below the other.
        join: how their rows make the whole.
        rotated: `queries` or `keys`, whose rows its rotation takes as neighbours; "" for none.
        transposed: whether Hugging Face stores the last two axes the other way round.
        vocabulary: whether its rows may end in padding.
        output: whether it is the embedding where a model is tied.
        share: which part of Hugging Face's tensor it is; None where it is the whole.
        flat: whether it has one axis for all but the first of Hugging Face's.
    """

    names: Mapping[str, Sequence[Name]]
    hf: Sequence[Name]
    join: Join
    rotated: str
    transposed: bool
    vocabulary: bool
    output: bool
    share: Share | None = None
    flat: bool = False

    @property
    def stacked(self) -> bool:
        """Whether the first axis counts experts, each of which is a tensor of Hugging Face's."""
        return "expert" in self.hf[0].words and not any(
            "expert" in name.words for names in self.names.values() for name in names
        )

    @property
    def turns_alone(self) -> bool:
        """Whether both sides have one name for it, so that shapes alone tell them apart."""
        same = (names[0].text for names in self.names.values())
        return self.transposed and self.hf[0].text in same


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
        natives: rows for other model code; none where nothing is known of it.
        shapes: of the tensors on Hugging Face's side; None where the table does not say.
        parts: of a model with towers beside a language model; none for a language model.
        languages: whose table the language model has, by its `model_type`.
        mtp: what it says of layers that predict further tokens; empty where nothing is known.
        tied: whether output and embedding are one where `config.json` of such a model says nothing.
        written: arguments of Megatron that `config.json` gives, and that do not give it back.
        required: values that fields of `config.json` must have to be built by arguments.
        unbuilt: why no arguments build such a model; "" where they do.
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
    natives: Sequence[NativeEntry] = ()
    shapes: ShapeTable | None = None
    parts: Sequence[ModelPart] = ()
    languages: Mapping[str, str] = MappingProxyType({})
    tied: bool = False
    mtp: Mapping[str, Any] = MappingProxyType({})
    written: Mapping[str, WrittenArgument] = MappingProxyType({})
    required: Mapping[str, Any] = MappingProxyType({})
    unbuilt: str = ""


def family_names() -> tuple[str, ...]:
    """Return the names of the families, sorted."""
    folder = files("ftckpt.formats") / "families"
    return tuple(sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".toml")))


def built_by_arguments() -> tuple[str, ...]:
    """Return the names of the families whose `config.json` Megatron's arguments give, sorted."""
    found = ((name, family(name)) for name in family_names())
    return tuple(name for name, one in found if one.arguments and not one.written)


@cache
def family(name: str) -> Family:
    """Return a family by its name, or by the path of its TOML file.

    Raises:
        UsageError: there is none of that name, or the file does not hold a table.
    """
    if name.endswith(".toml"):
        return _own_table(name)
    if name not in family_names():
        raise UsageError(
            f"no family is called {name!r}", hint=f"known: {', '.join(family_names())}"
        )
    path = files("ftckpt.formats") / "families" / f"{name}.toml"
    return _family(name, tomllib.loads(path.read_text("utf-8")))


def _own_table(path: str) -> Family:
    """Return the table in a file of the user's."""
    file = Path(path)
    try:
        if file.stat().st_size > _MOST:
            raise UsageError(f"{path} is larger than a table of a family can be")
        table = tomllib.loads(file.read_text("utf-8"))
        return _family(file.stem, table)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (
        ValueError, TypeError, LookupError, AttributeError, RecursionError, re.error,
    ) as error:  # fmt: skip
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} cannot be read as a table of a family: {error}") from error


def _family(name: str, table: Mapping[str, Any]) -> Family:
    _require_known(table, _KEYS, name)
    _require_sections(table, name)
    base = family(table["extends"]) if "extends" in table else None
    own = Family(
        name,
        table.get("prefix", "") if base is None else base.prefix,
        tuple(_entry(entry, name) for entry in table.get("tensor", ())),
        tuple(Name.of(text) for entry in table.get("derived", ()) for text in entry.values()),
        table.get("config", {}),
        table.get("arguments", {}),
        table.get("model", {}),
        table.get("model", {}),
        tuple(_array(entry, table.get("maxtext_turns", ())) for entry in table.get("maxtext", ())),
        table.get("rotates", False),
        tuple(_native(entry, name) for entry in table.get("native", ())),
        _shapes(table),
        tuple(ModelPart.of(entry, name) for entry in table.get("part", ())),
        table.get("languages", {}),
        table.get("defaults", {}).get("tie_word_embeddings") == "true",
        _mtp(table.get("mtp", {}), name),
        {key: WrittenArgument.of(key, v, name) for key, v in table.get("megatron", {}).items()},
        table.get("required", {}),
        table.get("unbuilt", ""),
    )
    if base is None:
        return own
    return Family(
        name,
        own.prefix,
        (*own.entries, *base.entries),
        (*own.derived, *base.derived),
        {**base.config, **own.config},
        {**(base.arguments if table.get("extends_arguments", True) else {}), **own.arguments},
        # Where a table has none, Megatron's arguments cannot tell it from the one it extends.
        {**base.model, **own.model} if own.model else {},
        {**base.constants, **own.constants},
        (*own.arrays, *_others(base.arrays, own.arrays, table.get("maxtext_without", ()))),
        own.rotates,
        (*own.natives, *_taken(base.natives, table.get("extends_native", ()))),
        _extended(base.shapes, own.shapes),
        own.parts or base.parts,
        {**base.languages, **own.languages},
        own.tied or base.tied,
        own.mtp or base.mtp,
        {**base.written, **own.written},
        {**base.required, **own.required},
        own.unbuilt or base.unbuilt,
    )


def _taken(natives: Sequence[NativeEntry], dialects: Sequence[str]) -> list[NativeEntry]:
    """Return the rows of another table that are about some dialects, and about no others."""
    found = []
    for entry in natives:
        names = {key: names for key, names in entry.names.items() if key in dialects}
        if names:
            found.append(entry._replace(names=names))
    return found


def _shapes(table: Mapping[str, Any]) -> ShapeTable | None:
    if not any(key in table for key in ("shapes", "defaults", "counts")):
        return None
    rules = {name: ShapeRule.of(name, said) for name, said in table.get("shapes", {}).items()}
    return ShapeTable(rules, table.get("defaults", {}), table.get("counts", {}))


def _extended(base: ShapeTable | None, own: ShapeTable | None) -> ShapeTable | None:
    if base is None or own is None:
        return own or base
    return ShapeTable(
        {**base.rules, **own.rules},
        {**base.defaults, **own.defaults},
        {**base.counts, **own.counts},
    )


def _mtp(said: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return what a table says of layers that predict further tokens."""
    if not said:
        return {}
    maps = [said.get(word, {}) for word in ("copies", "names")]
    texts = [said.get(word, "") for word in ("layers", "kind")]
    sound = said.keys() <= _MTP_KEYS and isinstance(said.get("count"), str)
    if (
        not sound
        or not all(isinstance(one, dict) for one in maps)
        or not all(isinstance(text, str) for one in maps for text in one.values())
        or not all(isinstance(text, str) for text in texts)
        or not isinstance(said.get("swapped", False), bool)
        or (maps[1] and not texts[0])
    ):
        raise UsageError(f"the table of {name} has an [mtp] without a count, or with other words")
    return {**said, "copies": maps[0]}


def _require_sections(table: Mapping[str, Any], name: str) -> None:
    """Refuse a section of another form: a map, or rows."""
    for key, held in table.items():
        if key in _TEXTS and not isinstance(held, str):
            raise UsageError(f"the table of {name} gives in {key} no text: {held!r}")
        if key == "extends_arguments" and not isinstance(held, bool):
            raise UsageError(f"the table of {name} says {key} = {held!r}: true or false")
        if key in _MAPS and not isinstance(held, dict):
            raise UsageError(f"the table of {name} has a {key} that is not a section [{key}]")
        if key in _ROWS and not (
            isinstance(held, list) and all(isinstance(row, dict) for row in held)
        ):
            raise UsageError(f"the table of {name} has a {key} that is not rows [[{key}]]")
        if key in ("defaults", "counts", "languages"):
            wrong = [field for field, value in held.items() if not isinstance(value, str)]
            if wrong:
                raise UsageError(
                    f"the table of {name} gives {wrong[0]} in [{key}] no text: {held[wrong[0]]!r}"
                )


def _require_numbers(names: Sequence[Name], hf: Sequence[Name], table: str, *, whole: bool) -> None:
    """Refuse a row whose names do not have the same numbers.

    Args:
        names: of one side.
        hf: of Hugging Face's.
        table: of the row.
        whole: whether all experts may be one tensor of `names`; else they may be one of `hf`.
    """
    if not names or not hf:
        raise UsageError(f"a row of {table} names a tensor on one side alone")
    wanted = set(hf[0].words)
    allowed = [wanted, wanted - {"expert"}]
    if not whole:
        allowed = [wanted | {"expert"}] if "expert" in names[0].words else [wanted]
    for name in (*names, *hf):
        if len(set(name.words)) != len(name.words):
            raise UsageError(f"{name.text} in the table of {table} has a number twice")
    odd = [n for n in hf if set(n.words) != wanted] or [
        n for n in names if set(n.words) not in allowed
    ]
    if odd:
        raise UsageError(
            f"{odd[0].text} in the table of {table} does not have the numbers of {hf[0].text}"
        )


def _require_known(table: Mapping[str, Any], known: frozenset[str], name: str) -> None:
    """Refuse a word that a table cannot have: it would be ignored."""
    wrong = sorted(table.keys() - known)
    if wrong:
        raise UsageError(
            f"the table of {name} has {', '.join(wrong)}, which no table has",
            hint=f"known: {', '.join(sorted(known))}",
        )


def _others(
    base: Sequence[ArrayEntry], own: Sequence[ArrayEntry], without: Sequence[str]
) -> list[ArrayEntry]:
    """Return the rows of another table that are not replaced, and not said to be absent."""
    gone = {entry.pattern for entry in own} | {_pattern(name) for name in without}
    return [entry for entry in base if entry.pattern not in gone]


def _pattern(name: str, turns: Sequence[str] = ()) -> re.Pattern[str]:
    turn = f"(?P<turn>{'|'.join(map(re.escape, turns))})"
    layers = r"layers|layers_(?P<layer>\d+)"
    if turns and _TURN not in name:
        layers = (
            rf"layers_(?P<layer>\d+)|layers\.layers_{turn}|layers_remainder\.layers_(?P<left>\d+)"
        )
    text = re.escape(name).replace(re.escape(_TURN), turn)
    return re.compile(text.replace(_LAYERS, f"(?:{layers})"))


def _array(entry: Mapping[str, Any], turns: Sequence[str]) -> ArrayEntry:
    inputs, bar, outputs = entry["axes"].rpartition("|")
    leading = inputs.split()
    layered = "{layers}" in entry["name"]
    stored = entry.get("stored", "")
    if stored not in STORED:
        raise UsageError(f"no array is stored {stored!r}", hint=f"known: {', '.join(STORED[1:])}")
    return ArrayEntry(
        _pattern(entry["name"], turns),
        Name.of(entry["hf"]),
        (*leading, *outputs.split()),
        sum(axis != "experts" for axis in leading),
        bool(bar),
        layered,
        turns if layered else (),
        entry.get("rotated", False),
        stored,
        entry.get("vocabulary", False),
        entry.get("output", False),
    )


def _entry(entry: Mapping[str, Any], name: str) -> TableEntry:
    _require_known(entry, _ENTRY_KEYS, name)
    if not isinstance(entry.get("layers", ""), str):
        raise UsageError(f"a row of {name} says layers = {entry['layers']!r}, not a text")
    spelled = {key: Name.of(entry[key]) for key in SPELLINGS if key in entry}
    _require_numbers(tuple(spelled.values()), _names(entry["hf"]), name, whole=False)
    found = TableEntry(
        spelled,
        _names(entry["hf"]),
        Join(entry.get("join", "whole")),
        entry.get("transposed", False),
        entry.get("vocabulary", False),
        entry.get("layers", ""),
        entry.get("stored", ""),
        tuple(entry.get("sections", ())),
    )
    _require_possible(found, name)
    return found


def _require_possible(entry: TableEntry, name: str) -> None:
    """Refuse a row whose words do not go together."""
    said = entry.hf[0].text
    if entry.stored not in OFFSETS:
        raise UsageError(
            f"the table of {name} says stored = {entry.stored!r} of {said}",
            hint=f"known: {', '.join(list(OFFSETS)[1:])}",
        )
    if entry.stored and (entry.join is not Join.WHOLE or entry.stacked or entry.transposed):
        raise UsageError(f"the table of {name} joins or turns {said}, which is stored otherwise")
    if entry.stacked and (len(entry.hf) > 1 or entry.join not in (Join.WHOLE, Join.ALTERNATE)):
        raise UsageError(f"the table of {name} joins {said}, which holds all experts")
    if not entry.stacked and entry.join is Join.ALTERNATE:
        raise UsageError(f"the table of {name} says that {said} alternates: only experts do")
    if not all(isinstance(section, str) and section for section in entry.sections):
        raise UsageError(f"the table of {name} gives {said} sections that are no names")


def _native(entry: Mapping[str, Any], name: str) -> NativeEntry:
    _require_known(entry, _NATIVE_KEYS, name)
    known = {key: _names(entry[key]) for key in DIALECTS if key in entry}
    every = tuple(one for names in known.values() for one in names)
    _require_numbers(every, _names(entry["hf"]), name, whole=True)
    rotated = entry.get("rotated", "")
    share = Share.of(entry["share"], name) if "share" in entry else None
    if rotated not in _ROTATED or (rotated == "halves") > (share is not None):
        raise UsageError(f"the table of {name} says rotated = {rotated!r}: queries or keys")
    flat = entry.get("flat", False)
    if not isinstance(flat, bool):
        raise UsageError(f"the table of {name} says flat = {flat!r}: true or false")
    turned = entry.get("transposed", False)
    odd = rotated not in ("", "halves") or len(_names(entry["hf"])) > 1
    if (share or flat) and (odd or (flat and (turned or share)) or (turned and rotated)):
        raise UsageError(
            f"the table of {name} cuts or joins {_names(entry['hf'])[0].text} in two ways at once"
        )
    return NativeEntry(
        known,
        _names(entry["hf"]),
        Join(entry.get("join", "whole")),
        rotated,
        entry.get("transposed", False),
        entry.get("vocabulary", False),
        entry.get("output", False),
        share,
        flat,
    )


def _names(said: Any) -> tuple[Name, ...]:
    return tuple(Name.of(text) for text in ([said] if isinstance(said, str) else said))
