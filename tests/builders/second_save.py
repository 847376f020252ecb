"""The files of a checkpoint as a save of one step later would have written them.

Every step counter is one higher and every floating-point value twice as large, which keeps casts
of masters exact. Lengths and CRC-32s are right, so that only what files say of their step tells.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ftckpt.formats.pickles.inert import Inert
from ftckpt.formats.torch_files.stream import parse_stream
from ftckpt.formats.torch_files.values import Composite, SubclassRef, TensorRef
from ftckpt.formats.torch_files.write_tree import CopiedTree, save
from ftckpt.transfer.layout import Checksums, Literal, Zeros

COUNTERS = frozenset({
    "step", "global_step", "global_steps", "iteration", "last_epoch", "_step_count", "common_step",
    "num_steps",
})  # fmt: skip


class Later(NamedTuple):
    """A file of the later save."""

    data: bytes
    counters: int  # how many of its numbers say so


def later_files(place: Path) -> dict[Path, Later]:
    """Return the files of a checkpoint that differ in a later save, with their new content."""
    found: dict[Path, Later] = {}
    for file in sorted(p for p in place.rglob("*") if p.is_file()):
        if file.name == ".metadata":
            found |= _store(file.parent)
        elif file.suffix in (".pt", ".pth", ".bin", ".pkl"):
            found[file] = _stream(file)
        elif file.name == "trainer_state.json":
            tree = json.loads(file.read_bytes())
            count = _raise_counters(tree)
            found[file] = Later(json.dumps(tree).encode(), count)
    return found


def _raise_counters(tree: Any) -> int:
    """Raise the plain numbers among the counters of a tree; return how many there are."""
    count = 0
    for key, value in list(_members(tree)):
        if key in COUNTERS and type(value) in (int, float):
            tree[key] = value + 1
            count += 1
        else:
            count += _raise_counters(value)
    return count


def _members(tree: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, dict):
        yield from tree.items()
    elif isinstance(tree, (list, tuple)):
        yield from enumerate(tree)
    elif isinstance(tree, Inert):
        yield "", tree.state
    elif isinstance(tree, Composite):
        yield from tree.parts.items()
    elif isinstance(tree, SubclassRef):
        yield from (("", tree.base), ("", tree.state))


def _refs(tree: Any, key: Any = "") -> Iterator[tuple[Any, TensorRef]]:
    if isinstance(tree, TensorRef):
        yield key, tree
    else:
        for inner, value in _members(tree):
            yield from _refs(value, inner)


def _stream(file: Path) -> Later:
    raw = file.read_bytes()
    stream = parse_stream(lambda at, n: raw[at : at + n], len(raw), file=file.name)
    count = _raise_counters(stream.tree)
    held: dict[str, torch.Tensor] = {}
    steps: dict[tuple[str, int], float] = {}
    for key, ref in _refs(stream.tree):
        if ref.key not in held:
            stored = stream.storages[ref.key]
            start = stored.extent.offset
            data = bytearray(raw[start : start + stored.extent.length])
            dtype = getattr(torch, ref.dtype.name)
            held[ref.key] = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0)
        if key in COUNTERS and ref.numel == 1:
            steps[ref.key, ref.storage_offset] = held[ref.key][ref.storage_offset].item() + 1
    for tensor in held.values():
        if tensor.is_floating_point():
            tensor *= 2
    for (key, offset), value in steps.items():
        held[key][offset] = value
    storages = {
        key: stream.storages[key]._replace(inline=tensor.view(torch.uint8).numpy().tobytes())
        for key, tensor in held.items()
    }
    with zipfile.ZipFile(file) as archive:
        folder = archive.namelist()[0].partition("/")[0]
    made = bytearray()
    for segment in save(CopiedTree(stream.tree, {**stream.storages, **storages}), folder=folder):
        if isinstance(segment, Literal):
            made += segment.data
        elif isinstance(segment, Zeros):
            made += bytes(segment.nbytes)
        else:
            assert isinstance(segment, Checksums)
            made += segment.build([zlib.crc32(made[a:b]) for a, b in segment.ranges])
    return Later(bytes(made), count + len(steps))


def _store(folder: Path) -> dict[Path, Later]:
    """Return the data files of a DCP store; every item keeps its length."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    made: dict[Path, bytearray] = {}
    count: dict[Path, int] = {}
    for index, stored in metadata.storage_data.items():
        file = folder / stored.relative_path
        data = made.setdefault(file, bytearray(file.read_bytes()))
        count.setdefault(file, 0)
        place = slice(stored.offset, stored.offset + stored.length)
        value = torch.load(io.BytesIO(bytes(data[place])), weights_only=False)
        counter = index.fqn.rpartition(".")[2] in COUNTERS
        if isinstance(value, (dict, list)):
            count[file] += _raise_counters(value)
        elif counter and (isinstance(value, torch.Tensor) or type(value) in (int, float)):
            value = value + 1
            count[file] += 1
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            value = value * 2
        else:
            continue
        buffer = io.BytesIO()
        torch.save(value, buffer)
        assert len(buffer.getvalue()) == stored.length, index
        data[place] = buffer.getvalue()
    return {file: Later(bytes(data), count[file]) for file, data in made.items()}
