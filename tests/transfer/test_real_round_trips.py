"""What real frameworks wrote goes through safetensors and back, by the engine, and is the same.

The formats are tried that have a writer; state that a format has no place for is dropped by name,
and what is dropped is part of the expectation.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ftckpt.checkpoint import Checkpoint
from ftckpt.digests.tensors import digest_tensor
from ftckpt.discovery.candidates import newest_child
from ftckpt.discovery.listing import open_part
from ftckpt.discovery.resolve import open_target
from ftckpt.formats.catalog import FORMATS
from ftckpt.formats.state.same_object import SameObject
from ftckpt.formats.writers import WRITERS
from ftckpt.storage import StoreOptions
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from ftckpt.transfer.request.renaming import parse_renames, rename
from ftckpt.transfer.run import TransferOptions, TransferReport, transfer
from ftckpt.workers import Work
from tests.builders.real_sets import ARCHIVES, real_set

SETS = sorted(p.name.removesuffix(".tar.xz") for p in ARCHIVES.glob("*.tar.xz"))
# The folder in a set where its checkpoint is not the newest of a root.
INSIDE = {"dcp_hf": "sharded"}
UNWRAPPED = '[[rename]]\nfrom = "module.*"\nto = "*"\n'


def _open(path: Path) -> Checkpoint:
    target = open_target(str(path), FORMATS, StoreOptions())
    if target.root is None:
        return target.open()
    return open_part(target.root.store, newest_child(target.root).part)


def _write(content: Content, to: str, path: Path) -> TransferReport:
    writer = WRITERS[to]()
    return transfer(
        content,
        writer.layout(content, LayoutRequest()),
        str(path),
        next(f for f in FORMATS if f.name == to),
        single=writer.single,
        same_objects=SameObject,
        options=TransferOptions(Work(threads=2)),
        store_options=StoreOptions(),
    )


def _require_same(result: Checkpoint, content: Content) -> None:
    source = content.checkpoint
    for key in content.tensors:
        found = result.tensors[result.aliases.get(key, key)]
        (copy,) = content.tensors[key].copies
        info = source.tensors[copy.key]
        assert (found.shape, found.dtype) == (info.shape, info.dtype), key
        assert digest_tensor(result, found) == digest_tensor(source, info), key


@pytest.mark.parametrize("name", SETS or ["none"])
def test_through_safetensors_and_back(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = _open(real_set(name, INSIDE.get(name, ""), tmp_path_factory))
    content = Content.of(source)
    first = _write(content, "safetensors", tmp_path / "first")
    assert first.proof is not None
    assert first.proof.tensors == len(source.tensors)
    assert first.proof.objects == len(source.objects)
    middle = _open(tmp_path / "first")
    assert middle.step == source.step
    # A distributed checkpoint takes anything, under names that it can give back.
    back = Content.of(middle)
    if all(w.name.startswith("module.") for w in back.tensors.values() if w.component == "model"):
        back = rename(back, parse_renames(UNWRAPPED, "unwrapped"))
    second = _write(back, "dcp", tmp_path / "second")
    assert second.proof is not None
    _require_same(_open(tmp_path / "second"), back)


@pytest.mark.parametrize("name", SETS or ["none"])
def test_in_its_own_format_it_is_the_same(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = _open(real_set(name, INSIDE.get(name, ""), tmp_path_factory))
    if source.format not in WRITERS:
        pytest.skip(f"{source.format} is several formats in one folder; convert takes it apart")
    content = Content.of(source)
    report = _write(content, source.format, tmp_path / "out")
    assert report.proof is not None
    result = _open(tmp_path / "out")
    _require_same(result, content)
    assert result.step == source.step
    # What describes the buckets of one number of ranks goes with the buckets.
    kept = {n for n in source.objects if not n.startswith("optimizer.distributed.")}
    assert set(result.objects) >= kept
    assert set(result.objects) <= set(source.objects)
