"""The lines of Python on the pages of frameworks load what those frameworks have saved."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import ftckpt
from ftckpt.formats.state.job_settings import KnowsMembers
from tests.formats.dcp.fsdp2_loading import Model, trained

dcp: Any = checkpoint
PAGES = Path(__file__).parents[2] / "docs" / "frameworks"
DATA = Path(__file__).parents[1] / "data"
HEADING = "## Load straight into the job\n"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def lines_of(page: str) -> str:
    """Return the Python below the heading of a page."""
    text = (PAGES / f"{page}.md").read_text()
    _, _, rest = text.partition(HEADING)
    code, _, _ = rest.partition("```python\n")[2].partition("```")
    assert code, page
    return code


class Named(torch.nn.Module):
    """A model with the parameters and buffers of given names, shapes and types."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        super().__init__()
        for name, info in tensors.items():
            *above, last = name.split(".")
            module: torch.nn.Module = self
            for key in above:
                if not hasattr(module, key):
                    module.add_module(key, torch.nn.Module())
                module = getattr(module, key)
            empty = torch.full(info.shape, 7).to(getattr(torch, info.dtype.name))
            if empty.is_floating_point():
                module.register_parameter(last, torch.nn.Parameter(empty))
            else:
                module.register_buffer(last, empty)


def titan(root: Path) -> None:
    weights, settings = get_state_dict(
        *trained(), options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    dcp.save({**weights, "optimizer": settings}, checkpoint_id=str(root / "step-3"))


def fsdp2(root: Path) -> None:
    weights, settings = get_state_dict(*trained())
    dcp.save({"model": weights, "optimizer": settings}, checkpoint_id=str(root / "step-3"))


def lightning(root: Path) -> None:
    model, optimizer = trained()
    state = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()],
             "global_step": 3, "epoch": 0, "pytorch-lightning_version": "2.6.0"}  # fmt: skip
    root.mkdir()
    torch.save(state, root / "step=3.ckpt")


@pytest.mark.parametrize(
    ("page", "save"), [("fsdp2", fsdp2), ("torchtitan", titan), ("lightning", lightning)]
)
def test_a_job_of_torch_loads_as_pasted(
    page: str, save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(12)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    said: dict[str, Any] = {"model": model, "optimizer": optimizer}
    exec(compile(lines_of(page), page, "exec"), said)
    truth = trained()[0].state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, truth[name]), name
    if page == "fsdp2":
        assert optimizer.param_groups[0]["lr"] == 0.01
    if page == "torchtitan":
        assert said["settings"]["param_groups.embed.weight.lr"] == 0.01


@pytest.mark.parametrize(
    ("page", "sample", "name"),
    [
        ("hugging-face", "trainer_dirs/trainer", "checkpoint-2"),
        ("hugging-face", "trainer_dirs/accelerate", "checkpoint_0"),
        ("deepspeed", "deepspeed/z1/global_step2", "global_step2"),
        ("deepspeed", "deepspeed/z3/global_step2", "global_step2"),
    ],
)
def test_what_others_have_saved_is_loaded_as_pasted(
    page: str, sample: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(DATA / sample, tmp_path / "run" / name)
    monkeypatch.chdir(tmp_path)
    opened = ftckpt.open_checkpoint(f"run/{name}")
    held = {key: info for key, info in opened.tensors.items()
            if info.component == "model" and ":" not in key}  # fmt: skip
    alone = {key.partition(":")[2]: info for key, info in opened.tensors.items()
             if page == "deepspeed" and key.startswith("exp_avg:")}  # fmt: skip
    model = Named({**alone, **held})
    groups: Any = model.parameters()
    if isinstance(opened, KnowsMembers):  # as the job that saved them grouped them
        named = dict(model.named_parameters())
        groups = [{"params": [named[n] for n in sorted(some)]} for some in opened.group_members()]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    exec(compile(lines_of(page), page, "exec"), {"model": model, "optimizer": optimizer})
    for key in held:
        assert torch.equal(model.state_dict()[key], opened[key].torch()), key
    if page == "deepspeed":
        assert optimizer.param_groups[0]["lr"] != 1.0
        names: dict[Any, str] = {p: n for n, p in model.named_parameters()}
        for parameter, state in optimizer.state.items():
            want = opened[f"exp_avg:{names[parameter]}"].torch()
            assert torch.equal(state["exp_avg"], want.to(state["exp_avg"].dtype))


def test_the_page_of_loading_runs_as_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fsdp2(tmp_path / "run")
    (tmp_path / "run" / "step-3").rename(tmp_path / "run" / "step-100")
    monkeypatch.chdir(tmp_path)
    weights = Model().state_dict()
    said: dict[str, Any] = {"state": {"model": weights}}
    text = (PAGES.parent / "loading.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4
    for code in blocks:
        exec(compile(code, "loading.md", "exec"), said)
    truth = trained()[0].state_dict()
    for name, tensor in truth.items():
        assert torch.equal(weights[name], tensor), name
        assert torch.equal(said["weights"][name], tensor), name
        assert (said["arrays"][name] == tensor.numpy()).all(), name
    assert len(said["rows"]["embed.weight"]) == 4
    assert said["state"].keys() == {"model", "optimizer"}
    assert "not asked for: optimizer" in capsys.readouterr().out
