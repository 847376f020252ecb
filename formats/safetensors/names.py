"""Which files of a folder are safetensors weights, which belong together, and what lies beside.

Names alone decide here: `<stem>.safetensors`, or shards `<stem>-00001-of-00003.safetensors` with
`<stem>.safetensors.index.json`. A variant is part of the stem: `model.fp16-00001-of-00002` has
the index `model.safetensors.index.fp16.json`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ftckpt.checkpoint import CommitState, Extent
from ftckpt.discovery.recognise import Listing
from ftckpt.errors import IncompleteError
from ftckpt.formats.huggingface.index import Index, check_index_size, parse_index, shard_name
from ftckpt.formats.torch_files.compression import SUFFIXES
from ftckpt.storage.source import Source

from .dcp_shards import shard_place
from .header import MAX_HEADER, PREFIX

SUFFIX = ".safetensors"
COMPRESSED = tuple(SUFFIX + packed for packed in SUFFIXES)
OPTIMIZER = "optimizer/"
COMPONENTS = "ftckpt.components/"
SHARDED = "sharded"
_INDEX = re.compile(r"(?P<stem>.+)\.safetensors\.index(?P<variant>\.[^/]+)?\.json")
_MAIN_STEMS = ("model", "pytorch_model", "diffusion_pytorch_model", "adapter_model")
# What lies in a model folder beside the weights and belongs to it.
_BESIDE = re.compile(
    r"[^/]+\.(json|txt|model|py|md|jinja|tiktoken|bpe)"
    r"|(LICENSE|NOTICE|README|tokenizer|vocab)[^/]*|\.gitattributes",
    re.IGNORECASE,
)


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
    index: Index | None = None
    stale: Sequence[str] = ()


def evidence(listing: Listing) -> tuple[str, CommitState] | None:
    """Return why a listing is a safetensors checkpoint, and what its names say of the commit."""
    if listing.single:
        return _evidence_in_file(listing)
    names = listing.files
    if ".metadata" in names:
        return None
    top = [n for n in names if n.endswith(SUFFIX)]
    weights = [n for n in top if shard_place(n) is None]
    indexes = [n for n in names if _INDEX.fullmatch(n)]
    if indexes:
        return f"has {min(indexes)}", CommitState.COMMITTED
    if weights:
        shards = [s for s in map(shard_name, weights) if s is not None]
        whole = all(s.total == 1 for s in shards) and not _shards_below(listing)
        single = len(shards) < len(weights)
        state = CommitState.NO_MARKER if single or whole else CommitState.UNCOMMITTED
        return f"has {min(weights)}", state
    if top:
        return f"has {min(top)}", CommitState.NO_MARKER
    for folder in (OPTIMIZER, COMPONENTS):
        if folder[:-1] in listing.directories:
            inside = [n for n in listing.inside(folder[:-1]).files if _INDEX.fullmatch(n)]
            if inside:
                return f"has {folder}{min(inside)} and no weights", CommitState.COMMITTED
    inside = _shards_below(listing)
    # torch makes no other directory there: beside others it is a child of that name.
    if inside and all(d == SHARDED or d.startswith(".") for d in listing.directories):
        reason = f"has {SHARDED}/{min(inside)} and nothing consolidated"
        return reason, CommitState.UNCOMMITTED
    return None


def _shards_below(listing: Listing) -> list[str]:
    """Return the names of what ranks wrote below, to be consolidated here."""
    if SHARDED not in listing.directories:
        return []
    return [name for name in listing.inside(SHARDED).files if shard_place(name)]


def _evidence_in_file(listing: Listing) -> tuple[str, CommitState] | None:
    name = listing.single
    if name.endswith((SUFFIX, *COMPRESSED)):
        return f"ends in {name[name.rindex(SUFFIX) :]}", CommitState.NO_MARKER
    head = listing.head(name, PREFIX + 1)
    length = int.from_bytes(head[:PREFIX], "little")
    if head[PREFIX:] == b"{" and length <= min(MAX_HEADER, listing.files[name].size):
        return "begins with a length and a JSON header", CommitState.NO_MARKER
    return None


def read_indexes(source: Source) -> dict[str, Index]:
    """Return the indexes of a folder by stem; a variant is part of the stem (`model.fp16`)."""
    stems = {}
    for name in source.entries:
        match = _INDEX.fullmatch(name)
        if match is not None and "/" not in name:
            check_index_size(name, source.size(name))
            stems[match["stem"] + (match["variant"] or "")] = name
    texts = source.read_many([Extent(n, 0, source.size(n)) for n in stems.values()])
    return {
        stem: parse_index(raw, name) for (stem, name), raw in zip(stems.items(), texts, strict=True)
    }


def find_sets(source: Source, indexes: Mapping[str, Index]) -> list[WeightSet]:
    """Group the `.safetensors` files directly in a folder by stem.

    A single `<stem>.safetensors` goes before shards of the same stem, as transformers loads it.

    Args:
        source: the folder.
        indexes: parsed indexes by stem.

    Raises:
        IncompleteError: several shards without an index.
    """
    names = [n for n in source.entries if "/" not in n and n.endswith(SUFFIX)]
    names = [n for n in names if shard_place(n) is None]
    shards: dict[str, list[str]] = {}
    single: list[str] = []
    for name in names:
        shard = shard_name(name)
        if shard is None:
            single.append(name.removesuffix(SUFFIX))
        else:
            shards.setdefault(shard.stem, []).append(name)
    stems = sorted({*single, *shards, *indexes})
    main = next((s for s in _MAIN_STEMS if s in stems), stems[0] if len(stems) == 1 else None)

    sets = []
    for stem in stems:
        component = "model" if stem == main else f"extra:{stem}"
        own, index, parts = stem + SUFFIX, indexes.get(stem), shards.get(stem, [])
        if index is not None and (stem not in single or own in index.weight_map.values()):
            files = index.files()
            stale = [p for p in parts if p not in set(files)]
            sets.append(WeightSet(component, files, index, stale))
        elif stem in single:
            sets.append(WeightSet(component, [own], None, parts))
        else:
            first = shard_name(parts[0])
            whole = len(parts) == 1 and first is not None and first.total == 1
            if not whole or has_sharded(source):
                raise uncommitted(source, f"{own}.index.json")
            sets.append(WeightSet(component, parts))
    return sorted(sets, key=lambda s: s.component != "model")


def is_beside(name: str) -> bool:
    """Say whether a file is of the kind that lies beside weights: configuration, a tokenizer."""
    return _BESIDE.fullmatch(name) is not None


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
