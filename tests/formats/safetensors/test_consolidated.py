"""Consolidated saves of torch's Hugging Face writer: every tensor is there twice.

The samples and their truth are of torch 2.13 (tests/data/consolidated).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ftckpt as api
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import CorruptError, ExitCode, FtckptError, UnavailableError
from ftckpt.findings import Severity
from ftckpt.verification.values import masters
from ftckpt.workers import Work
from tests.builders.checkpoints import flip, open_checkpoint
from tests.json_run import ftckpt_json

DATA = Path(__file__).parents[2] / "data" / "consolidated"
TRUTH: dict[str, torch.Tensor] = load_file(DATA / "three.safetensors")
SHARD = "sharded/shard-0000{}-model-0000{}-of-00002.safetensors"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "three", tmp_path / "three"))


def findings(path: Path, level: str = "values") -> set[tuple[str, str | None]]:
    report = api.verify(str(path), level=level)
    return {(f.kind, f.tensor) for f in report.findings if f.code is not ExitCode.OK}


def require_truth(state: dict[str, torch.Tensor]) -> None:
    assert state.keys() == TRUTH.keys()
    for name, wanted in TRUTH.items():
        assert state[name].dtype == wanted.dtype
        assert torch.equal(state[name], wanted), name


def test_it_is_one_checkpoint_with_the_values_of_the_shards() -> None:
    checkpoint = open_checkpoint(DATA / "three")
    assert checkpoint.tensors.keys() == TRUTH.keys()
    for name, wanted in TRUTH.items():
        assert checkpoint.tensors[name].shape == tuple(wanted.shape)
        raw = wanted.flatten().view(torch.uint8).numpy().tobytes()
        assert read_tensor(checkpoint, name) == raw, name
    # What is in it twice is counted once.
    shown = api.inspect(str(DATA / "three"))
    assert shown.parameters == sum(t.numel() for t in TRUTH.values())
    # torch itself wrote zero for the tensor without axes, and lost its value there.
    assert load_file(DATA / "three/model-00002-of-00002.safetensors")["temperature"] == 0
    assert findings(DATA / "three") == {("copy-differs", "temperature")}
    report = api.verify(str(DATA / "three"), level="structure")
    assert report.code is ExitCode.OK
    assert any(f.kind == "note" and "temperature" in f.message for f in report.findings)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_nothing_is_lost_in_a_conversion(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    api.convert(str(DATA / "three"), str(tmp_path / "st"), "safetensors")
    require_truth(load_file(tmp_path / "st/model.safetensors"))
    api.convert(str(DATA / "three"), str(tmp_path / "dcp"), "dcp")
    state: dict[str, Any] = {name: torch.zeros_like(t) for name, t in TRUTH.items()}
    load({"model": state}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    require_truth(state)


@pytest.mark.parametrize("file", [SHARD.format(1, 1), "model-00001-of-00002.safetensors"])
def test_a_flipped_bit_in_either_copy_is_found(place: Path, file: str) -> None:
    flip(place / file, -1)
    assert ("copy-differs", "embed.weight") in findings(place)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_missing_shard_is_found(place: Path, rank: int, tmp_path: Path) -> None:
    (place / SHARD.format(rank, 1)).unlink()
    assert findings(place, "structure")
    with pytest.raises(CorruptError):
        api.convert(str(place), str(tmp_path / "out"), "safetensors")


def test_what_a_lost_shard_held_alone_is_missing(place: Path) -> None:
    file = place / SHARD.format(2, 2)
    held = load_file(file)
    alone = {name for name, part in held.items() if part.shape == TRUTH[name].shape}
    assert alone  # torch spreads what is not sharded over the ranks
    file.unlink()
    assert {("missing-tensor", name) for name in alone} <= findings(place, "structure")


def test_shards_of_a_save_on_more_ranks_are_found(tmp_path: Path) -> None:
    # Two ranks saved where three had: torch consolidated rank 3's old shards with the new ones.
    kinds = {kind for kind, _ in findings(DATA / "stale", "structure")}
    assert "overlap" in kinds
    with pytest.raises(CorruptError, match="several saves"):
        api.convert(str(DATA / "stale"), str(tmp_path / "out"), "safetensors")


def other_step(place: Path) -> None:
    file = place / SHARD.format(2, 2)
    held = load_file(file)
    info = open_metadata(file)
    save_file({name: part + 1 for name, part in held.items()}, file, info)


def open_metadata(file: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        said: dict[str, str] = opened.metadata()
    return said


def no_consolidated_file(place: Path) -> None:
    (place / "model-00002-of-00002.safetensors").unlink()


def part_less(place: Path) -> None:
    """Lose a part of one tensor and keep its shard."""
    file = place / SHARD.format(2, 2)
    held, info = load_file(file), open_metadata(file)
    del held["conv"]
    save_file(held, file, info)


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("shard-00003", "shard-1000000000", 7), ("of-00002", "of-1000000000", 7),
        ("shard-00003", "shard-900000", 0), ("of-00002", "of-900000", 4),
    ],
)  # fmt: skip
def test_a_number_in_a_name_is_not_counted_up_to(
    place: Path, old: str, new: str, code: int
) -> None:
    """One name made a note, or a finding, for each of a billion ranks or parts."""
    for file in sorted(place.glob(f"sharded/*{old}*")):
        file.rename(file.with_name(file.name.replace(old, new)))
    found = api.verify(str(place), level="structure")
    assert int(found.code) == code, found.message
    assert len(found.findings) < 500


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (other_step, ("copy-differs", "up.weight")),
        (no_consolidated_file, ("missing-file", None)),
        (part_less, ("hole", "conv")),
    ],
)
def test_what_differs_between_the_two_is_found(
    place: Path, damage: Callable[[Path], None], found: tuple[str, str | None]
) -> None:
    damage(place)
    assert found in findings(place)


def test_a_conversion_says_which_of_the_two_it_wrote(place: Path, tmp_path: Path) -> None:
    other_step(place)
    done = ftckpt_json("convert", str(place), str(tmp_path / "out"), "--to", "dcp")
    assert done["result"]["code"] == 0
    told = {f["tensor"]: f["severity"] for f in done["findings"] if f["kind"] == "copy-differs"}
    assert told["up.weight"] == "warning"
    part = ftckpt_json("convert", str(place), str(tmp_path / "part"), "--to", "dcp",
                       "--drop", "up.weight")  # fmt: skip
    assert "up.weight" not in {f["tensor"] for f in part["findings"]}


@pytest.mark.parametrize("lost", [CorruptError, UnavailableError])
def test_a_second_copy_that_cannot_be_read_does_not_end_a_conversion(
    lost: type[FtckptError], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = masters._digest

    def digest(*args: Any) -> bytes:
        file = args[2].extent.file
        if file in args[0].second_copies:
            raise lost(f"{file} cannot be read", file=file)
        return whole(*args)

    monkeypatch.setattr(masters, "_digest", digest)
    told = list(masters.differing_copies(open_checkpoint(place), sorted(TRUTH), Work(threads=2)))
    assert {f.tensor for f in told} == TRUTH.keys()
    assert {(f.severity, f.code) for f in told} == {(Severity.WARNING, ExitCode.OK)}
    assert all("cannot be read" in f.message for f in told)
    api.convert(str(place), str(tmp_path / "out"), "dcp")
    monkeypatch.setattr(masters, "differing_copies", None)
    api.convert(str(place), str(tmp_path / "unproven"), "dcp", no_proof=True)  # compares none
