"""The recipe for torchtitan: its own checkpointer saves, and what it saves is sealed."""

from __future__ import annotations

import importlib
import socket
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as checkpointing

import ftckpt
from ftckpt.errors import ExitCode
from ftckpt.own_files import MANIFEST
from ftckpt.torch import seal_dcp

pytestmark = [
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed"),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_step_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        titan: Any = importlib.import_module("torchtitan.components.checkpointer.dcp")
    dcp: Any = checkpointing
    for name in ("save", "async_save"):
        monkeypatch.setattr(dcp, name, getattr(dcp, name))
    seal_dcp(strict=True)
    kind: Any = next(
        one for one in vars(titan).values()
        if isinstance(one, type) and "dcp_save" in vars(one)
    )  # fmt: skip
    path = tmp_path / "step-2"
    manager = SimpleNamespace(
        pg=dist.new_group(backend="gloo"), sd_adapter=None, stager=None, states={}
    )
    state: dict[str, Any] = {"model": {"w": torch.randn(40, 7)}, "train_state": {"step": 2}}
    done = kind.dcp_save(manager, state, str(path), titan.AsyncMode(mode))
    if mode == "async":
        done.result()
    assert (path / MANIFEST).is_file()
    assert ftckpt.verify(str(path), level="content").code is ExitCode.OK
    loaded: dict[str, Any] = {"model": {"w": torch.zeros(40, 7)}, "train_state": {"step": 0}}
    kind.dcp_load(manager, loaded, str(path), from_hf=False, from_quantized=False)
    assert torch.equal(loaded["model"]["w"], state["model"]["w"])
