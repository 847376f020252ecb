"""Compute which part of a tensor each rank owns: geometry without names.

A tensor is cut along one axis into equal parts, or not at all. If an axis packs several sub-blocks
(gate and up of a gated MLP; z, x, B, C, dt of a state-space layer), each sub-block is cut on its
own and a part holds its share of each, one after the other:

    axis of 8 = [gate 0..3 | up 0..3], 2 parts    part 0 = gate 0..1, up 0..1
                                                  part 1 = gate 2..3, up 2..3

A plain concatenation of such parts has the right shape and the wrong rows, so the rule of the cut
must be known and is never guessed.

Choose the rule that cuts a tensor: tables of name patterns, built in or from a file.

A table is a TOML file; the first rule whose pattern matches a whole name decides.

    family = "llama"

    [[rule]]
    names = ["*.q_proj.weight", "*.k_proj.weight"]   # `*` stands for any text, dots included
    split = 0                                         # the axis, or "replicated"

    [[rule]]
    names = ["*.linear_fc1.weight"]
    split = 0
    blocks = [1, 1]          # sub-blocks, each cut on its own; a name stands for a caller's value
    when = "gated"           # only where the caller says so; `unless` is its opposite
    expert = true            # divided over the expert-parallel group's tensor ranks
    vocabulary = true        # the axis may end in padding rows

A name that no rule matches is refused: a guess would load without an error and be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.extents import Box


class Split(NamedTuple):
    """How a tensor is cut over the parts of one group of ranks.

    Attributes:
        axis: the axis that is cut, or None if every part holds all of it.
        blocks: relative sizes of the sub-blocks that the axis packs; () for one block.
    """

    axis: int | None = None
    blocks: tuple[int, ...] = ()


REPLICATED = Split()
COLUMN = Split(0)  # weights are [out, in]: the outputs are divided
ROW = Split(1)
GATED = Split(0, (1, 1))


class Slab(NamedTuple):
    """A box of a global tensor, and its place in one part's own tensor; equal sizes."""

    box: Box
    local: Box


def slabs(shape: Sequence[int], split: Split, parts: int, part: int) -> tuple[Slab, ...]:
    """Return the content of part `part` of `parts` of a tensor of global `shape`.

    The slabs are in the order of the part's own tensor and tile it.

    Raises:
        UsageError: the axis does not exist, or cannot be divided evenly.
    """
    if split.axis is None or parts == 1:
        return (Slab(Box.whole(shape), Box.whole(shape)),)
    return _slabs(tuple(shape), split, parts, part)


# The layers of a model have a few shapes, and state has those of the weights.
@lru_cache(maxsize=1024)
def _slabs(shape: tuple[int, ...], split: Split, parts: int, part: int) -> tuple[Slab, ...]:
    assert split.axis is not None
    found, inside = [], 0
    for begin, size in _blocks(shape, split, parts):
        share = size // parts
        found.append(
            Slab(
                _along(shape, split.axis, begin + part * share, share),
                _along(shape, split.axis, inside, share),
            )
        )
        inside += share
    return tuple(found)


def part_shape(shape: Sequence[int], split: Split, parts: int) -> tuple[int, ...]:
    """Return the shape of one part of a tensor of global `shape`.

    Raises:
        UsageError: the axis does not exist, or cannot be divided evenly.
    """
    if split.axis is None or parts == 1:
        return tuple(shape)
    size = sum(size // parts for _, size in _blocks(shape, split, parts))
    return (*shape[: split.axis], size, *shape[split.axis + 1 :])


def global_shape(local: Sequence[int], split: Split, parts: int) -> tuple[int, ...]:
    """Return the shape of the tensor of which `local` is one of `parts` equal parts.

    Raises:
        UsageError: the axis does not exist.
    """
    if split.axis is None or parts == 1:
        return tuple(local)
    _require_axis(local, split.axis)
    return (*local[: split.axis], local[split.axis] * parts, *local[split.axis + 1 :])


def even_rows(length: int, parts: int, part: int) -> tuple[int, int]:
    """Return [start, stop) of a part in the chunked division of torch: ceil-sized, last ones short.

    This is how `torch.chunk` and DTensor's `Shard` divide; a part can be empty.
    """
    share = -(-length // parts)
    return min(part * share, length), min((part + 1) * share, length)


def _blocks(shape: Sequence[int], split: Split, parts: int) -> list[tuple[int, int]]:
    """Return (begin, size) of every sub-block along the axis, each divisible by `parts`."""
    assert split.axis is not None
    _require_axis(shape, split.axis)
    length = shape[split.axis]
    weights = split.blocks or (1,)
    unit, rest = divmod(length, sum(weights))
    if rest:
        raise UsageError(
            f"axis {split.axis} of {list(shape)} is not made of sub-blocks in the proportion "
            f"{':'.join(map(str, weights))}"
        )
    found, begin = [], 0
    for weight in weights:
        size = unit * weight
        if size % parts:
            what = f"a sub-block of {size}" if split.blocks else str(size)
            raise UsageError(
                f"axis {split.axis} of {list(shape)} cannot be divided: {what} rows over {parts}"
            )
        found.append((begin, size))
        begin += size
    return found


def _require_axis(shape: Sequence[int], axis: int) -> None:
    if not 0 <= axis < len(shape):
        raise UsageError(f"a tensor of shape {list(shape)} has no axis {axis} to divide")


def _along(shape: Sequence[int], axis: int, begin: int, size: int) -> Box:
    """Return the box of all of `shape` except that one axis has only `size` rows from `begin`."""
    offsets = tuple(begin if d == axis else 0 for d in range(len(shape)))
    sizes = tuple(size if d == axis else n for d, n in enumerate(shape))
    return Box(offsets, sizes)


_FIELDS = frozenset(("names", "split", "blocks", "when", "unless", "expert", "vocabulary"))


@dataclass(frozen=True, slots=True)
class Rule:
    """A table's rule for the tensors that one of its patterns matches.

    Attributes:
        split: how they are cut over tensor-parallel ranks.
        expert: whether over those of the expert group.
        vocabulary: whether the axis counts a vocabulary and may end in padding.
    """

    split: Split
    expert: bool = False
    vocabulary: bool = False


@dataclass(frozen=True)
class Rules:
    """A parsed table; `family` is its name in messages."""

    family: str
    rules: Sequence[tuple[re.Pattern[str], Rule]]
    _known: dict[str, Rule | None] = field(default_factory=dict, repr=False, compare=False)

    def get(self, name: str) -> Rule | None:
        """Return the rule of a tensor's name, or None if none matches."""
        if name not in self._known:
            self._known[name] = next((r for p, r in self.rules if p.fullmatch(name)), None)
        return self._known[name]

    def find(self, name: str) -> Rule:
        """Return the rule of a tensor's name.

        Raises:
            UnsupportedError: no rule matches (`unknown-rule`); the hint says how to give one.
        """
        rule = self.get(name)
        if rule is None:
            raise UnsupportedError(
                f"no rule of {self.family} says how {name} is divided over tensor-parallel ranks",
                hint="--rules FILE.toml adds one; docs/rules.md shows the form",
                kind="unknown-rule",
                tensor=name,
            )
        return rule

    def before(self, other: Rules) -> Rules:
        """Return a table with this one's rules before those of `other`."""
        return Rules(f"{self.family} and {other.family}", (*self.rules, *other.rules))


def parse_rules(text: str, origin: str, values: Mapping[str, int] | None = None) -> Rules:
    """Parse a table.

    Args:
        text: TOML, as the module describes.
        origin: where it is from, for messages.
        values: of `when`, `unless` and names in `blocks`; a missing or zero value of `when` drops
            the rule.

    Raises:
        UsageError: not TOML, or a field that is unknown, missing or of the wrong type.
    """
    import tomllib

    values = values or {}
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{origin} is not TOML: {error}") from error
    unknown = set(table) - {"family", "rule"}
    entries = table.get("rule")
    if unknown or not isinstance(entries, list):
        what = f"knows no {sorted(unknown)[0]!r}" if unknown else "needs [[rule]] entries"
        raise UsageError(f"{origin}: a table of rules {what}")
    found: list[tuple[re.Pattern[str], Rule]] = []
    for number, entry in enumerate(entries, 1):
        where = f"rule {number} of {origin}"
        patterns, rule = _rule(entry, where, values)
        if rule is not None:
            found += [(pattern, rule) for pattern in patterns]
    return Rules(str(table.get("family", origin)), tuple(found))


def _rule(
    entry: Any, where: str, values: Mapping[str, int]
) -> tuple[list[re.Pattern[str]], Rule | None]:
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is not a table")
    unknown = set(entry) - _FIELDS
    if unknown:
        raise UsageError(f"{where} has an unknown field {sorted(unknown)[0]!r}")
    names = entry.get("names")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise UsageError(f'{where} needs names = ["PATTERN", …]')
    patterns = [name_pattern(name) for name in names]
    for key, wanted in (("when", True), ("unless", False)):
        if key in entry and bool(values.get(entry[key])) is not wanted:
            return patterns, None
    split = _split(entry, where, values)
    return patterns, Rule(
        split, bool(entry.get("expert", False)), bool(entry.get("vocabulary", False))
    )


def _split(entry: Mapping[str, Any], where: str, values: Mapping[str, int]) -> Split:
    axis = entry.get("split")
    if axis == "replicated" and "blocks" not in entry:
        return REPLICATED
    if type(axis) is not int or axis < 0:
        raise UsageError(f'{where} needs split = AXIS, or split = "replicated" without blocks')
    blocks = entry.get("blocks", [])
    if not isinstance(blocks, list):
        raise UsageError(f"{where}: blocks is a list of sizes")
    sizes = [values.get(size, 0) if isinstance(size, str) else size for size in blocks]
    for size, given in zip(sizes, blocks, strict=True):
        if type(size) is not int or size < 1:
            raise UsageError(f"{where}: {given!r} in blocks is not a size that is known")
    return Split(axis, tuple(sizes))


def name_pattern(text: str) -> re.Pattern[str]:
    """Return the pattern of whole names in which `*` matches any text, each `*` a group."""
    return re.compile("(.*)".join(re.escape(part) for part in text.split("*")), re.DOTALL)
