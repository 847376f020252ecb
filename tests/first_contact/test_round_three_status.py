"""Saves that no list of trainers named: what status says, other archives, pointers of any name.

k-diffusion's pointer, PhysicsNeMo's archives, the two models of the Descript Audio Codec,
Implicitron's pairs, diffusion_policy's `latest.ckpt`.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.json_run import ftckpt_json


def save(path: Path, fill: float = 1.0, **state: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": {"layer.weight": torch.full((4, 4), fill)}, **state}, path)


def code(*words: str) -> int:
    return int(ftckpt_json(*words)["result"]["code"])


# ---------------------------------------------------------------------------------------------
# A pointer under any name


def reasons(root: Path) -> dict[str, str]:
    """Return what gc says of each entry, by its name."""
    plan = ftckpt_json("gc", str(root), "--keep-last", "2")
    return {one["name"]: json.dumps(one) for one in plan["plan"]["decisions"]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model_state.json", '{"latest_checkpoint": "model_00020000.pth"}'),
        ("run.json", '{"a": {"b": ["/elsewhere/run/model_00020000.pth"]}}'),
        ("state.yaml", "epoch: 3\nbest: ./model_00020000.pth\n"),
        ("checkpoint", 'model_checkpoint_path: "model_00020000.pth"\n'),
        ("current.txt", "model_00020000.pth\n"),
    ],
)
def test_gc_keeps_what_a_small_text_names(tmp_path: Path, name: str, text: str) -> None:
    for step in (10000, 20000, 30000, 40000):
        save(tmp_path / f"model_{step:08}.pth", step, step=step)
    (tmp_path / name).write_text(text)
    said = reasons(tmp_path)
    assert f"{name} names it" in said["model_00020000.pth"]
    assert "expired" in said["model_00010000.pth"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model_00020000.json", '{"file": "model_00020000.pth"}'),
        ("losses.json", '{"model_00020000.pth": 0.5}'),
        ("log.csv", "model_00020000.pth\n"),
        ("note.txt", "model_00020000.pth was bad, do not use it\n"),
        ("all.json", json.dumps([f"model_{step:08}.pth" for step in range(10000, 110000, 10000)])),
    ],
)
def test_a_text_about_saves_is_no_pointer(tmp_path: Path, name: str, text: str) -> None:
    for step in range(10000, 110000, 10000):
        save(tmp_path / f"model_{step:08}.pth", step, step=step)
    (tmp_path / name).write_text(text)
    assert "names it" not in reasons(tmp_path)["model_00020000.pth"]


# ---------------------------------------------------------------------------------------------
# Archives of other programs


def archive(path: Path, names: tuple[str, ...], method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", method) as held:
        for name in names:
            held.writestr(name, name.encode() * 40)


@pytest.mark.parametrize(
    ("names", "method"),
    [
        (("model.pt", "args.json", "metadata.json"), zipfile.ZIP_STORED),
        (("data", "policy.pth", "_stable_baselines3_version"), zipfile.ZIP_STORED),
        (("config.json", "model.weights.h5"), zipfile.ZIP_DEFLATED),
        (("w.npy", "b.npy"), zipfile.ZIP_STORED),
    ],
)
@pytest.mark.parametrize("suffix", ["pt", "ckpt"])
def test_another_programs_zip_is_refused_by_name(
    tmp_path: Path, names: tuple[str, ...], method: int, suffix: str
) -> None:
    path = tmp_path / f"FourCastNet.0.10.{suffix}"
    archive(path, names, method)
    for words in (("verify", str(path)), ("inspect", str(path))):
        answer = json.dumps(ftckpt_json(*words))
        assert "that torch.save did not write" in answer
        assert names[0] in answer
        assert code(*words) == 13


def test_a_zip_with_a_sign_of_torch_is_still_ambiguous(tmp_path: Path) -> None:
    archive(tmp_path / "step_10.pt", ("model.pt", "x/data.pkl"))
    assert code("verify", str(tmp_path / "step_10.pt")) == 7


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (gzip.compress(b"weights" * 200), "gzip"),
        (lzma.compress(b"weights" * 200), "xz"),
        (b"\x93NUMPY\x01\0" + bytes(500), "NumPy"),
        (b"\x89HDF\r\n\x1a\n" + bytes(500), "HDF5"),
    ],
    ids=["gzip", "xz", "numpy", "hdf5"],
)
def test_a_sound_file_of_another_kind_is_not_damaged(
    tmp_path: Path, content: bytes, kind: str
) -> None:
    (tmp_path / "model_10.pt").write_bytes(content)
    answer = ftckpt_json("verify", str(tmp_path / "model_10.pt"))
    assert answer["result"]["code"] == 13
    assert kind in json.dumps(answer)


def test_a_folder_of_other_archives_promises_nothing(tmp_path: Path) -> None:
    for step in (5, 10):
        archive(tmp_path / f"FourCastNet.0.{step}.mdlus", ("model.pt", "args.json"))
    answer = ftckpt_json("latest", str(tmp_path))
    assert answer["result"]["code"] == 13
    assert "can be read by itself" not in json.dumps(answer)


# ---------------------------------------------------------------------------------------------
# Two models of one save


def audio(root: Path) -> None:
    for number, tag in enumerate(("10k", "50k", "100k", "latest")):
        for model in ("dac", "discriminator"):
            torch.manual_seed(number)
            net = torch.nn.Linear(4, 4 if model == "dac" else 2)
            optimizer = torch.optim.AdamW(net.parameters())
            net(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            folder = root / tag / model
            folder.mkdir(parents=True)
            torch.save(net.state_dict(), folder / "weights.pth")
            torch.save(optimizer.state_dict(), folder / "optimizer.pth")
            if model == "dac":
                torch.save({"step": 10000 * (number + 1)}, folder / "tracker.pth")


def test_two_models_are_one_save(tmp_path: Path) -> None:
    audio(tmp_path)
    latest = str(tmp_path / "latest")
    answer = ftckpt_json("verify", latest, "--level", "content")
    assert answer["result"]["code"] == 0
    assert "discriminator" in json.dumps(ftckpt_json("inspect", latest))
    assert ftckpt_json("latest", str(tmp_path))["path"].endswith("/latest")
    damage = tmp_path / "latest" / "discriminator" / "weights.pth"
    damage.write_bytes(damage.read_bytes()[:-200])
    assert code("verify", latest) == 4
    assert ftckpt_json("latest", str(tmp_path))["path"].endswith("/100k")


@pytest.mark.parametrize("lost", ["dac/optimizer.pth", "discriminator/weights.pth"])
def test_what_all_others_have_is_named(tmp_path: Path, lost: str) -> None:
    audio(tmp_path)
    (tmp_path / "latest" / lost).unlink()
    answer = ftckpt_json("verify", str(tmp_path / "latest"))
    assert answer["result"]["code"] == 5
    assert f"lacks {lost}" in json.dumps(answer)
    assert ftckpt_json("latest", str(tmp_path))["path"].endswith("/100k")


def test_what_is_not_understood_is_not_known_to_be_bad(tmp_path: Path) -> None:
    audio(tmp_path)
    archive(tmp_path / "latest" / "dac" / "package.pth", ("model.pt", "args.json"))
    assert code("latest", str(tmp_path), "--level", "content") in (6, 13)
    assert "corrupt" not in {alert["kind"] for alert in run_of(tmp_path)["alerts"]}


# ---------------------------------------------------------------------------------------------
# What status says is what latest says


def run_of(root: Path) -> Any:
    return ftckpt_json("status", str(root))["runs"][0]


def pairs(root: Path) -> None:
    for epoch in (7, 8, 9):
        torch.manual_seed(epoch)
        net = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        torch.save(net.state_dict(), root / f"model_epoch_{epoch:08}.pth")
        torch.save(optimizer.state_dict(), root / f"model_epoch_{epoch:08}_opt.pth")


def test_status_names_the_pair_that_latest_names(tmp_path: Path) -> None:
    pairs(tmp_path)
    assert code("latest", str(tmp_path)) == 2
    run = run_of(tmp_path)
    assert run["newest"]["name"] == "model_epoch_00000009.pth"
    assert run["newest_with"] == ["model_epoch_00000009_opt.pth"]
    assert run["interval"]["reason"] == "several files are one save"


def test_a_lost_half_is_unfinished(tmp_path: Path) -> None:
    pairs(tmp_path)
    (tmp_path / "model_epoch_00000009_opt.pth").unlink()
    for path in tmp_path.iterdir():
        os.utime(path, (1e9, 1e9))
    run = run_of(tmp_path)
    assert run["newest"]["name"] == "model_epoch_00000008.pth"
    said = [alert for alert in run["alerts"] if alert["kind"] == "unfinished"]
    assert [alert["about"] for alert in said] == [["model_epoch_00000009.pth"]]


def test_status_and_latest_name_the_same_newest(tmp_path: Path) -> None:
    for epoch in (0, 50, 100):
        save(tmp_path / f"epoch={epoch:04}-test_mean_score=0.{epoch}.ckpt", epoch)
    save(tmp_path / "latest.ckpt", 120)
    assert ftckpt_json("latest", str(tmp_path), "--level", "content")["path"].endswith(
        "/latest.ckpt"
    )
    run = run_of(tmp_path)
    assert run["newest"]["name"] == "latest.ckpt"
    assert run["verified"]["name"] == "latest.ckpt"
    assert run["interval"]["reason"] == "no save says its step"


def test_status_does_not_call_an_unknown_order_ok(tmp_path: Path) -> None:
    for version in ("0.5", "0.10"):
        save(tmp_path / f"checkpoint.{version}.pt", float(version))
    assert code("latest", str(tmp_path)) == 6
    answer = ftckpt_json("status", str(tmp_path))
    assert answer["result"]["code"] == 6
    assert answer["runs"][0]["newest"] is None
    assert answer["runs"][0]["doubt"]


def test_status_counts_steps_that_lie_side_by_side(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        for rank in range(2):
            save(tmp_path / f"ckpt_step{step}_rank{rank}.pt", step + rank, step=step)
    assert ftckpt_json("latest", str(tmp_path))["path"].endswith("/ckpt_step300_rank0.pt")
    run = run_of(tmp_path)
    assert run["newest"]["step"] == 300
    assert run["newest"]["files"] == 2
    assert run["counts"] == {"COMMITTED": 3}
    assert "expired" not in json.dumps(reasons(tmp_path))
