"""A run that lies inside a checkpoint of another: gc would drop it with the whole directory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ftckpt.errors import ExitCode
from ftckpt.formats.catalog import FORMATS as CATALOG
from ftckpt.retention.apply.prepare import prepare
from ftckpt.retention.scan.classify import Suspects, suspects_in
from tests.retention.carrying import (
    HOUR,
    KEEP_2,
    NOW,
    apply_to,
    dropped,
    names_in,
    place_of,
    plan_of,
    save,
)

TRAINED = Path(__file__).parents[2] / "data" / "trainer_dirs"


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["model.safetensors", "sft/checkpoint-20/w"], Suspects("", (), ["sft/checkpoint-20"])),
        (["sft/checkpoint-5/w", "sft/checkpoint-10/w"], Suspects("", ["sft/checkpoint-10"], ())),
        (["sft/step-0/w", "sft/step-1/w"], Suspects("", ["sft/step-0", "sft/step-1"], ())),
        (["iter_0000007/w"], Suspects("", (), ["iter_0000007"])),
        (["sft/.ftckpt/pins/100/me.json"], Suspects("sft")),
        (["sft/.ftckpt/root.json", "sft/100/w"], Suspects("sft")),
        (["global_step4/w", "global_step6/w"], Suspects("", ["global_step4", "global_step6"], ())),
        (["w", ".ftckpt/root.json"], Suspects(".")),
        # Parts of one checkpoint, as frameworks name them.
        (["w", "global_step5/mp_rank_00_model_states.pt"], Suspects("")),
        (["w", "global_step4/mp_rank_00_model_states.pt"], Suspects("")),
        (["latest", "step4/mp_rank_00_model_states.pt"], Suspects("")),
        (["latest_checkpointed_iteration.txt", "iter_0000007/w"], Suspects("")),
        (["policy/weights/iter_0000000/.metadata"], Suspects("")),
        (["default/ocdbt.process_0/d/1", "array/c/0/1", "array/c/1/0"], Suspects("")),
        (["checkpoint-20", "step-20.pt", "notes/step-20.txt"], Suspects("")),
        (["w", ".ftckpt/transfer.json", "part/.ftckpt/parts/0.json"], Suspects("")),
    ],
)  # fmt: skip
def test_what_may_be_another_run_inside_a_checkpoint(names: list[str], found: Suspects) -> None:
    base = "run/checkpoint-5"

    def placed(paths: Sequence[str]) -> list[str]:
        return [f"{base}/{path}" for path in paths]

    root = found.root and (base if found.root == "." else f"{base}/{found.root}")
    seen = suspects_in(placed(names), base)
    assert seen.root == root
    assert list(seen.several) == placed(found.several)
    assert list(seen.alone) == placed(found.alone)


def test_one_step_inside_what_names_no_step_may_be_its_part() -> None:
    assert suspects_in(["run/final/global_step9/w"], "run/final") == Suspects("", [], [])
    assert suspects_in(["run/out/checkpoint-1/w", "run/out/checkpoint-2/w"], "run/out").several


def trained(to: Path, step: int, source: str = "trainer") -> None:
    """Save what a trainer has saved."""
    shutil.copytree(TRAINED / source, to, dirs_exist_ok=True)
    state = json.loads((to / "trainer_state.json").read_text())
    (to / "trainer_state.json").write_text(json.dumps(state | {"global_step": step}))
    for path in (*to.rglob("*"), to):
        os.utime(path, (NOW - (100 - step) * HOUR,) * 2)


def trainer_with_deepspeed(root: Path) -> None:
    """HF's Trainer counts the rest of an epoch as a step, the engine of DeepSpeed does not."""
    for step in range(3, 7):
        trained(root / f"checkpoint-{step}", step, "trainer_zero2")  # with global_step2


def with_pictures(root: Path) -> None:
    for step in range(3, 7):
        for picture in (100, 200)[: step - 2]:
            folder = root / f"checkpoint-{step}" / "samples" / f"step_{picture}"
            folder.mkdir(parents=True)
            (folder / "a.png").write_bytes(b"a picture")
        trained(root / f"checkpoint-{step}", step)


def with_models(root: Path) -> None:
    """One checkpoint for each model, with a counter of its own."""
    for step in range(3, 7):
        actor = root / f"global_step_{step}" / "actor"
        trained(actor / "iter_0000009", step)
        trained(actor, step)


@pytest.mark.parametrize("write", [trainer_with_deepspeed, with_pictures, with_models])
def test_steps_that_are_parts_of_a_checkpoint_do_not_hold_it(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    write(tmp_path)
    plan = prepare(place_of(tmp_path), CATALOG, KEEP_2, NOW).plan
    assert sorted(d.entry.name[-1] for d in plan.drop) == ["3", "4"]


@pytest.mark.parametrize("inner", ["sft/checkpoint-20", "checkpoint-20", "a/sft/checkpoint-20"])
def test_a_checkpoint_in_one_of_a_trainer_holds_it(tmp_path: Path, inner: str) -> None:
    for step in range(3, 7):
        trained(tmp_path / f"checkpoint-{step}", step)
    trained(tmp_path / "checkpoint-3" / inner, 20)
    plan = prepare(place_of(tmp_path), CATALOG, KEEP_2, NOW).plan
    assert [d.entry.name for d in plan.drop] == ["checkpoint-4"]


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
