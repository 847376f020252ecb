"""Which save of a root is the newest, and what else lies there: a first contact with trainers.

WeNet's two counters, sockeye's files without a suffix, NeMo 1's markers and archives, exports
beside the saves of rsl_rl.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import ftckpt
from ftckpt.discovery.step_names import unfinished_marker
from ftckpt.retention.scan.entries import EntryClass
from tests.json_run import ftckpt_json


def save(path: Path, fill: float = 1.0, **state: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": {"layer.weight": torch.full((4, 4), fill)}, **state}, path)


def newest(root: Path, *flags: str) -> tuple[int, str]:
    answer = ftckpt_json("latest", str(root), *flags)
    return answer["result"]["code"], (answer.get("path") or "").rpartition("/")[2]


def code(*words: str) -> int:
    return int(ftckpt_json(*words)["result"]["code"])


def says(*words: str) -> str:
    return json.dumps(ftckpt_json(*words))


def export(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x08\x07\x12\x04test" + bytes(range(64)))


# ---------------------------------------------------------------------------------------------
# Two counters in one root


def two_counters(root: Path, *, beside: str = "") -> None:
    for epoch, step in enumerate((899, 1799, 2699, 3599)):
        save(root / f"epoch_{epoch}.pt", epoch)
        if beside == "yaml":
            said = f"epoch: {epoch}\nloss_dict:\n  step: 7\nstep: {step}\ntag: epoch_{epoch}\n"
            (root / f"epoch_{epoch}.yaml").write_text(said)
        elif beside == "json":
            (root / f"epoch_{epoch}.json").write_text(json.dumps({"step": step}))
        elif beside == "setting":
            (root / f"epoch_{epoch}.yaml").write_text("step: 100000\n")
    save(root / "step_1999.pt", 9)


@pytest.mark.parametrize("beside", ["yaml", "json"])
def test_the_file_beside_says_the_step(tmp_path: Path, beside: str) -> None:
    two_counters(tmp_path, beside=beside)
    assert newest(tmp_path) == (0, "epoch_3.pt")
    save(tmp_path / "step_3999.pt")
    assert newest(tmp_path) == (0, "step_3999.pt")
    whole = (tmp_path / "step_3999.pt").read_bytes()
    (tmp_path / "step_3999.pt").write_bytes(whole[: len(whole) // 2])
    assert newest(tmp_path) == (0, "epoch_3.pt")


def test_a_setting_of_the_run_is_no_step(tmp_path: Path) -> None:
    two_counters(tmp_path, beside="setting")
    assert newest(tmp_path) == (6, "")


def test_a_step_in_a_name_is_no_order(tmp_path: Path) -> None:
    two_counters(tmp_path)
    assert newest(tmp_path) == (6, "")
    assert newest(tmp_path, "--skip-unverified") == (6, "")
    assert code("verify", str(tmp_path)) == 6
    # The time of a file is that of the copying: it is said, and decides nothing.
    for path in tmp_path.iterdir():
        os.utime(path, (1e9, 1e9))
    os.utime(tmp_path / "epoch_3.pt", (1.1e9, 1.1e9))
    assert "epoch_3.pt is the youngest" in says("latest", str(tmp_path))
    # A step by its number is still one step.
    assert code("inspect", f"{tmp_path}@1999") == 0


def test_one_file_beside_that_is_lost(tmp_path: Path) -> None:
    two_counters(tmp_path, beside="yaml")
    (tmp_path / "epoch_3.yaml").unlink()
    assert newest(tmp_path) == (0, "epoch_3.pt")  # after epoch_2, which is at 2699
    save(tmp_path / "step_2999.pt", 9)
    assert newest(tmp_path) == (6, "")  # and whether after 2999, nothing says
    (tmp_path / "step_2999.pt").unlink()
    (tmp_path / "epoch_3.pt").unlink()
    (tmp_path / "epoch_0.yaml").unlink()  # and epoch_2 is newer than that
    assert newest(tmp_path) == (0, "epoch_2.pt")


def test_a_pointer_decides_between_two_counters(tmp_path: Path) -> None:
    two_counters(tmp_path)
    (tmp_path / "latest").write_text("epoch_3.pt")
    assert newest(tmp_path) == (0, "epoch_3.pt")
    (tmp_path / "latest").write_text("step_1999.pt")
    assert newest(tmp_path) == (0, "step_1999.pt")


def test_a_number_that_is_a_step_of_the_others_is_no_counter_of_its_own(tmp_path: Path) -> None:
    for step in (1000, 2000):
        save(tmp_path / f"step_{step}.pt", step)
        save(tmp_path / f"ema_step_{step}.pt", step + 1)
    assert newest(tmp_path) == (0, "step_2000.pt")
    save(tmp_path / "ema_step_3000.pt", 3)
    assert newest(tmp_path) == (6, "")


# ---------------------------------------------------------------------------------------------
# Pointers


def test_a_pointer_to_a_file_without_a_suffix_is_not_dangling(tmp_path: Path) -> None:
    for number in (1, 2):
        save(tmp_path / "saved.pt", number)
        (tmp_path / "saved.pt").rename(tmp_path / f"params.0000{number}")
    save(tmp_path / "step-10.pt", step=10)
    (tmp_path / "params.best").symlink_to("params.00001")
    (tmp_path / "latest").write_text("params.00002")
    for words in (["verify", str(tmp_path), "--all"], ["latest", str(tmp_path)]):
        assert "pointer-dangling" not in says(*words)
        assert code(*words) == 0
    assert "not there" not in says("gc", str(tmp_path), "--keep-last", "1")
    assert newest(tmp_path, "--pointer", "latest") == (13, "")
    (tmp_path / "params.00001").unlink()
    assert "pointer-dangling" in says("verify", str(tmp_path), "--all")
    assert code("verify", str(tmp_path), "--all") == 4


# ---------------------------------------------------------------------------------------------
# Markers and archives beside the saves


NEMO = "Net--val_wer=0.{wer}-epoch={epoch}{after}"


def nemo(root: Path) -> None:
    for epoch in (9, 19, 24):
        name = NEMO.format(wer=epoch, epoch=epoch, after=".ckpt")
        save(root / name, epoch, global_step=epoch * 100, epoch=epoch)


@pytest.mark.parametrize("after", ["-unfinished", ".ckpt-unfinished"])
def test_a_marked_file_is_not_the_newest(tmp_path: Path, after: str) -> None:
    nemo(tmp_path)
    assert newest(tmp_path)[1] == NEMO.format(wer=24, epoch=24, after=".ckpt")
    (tmp_path / NEMO.format(wer=24, epoch=24, after=after)).touch()
    assert newest(tmp_path) == (0, NEMO.format(wer=19, epoch=19, after=".ckpt"))
    plan = ftckpt.gc(str(tmp_path), keep_last=1, min_survivors=1, any_name=True).plan
    classes = {d.entry.name: d.entry.entry_class for d in plan.decisions}
    assert classes[NEMO.format(wer=24, epoch=24, after=".ckpt")] is EntryClass.STAGING
    assert NEMO.format(wer=19, epoch=19, after=".ckpt") not in {d.entry.name for d in plan.drop}


def test_only_a_marker_beside_counts(tmp_path: Path) -> None:
    beside = {"a.ckpt", "a-EMA.ckpt", "b.ckpt", "a-unfinished", "c-unfinished"}
    assert unfinished_marker("a.ckpt", beside) == "a-unfinished"
    assert unfinished_marker("a-EMA.ckpt", beside) == "a-unfinished"
    assert unfinished_marker("b.ckpt", beside) == ""
    assert unfinished_marker("a-unfinished", beside | {"a-unfinished-unfinished"}) == ""


@pytest.mark.parametrize("name", ["Net.nemo", "Net.onnx", "Net.msgpack", "Net.gguf", "Net.h5"])
def test_an_export_beside_saves_does_not_claim_their_folder(tmp_path: Path, name: str) -> None:
    nemo(tmp_path)
    head = {"gguf": b"GGUF", "h5": b"\x89HDF\r\n\x1a\n"}.get(name.rpartition(".")[2], b"\x08\x07")
    (tmp_path / name).write_bytes(head + bytes(100))
    assert newest(tmp_path) == (0, NEMO.format(wer=24, epoch=24, after=".ckpt"))
    assert code("verify", str(tmp_path), "--all") == 0
    for path in tmp_path.glob("*.ckpt"):
        path.unlink()
    for verb in ("verify", "inspect"):
        assert code(verb, str(tmp_path)) == 13


# ---------------------------------------------------------------------------------------------
# One count, and what is said of a folder


def test_verify_all_counts_what_ls_counts(tmp_path: Path) -> None:
    for number in (50, 100):
        save(tmp_path / f"model_{number}.pt", number, iter=number)
    export(tmp_path / "exported" / "policy.onnx")
    answer = ftckpt_json("verify", str(tmp_path), "--all")
    assert answer["result"]["code"] == 0
    for path in tmp_path.glob("*.pt"):
        path.unlink()
    assert code("verify", str(tmp_path), "--all") == 13


def test_what_is_read_one_by_one_is_not_called_unknown(tmp_path: Path) -> None:
    save(tmp_path / "runs" / "one" / "model_50.pt")
    save(tmp_path / "saved.pt")
    (tmp_path / "saved.pt").rename(tmp_path / "do_00005000")
    for root, readable in ((tmp_path / "runs", "model_50.pt"), (tmp_path, "do_00005000")):
        result = ftckpt_json("latest", str(root))["result"]
        assert result["code"] == 13
        assert readable in result["message"]
        assert "no known format" not in result["message"]
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "state.xyz").write_bytes(bytes(range(256)))
    assert "no known format" in ftckpt_json("latest", str(tmp_path / "none"))["result"]["message"]
