"""One flipped bit in Orbax's JSON: found wherever Orbax fails by it or loads other values.

`tests/data/orbax/flips.json` has the verdicts of Orbax itself (`make_flips.py`): of 888 flips it
fails at 788, loads other values of 19 and the same of 81. All of the 19 are in the text of a
string, which no evidence covers: there the verdict stays what it is without a flip.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ftckpt
from ftckpt.errors import ExitCode
from ftckpt.formats.orbax.tree import _is_slip
from tests.campaign import examples

DATA = Path(__file__).parents[2] / "data" / "orbax"
FLIPS: dict[str, dict[str, list[list[int]]]] = json.loads((DATA / "flips.json").read_text())[
    "flips"
]
FOUND = (ExitCode.CORRUPT, ExitCode.UNSAFE, ExitCode.UNSUPPORTED)
METADATAS = "array_metadatas/process_0"
STEP = examples(4, 1)  # each so-manieth flip


def verified(path: Path) -> ExitCode:
    return ftckpt.verify(str(path), level="content").code


def flipped(file: Path, flips: list[list[int]]) -> Iterator[list[int]]:
    data = file.read_bytes()
    for at, bit in flips:
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        yield [at, bit]
    file.write_bytes(data)


@pytest.mark.parametrize("name", FLIPS)
def test_what_orbax_stumbles_over_is_found(name: str, tmp_path: Path) -> None:
    sample, _, file = name.partition("/")
    step = Path(shutil.copytree(DATA / sample, tmp_path / sample))
    clean = verified(step)
    assert clean in (ExitCode.OK, ExitCode.UNVERIFIED)
    for flip in flipped(step / file, FLIPS[name]["fails"][::STEP]):
        assert verified(step) in FOUND, flip
    for flip in flipped(step / file, FLIPS[name]["other"][::STEP]):
        assert file == "_strings.json", flip
        assert verified(step) is clean, flip


def changed(step: Path, file: str, old: str, new: str) -> None:
    path = step / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("sample", "file", "old", "new", "kind"),
    [
        ("edges_zarr3", "packed/zarr.json", '"shape":[50,30]', '"shape":[10,30]', "out-of-bounds"),
        ("files", "params.embed/.zarray", '"shape":[16,8]', '"shape":[4,8]', "out-of-bounds"),
        ("files", "params.embed/.zarray", '"shape":[16,8]', '"shape":[15,8]', "shape-mismatch"),
        ("adamw", "_METADATA", '"use_zarr3": false', '"use_zarr3": true', "bad-metadata"),
        ("adamw", "_METADATA", '"key_type": 2', '"key_tipe": 2', "bad-metadata"),
        ("adamw", "_METADATA", '"skip_deserialize"', '"skip_deserialise"', "bad-metadata"),
        ("adamw", METADATAS, '"chunk_shape": [4]', '"chunk_shape": [2]', "bad-metadata"),
    ],
)  # fmt: skip
def test_metadata_that_contradicts_what_is_stored(
    sample: str, file: str, old: str, new: str, kind: str, tmp_path: Path
) -> None:
    step = Path(shutil.copytree(DATA / sample, tmp_path / sample))
    changed(step, file, old, new)
    found = ftckpt.verify(str(step), level="content")
    assert found.code is ExitCode.CORRUPT
    assert kind in {one.kind for one in found.findings}


@pytest.mark.parametrize("file", ["_sharding", "array_metadatas/process_0"])
def test_a_torn_or_lost_file_beside_the_arrays(file: str, tmp_path: Path) -> None:
    step = Path(shutil.copytree(DATA / "adamw", tmp_path / "adamw"))
    data = (step / file).read_bytes()
    for torn in (b"", data[: len(data) // 2], b"[]", b"{}"):
        (step / file).write_bytes(torn)
        assert verified(step) is ExitCode.CORRUPT, torn
    (step / file).unlink()
    lost = file == "_sharding"  # Orbax before 2024 wrote no metadata of arrays, and reads without
    assert verified(step) is (ExitCode.CORRUPT if lost else ExitCode.OK)


def test_what_a_newer_orbax_may_write_is_no_damage(tmp_path: Path) -> None:
    step = Path(shutil.copytree(DATA / "adamw", tmp_path / "adamw"))
    shardings: dict[str, Any] = json.loads((step / "_sharding").read_text())
    new = {"sharding_type": "GlobalSharding", "words": 1}
    shardings[next(iter(shardings))] = json.dumps(new)
    last = list(shardings)[-1]
    shardings[last] = json.dumps(
        {"sharding_type": "SingleDeviceSharding", "device_str": "neuron:3"}
    )
    (step / "_sharding").write_text(json.dumps(shardings))
    changed(
        step, "array_metadatas/process_0", '"ext_metadata": null', '"ext_metadata": null, "x": 1'
    )
    changed(step, "_METADATA", '"custom_metadata"', '"new_member": 3, "custom_metadata"')
    assert verified(step) is ExitCode.OK


def test_a_slip_is_one_letter_and_no_number() -> None:
    assert _is_slip("cpu:0", "bpu:0")
    assert not _is_slip("cpu:0", "cpu:1")
    assert not _is_slip("cpu:0", "cpu:10")
    assert not _is_slip("cpu:0", "gqu:0")
