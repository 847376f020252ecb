"""Group files of a folder into sets of weights, by names and indexes.

A variant is part of the stem: `model.fp16-00001-of-00002` has the index
`model.safetensors.index.fp16.json`.

Weights as an inference engine keeps them: the files of each rank, cut as that engine cuts.

    model-rank-<R>-part-<P>.safetensors   vLLM and SGLang (`--load-format sharded_state`)
    rank<R>.safetensors                   TensorRT-LLM, with `mapping` in config.json

A rank's tensors are fused and cut by the engine's own rules, padded for its kernels, and nothing in
the files says along which axis. So they are refused by name, as a set: one rank alone is never the
model. What is missing of the set is said first. How many ranks there are stands in TensorRT-LLM's
`mapping` alone; elsewhere the highest number tells.

Sources: `DEFAULT_PATTERN` and `save_model` in vLLM's `sharded_state_loader.py`; TensorRT-LLM's
`from_checkpoint` in `models/modeling_utils.py` (ranks of context parallelism share files).

Tensors that lie in folders beside the weights, so that a loader of weights passes them by.

`optimizer/` holds the optimizer's, `ftckpt.components/` those of every other component (averages,
RNG states), each in the layout of the weights: one file or shards of a stem. ftckpt writes an
index also for one file, because a lost file would otherwise not be missed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ftckpt.checkpoint import Extent
from ftckpt.errors import CorruptError, FtckptError, IncompleteError, UnsupportedError
from ftckpt.findings import Finding, counted
from ftckpt.formats.huggingface.index import (
    ShardIndex,
    check_index,
    check_index_size,
    check_shard_count,
    is_beside,
    parse_index,
    shard_name,
)
from ftckpt.storage.source import Source

from .header import Header
from .names import COMPONENTS, INDEX, OPTIMIZER, SHARDED, SUFFIX, shard_place

_PARTS = re.compile(r"(?P<stem>.+-)?rank-(?P<rank>\d{1,6})-part-(?P<part>\d{1,6})\.safetensors")
_WHOLE = re.compile(r"rank(?P<rank>\d{1,6})\.safetensors")
_VLLM, _TENSORRT = "vLLM's sharded_state", "TensorRT-LLM"
_MOST = 100_000  # ranks


class EngineRanks(NamedTuple):
    """The files of all ranks.

    Attributes:
        engine: whose they are.
        parts: rank -> number of each part -> file.
        ranks: how many there must be, where it is recorded; else 0.
    """

    engine: str
    parts: Mapping[int, Mapping[int, str]]
    ranks: int

    @property
    def files(self) -> list[str]:
        """Return all files."""
        return [file for held in self.parts.values() for file in held.values()]

    def error(self, url: str) -> FtckptError:
        """Return what is missing, else that the set is not read."""
        count = max(self.ranks, max(self.parts) + 1)
        known = f"config.json says {self.ranks}" if self.ranks else f"rank {count - 1} is there"
        absent = [rank for rank in range(min(count, _MOST)) if rank not in self.parts]
        if absent:
            lost = re.sub(r"rank(-?)\d+", rf"rank\g<1>{absent[0]}", self.files[0])
            lost = re.sub(r"part-\d+", "part-0", lost)
            return IncompleteError(
                f"{lost} is not there: {len(self.parts)} of {count} ranks have files ({known})",
                hint="wait until every rank has written its file, or write the set again",
                kind="missing-rank",
                file=lost,
            )
        for held in self.parts.values():
            gap = next((part for part in range(max(held)) if part not in held), None)
            if gap is not None:
                lost = re.sub(r"part-\d+", f"part-{gap}", held[max(held)])
                return CorruptError(
                    f"{lost} is missing: part {max(held)} of its rank is there",
                    kind="missing-file",
                    file=lost,
                )
        return UnsupportedError(
            f"{url} holds the files of {counted(count, 'rank')} of {self.engine}: each"
            " has its part of every tensor, and nothing records how they join",
            hint="name the model that the engine read; it has all that these files have",
        )


def is_rank_file(name: str) -> bool:
    """Say whether a name is that of one rank's file, without a look at those beside it."""
    return (_PARTS.fullmatch(name) or _WHOLE.fullmatch(name)) is not None


def rank_files(source: Source, names: Iterable[str]) -> EngineRanks | None:
    """Return the files of ranks among the safetensors files of a folder; None where there are none.

    `rank16.safetensors` alone may be an adapter of that rank: a set has a first rank, or a record.

    Args:
        source: the folder.
        names: files directly in it that no index names.
    """
    parts: dict[int, dict[int, str]] = {}
    whole: dict[int, dict[int, str]] = {}
    for name in names:
        if match := _PARTS.fullmatch(name):
            parts.setdefault(int(match["rank"]), {})[int(match["part"])] = name
        elif match := _WHOLE.fullmatch(name):
            whole[int(match["rank"])] = {0: name}
    if parts:
        return EngineRanks(_VLLM, dict(sorted(parts.items())), 0)
    if not whole:
        return None
    from ftckpt.formats.huggingface.config import CONFIG, parsed_json

    mapping = parsed_json(source, CONFIG).get("mapping")
    ranks = _recorded(mapping) if isinstance(mapping, dict) else 0
    if not ranks and 0 not in whole:
        return None
    return EngineRanks(_TENSORRT, dict(sorted(whole.items())), ranks)


def _recorded(mapping: Mapping[str, object]) -> int:
    """Return how many files a `mapping` means: one for each rank of tensors and of the pipeline."""
    tp, pp, world = (mapping.get(f"{one}_size") for one in ("tp", "pp", "world"))
    if type(tp) is int and type(pp) is int and 0 < tp * pp <= _MOST:
        return tp * pp
    return world if type(world) is int and 0 < world <= _MOST else 0


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


FOLDERS = (OPTIMIZER, COMPONENTS)


@dataclass(frozen=True)
class Beside:
    """The files of these folders.

    Attributes:
        files: with tensors, those included that an index only names.
        indexes: with the folder in every name.
    """

    files: Sequence[str] = ()
    indexes: Sequence[ShardIndex] = ()

    def members(self) -> list[str]:
        """Return all files, indexes included."""
        return [*self.files, *(index.file for index in self.indexes)]

    def component(self, file: str) -> str:
        """Return the component of a file's tensors, where its header does not say it."""
        if file.startswith(OPTIMIZER):
            return "optimizer"
        shard = shard_name(file)
        stem = file.removesuffix(SUFFIX) if shard is None else shard.stem
        return f"extra:{stem.removeprefix(COMPONENTS)}"

    def check(self, source: Source, headers: Mapping[str, Header]) -> Iterator[Finding]:
        """Yield where indexes, names and headers disagree.

        Args:
            source: the whole checkpoint.
            headers: of the files that could be read.
        """
        indexed: set[str] = set()
        for index in self.indexes:
            files = index.files()
            indexed.update(files)
            held = {f: [t.name for t in headers[f].tensors] for f in files if f in headers}
            stored = (t for f in held for t in headers[f].tensors)
            nbytes = sum(t.end - t.begin for t in stored)
            yield from check_index(index, held, source.entries, nbytes)
        groups: dict[tuple[str, int], list[str]] = {}
        for file in self.files:
            shard = shard_name(file)
            if shard is not None and file not in indexed:
                groups.setdefault((shard.stem, shard.total), []).append(file)
        for group in groups.values():
            yield from check_shard_count(group, group[0])


def find_beside(source: Source) -> Beside:
    """Find the files of the folders, and read their indexes.

    Raises:
        CorruptError: an index is damaged.
        UnsafeError: an index is hostile.
    """
    files: dict[str, None] = {}
    indexes: list[ShardIndex] = []
    for folder in FOLDERS:
        part = source.part(folder[:-1])
        if not part.entries:
            continue
        names = [n for n in part.entries if "/" not in n and n.endswith(SUFFIX)]
        files.update(dict.fromkeys(folder + n for n in names))
        for index in read_indexes(part).values():
            shards = {name: folder + file for name, file in index.weight_map.items()}
            whole = index._replace(file=folder + index.file, weight_map=shards)
            files.update(dict.fromkeys(whole.files()))
            indexes.append(whole)
    return Beside(list(files), indexes)
