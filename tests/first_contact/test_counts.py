"""An optimizer's own count is not the step of a save that its name says."""

from __future__ import annotations

from pathlib import Path

import torch

import ftckpt


def save(path: Path, count: int, **state: object) -> None:
    """Write a training state whose optimizer has made `count` updates, as torch.save does."""
    layer = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    for _ in range(count):
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    path.parent.mkdir(exist_ok=True)
    whole = {"model": layer.state_dict(), "optimizer": optimizer.state_dict(), **state}
    torch.save(whole, path)


def newest(root: Path) -> str:
    path = ftckpt.latest(str(root), level="structure").path
    assert path is not None
    return Path(path).name


def test_a_new_optimizer_makes_no_old_save_the_newest(tmp_path: Path) -> None:
    for step, count in ((2000, 4), (4000, 8), (6000, 3)):
        save(tmp_path / f"step-{step}.pt", count)
    assert newest(tmp_path) == "step-6000.pt"


def test_several_updates_a_step_change_no_order(tmp_path: Path) -> None:
    for step, count in ((10, 9), (11, 1), (9, 12)):
        save(tmp_path / f"step-{step}.pt", count)
    assert newest(tmp_path) == "step-11.pt"


def test_a_trainers_own_counter_still_decides(tmp_path: Path) -> None:
    save(tmp_path / "step-10.pt", 2, global_step=10)
    save(tmp_path / "step-20.pt", 2, global_step=5)  # renamed, or copied from elsewhere
    assert newest(tmp_path) == "step-10.pt"


def test_a_series_orders_where_no_name_says_a_step(tmp_path: Path) -> None:
    for name, count in (("epoch_1", 2), ("epoch_2", 4)):
        save(tmp_path / f"{name}.pt", count)
    assert newest(tmp_path) == "epoch_2.pt"
