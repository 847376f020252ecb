"""DeepSpeed's layers of experts: what their files record, and what contradicts it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.checkpoint.steps import SCALARS_A_FILE, mixed_steps
from ftckpt.errors import CorruptError, ExitCode, NewerWriterError, UnsupportedError
from ftckpt.verification.values import check_values
from ftckpt.workers import Work
from tests.formats.deepspeed.sets import copied, opened, tag, truth_of
from tests.formats.deepspeed.test_damage import edit, errors, optimizer_file

OF_A = "a.deepspeed_moe.experts.deepspeed_experts."


def expert_file(path: Path, layer: int, expert: int) -> Path:
    return path / f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"


def model_file(path: Path) -> Path:
    return path / "mp_rank_00_model_states.pt"


@pytest.mark.parametrize("name", ["moe_z1", "moe_z2", "moe_data", "moe_bf16", "moe_off"])
def test_every_expert_is_there_under_its_number_in_the_model(name: str) -> None:
    checkpoint = opened(tag(name))
    numbers = {key[len(OF_A)] for key in checkpoint.tensors if key.startswith(OF_A)}
    assert numbers == {"0", "1", "2", "3"}
    assert checkpoint.topology.ep == 2
    assert checkpoint.load_object("num_experts") == [4, 2]


def test_a_rank_may_have_its_groups_of_experts_in_another_order(tmp_path: Path) -> None:
    path = copied("moe_z2", tmp_path)

    def swap(state: Any) -> None:
        inner = state["optimizer_state_dict"]
        base = inner["base_optimizer_state"]
        for flats in (inner["single_partition_of_fp32_groups"], inner["param_slice_mappings"],
                      inner["partition_count"], inner["param_alignment_paddings"],
                      base["param_groups"]):  # fmt: skip
            flats[1], flats[2] = flats[2], flats[1]
        states = base["state"]
        states[1], states[2] = states[2], states[1]

    edit(optimizer_file(path, 0), swap)
    assert errors(path) == []
    checkpoint = opened(path)
    for key, truth in truth_of("moe_z2").items():
        assert read_tensor(checkpoint, key) == truth.data, key


def test_an_expert_of_another_save_does_not_fit_its_master(tmp_path: Path) -> None:
    path = copied("moe_z1", tmp_path)

    def older(state: Any) -> None:
        for value in state.values():
            value += 1

    edit(expert_file(path, 0, 3), older)
    found = list(check_values(opened(path), Work()))
    odd = [f.tensor or "" for f in found if f.kind == "master-differs"]
    assert len(odd) == 3
    assert all(key.startswith(f"master:{OF_A}3.") for key in odd)
    of_files = [(f.kind, f.file) for f in found if f.code is not ExitCode.OK]
    assert of_files == [("mixed-steps", expert_file(path, 0, 3).name)]


def test_a_partition_of_another_save(tmp_path: Path) -> None:
    path = copied("moe_z1", tmp_path)
    file = optimizer_file(path, 2)

    def older(state: Any) -> None:
        for group in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            group["step"] -= 1

    edit(file, older)
    checkpoint = opened(path)
    found = [*checkpoint.check(), *mixed_steps(checkpoint.scalars(SCALARS_A_FILE), [])]
    assert [(f.kind, f.file) for f in found] == [("mixed-steps", file.name)]


def _swapped(path: Path) -> str:
    one, other = expert_file(path, 0, 1), expert_file(path, 0, 2)
    one.rename(path / "x")
    other.rename(one)
    (path / "x").rename(other)
    return one.name


def _of_another_layer(path: Path) -> str:
    shutil.copyfile(expert_file(path, 1, 1), expert_file(path, 0, 1))
    return expert_file(path, 0, 1).name


def _one_too_many(path: Path) -> str:
    shutil.copyfile(expert_file(path, 0, 3), expert_file(path, 0, 4))
    return expert_file(path, 0, 4).name


def _another_count(path: Path) -> str:
    file = optimizer_file(path, 1)
    edit(file, lambda s: s["optimizer_state_dict"].update(partition_count=[4, 4]))
    return file.name


def _another_group(path: Path) -> str:
    file = optimizer_file(path, 1)

    def change(state: Any) -> None:
        base = state["optimizer_state_dict"]["base_optimizer_state"]
        base["param_groups"][1]["name"] = "ep_size_4"

    edit(file, change)
    return file.name


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (_swapped, "bad-metadata"),
        (_of_another_layer, "bad-metadata"),
        (_one_too_many, "world-size"),
        (_another_count, "world-size"),
        (_another_group, "bad-metadata"),
    ],
)
def test_what_files_record_is_checked(
    damage: Callable[[Path], str], kind: str, tmp_path: Path
) -> None:
    path = copied("moe_z1", tmp_path)
    file = damage(path)
    assert (kind, file) in errors(path)


def _counts(*counts: Any) -> Callable[[Any], None]:
    return lambda state: state.update(num_experts=[*counts])


def _no_zero(state: Any) -> None:
    group = state["param_shapes"][1]
    for name in [n for n in group if n.startswith(f"{OF_A}0.")]:
        group[name.replace(f"{OF_A}0.", f"{OF_A}7.")] = group.pop(name)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (_counts(3, 2), "world-size"),
        (_counts(0, 2), "world-size"),
        (_counts(4), "world-size"),
        (_counts(4, 1 << 40), "world-size"),
        (_counts(4, 6), "world-size"),
        (_counts(-4, 2), "bad-metadata"),
        (_counts("4", 2), "newer-writer"),
        (_no_zero, "world-size"),
    ],
)
def test_numbers_that_contradict_each_other(
    change: Callable[[Any], None], kind: str, tmp_path: Path
) -> None:
    path = copied("moe_z1", tmp_path)
    edit(model_file(path), change)
    with pytest.raises((CorruptError, NewerWriterError)) as caught:
        opened(path)
    assert (caught.value.kind, caught.value.file) == (kind, model_file(path).name)


def test_all_files_of_a_layer_are_lost(tmp_path: Path) -> None:
    path = copied("moe_z1", tmp_path)
    lost = [expert_file(path, 1, expert) for expert in (0, 1)]
    for file in lost:
        file.unlink()
    assert errors(path) == [("missing-file", file.name) for file in lost]
    assert "master:b.deepspeed_moe.experts.deepspeed_experts.1.up.bias" in opened(path).tensors


def test_layers_that_are_shared_differently_without_zero_are_refused(tmp_path: Path) -> None:
    path = copied("moe_off", tmp_path)

    def change(state: Any) -> None:
        groups = state["optimizer"]["param_groups"]
        groups.append({**groups[1], "name": "ep_size_1", "params": []})

    edit(model_file(path), change)
    with pytest.raises(UnsupportedError, match="nothing says which"):
        opened(path)
