"""Real checkpoints whose files lie on the disks of several nodes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ftckpt
from ftckpt.errors import CorruptError, FtckptError, RefusedError, UsageError
from tests.json_run import ftckpt_json
from tests.servers.s3 import upload_tree

DATA = Path(__file__).parents[1] / "data"
# What each sample's second node has of its own; the first file lies on both.
SAMPLES = {
    "run/step-2": ("__0_1.distcp",),
    "dcp/fsdp2/step-4": ("__2_0.distcp", "__3_0.distcp"),
    "deepspeed/z3/global_step2": (
        "zero_pp_rank_2_mp_rank_00_model_states.pt",
        "zero_pp_rank_2_mp_rank_00_optim_states.pt",
    ),
}


def _divide(name: str, tmp_path: Path) -> tuple[Path, Path]:
    """Return the two nodes' directories of a checkpoint."""
    nodes = tuple(tmp_path / f"node{n}" / Path(name).name for n in (0, 1))
    for node in nodes:
        shutil.copytree(DATA / name, node)
    theirs = SAMPLES[name]
    for file in nodes[0].iterdir():
        (nodes[0] if file.name in theirs else nodes[1]).joinpath(file.name).unlink()
    shared = (
        ".metadata"
        if (nodes[0] / ".metadata").exists()
        else min(p.name for p in nodes[0].iterdir())
    )
    shutil.copy2(nodes[0] / shared, nodes[1])
    return nodes[0], nodes[1]


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_gathered_is_the_whole(name: str, tmp_path: Path) -> None:
    ours, theirs = _divide(name, tmp_path)
    whole = str(DATA / name)
    for alone in (ours, theirs):
        assert ftckpt_json("verify", str(alone))["result"]["code"] in (4, 5)
    also = ("--also", str(theirs))
    answer = ftckpt_json("verify", str(ours), *also, "--level", "values")
    assert answer["result"]["code"] == 0
    assert answer["also"] == [str(theirs)]
    shown = ftckpt_json("inspect", str(ours), *also, "--files")
    assert shown["tensors"]["count"] == ftckpt_json("inspect", whole)["tensors"]["count"]
    places = {one["path"]: one["places"] for one in shown["files"]["list"]}
    assert sorted(map(len, places.values())) == [1] * (len(places) - 1) + [2]
    assert {places[file][0] for file in SAMPLES[name]} == {str(theirs)}
    out, copied = tmp_path / "out", tmp_path / "copied" / Path(name).name
    assert (
        ftckpt_json("convert", str(ours), str(out), "--to", "safetensors", *also)["result"]["code"]
        == 0
    )
    assert ftckpt.diff(whole, str(out)).total.changed == 0
    copied.parent.mkdir()
    assert ftckpt_json("copy", str(ours), str(copied), *also)["result"]["code"] == 0
    assert ftckpt.verify(str(copied), against=whole).code == 0


def test_in_python(tmp_path: Path) -> None:
    ours, theirs = map(str, _divide("dcp/fsdp2/step-4", tmp_path))
    whole = ftckpt.inspect(str(DATA / "dcp/fsdp2/step-4"))
    assert ftckpt.inspect(ours, also=[theirs]).tensors == whole.tensors
    assert ftckpt.verify(ours, also=[theirs]).code == 0
    opened = ftckpt.open_checkpoint(ours, also=[theirs])
    assert ftckpt.diff(opened, str(DATA / "dcp/fsdp2/step-4")).total.changed == 0
    ftckpt.copy(ours, str(tmp_path / "copy"), also=[theirs])
    ftckpt.reshard(ours, str(tmp_path / "two"), dp=2, also=[theirs])
    assert ftckpt.diff(str(tmp_path / "two"), str(tmp_path / "copy")).total.changed == 0
    with pytest.raises(UsageError, match="is open"):
        ftckpt.verify(opened, also=[theirs])
    with pytest.raises(UsageError, match="one place"):
        ftckpt.verify(ours, also=[theirs], remember=True)


def test_a_disk_and_a_bucket(tmp_path: Path, s3_url: str) -> None:
    ours, theirs = _divide("run/step-2", tmp_path)
    upload_tree(theirs, f"{s3_url}/step-2")
    for first, second in ((str(ours), f"{s3_url}/step-2"), (f"{s3_url}/step-2", str(ours))):
        assert ftckpt.verify(first, also=[second]).code == 0
        out = str(tmp_path / f"out-{len(first)}")
        ftckpt.convert(first, out, "safetensors", also=[second])
        assert ftckpt.diff(out, str(DATA / "run/step-2")).total.changed == 0


@pytest.mark.parametrize("name", SAMPLES)
def test_a_bit_that_one_copy_has_otherwise(name: str, tmp_path: Path) -> None:
    ours, theirs = _divide(name, tmp_path)
    (both,) = {p.name for p in ours.iterdir()} & {p.name for p in theirs.iterdir()}
    size = (theirs / both).stat().st_size
    for at in (size // 3, size // 2, size - 30):
        _flip(theirs / both, at)
        answer = ftckpt_json("verify", str(ours), "--also", str(theirs), "--level", "content")
        assert answer["result"]["code"] == 4
        found = [one for one in answer["findings"] if one["kind"] == "copies-differ"]
        assert found[0]["file"] == both
        assert str(ours) in found[0]["message"]
        assert str(theirs) in found[0]["message"]
        with pytest.raises(CorruptError):
            ftckpt.copy(str(ours), str(tmp_path / "copy"), also=[str(theirs)])
        with pytest.raises(CorruptError):
            ftckpt.convert(str(ours), str(tmp_path / "out"), "safetensors", also=[str(theirs)])
        _flip(theirs / both, at)
    assert ftckpt.verify(str(ours), also=[str(theirs)]).code == 0


def test_a_truncated_copy_is_found_by_its_size(tmp_path: Path) -> None:
    ours, theirs = _divide("run/step-2", tmp_path)
    shutil.copy2(ours / "__0_0.distcp", theirs)
    (theirs / "__0_0.distcp").write_bytes(b"")
    answer = ftckpt_json("verify", str(ours), "--also", str(theirs), "--level", "structure")
    assert answer["result"]["code"] == 4
    assert [f["kind"] for f in answer["findings"] if f["severity"] == "error"] == ["copies-differ"]


def test_damage_names_the_place(tmp_path: Path) -> None:
    ours, theirs = _divide("run/step-2", tmp_path)
    size = (theirs / "__0_1.distcp").stat().st_size
    data = bytearray((theirs / "__0_1.distcp").read_bytes())
    at = data.index(b"archive/data/0") + 200
    data[at] ^= 1
    (theirs / "__0_1.distcp").write_bytes(data)
    report = ftckpt.verify(str(ours), also=[str(theirs)])
    if report.code == 0:  # a byte of padding
        pytest.fail(f"nothing was found at {at} of {size}")
    assert str(theirs) in report.message


def test_a_missing_rank_stays_missing(tmp_path: Path) -> None:
    ours, theirs = _divide("dcp/fsdp2/step-4", tmp_path)
    (theirs / "__3_0.distcp").unlink()
    assert ftckpt.verify(str(ours), also=[str(theirs)]).code == 4


def test_roots(tmp_path: Path) -> None:
    ours, theirs = _divide("run/step-2", tmp_path)
    a, b = str(ours.parent), str(theirs.parent)
    assert ftckpt.verify(a, also=[b]).code == 0
    assert ftckpt.verify(f"{a}@2", also=[b]).code == 0
    shutil.copytree(DATA / "run/step-1", Path(a) / "step-1")
    report = ftckpt.verify(f"{a}@1", also=[b])
    assert report.code == 5
    assert "step-1 is in" in report.message


def test_what_does_not_belong_together(tmp_path: Path) -> None:
    ours, theirs = map(str, _divide("run/step-2", tmp_path))
    other = str(shutil.copytree(DATA / "run/step-1", tmp_path / "step-1"))
    file = f"{theirs}/__0_1.distcp"
    refused = [
        (ours, other, "several steps are never mixed"),
        (ours, ours, "same place"),
        (ours, str(Path(theirs).parent), "holds several"),
        (str(Path(ours).parent), theirs, "holds several"),
        (ours, file, "one file"),
        (file, ours, "one file"),
        (str(tmp_path), theirs, "lies in the other"),
    ]
    for path, also, told in refused:
        with pytest.raises(UsageError, match=told):
            ftckpt.verify(path, also=[also])
    with pytest.raises(FtckptError, match="does not exist"):
        ftckpt.verify(ours, also=[f"{theirs}x"])
    # A copy goes into none of them, and seal has no such flag.
    with pytest.raises(RefusedError, match="lies inside"):
        ftckpt.copy(ours, f"{theirs}/in", also=[theirs])
    assert ftckpt_json("seal", ours, "--also", theirs)["result"]["code"] == 2
