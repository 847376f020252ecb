"""Files of `pickle.dump`: read by every verb, unless they would run something (7)."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.json_run import ftckpt_json


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


class LoadsBytes:
    """A tensor's own call, given bytes that are no tensor."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.storage._load_from_bytes, (self._data,)


PLAIN = {
    "arrays": {"step": 100, "w": np.arange(12.0).reshape(3, 4)},
    "tensors": {"step": 100, "model": {"w": torch.arange(12.0), "b": torch.ones(2).bfloat16()}},
    "parameters": torch.nn.Linear(2, 2).state_dict() | {"p": torch.nn.Parameter(torch.ones(1))},
}
HOSTILE = {
    "calls": {"step": 1, "x": Hostile()},
    "inside": {"step": 1, "x": LoadsBytes(pickle.dumps(Hostile()))},
}


def result(*arguments: str | Path) -> tuple[int, str]:
    answer = ftckpt_json(*map(str, arguments))["result"]
    return int(answer["code"]), str(answer["message"])


@pytest.mark.parametrize("name", ["latest.pkl", "ckpt_100.pkl", "ckpt_100.pt"])
@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_pickle_is_read(kind: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "root" / name
    file.parent.mkdir()
    file.write_bytes(pickle.dumps(PLAIN[kind]))
    for verb in ("inspect", "verify", "latest"):
        code, said = result(verb, file.parent if verb == "latest" else file)
        assert code == 0, (verb, said)
    assert result("verify", file, "--level", "content")[0] == 6  # it carries no checksum


def test_one_without_a_tensor_is_no_checkpoint(tmp_path: Path) -> None:
    """A vocabulary or a list of settings beside checkpoints must not be restarted from."""
    file = tmp_path / "latest.pkl"
    file.write_bytes(pickle.dumps({"step": 100, "lr": 0.1, "names": ["a"]}))
    for verb in ("inspect", "verify"):
        assert result(verb, file)[0] == 13
    torch.save({"model": {"w": torch.ones(3)}, "step": 5}, tmp_path / "ckpt_5.pt")
    answer = ftckpt_json("latest", str(tmp_path))
    assert answer.get("path") != str(file)


@pytest.mark.parametrize("name", ["latest.pkl", "ckpt_100.pt"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_one_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(pickle.dumps(HOSTILE[kind]))
    assert result("verify", file)[0] == 7


def test_one_beside_checkpoints_is_one_of_them(tmp_path: Path) -> None:
    """The newest of the root; it has no evidence, and that alone does not hide an older one."""
    torch.save({"model": {"w": torch.ones(3)}, "step": 5}, tmp_path / "ckpt_5.pt")
    (tmp_path / "best_model.pkl").write_bytes(pickle.dumps(PLAIN["tensors"]))
    assert ftckpt_json("latest", str(tmp_path))["step"] == 100
    assert result("latest", tmp_path, "--level", "content")[0] == 6
    answer = ftckpt_json("latest", str(tmp_path), "--level", "content", "--skip-unverified")
    assert answer["path"] == str(tmp_path / "ckpt_5.pt")


def test_one_that_is_cut_short_is_damage(tmp_path: Path) -> None:
    file = tmp_path / "ckpt_5.pt"
    file.write_bytes(pickle.dumps(PLAIN["arrays"])[:-20])
    assert result("verify", file)[0] == 4
