"""Translate a tower by a table of its own: names, rows and columns, and shapes that are held.

The table's names are whole, as the files of the whole model have them. Its fields are those of
`vision_config`, and a projector's of the whole model: `text_hidden_size` is `hidden_size` of
`text_config`, and `merge_kernel_size.0` the first entry of a list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ftckpt.errors import UsageError
from ftckpt.formats.huggingface.config import CONFIG
from ftckpt.transfer.content import Content

from .facts import weights_of
from .native import NativeTranslator
from .shapes import require_same
from .tables import family
from .translator import Translator
from .views.joins import Heads

_HEADS = ("num_heads", "num_attention_heads", "vt_num_attention_heads")
_WIDTHS = ("hidden_size", "vt_hidden_size")
# Of the whole model's fields, those of a projector.
_TOP = ("projection_hidden_size",)
_MOST = 1 << 20


def has_layout(name: str, layout: str) -> bool:
    """Say whether a table of a tower has names of a layout; else they are carried."""
    table = family(name)
    if layout == "megatron":
        return bool(table.entries)
    return any(layout in entry.names for entry in table.natives)


def tower_from(content: Content, name: str, config: Mapping[str, Any], layout: str) -> Content:
    """Return a tower under Hugging Face's names.

    Args:
        content: the tower alone, under a layout's names.
        name: of its table, which has the layout.
        config: the `config.json` of the whole model.
        layout: of `parts.LAYOUTS`.

    Raises:
        UnsupportedError, UsageError: as of a translation.
    """
    table, fields = family(name), _fields(config)
    if layout == "megatron":
        return Translator(table, _heads(fields), config=fields).to_hugging_face(content)
    return NativeTranslator(table, _heads(fields), fields).to_hugging_face(content)


def tower_to(
    content: Content, name: str, config: Mapping[str, Any], layout: str, spellings: Sequence[str]
) -> Content:
    """Return a tower under the names of a layout.

    Args:
        content: the tower alone, under Hugging Face's names.
        name: of its table, which has the layout.
        config: the `config.json` of the whole model.
        layout: of `parts.LAYOUTS`.
        spellings: of Megatron-core, where its implementations differ.

    Raises:
        UnsupportedError, UsageError: as of a translation.
    """
    table, fields = family(name), _fields(config)
    if layout == "megatron":
        weights = weights_of(content.tensors)
        if weights:
            require_tower(weights, name, config)
        translator = Translator(table, _heads(fields), spellings=spellings, config=fields)
        return translator.to_megatron(content)
    return NativeTranslator(table, _heads(fields), fields).from_hugging_face(content, layout)


def is_published(name: str, table: str, layout: str) -> bool:
    """Say whether a name is one of the files, and not one of a layout."""
    found = family(table)
    own = [one for entry in found.entries for one in entry.megatron.values()]
    if layout != "megatron" or any(one.numbers(name) is not None for one in own):
        return False
    return any(one.numbers(name) is not None for entry in found.entries for one in entry.hf)


def require_tower(
    weights: Mapping[str, tuple[int, ...]], name: str, config: Mapping[str, Any]
) -> None:
    """Refuse a tower that is not what `config.json` says.

    Args:
        weights: shapes by Hugging Face's names.
        name: of its table.
        config: the `config.json` of the whole model.

    Raises:
        UsageError: a tensor too many, one missing or another shape; fields that give no shapes.
    """
    table = family(name)
    if table.shapes is None:
        raise UsageError(f"the table of {name} has no shapes")
    held = {
        key: shape
        for key, shape in weights.items()
        if not any(one.numbers(key) is not None for one in table.derived)
    }
    require_same(table.shapes.tensors(_fields(config)), held, name)


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields by which a tower's shapes are given."""
    found: dict[str, Any] = {k: config[k] for k in _TOP if k in config}
    text, vision = config.get("text_config"), config.get("vision_config")
    if not isinstance(vision, dict):
        raise UsageError(f"{CONFIG} says vision_config = {vision!r}, not a map of fields")
    if isinstance(text, dict):
        found |= {f"text_{key}": value for key, value in text.items()}
    found |= vision
    for key, value in list(found.items()):
        if isinstance(value, list) and len(value) < 5:
            found |= {f"{key}.{number}": one for number, one in enumerate(value)}
    return found


def _heads(fields: Mapping[str, Any]) -> Heads:
    count, width = _said(fields, _HEADS), _said(fields, _WIDTHS)
    sound = all(type(one) is int and 0 < one < _MOST for one in (count, width))
    if not sound or width % count:
        raise UsageError(f"{CONFIG} gives no attention of the tower: {count!r} heads of {width!r}")
    return Heads(count, count, width // count)


def _said(fields: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return a number that fields of several names give; they must not contradict each other."""
    found = {name: fields[name] for name in names if fields.get(name) is not None}
    first = next(iter(found.values()), None)
    if any(one != first for one in found.values()):
        said = " and ".join(f"{name} = {value!r}" for name, value in found.items())
        raise UsageError(f"{CONFIG} says of the tower {said}")
    return first
