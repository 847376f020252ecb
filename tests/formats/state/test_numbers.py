"""An optimizer's numbers: what torch writes on purpose is let be, what it cannot write is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import ExitCode
from ftckpt.formats.state.rank_optimizer import misnumbered
from ftckpt.verification import VerifyOptions, verify
from tests.builders.checkpoints import open_checkpoint


@pytest.mark.parametrize(
    ("groups", "keys", "told"),
    [
        ([[0, 1], [2]], [0, 1, 2], ""),
        ([[0, 1], [2]], [0], ""),
        ([[2, 1, 2]], [1, 2], ""),
        ([[0, 1], [1]], [0, 1], "two of the optimizer's groups"),
        ([[0, 1]], [0, 1, "global"], ""),
        ([[0, 1]], [0, 1, 2], "which no group has"),
        ([["a"], ["b"]], ["a", "b", "c"], ""),
    ],
)
def test_numbers(groups: list[list[Any]], keys: list[Any], told: str) -> None:
    found = list(misnumbered(keys, [{"params": ids} for ids in groups]))
    assert len(found) == bool(told)
    assert told in "".join(found)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_what_torch_saves_of_a_parameter_twice_in_a_group_is_whole(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW([model.weight, model.bias, model.weight])
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.state["global"] = {"scale": torch.ones(2)}  # type: ignore[index]
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert saved["optimizer"]["param_groups"][0]["params"] == [2, 1, 2]
    torch.save(saved, tmp_path / "last.pt")
    report = verify(open_checkpoint(tmp_path / "last.pt"), VerifyOptions())
    assert report.code is ExitCode.OK
