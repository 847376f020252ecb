"""Steps laid out for Orbax: read back bit for bit, cut into chunks, and published whole.

The real Orbax judges in tests/peers/test_orbax.py. Its verdict holds here by digests of the files
that it restored (tests/data/orbax/written.json).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

import ftckpt
import ftckpt as api
from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.comparison import Field
from ftckpt.comparison.state import compare_fields
from ftckpt.errors import ExitCode, UnsupportedError
from ftckpt.formats.orbax import writer as module
from ftckpt.formats.orbax.checkpoint import OrbaxCheckpoint
from ftckpt.formats.orbax.writer import OrbaxWriter
from ftckpt.formats.state.fields import state_fields
from ftckpt.formats.state.same_object import SameObject
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from tests.builders.checkpoints import open_checkpoint
from tests.conformance.writers import assert_same_tensors, write
from tests.killing import kill_points

DATA = Path(__file__).parents[2] / "data"
# What is laid out for the judge; each has another way to be nested.
JUDGED = {
    "dcp": DATA / "dcp" / "fsdp2" / "step-3",
    "run": DATA / "run" / "step-1",
    "deepspeed": DATA / "deepspeed" / "z1" / "global_step2",
    "adamw": DATA / "orbax" / "adamw",
    "everything": DATA / "orbax" / "everything",
    "manager": DATA / "orbax" / "manager" / "30",
    "processes": DATA / "orbax" / "processes",
}
DIGESTS = DATA / "orbax" / "written.json"


def digest_of(folder: Path) -> str:
    """Return a digest of all files of a step, names included; not of ftckpt's manifest."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "ftckpt.manifest.json":
            digest.update(
                f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode()
            )
            digest.update(path.read_bytes())
    return digest.hexdigest()


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut arrays as only large ones are cut."""
    monkeypatch.setattr(module, "_CHUNK", 100)


@pytest.mark.parametrize("name", JUDGED)
def test_it_reads_back_and_is_what_orbax_has_judged(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch)
    source = open_checkpoint(JUDGED[name])
    result = write(OrbaxWriter(), source, tmp_path / "30")
    assert isinstance(result, OrbaxCheckpoint)
    assert_same_tensors(result, source)
    same = SameObject(source, result)
    assert set(result.objects) >= set(source.objects)
    assert all(same(object_name) for object_name in source.objects)
    assert result.step == source.step
    assert set(result.members()) == set(result.source.entries)
    assert json.loads(DIGESTS.read_text())[name] == digest_of(tmp_path / "30")


def _saved(path: Path, **state: object) -> Checkpoint:
    import torch

    torch.save(state, path / "x.pt")
    return open_checkpoint(path / "x.pt")


def test_chunks_are_even_and_the_last_is_padded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    small_chunks(monkeypatch)
    source = _saved(
        tmp_path,
        wide=torch.arange(3 * 61, dtype=torch.int16).reshape(3, 61),
        tall=torch.arange(70, dtype=torch.float32).reshape(10, 7),
        none=torch.zeros(0, 4),
        one=torch.tensor(7),
    )
    result = write(OrbaxWriter(), source, tmp_path / "out")
    assert_same_tensors(result, source)
    folder = tmp_path / "out" / "default"

    def chunks(name: str) -> tuple[list[int], list[str]]:
        held = folder / name
        said = json.loads((held / ".zarray").read_text())
        return said["chunks"], sorted(p.name for p in held.iterdir() if p.name != ".zarray")

    assert chunks("params.tall") == ([3, 7], ["0.0", "1.0", "2.0", "3.0"])
    assert (folder / "params.tall" / "3.0").stat().st_size == 84  # one row, and two of zeros
    assert chunks("params.wide") == ([1, 31], [f"{a}.{b}" for a in range(3) for b in range(2)])
    assert chunks("params.none") == ([1, 4], [])
    assert chunks("params.one") == ([], ["0"])


def test_names_that_lie_inside_others_are_kept(tmp_path: Path) -> None:
    import torch

    source = _saved(tmp_path, **{"a": torch.ones(1), "a.b": torch.ones(2), "c.": torch.ones(3)})
    result = write(OrbaxWriter(), source, tmp_path / "out")
    assert_same_tensors(result, source)
    assert isinstance(result, OrbaxCheckpoint)
    assert result.paths["a.b"] == ("default", ("params", "a.b"))
    for name in ("x" * 300, "a/../b"):
        with pytest.raises(UnsupportedError) as caught:
            write(OrbaxWriter(), _saved(tmp_path, **{name: torch.ones(1)}), tmp_path / "refused")
        assert "--rename" in caught.value.hint


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_type_that_zarr_lacks_is_refused_by_name(tmp_path: Path) -> None:
    import torch

    source = _saved(tmp_path, w=torch.zeros(2, dtype=torch.complex32))
    with pytest.raises(UnsupportedError, match="complex32"):
        OrbaxWriter().layout(Content.of(source), LayoutRequest())


def test_states_of_torch_are_optax_names(tmp_path: Path) -> None:
    result = write(OrbaxWriter(), open_checkpoint(JUDGED["dcp"]), tmp_path / "3")
    assert isinstance(result, OrbaxCheckpoint)
    name = next(info.name for info in result.tensors.values() if str(info.kind) == "exp_avg")
    words = tuple(name.split("."))
    assert result.paths[name] == ("default", ("params", *words))
    assert result.paths[f"exp_avg:{name}"] == ("default", ("opt_state", "0", "mu", *words))
    assert result.paths[f"exp_avg_sq:{name}"] == ("default", ("opt_state", "0", "nu", *words))
    steps = result.paths[f"optimizer:{name}.step"]
    assert steps == ("default", ("opt_state", "0", "step", *words))


def test_a_conversion_that_is_killed_is_absent_or_whole(tmp_path: Path) -> None:
    source, out = DATA / "orbax" / "processes", tmp_path / "run" / "4"
    out.parent.mkdir()

    def convert() -> None:
        api.convert(str(source), str(out), "orbax")

    points = 0
    for point in kill_points(convert):
        points = point
        if out.exists():
            assert ftckpt.verify(str(out), level="content").code is ExitCode.OK
        assert (ftckpt.latest(str(out.parent)).code is ExitCode.OK) == out.exists()
    assert points > 40
    assert [path.name for path in out.parent.iterdir()] == ["4"]
    assert ftckpt.verify(str(out), level="content").code is ExitCode.OK


def test_a_round_trip_over_torch_has_equal_state(tmp_path: Path) -> None:
    """The file of torch.save has an empty list of groups, which torch asks for."""

    def fields(checkpoint: Checkpoint) -> list[Field]:
        return [one for one in state_fields(checkpoint) if isinstance(one, Field)]

    source = open_checkpoint(JUDGED["adamw"])
    api.convert(source, str(tmp_path / "x.pt"), "torchsave")
    middle = open_checkpoint(tmp_path / "x.pt")
    assert list(compare_fields(fields(source), fields(middle))) == []
    api.convert(middle, str(tmp_path / "3"), "orbax")
    result = open_checkpoint(tmp_path / "3")
    assert_same_tensors(result, source)


@pytest.mark.parametrize("lost", ["ftckpt.objects/records.bin", "ftckpt.objects/index.json"])
def test_state_beside_the_tree_that_is_damaged(lost: str, tmp_path: Path) -> None:
    api.convert(str(JUDGED["run"]), str(tmp_path / "1"), "orbax")
    (tmp_path / "1" / "ftckpt.manifest.json").unlink()
    file = tmp_path / "1" / "default" / lost
    raw = file.read_bytes()
    for kept in (b"", raw[: len(raw) // 2]):
        file.write_bytes(kept)
        assert ftckpt.verify(str(tmp_path / "1")).code is ExitCode.CORRUPT
    shutil.rmtree(tmp_path / "1" / "default" / "ftckpt.objects")
    opened = open_checkpoint(tmp_path / "1")
    assert isinstance(opened, OrbaxCheckpoint)
    assert read_tensor(opened, next(iter(opened.tensors)))
