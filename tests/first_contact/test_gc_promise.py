"""What gc may drop, and what must be left: never the only good one, never on a guess."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import time
import types
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ftckpt
from ftckpt.errors import NoResourceError, RefusedError
from ftckpt.storage.local.store import LocalStore
from tests.builders.checkpoints import flip, save_dcp
from tests.json_run import ftckpt_json

DAY = 86400.0


def steps(root: Path) -> set[int]:
    return {int(path.name.partition("-")[2]) for path in root.glob("step-*")}


@pytest.fixture
def six(tmp_path: Path) -> Path:
    """Six steps: 60 and 40 have a flipped bit of a tensor, 50 is cut short."""
    root = tmp_path / "run"
    for step in range(10, 70, 10):
        save_dcp(root / f"step-{step}", step=step)
    for step in (60, 40):
        data = root / f"step-{step}" / "__0_0.distcp"
        flip(data, data.stat().st_size // 2)
    short = root / "step-50" / "__0_0.distcp"
    short.write_bytes(short.read_bytes()[:2000])
    return root


def test_the_only_good_ones_stay(six: Path) -> None:
    answer = ftckpt.gc(str(six), keep_last=2, apply=True)
    assert steps(six) == {20, 30, 40, 50, 60}
    looked = {d.entry.name: (str(d.entry.entry_class), str(d.entry.looked))
              for d in answer.plan.decisions}  # fmt: skip
    assert looked["step-60"] == ("CORRUPT", "content")
    assert looked["step-30"] == ("COMMITTED", "content")
    assert ftckpt.latest(str(six)).step == 30  # what gc has read is known to all
    assert ftckpt.gc(str(six), keep_last=2, apply=True).plan.drop == ()


def test_what_a_scrub_has_found_is_no_survivor(six: Path) -> None:
    ftckpt.scrub(str(six))
    plan = ftckpt.gc(str(six), keep_last=2).plan
    assert [d.entry.name for d in plan.drop] == ["step-10"]
    assert not any("--apply first reads" in note for note in plan.notes)
    (status,) = ftckpt.status(str(six)).runs
    assert (status.newest is not None and status.newest.entry.step) == 30


def test_a_dry_run_says_what_will_be_read_and_reads_nothing(
    six: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = sum(file.stat().st_size for file in (six / "step-60").iterdir())
    document = ftckpt_json("gc", str(six), "--keep-last", "2")
    (note,) = document["plan"]["notes"]
    assert f"--apply first reads step-60 ({nbytes:,} bytes)" in note
    assert not (six / ".ftckpt").exists()
    assert ftckpt.gc(str(six), keep_last=2, no_check=True).plan.notes == ()


def test_a_plan_of_a_file_is_proven_before_it_is_carried_out(six: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(ftckpt_json("gc", str(six), "--keep-last", "2")))
    with pytest.raises(RefusedError, match="stays now"):
        ftckpt.gc(str(six), str(file), apply=True)
    assert steps(six) == {10, 20, 30, 40, 50, 60}


def test_nobody_has_to_have_it_read(six: Path) -> None:
    ftckpt.gc(str(six), keep_last=2, apply=True, no_check=True)
    assert steps(six) == {40, 50, 60}


def test_nothing_goes_where_nothing_is_good(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        data = save_dcp(tmp_path / f"step-{step}", step=step) / "__0_0.distcp"
        flip(data, data.stat().st_size // 2)
    assert ftckpt.gc(str(tmp_path), keep_last=2, apply=True).plan.drop == ()
    with pytest.raises(RefusedError, match="no finished checkpoint would be left"):
        ftckpt.gc(str(tmp_path), keep_last=1, min_survivors=1, delete_corrupt=True, apply=True)
    assert steps(tmp_path) == {1, 2, 3, 4}


def test_a_full_disk_stops_nothing(six: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LocalStore.put

    def put(store: LocalStore, path: str, data: bytes) -> None:
        if "verdicts" in path or "passed" in path:
            raise NoResourceError("the disk is full")
        real(store, path, data)

    monkeypatch.setattr(LocalStore, "put", put)
    ftckpt.gc(str(six), keep_last=2, apply=True)
    assert steps(six) == {20, 30, 40, 50, 60}
    assert not list((six / ".ftckpt").glob("verdicts/*/*.json"))


def test_without_evidence_the_numbers_are_read(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    for step in (1, 2, 3, 4):
        place = tmp_path / f"step-{step}"
        place.mkdir()
        weights = torch.full((64,), float(step))
        if step == 4:
            weights[3] = float("nan")
        save_file({"model.layers.0.mlp.up_proj.weight": weights}, place / "model.safetensors")
    plan = ftckpt.gc(str(tmp_path), keep_last=2, apply=True).plan
    looked = {d.entry.name: str(d.entry.looked) for d in plan.decisions}
    assert (looked["step-3"], steps(tmp_path)) == ("values", {2, 3, 4})
    assert ftckpt.latest(str(tmp_path)).step == 3
    # The numbers are no digest: who asks for evidence is not answered by them.
    assert ftckpt.latest(str(tmp_path), level="content", reuse="1h").path is None


def hostile(path: Path) -> None:
    """Write a `.pt` whose pickle calls `os.system`."""

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Evil(), 2))
        archive.writestr("archive/version", "3\n")


def test_what_is_unsafe_is_never_dropped(tmp_path: Path) -> None:
    import torch

    for step in (1, 2, 3):
        torch.save({"model": {"w": torch.ones(4)}, "step": step}, tmp_path / f"step-{step}.pt")
    hostile(tmp_path / "step-4.pt")
    old = time.time() - 3 * DAY
    for path in tmp_path.iterdir():
        os.utime(path, (old, old))
    assert ftckpt.latest(str(tmp_path)).step == 3
    flags: dict[str, Any] = {"keep_last": 1, "min_survivors": 1, "delete_corrupt": True}
    plan = ftckpt.gc(str(tmp_path), apply=True, **flags).plan
    kept = {d.entry.name: str(d.entry.entry_class) for d in plan.keep}
    assert kept == {"step-4.pt": "UNSAFE", "step-3.pt": "COMMITTED"}


def test_a_flipped_bit_of_a_zip_header_does_not_stop_a_restart(tmp_path: Path) -> None:
    import torch

    for step in (1, 2):
        torch.save({"model": {"w": torch.ones(64)}, "step": step}, tmp_path / f"step-{step}.pt")
    flip(tmp_path / "step-2.pt", 26)  # the length of a name in a local header
    found = ftckpt.latest(str(tmp_path))
    assert (found.step, [int(one.code) for one in found.skipped]) == (1, [7])
    stopped = ftckpt.latest(str(tmp_path), stop_at_unsafe=True)
    assert (stopped.path, int(stopped.code)) == (None, 7)
    restarted = ftckpt_json("restart", str(tmp_path), "--world", "1", "--level", "structure")
    assert restarted["step"] == 1
    refused = ftckpt_json("restart", str(tmp_path), "--world", "1", "--stop-at-unsafe")
    assert refused["result"]["code"] == 7


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser gives files away")
def test_the_word_of_somebody_else_deletes_nothing(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_dcp(tmp_path / f"step-{step}", step=step)
    data = tmp_path / "step-4" / "__0_0.distcp"
    flip(data, data.stat().st_size // 2)
    ftckpt.verify(str(tmp_path / "step-4"), remember=True)
    (said,) = (tmp_path / ".ftckpt" / "verdicts" / "step-4").iterdir()
    assert next(iter(ftckpt.ls(str(tmp_path)))).entry_class == "CORRUPT"
    os.chown(said, 12345, 12345)
    assert next(iter(ftckpt.ls(str(tmp_path)))).entry_class == "UNSAFE"
    ftckpt.gc(str(tmp_path), keep_last=2, delete_corrupt=True, apply=True)
    assert steps(tmp_path) == {2, 3, 4}
    assert ftckpt.latest(str(tmp_path)).step == 3  # it is read, and is bad indeed


def aged(place: Path, days: float) -> None:
    for path in place.rglob("*"):
        os.utime(path, (time.time() - days * DAY,) * 2)


def hf(place: Path, *, whole: bool) -> None:
    """Write a model in two shards; without `whole` no index says what belongs to it."""
    import torch
    from safetensors.torch import save_file

    place.mkdir(parents=True)
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for number, name in enumerate(names):
        save_file({f"w{number}": torch.ones(4)}, place / name)
    if whole:
        index = {"metadata": {}, "weight_map": {f"w{n}": name for n, name in enumerate(names)}}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("sign", [True, False])
def test_a_missing_marker_is_a_sign_only_where_later_saves_have_it(
    tmp_path: Path, sign: bool
) -> None:
    for step in (1, 2, 3, 4):
        hf(tmp_path / f"step-{step}", whole=sign and step > 1)
        aged(tmp_path / f"step-{step}", 10 - step)
    plan = ftckpt.gc(str(tmp_path), keep_last=10).plan
    assert [d.entry.name for d in plan.drop] == (["step-1"] if sign else [])


def test_what_a_person_named_tmp_is_no_abandoned_save(tmp_path: Path) -> None:
    for step in (1, 2):
        save_dcp(tmp_path / f"step-{step}", step=step)
    (tmp_path / "tmp-notes").mkdir()
    (tmp_path / "tmp-notes" / "a.txt").write_text("x")
    (tmp_path / "step-0.tmp").mkdir()
    (tmp_path / "step-0.tmp" / "__0_0.distcp").write_bytes(b"x")
    for name, days in (("tmp-notes", 9), ("step-0.tmp", 9), ("step-1", 3), ("step-2", 2)):
        aged(tmp_path / name, days)
    plan = ftckpt.gc(str(tmp_path), keep_last=5).plan
    assert [d.entry.name for d in plan.drop] == ["step-0.tmp"]


def test_status_looks_into_the_newest_save(tmp_path: Path) -> None:
    for step in (1, 2):
        hf(tmp_path / f"step-{step}", whole=True)
        aged(tmp_path / f"step-{step}", 3 - step)
    assert not [a for a in ftckpt.status(str(tmp_path)).alerts if a.kind == "corrupt"]
    (tmp_path / "step-2" / "model-00002-of-00002.safetensors").unlink()
    found = ftckpt.status(str(tmp_path))
    (alert,) = [one for one in found.alerts if one.kind in ("corrupt", "unfinished")]
    assert "model-00002-of-00002.safetensors" in alert.message
    assert found.runs[0].newest is not None
    assert found.runs[0].newest.entry.name == "step-1"


MODULE = "mmengine.logging.history_buffer"
HISTORY = f"""
class HistoryBuffer:
    __module__ = {MODULE!r}
    def mean(self): ...
    def min(self): ...
    def max(self): ...
    def current(self): ...
    def other(self): ...
"""


@pytest.fixture
def history() -> Iterator[Any]:
    """mmengine's HistoryBuffer, which keeps its methods in its state (`getattr` in protocol 2)."""
    made = {}
    for name in ("mmengine", "mmengine.logging", MODULE):
        made[name] = sys.modules[name] = types.ModuleType(name)
    exec(HISTORY, made[MODULE].__dict__)
    yield made[MODULE].HistoryBuffer
    for name in made:
        del sys.modules[name]


def save_mmengine(path: Path, history: Any, epoch: int, *methods: str) -> None:
    import torch

    buffer = history()
    buffer._statistics_methods = {name: getattr(history, name) for name in methods}
    torch.save(
        {
            "meta": {"epoch": epoch, "iter": epoch * 5, "cfg": "model = dict()", "seed": 1},
            "message_hub": {"log_scalars": OrderedDict({"train/loss": buffer})},
            "state_dict": {"w": torch.ones(4)},
        },
        path,
    )


def test_methods_of_a_known_inert_class_are_inert(tmp_path: Path, history: Any) -> None:
    for epoch in (1, 2, 3):
        methods = ("mean", "min", "max", "current")
        save_mmengine(tmp_path / f"epoch_{epoch}.pth", history, epoch, *methods)
    report = ftckpt.verify(str(tmp_path / "epoch_1.pth"))
    assert (int(report.code), report.level) == (0, "content")
    for path in tmp_path.iterdir():
        os.utime(path, (time.time() - 3 * DAY,) * 2)
    flags: dict[str, Any] = {"keep_last": 3, "delete_corrupt": True}
    assert ftckpt.gc(str(tmp_path), **flags).plan.drop == ()


@pytest.mark.parametrize("name", ["other", "__init__"])
def test_other_attributes_stay_refused(tmp_path: Path, history: Any, name: str) -> None:
    save_mmengine(tmp_path / "epoch_1.pth", history, 1, "other")
    assert int(ftckpt.verify(str(tmp_path / "epoch_1.pth")).code) == 7
    data = zipfile.ZipFile(tmp_path / "epoch_1.pth").read("epoch_1/data.pkl")
    assert b"getattr" in data
    shutil.rmtree(tmp_path)
