"""Group files of a folder into sets of weights, by names and indexes.

A variant is part of the stem: `model.fp16-00001-of-00002` has the index
`model.safetensors.index.fp16.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ftckpt.checkpoint import Extent
from ftckpt.errors import IncompleteError
from ftckpt.formats.huggingface.index import ShardIndex, check_index_size, parse_index
from ftckpt.formats.huggingface.names import is_beside, shard_name
from ftckpt.storage.source import Source

from .names import INDEX, SHARDED, SUFFIX, shard_place
from .rank_files import rank_files

_MAIN_STEMS = ("model", "pytorch_model", "diffusion_pytorch_model", "adapter_model")


@dataclass(frozen=True)
class WeightSet:
    """The files of one stem: one file, or shards and perhaps their index.

    Attributes:
        component: component of its tensors.
        files: names of the files that hold its tensors, present or not.
        index: its index.
        stale: shards of the stem that an earlier save left.
    """

    component: str
    files: Sequence[str]
    index: ShardIndex | None = None
    stale: Sequence[str] = ()


def read_indexes(source: Source) -> dict[str, ShardIndex]:
    """Return the indexes of a folder by stem; a variant is part of the stem (`model.fp16`)."""
    stems = {}
    for name in source.entries:
        match = INDEX.fullmatch(name)
        if match is not None and "/" not in name:
            check_index_size(name, source.size(name))
            stems[match["stem"] + (match["variant"] or "")] = name
    texts = source.read_many([Extent(n, 0, source.size(n)) for n in stems.values()])
    return {
        stem: parse_index(raw, name) for (stem, name), raw in zip(stems.items(), texts, strict=True)
    }


def find_sets(source: Source, indexes: Mapping[str, ShardIndex]) -> list[WeightSet]:
    """Group the `.safetensors` files directly in a folder by stem.

    A file belongs to the set whose index names it, whatever its own name is. A single
    `<stem>.safetensors` goes before shards of the same stem, as transformers loads it.

    Args:
        source: the folder.
        indexes: parsed indexes by stem.

    Raises:
        IncompleteError: several shards without an index, or ranks without their files.
        CorruptError: a rank lacks one of its files.
        UnsupportedError: the files of ranks of an inference engine.
    """
    names = [n for n in source.entries if "/" not in n and n.endswith(SUFFIX)]
    names = [n for n in names if shard_place(n) is None]
    decides = {
        stem: index
        for stem, index in indexes.items()
        if stem + SUFFIX not in names or stem + SUFFIX in index.weight_map.values()
    }
    claimed = {file for index in decides.values() for file in index.weight_map.values()}
    shards: dict[str, list[str]] = {}
    single: list[str] = []
    free = [name for name in names if name not in claimed]
    of_ranks = rank_files(source, free)
    if of_ranks is not None:
        raise of_ranks.error(source.url)
    for name in free:
        shard = shard_name(name)
        if shard is None:
            single.append(name.removesuffix(SUFFIX))
        else:
            shards.setdefault(shard.stem, []).append(name)
    stems = sorted({*single, *shards, *decides})
    main = next((s for s in _MAIN_STEMS if s in stems), stems[0] if len(stems) == 1 else None)

    sets = []
    for stem in stems:
        component = "model" if stem == main else f"extra:{stem}"
        own, index, parts = stem + SUFFIX, decides.get(stem), shards.get(stem, [])
        if index is not None:
            sets.append(WeightSet(component, index.files(), index, parts))
        elif stem in single:
            sets.append(WeightSet(component, [own], None, parts))
        else:
            first = shard_name(parts[0])
            whole = len(parts) == 1 and first is not None and first.total == 1
            if not whole or has_sharded(source):
                raise uncommitted(source, f"{own}.index.json")
            sets.append(WeightSet(component, parts))
    return sorted(sets, key=lambda s: s.component != "model")


def has_sharded(source: Source) -> bool:
    """Say whether `sharded/` in the folder holds what ranks wrote before a consolidation."""
    below = SHARDED + "/"
    return any(n.startswith(below) and shard_place(n[len(below) :]) for n in source.entries)


def uncommitted(source: Source, index: str) -> IncompleteError:
    """Return the error for shards whose index is not there."""
    hint = "a later save may be complete"
    if has_sharded(source):
        hint = f"the parts of all ranks are in {source.url.rstrip('/')}/{SHARDED}"
    return IncompleteError(
        f"{index} is not there: the index is written last, so the save did not finish",
        hint=hint,
        kind="uncommitted",
        file=index,
    )


def members_of(source: Source, sets: Sequence[WeightSet], beside: Sequence[str]) -> Iterator[str]:
    """Yield the files that belong to the checkpoint, those included that an index only names.

    Args:
        source: its files.
        sets: the weights; none where the shards of ranks are the weights.
        beside: what lies in folders of ftckpt's own.
    """
    if source.single:
        yield from source.entries
        return
    seen: set[str] = set()
    for weights in sets:
        seen.update(weights.files)
        if weights.index is not None:
            seen.add(weights.index.file)
    seen.update(beside)
    for name in source.entries:
        if is_beside(name) or (not sets and shard_place(name)):
            seen.add(name)
    yield from sorted(n for n in seen if not n.startswith("ftckpt.manifest"))
