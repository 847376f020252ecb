"""Every kept hostile file is refused, with its own finding, its exit code, and little memory."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path

import pytest

from ftckpt.errors import worst
from ftckpt.findings import Finding
from ftckpt.formats.safetensors import Safetensors
from tests.conformance.formats import findings_of
from tests.data.hostile.make_safetensors import HEADERS, HERE, INDEXES, SHARDS, Case, files

FORMAT = Safetensors()
# Beside reading, tracemalloc sees imports on first use.
MEMORY = 64 << 20


def checked(path: Path) -> list[Finding]:
    tracemalloc.start()
    try:
        found = findings_of(FORMAT, path)
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()
    return found


def expect(found: list[Finding], case: Case) -> None:
    assert case.kind in {f.kind for f in found}, found
    assert worst(f.code for f in found) == case.code, found


@pytest.mark.parametrize("name", HEADERS)
def test_a_hostile_file_is_refused(name: str) -> None:
    found = checked(HERE / "safetensors" / f"{name}.safetensors")
    expect(found, HEADERS[name])
    assert len(found) == 1
    assert len(found[0].message) < 300


@pytest.mark.parametrize("name", HEADERS)
def test_a_hostile_shard_does_not_pass_among_good_ones(name: str, tmp_path: Path) -> None:
    for file, content in SHARDS.items():
        (tmp_path / file).write_bytes(content)
    kept = HERE / "safetensors" / f"{name}.safetensors"
    shutil.copy(kept, tmp_path / "model-00002-of-00002.safetensors")
    shutil.copy(HERE / "index" / "swapped-shards.json", tmp_path / "model.safetensors.index.json")
    expect(checked(tmp_path), HEADERS[name])


@pytest.mark.parametrize("name", HEADERS)
def test_the_reference_reader_refuses_it_too(name: str) -> None:
    import safetensors

    try:
        safetensors.deserialize(HEADERS[name].content)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        accepted = False
    else:
        accepted = True
    assert accepted is HEADERS[name].accepted


@pytest.mark.parametrize("name", INDEXES)
def test_a_hostile_index_is_refused(name: str, tmp_path: Path) -> None:
    for file, content in SHARDS.items():
        (tmp_path / file).write_bytes(content)
    shutil.copy(HERE / "index" / f"{name}.json", tmp_path / "model.safetensors.index.json")
    expect(checked(tmp_path), INDEXES[name])


def test_the_kept_files_are_what_the_script_writes() -> None:
    made = files()
    for folder in ("safetensors", "index"):
        kept = {p.relative_to(HERE).as_posix(): p.read_bytes() for p in (HERE / folder).iterdir()}
        assert kept == {k: v for k, v in made.items() if k.startswith(folder + "/")}
