"""The parts of a model with towers: which names begin how, in each layout.

    [[part]]                          # of the language model, whose own table has `model.…`
    language = "model."
    hf = ["model.", "model.language_model."]   # in files; all are read, the first is written
    packed = "model.language_model."  # transformers 5 in memory, so in a DCP of such a model
    megatron = "language_model."

    [[part]]                          # a tower or a projector: carried by its name
    hf = "visual."
    packed = "model.visual."
    megatron = "visual."
    blocks = "blocks"                 # modules of that name are numbered from 0, and there are
    count = "vision_config.depth"     # as many as this field of config.json says
    table = "qwen3_vl_vision"         # or: its names, shapes and joins by a table, by whole names

`language = ""` with `megatron` says what stands before all names of Megatron-core's. A whole name
with `transposed = ["megatron"]` is stored there with its two axes exchanged. A layout that a part
does not name cannot hold it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ftckpt.errors import UsageError

# Whose layouts a part may name.
LAYOUTS = ("hf", "packed", "megatron", "torchtitan")
_WORDS = frozenset((*LAYOUTS, "language", "transposed", "blocks", "count", "optional", "table"))


class ModelPart(NamedTuple):
    """Tensors whose names begin alike.

    Attributes:
        beginnings: by layout; all are read, and the first is written.
        language: how the language model's own table begins them; None for a tower.
        transposed: layouts that exchange the two axes of what `hf` has.
        blocks: a module whose numbers are counted; "" for none.
        told_by: the field of `config.json` that says how many, with dots.
        optional: whether a model may lack it.
        table: of its tensors; "" where names are carried.
    """

    beginnings: Mapping[str, Sequence[str]]
    language: str | None
    transposed: Sequence[str]
    blocks: str
    told_by: str
    optional: bool
    table: str = ""

    @classmethod
    def of(cls, entry: Mapping[str, Any], table: str) -> ModelPart:
        """Return the part that a row of a table gives.

        Raises:
            UsageError: the row has a word that no part has, or says it wrongly.
        """
        wrong = sorted(entry.keys() - _WORDS)
        if wrong:
            raise UsageError(f"a part in the table of {table} has {', '.join(wrong)}")
        found = {}
        for layout in LAYOUTS:
            if layout in entry:
                said = entry[layout]
                found[layout] = (said,) if isinstance(said, str) else tuple(said)
        texts = [text for texts in found.values() for text in texts]
        texts += [entry.get(word, "") for word in ("language", "blocks", "count", "table")]
        flags = (entry.get("optional", False), *(one in LAYOUTS for one in _turned(entry)))
        if not found or not all(isinstance(text, str) for text in texts):
            raise UsageError(f"a part in the table of {table} does not say how its names begin")
        if not all(isinstance(flag, bool) for flag in flags) or not all(flags[1:]):
            raise UsageError(f"a part in the table of {table} says transposed or optional wrongly")
        return cls(
            found, entry.get("language"), _turned(entry), entry.get("blocks", ""),
            entry.get("count", ""), entry.get("optional", False), entry.get("table", ""),
        )  # fmt: skip

    def rest_of(self, name: str, layout: str) -> str | None:
        """Return what follows the longest beginning in a layout; None where the name is another's.

        A beginning without a dot at its end is a whole name.
        """
        for text in sorted(self.beginnings.get(layout, ()), key=len, reverse=True):
            whole = bool(text) and not text.endswith(".")
            if name == text if whole else name.startswith(text):
                return name[len(text) :]
        return None

    def numbers(self, names: Sequence[str]) -> dict[int, set[str]]:
        """Return the numbers of the blocks in names, and what each block has."""
        pattern = re.compile(rf"(?:.*\.)?{re.escape(self.blocks)}\.(\d{{1,6}})\.(.+)")
        found: dict[int, set[str]] = {}
        for name in names:
            match = pattern.fullmatch(name)
            if match is not None:
                found.setdefault(int(match[1]), set()).add(match[2])
        return found


def _turned(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    said = entry.get("transposed", ())
    return tuple(said) if isinstance(said, (list, tuple)) else (said,)


def part_of(parts: Sequence[ModelPart], name: str, layout: str) -> tuple[ModelPart, str] | None:
    """Return the part with the longest beginning of a name, and what follows it."""
    found = [
        (len(name) - len(rest), part, rest)
        for part in parts
        if (rest := part.rest_of(name, layout)) is not None
    ]
    return max(found, key=lambda one: one[0])[1:] if found else None


def layouts_of(parts: Sequence[ModelPart], name: str) -> Iterator[tuple[int, str]]:
    """Yield the layouts that a name may be of, with the length of what says so."""
    for layout in LAYOUTS:
        found = part_of(parts, name, layout)
        if found is not None:
            yield len(name) - len(found[1]), layout
