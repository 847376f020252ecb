"""A run that lies inside a checkpoint of another: gc would drop it with the whole directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftckpt.errors import ExitCode
from ftckpt.retention.scan.inside import run_inside
from tests.retention.carrying import apply_to, dropped, names_in, place_of, plan_of, save


def _files(*names: str) -> list[str]:
    return [f"run/checkpoint-5/{name}" for name in names]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["model.safetensors", "sft/checkpoint-20/model.safetensors"], "sft/checkpoint-20"),
        (["sft/checkpoint-5/w", "sft/checkpoint-10/w"], "sft/checkpoint-10"),
        (["sft/step-0/w", "sft/step-1/w"], "sft/step-0"),
        (["iter_0000007/w"], "iter_0000007"),
        (["sft/.ftckpt/pins/100/me.json"], "sft"),
        (["sft/.ftckpt/root.json", "sft/100/w"], "sft"),
        (["w", ".ftckpt/root.json"], ""),
        # Parts of one checkpoint, as frameworks name them.
        (["w", "global_step5/mp_rank_00_model_states.pt"], None),
        (["policy/weights/iter_0000000/.metadata"], None),
        (["default/ocdbt.process_0/d/1", "array/c/0/1", "array/c/1/0"], None),
        (["checkpoint-20", "step-20.pt", "notes/step-20.txt"], None),
        (["w", ".ftckpt/transfer.json", "part/.ftckpt/parts/0.json"], None),
    ],
)  # fmt: skip
def test_what_shows_another_run_inside_a_checkpoint(names: list[str], found: str | None) -> None:
    base = "run/checkpoint-5"
    expected = "" if found is None else "/".join(filter(None, (base, found)))
    assert run_inside(_files(*names), base) == expected


def test_one_step_inside_what_names_no_step_may_be_its_part() -> None:
    assert run_inside(["run/final/global_step9/w"], "run/final") == ""
    assert run_inside(["run/out/checkpoint-1/w", "run/out/checkpoint-2/w"], "run/out") != ""


def test_gc_does_not_drop_a_checkpoint_that_holds_another_run(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, f"step-{step}", step)
    (tmp_path / "step-1" / "sft").mkdir()
    save(tmp_path / "step-1" / "sft", "step-40", 40)
    plan = plan_of(tmp_path)
    (held,) = [d for d in plan.keep if d.entry.name == "step-1"]
    assert [str(r) for r in held.reasons] == ["holds: step-1/sft/step-40 in it is of another run"]
    applied = apply_to(tmp_path, plan)
    assert (applied.code, dropped(applied)) == (ExitCode.OK, ["step-2"])
    assert names_in(tmp_path) == {"step-1", "step-3", "step-4"}


def test_a_run_that_begins_inside_a_checkpoint_makes_the_plan_stale(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, f"step-{step}", step)
    plan = plan_of(tmp_path)
    assert [d.entry.name for d in plan.drop] == ["step-1"]
    (tmp_path / "step-1" / "sft").mkdir()
    save(tmp_path / "step-1" / "sft", "step-40", 40)
    with pytest.raises(Exception, match=r"step-1 stays now \(holds: "):
        apply_to(tmp_path, plan)
    assert place_of(tmp_path).store.names("step-1/sft")
