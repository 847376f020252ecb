"""Experts that AutoEP stacks: what the files record, and what contradicts it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest

from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import CorruptError, ExitCode, NewerWriterError, UnsupportedError
from ftckpt.formats.deepspeed.writer import DeepSpeedWriter
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from ftckpt.verification.values import check_values
from ftckpt.workers import Work
from tests.builders.checkpoints import open_checkpoint
from tests.conformance.formats import findings_of
from tests.formats.deepspeed.sets import DATA, copied, opened, tag, tensors_of
from tests.formats.deepspeed.test_damage import FORM, edit, errors, optimizer_file
from tests.formats.deepspeed.test_experts import expert_file, model_file
from tests.json_run import ftckpt_json

OF_FIRST = "model.layers.0.mlp.experts"


@pytest.mark.parametrize("name", ["autoep_z1", "autoep_data", "autoep_off", "autoep_z3"])
def test_a_layer_is_three_stacked_parameters(name: str) -> None:
    checkpoint = opened(tag(name))
    names = {info.name for info in checkpoint.tensors.values() if ".0.mlp.experts" in info.name}
    leaves = {f"{OF_FIRST}.w{n}" for n in (1, 2, 3)}
    assert names == leaves | {f"{leaf}.step" for leaf in leaves}
    assert checkpoint.tensors[f"exp_avg:{OF_FIRST}.w2"].shape == (4, 4, 3)
    assert checkpoint.topology.ep == 2


def _swapped(path: Path, one: Path, other: Path) -> str:
    one.rename(path / "x")
    other.rename(one)
    (path / "x").rename(other)
    return one.name


def _of_two_experts(path: Path) -> str:
    return _swapped(path, expert_file(path, 0, 1), expert_file(path, 0, 2))


def _of_two_layers(path: Path) -> str:
    shutil.copyfile(expert_file(path, 1, 1), expert_file(path, 0, 1))
    return expert_file(path, 0, 1).name


def _of_two_ranks(path: Path) -> str:
    return _swapped(path, optimizer_file(path, 0), optimizer_file(path, 1))


def _an_experts_lost(path: Path) -> str:
    expert_file(path, 1, 2).unlink()
    return expert_file(path, 1, 2).name


def _a_ranks_lost(path: Path) -> str:
    file = optimizer_file(path, 3)
    file.unlink()
    return file.name


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (_of_two_experts, "bad-metadata"),
        (_of_two_layers, "bad-metadata"),
        (_of_two_ranks, "wrong-rank"),
        (_an_experts_lost, "missing-file"),
        (_a_ranks_lost, "missing-rank"),
    ],
)
def test_files_that_are_not_in_their_place(
    damage: Callable[[Path], str], kind: str, tmp_path: Path
) -> None:
    path = copied("autoep_z1", tmp_path)
    file = damage(path)
    assert (kind, file) in errors(path)


def test_files_of_stage_3_that_are_not_in_their_place(tmp_path: Path) -> None:
    path = copied("autoep_z3", tmp_path)
    models = [path / f"zero_pp_rank_{n}_mp_rank_00_model_states.pt" for n in (0, 1)]
    _swapped(path, *models)
    optimizers = [path / f"zero_pp_rank_{n}_mp_rank_00_optim_states.pt" for n in (1, 3)]
    _swapped(path, *optimizers)
    found = set(errors(path))
    assert found == {("hole", None), *(("wrong-rank", f.name) for f in (*models, *optimizers))}


def test_an_expert_of_another_step_does_not_fit_its_master(tmp_path: Path) -> None:
    path = copied("autoep_z1", tmp_path)

    def older(state: Any) -> None:
        for value in state.values():
            value += 1

    edit(expert_file(path, 0, 3), older)
    found = list(check_values(opened(path), Work()))
    assert {f.tensor for f in found if f.kind == "master-differs"} == {
        f"master:{OF_FIRST}.w{n}" for n in (1, 2, 3)
    }
    of_files = [(f.kind, f.file) for f in found if f.code is not ExitCode.OK]
    assert of_files == [("mixed-steps", expert_file(path, 0, 3).name)]


def test_an_experts_row_that_its_file_lacks_is_a_hole(tmp_path: Path) -> None:
    path = copied("autoep_z1", tmp_path)
    edit(expert_file(path, 0, 3), lambda state: state.pop(f"{OF_FIRST}.w3.3"))
    checkpoint = opened(path)
    assert len(checkpoint.tensors[f"{OF_FIRST}.w3"].pieces) == 3
    with pytest.raises(CorruptError):
        read_tensor(checkpoint, f"{OF_FIRST}.w3")


@pytest.mark.parametrize("name", ["autoep_z1", "autoep_off"])
def test_a_parameter_that_every_experts_file_lacks(name: str, tmp_path: Path) -> None:
    """No row of it is left, so no tensor shows a hole; its master does not make up for it."""
    path, lost = copied(name, tmp_path), f"{OF_FIRST}.w3"
    for number in range(4):
        edit(expert_file(path, 0, number), methodcaller("pop", f"{lost}.{number}"))
    found = [f.tensor for f in findings_of(FORM, path) if f.kind == "missing-tensor"]
    assert found == [lost]
    if name == "autoep_z1":
        made = DeepSpeedWriter().layout(Content.of(opened(path)), LayoutRequest(dp=2, ep=1))
        assert made.content is not None
        assert lost not in made.content.tensors


def test_a_layer_below_stage_3_whose_record_says_that_its_weights_are_partitioned(
    tmp_path: Path,
) -> None:
    path = copied("autoep_z1", tmp_path)
    form = {"checkpoint_format": "zero3_partitioned", "checkpoint_format_version": 1}
    edit(model_file(path), lambda s: _first(s).update(form))
    assert errors(path) == [("bad-metadata", model_file(path).name)]
    for number in range(4):
        expert_file(path, 0, number).unlink()
    found = {kind for kind, _ in errors(path)}
    assert found == {"bad-metadata", "missing-file", "missing-tensor"}


def test_frozen_experts_of_stage_3_are_refused(tmp_path: Path) -> None:
    """DeepSpeed saves none; a fragment would be a part of a rank's own rows."""
    path = copied("autoep_z3", tmp_path)

    def freeze(state: Any) -> None:
        group = state["param_shapes"][1]
        state["frozen_param_shapes"] = {f"{OF_FIRST}.w1": group.pop(f"{OF_FIRST}.w1")}

    for file in path.glob("*model_states.pt"):
        edit(file, freeze)
    with pytest.raises(UnsupportedError, match="which is not trained"):
        opened(path)


@pytest.mark.parametrize("name", ["autoep_z3", "universal_autoep_z1"])
def test_a_module_of_two_types_does_not_say_which_the_experts_have(
    name: str, tmp_path: Path
) -> None:
    path = copied(name, tmp_path)

    def widen(state: Any) -> None:
        module = state["module"]
        module["lm_head.weight"] = module["lm_head.weight"].double()

    for file in path.glob("*model_states.pt"):
        edit(file, widen)
    content = Content.of(open_checkpoint(path))
    with pytest.raises(UnsupportedError, match="which of these types the experts have"):
        DeepSpeedWriter().layout(content, LayoutRequest(zero_stage=1))
    DeepSpeedWriter().layout(content, LayoutRequest(zero_stage=3))  # which stores no weights


def _first(state: Any) -> Any:
    return state["ds_autoep_layers"][0]


def _sizes(state: Any) -> None:
    _first(state)["num_local_experts"] = 3


def _too_many(state: Any) -> None:
    _first(state).update(num_experts=1 << 23, num_local_experts=1 << 22)


def _no_list(state: Any) -> None:
    state["ds_autoep_layers"] = {"moe_layer_id": 0}


def _no_prefix(state: Any) -> None:
    _first(state)["expert_key_prefix"] = 7


def _twice(state: Any) -> None:
    _first(state)["moe_layer_id"] = 1


def _another_map(state: Any) -> None:
    one, other = _first(state), state["ds_autoep_layers"][1]
    params = one["affine_maps"]["params"]
    params[f"{OF_FIRST}.w1"] = other["affine_maps"]["params"]["model.layers.1.mlp.experts.w2"]
    del one["expert_placement"]
    params[f"{OF_FIRST}.w2"]["ranks"][0], params[f"{OF_FIRST}.w2"]["ranks"][1] = (
        params[f"{OF_FIRST}.w2"]["ranks"][1],
        params[f"{OF_FIRST}.w2"]["ranks"][0],
    )
    for rank, part in params[f"{OF_FIRST}.w2"]["ranks"].items():
        part["pieces"][0]["locations"] = [rank]


def _another_rank(state: Any) -> None:
    _first(state)["ep_rank"] = 2


def _another_count(state: Any) -> None:
    state["num_experts"] = [4, 8]


def _another_shape(state: Any) -> None:
    group = state["param_shapes"][1]
    group[f"{OF_FIRST}.w1"] = type(group[f"{OF_FIRST}.w1"])((4, 3, 4))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (_sizes, "bad-metadata"),
        (_too_many, "bad-metadata"),
        (_no_list, "newer-writer"),
        (_no_prefix, "newer-writer"),
        (_twice, "bad-metadata"),
        (_another_map, "bad-metadata"),
        (_another_rank, "bad-metadata"),
        (_another_count, "world-size"),
        (_another_shape, "world-size"),
    ],
)
def test_records_that_contradict_each_other(
    change: Callable[[Any], None], kind: str, tmp_path: Path
) -> None:
    path = copied("autoep_z1", tmp_path)
    edit(model_file(path), change)
    with pytest.raises((CorruptError, NewerWriterError)) as caught:
        opened(path)
    assert (caught.value.kind, caught.value.file) == (kind, model_file(path).name)


def _uneven(state: Any) -> None:
    ranks = _first(state)["expert_placement"]["ranks"]
    ranks[0]["experts"], ranks[1]["experts"] = [0, 1, 2], [3]


def _out_of_order(state: Any) -> None:
    ranks = _first(state)["expert_placement"]["ranks"]
    ranks[0]["experts"], ranks[1]["experts"] = [0, 2], [1, 3]


def _folded(state: Any) -> None:
    state["folding"] = {"version": 1, "tp_size": 2}


def _another_form(state: Any) -> None:
    _first(state)["checkpoint_format"] = "zero3_partitioned"
    _first(state)["checkpoint_format_version"] = 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_uneven, "evenly and in their order"),
        (_out_of_order, "evenly and in their order"),
        (_folded, "together with AutoTP"),
        (_another_form, "not one that ftckpt knows"),
    ],
)
def test_records_that_nothing_can_read(
    change: Callable[[Any], None], why: str, tmp_path: Path
) -> None:
    path = copied("autoep_z1", tmp_path)
    edit(model_file(path), change)
    with pytest.raises(UnsupportedError, match=why):
        opened(path)


def test_commands_give_every_bit_of_it_and_see_one_that_is_wrong(tmp_path: Path) -> None:
    path = copied("autoep_z1", tmp_path)
    truth = tensors_of(DATA / "autoep_z1" / "truth.safetensors")
    for form in ("safetensors", "dcp"):
        out = tmp_path / form
        assert ftckpt_json("convert", str(path), str(out), "--to", form)["result"]["code"] == 0
        result = open_checkpoint(out)
        for key, value in truth.items():
            assert read_tensor(result, key) == value.data, (form, key)
    assert ftckpt_json("verify", str(path), "--level", "values")["result"]["code"] == 0
    assert ftckpt_json("seal", str(path))["result"]["code"] == 0
    file, at = expert_file(path, 1, 2), opened(path).tensors["model.layers.1.mlp.experts.w1"]
    piece = next(piece for piece in at.pieces if piece.extent.file == file.name)
    data = bytearray(file.read_bytes())
    data[piece.extent.offset] ^= 1
    file.write_bytes(data)
    answer = ftckpt_json("verify", str(path), "--level", "content")
    assert answer["result"]["code"] == ExitCode.CORRUPT
    assert file.name in json.dumps(answer)


def test_the_name_that_the_record_had_before(tmp_path: Path) -> None:
    path = copied("autoep_z1", tmp_path)
    edit(model_file(path), lambda s: s.update(autoep_layers=s.pop("ds_autoep_layers")))
    assert errors(path) == []
    assert f"{OF_FIRST}.w1" in opened(path).tensors
