"""Real Megatron checkpoints through the command line: another layout, and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders.megatron_trees import assert_same_files
from tests.builders.real_sets import real_set
from tests.commands.golden import ftckpt

RULE = """
[[rule]]
names = ["*.strange.weight"]
split = 1
"""


@pytest.mark.parametrize(
    ("name", "there", "back"),
    [
        ("mcore_torch_tp2pp2", "--tp 4 --pp 1", "--tp 2 --pp 2"),
        ("mcore_torch_tp2dp2_distopt_bf16", "--tp 1 --pp 2 --dp 4", "--tp 2 --pp 1 --dp 2"),
    ],
)
def test_there_and_back(
    name: str, there: str, back: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = real_set(name, "iter_0000003", tmp_path_factory)
    for begin, end, flags in ((source, "there", there), ("there", "back", back)):
        done = ftckpt("reshard", begin, end, *flags.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "proven: 108 tensors" in done.stdout
        assert ("--no-load-rng" in done.stderr) is (end == "there")
    # Which device a rank had on its node is no part of a layout.
    without = ("rng_state", "local_rank")
    assert_same_files(tmp_path / "back", source, without=without, places="distopt" in name)


def test_names_that_only_the_user_can_explain(tmp_path: Path) -> None:
    import torch

    from tests.builders.megatron_files import write
    from tests.builders.megatron_model import Job

    made = write(tmp_path, Job(tp=2, layers=1))
    for number, place in enumerate(sorted(made.path.iterdir())):
        file = place / "model_optim_rng.pt"
        state = torch.load(file, weights_only=False)
        state["model"]["decoder.strange.weight"] = torch.full((3, 2), float(number))
        torch.save(state, file)
    refused = ftckpt("reshard", str(made.path), "out", "--tp", "1", cwd=tmp_path)
    assert refused.returncode == 13
    assert "--rules FILE.toml" in refused.stderr
    (tmp_path / "mine.toml").write_text(RULE)
    rules = ("--rules", "mine.toml")
    done = ftckpt("reshard", str(made.path), "out", "--tp", "1", *rules, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    weight = torch.load(tmp_path / "out/mp_rank_00/model_optim_rng.pt", weights_only=False)
    assert weight["model"]["decoder.strange.weight"].tolist() == [[0, 0, 1, 1]] * 3
    back = ftckpt("reshard", "out", "four", "--tp", "4", "--pp", "1", *rules, cwd=tmp_path)
    assert back.returncode == 0, back.stderr
