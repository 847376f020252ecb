"""The index of a sharded Hugging Face folder: `<stem>.index.json`, and what it must agree with.

    {"metadata": {"total_size": <bytes>, ...}, "weight_map": {<tensor>: <file name>, ...}}

Shards are `<stem>-00001-of-00003.<suffix>`, numbered from 1 as a rule (`lost_numbers` knows the
others), and the index is written last. It says which files belong together, whatever they are
called. The same text serves `model.safetensors.index.json` and `pytorch_model.bin.index.json`, so
nothing here knows what a shard looks like inside: the caller says which names each one holds.
Source: `transformers.modeling_utils.save_pretrained`, `huggingface_hub.serialization`.

The names of a Hugging Face folder: shards of weights, and what lies beside them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ftckpt.errors import CorruptError, UnsafeError
from ftckpt.findings import Finding, finding
from ftckpt.storage.source import safe_name
from ftckpt.strict_json import JsonLimits, parse, shown

# Five digits are the rule: Kimi-K2 has `model-1-of-61`, and DeepSeek-V3 `model-00001-of-000163`.
_SHARD = re.compile(
    r"(?P<stem>.+)-(?P<number>[0-9]{1,18})-of-(?P<total>[0-9]{1,18})(?P<suffix>\.[a-z]+)"
)
# `model_weight_pp-rank-0-of-1_tp-rank-0-of-2` (nanotron) is a rank's, and no index will follow.
_RANK = re.compile(r".*(?:[0-9]-of-[0-9].*|rank)")
_DIGITS = 5
_MAX_COUNTED = 1_000_000
# What lies in a model folder beside the weights and belongs to it.
_BESIDE = re.compile(
    r"[^/]+\.(json|txt|model|py|md|jinja|tiktoken|bpe)"
    r"|(LICENSE|NOTICE|README|tokenizer|vocab)[^/]*|\.gitattributes",
    re.IGNORECASE,
)


class ShardFile(NamedTuple):
    """What the name of a shard says: `model-00002-of-00003.safetensors`.

    Attributes:
        stem: what all shards of the set begin with.
        number: of this shard.
        total: how many the name says that there are.
        suffix: with its dot.
        digits: to how many digits the number and the total are filled with zeros.
    """

    stem: str
    number: int
    total: int
    suffix: str
    digits: tuple[int, int] = (_DIGITS, _DIGITS)

    def sibling(self, number: int) -> str:
        """Return the name of another shard of the same set."""
        width, of = self.digits
        return f"{self.stem}-{number:0{width}d}-of-{self.total:0{of}d}{self.suffix}"


def shard_name(name: str) -> ShardFile | None:
    """Return what `name` says if it is the name of a shard."""
    match = _SHARD.fullmatch(name)
    if match is None or _RANK.fullmatch(match["stem"]):
        return None
    number, total = match["number"], match["total"]
    digits = _filled(number), _filled(total)
    return ShardFile(match["stem"], int(number), int(total), match["suffix"], digits)


def _filled(digits: str) -> int:
    """Return to how many digits a number is filled; 1 where it seems to be not filled at all."""
    return len(digits) if digits.startswith("0") or len(digits) >= _DIGITS else 1


def lost_numbers(numbers: Collection[int], total: int) -> list[int]:
    """Return the numbers that a set of shards lacks, in order; the first million at most.

    A set of N is numbered 1..N (transformers), 0..N-1 of N (Ring, MiniMax) or 0..N of N (gpt-oss:
    three files, of which the names say two).
    """
    first = 0 if 0 in numbers else 1
    last = total if first or total in numbers else total - 1
    return [n for n in range(first, min(last, _MAX_COUNTED) + 1) if n not in numbers]


def is_beside(name: str) -> bool:
    """Say whether a file is of the kind that lies beside weights: configuration, a tokenizer."""
    return _BESIDE.fullmatch(name) is not None


MAX_INDEX = 100_000_000  # bytes
_LIMITS = JsonLimits(depth=8, objects=10_000, keys=1_010_000, items=1_100_000, naturals=False)


# ColossalAI's word (colossalai/checkpoint_io/{general,hybrid_parallel}_checkpoint_io.py).
_GROUPS = "param_groups"
_METADATA = "metadata"


class ShardIndex(NamedTuple):
    """A parsed index.

    Attributes:
        file: its own name.
        weight_map: tensor name -> the shard that holds it, by its path below the folder.
        total_size: bytes of all tensors as the writer counted them (shared storage once), or None.
        groups: the file of an optimizer's param groups, which ColossalAI writes beside its shards;
            "" if the index names none.
    """

    file: str
    weight_map: Mapping[str, str]
    total_size: int | None
    groups: str = ""

    def files(self) -> list[str]:
        """Return the shards that it names, in the order of first mention."""
        return list(dict.fromkeys(self.weight_map.values()))

    def names_in(self, names: Iterable[str], top: Mapping[Any, Any]) -> frozenset[str]:
        """Return what a shard holds, in the index's own words.

        A shard may hold a dict for each of its names: the state of a parameter, by its number. JSON
        has no numbers as keys, so the index names them as text.

        Args:
            names: of the shard's tensors.
            top: the shard's top level.
        """
        dicts = {
            str(k) for k, v in top.items() if isinstance(v, dict) and str(k) in self.weight_map
        }
        held = {name if (own := name.partition(".")[0]) not in dicts else own for name in names}
        return frozenset(held | dicts)


def check_index_size(file: str, size: int) -> None:
    """Refuse, before it is read, an index larger than any writer makes.

    Raises:
        UnsafeError: it has more than 100 MB (`unsafe-index`).
    """
    if size > MAX_INDEX:
        raise UnsafeError(
            f"{file} has {size} bytes, over the limit of {MAX_INDEX} for an index",
            kind="unsafe-index",
            file=file,
        )


def parse_index(raw: bytes, file: str) -> ShardIndex:
    """Return the index in `raw`.

    Raises:
        CorruptError: it is not JSON, or lacks a weight_map from text to text (`bad-index`).
        UnsafeError: equal keys, nesting (`unsafe-index`), or a shard that lies outside the folder
            (`unsafe-path`).
    """
    value = parse(raw, _LIMITS, file=file, what="text", bad="bad-index", unsafe="unsafe-index")
    weights = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weights, dict):
        raise CorruptError(f"{file} has no weight_map", kind="bad-index", file=file)
    for shard in set(_texts(weights, file)):
        safe_name(shard, named_by=file)
    slip = "" if _METADATA in value else _slipped(value)
    if slip:
        raise CorruptError(
            f"{file} has a member {shown(slip)}, one bit from {_METADATA}: the bit flipped",
            kind="bad-index",
            file=file,
        )
    metadata = value.get(_METADATA)
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some writers put 1234.0.
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    groups = metadata.get(_GROUPS) if isinstance(metadata, dict) else None
    groups = groups if isinstance(groups, str) and "/" not in groups else ""
    if groups:
        safe_name(groups, named_by=file)
    return ShardIndex(file, weights, total if type(total) is int else None, groups)


def _slipped(value: Mapping[str, object]) -> str:
    """Return a member that is one bit from `metadata`, without which transformers does not load."""
    from ftckpt.formats.pickles.inert import one_bit_from  # only where it is not there

    return next((name for name in value if one_bit_from(name, (_METADATA,))), "")


def _texts(weights: Mapping[str, object], file: str) -> Iterator[str]:
    for name, shard in weights.items():
        if not isinstance(shard, str):
            raise CorruptError(
                f"{file} maps {shown(name)} to {shown(shard)}, which is not a file name",
                kind="bad-index",
                file=file,
                tensor=name,
            )
        yield shard


def check_index(
    index: ShardIndex,
    held: Mapping[str, Collection[str]],
    present: Collection[str],
    nbytes: int,
) -> Iterator[Finding]:
    """Yield every disagreement between an index and the shards beside it.

    An index that names a part of the numbers is whole where its total agrees: a tool that takes
    the last layers off a model edits both, and an index that lost its lines keeps the old total.

    Args:
        index: the index.
        held: for each shard that could be read, the names of the tensors in it. A shard that is
            there and could not be read is in `present` only: it gets no verdict here.
        present: names of all files in the folder.
        nbytes: bytes of all tensors of the shards that could be read.
    """
    weights = index.weight_map
    owners: dict[str, list[str]] = {}
    for file, names in held.items():
        for name in names:
            owners.setdefault(name, []).append(file)

    numbers = Counter(weights.values())
    for file in index.files():
        if file not in present:
            lost = numbers[file]
            yield finding(
                "missing-file",
                f"{file}, which {index.file} names for {lost} tensors, is missing",
                file=file,
            )
    for name, file in weights.items():
        if file not in held or name in held[file]:
            continue
        elsewhere = owners.get(name)
        if elsewhere:
            yield finding(
                "wrong-shard",
                f"{index.file} sends {shown(name)} to {file}, but it is in {elsewhere[0]}",
                file=file,
                tensor=name,
            )
        else:
            yield finding(
                "missing-tensor",
                f"{index.file} sends {shown(name)} to {file}, which does not hold it",
                file=file,
                tensor=name,
            )
    for name, files in owners.items():
        if name not in weights:
            yield finding(
                "unindexed-tensor",
                f"{shown(name)} is in {files[0]}, but {index.file} does not name it",
                file=files[0],
                tensor=name,
            )
        if len(files) > 1:
            yield finding(
                "duplicate-tensor",
                f"{shown(name)} is in {files[0]} and in {files[1]}",
                file=files[1],
                tensor=name,
            )
    if index.groups and index.groups not in present:
        what = f"{index.groups}, which {index.file} names for its param groups, is missing"
        yield finding("missing-file", what, file=index.groups)
    whole = len(held) == len(index.files())
    if whole and index.total_size not in (None, nbytes):
        yield finding(
            "total-size",
            f"{index.file} says {index.total_size} bytes, the tensors have {nbytes}",
            file=index.file,
        )
    if not whole or index.total_size != nbytes:
        yield from check_shard_count(index.files(), index.file)


def check_shard_count(files: Collection[str], named_by: str) -> Iterator[Finding]:
    """Yield where the shards' own names (`-00001-of-00003`) contradict how many there are.

    Args:
        files: the shards of one set.
        named_by: what says that they are one set, for the message.
    """
    stems: dict[str, list[ShardFile]] = {}
    for shard in map(shard_name, files):
        if shard is not None:
            stems.setdefault(shard.stem, []).append(shard)
    for shards in stems.values():
        totals = sorted({shard.total for shard in shards})
        numbers = {shard.number for shard in shards}
        absent = lost_numbers(numbers, totals[0])
        if len(totals) > 1:
            what = f"{named_by} mixes shards of sets of {' and '.join(map(str, totals))}"
            yield finding("shard-count", what, file=named_by)
        elif absent or max(numbers) > totals[0]:
            first = f", {shards[0].sibling(absent[0])} is not among them" if absent else ""
            what = f"{named_by} has {len(numbers)} of {totals[0]} shards{first}"
            yield finding("shard-count", what, file=named_by)
