"""Whatever begins as a pickle is looked at as one, before it is called damaged."""

from __future__ import annotations

import io
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.errors import ExitCode, worst
from ftckpt.findings import Finding
from ftckpt.formats.dcp import Dcp
from ftckpt.formats.dcp.metadata import parse_metadata
from ftckpt.formats.torchsave import TorchSave
from tests.conformance.formats import findings_of
from tests.data.hostile.make_pickles import CANARY, PICKLES
from tests.formats.dcp.writing import save
from tests.workers.forked import run

LIVE = sorted(name for name, case in PICKLES.items() if case.live)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def verdict(found: list[Finding]) -> ExitCode:
    return worst(f.code for f in found)


@pytest.mark.parametrize("name", LIVE)
def test_a_pickle_that_runs_something_in_place_of_a_file_is_hostile(name: str) -> None:
    for content in (PICKLES[name].content, PICKLES[name].content + random.randbytes(300)):
        Path("model.pt").write_bytes(content)
        assert verdict(findings_of(TorchSave(), Path("model.pt"))) is ExitCode.UNSAFE
    assert not Path(CANARY).exists()


@pytest.mark.parametrize("protocol", range(6))
def test_a_call_far_behind_is_found_in_every_protocol(protocol: int) -> None:
    value = ["x" * 500_000, list(range(100_000)), _Runs()]
    Path("model.pt").write_bytes(pickle.dumps(value, protocol))
    assert verdict(findings_of(TorchSave(), Path("model.pt"))) is ExitCode.UNSAFE
    assert not Path(CANARY).exists()


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {CANARY}",)


def _bytes_io(data: bytes) -> dict[str, Any]:
    return {"w": torch.ones(2), "extra_state": io.BytesIO(data)}


def _saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


INSIDE = {
    "pickle": lambda: pickle.dumps(_Runs(), 4),
    "archive": lambda: _saved(_Runs()),
    "pickle in a pickle": lambda: pickle.dumps(pickle.dumps(_Runs(), 3), 3),
    "pickle with a tail": lambda: pickle.dumps(_Runs(), 2) + b"tail",
}


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("protocol", [2, 4])
def test_bytes_inside_a_checkpoint_are_looked_at(name: str, protocol: int) -> None:
    for value in (_bytes_io(INSIDE[name]()), {"w": INSIDE[name]()}, bytearray(INSIDE[name]())):
        torch.save(value, "model.pt", pickle_protocol=protocol)
        assert verdict(findings_of(TorchSave(), Path("model.pt"))) is ExitCode.UNSAFE
    for good in (b"", pickle.dumps({"amax": [1.0]}), _saved({"scale": torch.ones(2)}), b"PK\3\4no"):
        torch.save(_bytes_io(good), "model.pt", pickle_protocol=protocol)
        assert verdict(findings_of(TorchSave(), Path("model.pt"))) is ExitCode.OK
    assert not Path(CANARY).exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["s", "w"])
def test_a_pickle_in_place_of_an_item_is_hostile(name: str) -> None:
    save({"w": torch.ones(300), "s": "text" * 300}, Path("save"))
    meta = parse_metadata(Path("save/.metadata").read_bytes(), ".metadata")
    item = next(placed.item for placed in meta.placed() if placed.name == name)
    data = bytearray(Path("save", item.path).read_bytes())
    evil = PICKLES["os-system"].content
    data[item.offset : item.offset + item.length] = evil + bytes(item.length - len(evil))
    Path("save", item.path).write_bytes(data)
    assert verdict(findings_of(Dcp(), Path("save"))) is ExitCode.UNSAFE


@pytest.mark.parametrize("verb", ["verify", "inspect"])
def test_every_verb_stops_at_it(verb: str) -> None:
    Path("root").mkdir()
    torch.save({"w": torch.ones(2), "step": 1}, "root/ckpt_1.pt")
    Path("root/ckpt_2.pt").write_bytes(PICKLES["os-system"].content)
    assert run([verb, "root/ckpt_2.pt"], os.environ).returncode == 7
    latest = run(["latest", "root", "--stop-at-unsafe"], os.environ)
    assert (latest.returncode, latest.stdout) == (7, "")
    passed = run(["latest", "root"], os.environ)
    assert (passed.returncode, passed.stdout) == (0, "root/ckpt_1.pt\n")
    assert "ckpt_2.pt" in passed.stderr


@pytest.mark.parametrize("seed", range(40))
def test_noise_is_damage_and_no_attack(seed: int) -> None:
    Path("model.pt").write_bytes(random.Random(seed).randbytes(5000))
    assert verdict(findings_of(TorchSave(), Path("model.pt"))) is ExitCode.CORRUPT
