"""An optimizer that another format carried along, in torch_dist: as of the job itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import UnsupportedError
from ftckpt.formats.megatron.job.groups import GroupState
from ftckpt.formats.pickles.inert import Inert
from ftckpt.formats.state.same_object import SameObject
from ftckpt.formats.state.stored_names import is_common
from ftckpt.formats.writers import format_and_writer
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest
from ftckpt.transfer.prove.against_source import prove
from ftckpt.transfer.request.narrowing import drop
from tests.builders.checkpoints import open_checkpoint
from tests.builders.materialise import materialise
from tests.builders.megatron_files import write
from tests.builders.megatron_model import Job
from tests.builders.real_sets import real_set
from tests.campaign import examples
from tests.conformance.writers import as_bytes, assert_same_tensors

WRITER = format_and_writer("megatron-dist")[1]
RECORDED = (("transformer_impl", "local"), ("accumulate_allreduce_grads_in_fp32", True))
SAME: dict[str, int] = {}
OTHER = {"tp": 4, "pp": 1, "dp": 1}
# What is asked of each in a short run; a full one asks both of all.
REAL: dict[str, dict[str, int]] = {
    "mcore_torch_tp2dp2_distopt_bf16": OTHER,
    "mcore_torch_tp2pp2": SAME,
    "mcore_torchdist_tp2dp2_fullyreshard_bf16": SAME,
    "mcore_torchdist_tp2pp2": OTHER,
}
JOBS = {
    "fp32": Job(optimizer="fp32"),
    "masters": Job(optimizer="masters", tp=2, tied=True),
    "distributed": Job(optimizer="distributed", pp=2),
    "experts": Job(optimizer="distributed", experts=4, ep=2, dp=2),
    "experts, masters": Job(optimizer="masters", experts=4, ep=2, dp=2),
}


def written(content: Content, form: str, to: Path, **request: Any) -> tuple[Checkpoint, Layout]:
    writer = format_and_writer(form)[1]
    layout = writer.layout(content, LayoutRequest(**request))
    assert list(layout.unplaced) == []
    materialise(layout, content.checkpoint, to)
    return open_checkpoint(to / layout.files[0].path if writer.single else to), layout


def common_of(checkpoint: Checkpoint) -> dict[str, Any]:
    value = checkpoint.load_object(next(filter(is_common, checkpoint.objects)))
    root = dict(value[0] if isinstance(value, list) else value)
    args = root.pop("args")
    root["args"] = dict(args.state if isinstance(args, Inert) else args)
    return root


def require_same(there: Checkpoint, direct: Checkpoint) -> None:
    """Require what the job's own files become, but for the streams of its ranks."""
    assert_same_tensors(there, direct)
    ours, theirs = common_of(there), common_of(direct)
    said, wanted = ours.pop("args"), theirs.pop("args")
    assert said.keys() == wanted.keys() | {"no_save_rng"}
    for name in wanted.keys() - {"no_save_rng"}:
        assert as_bytes(said[name]) == as_bytes(wanted[name]), name
    assert ours.keys() == theirs.keys() - {"rerun_state_machine"}
    for key in ours.keys() - {"content_metadata", "optimizer"}:
        assert as_bytes(ours[key]) == as_bytes(theirs[key]), key
    assert steps_of(ours["optimizer"]) == steps_of(theirs["optimizer"])
    assert ours["content_metadata"].items() <= theirs["content_metadata"].items()


def steps_of(optimizer: Any) -> Any:
    """Return an optimizer with a mark for a step that is a tensor; which one, no reader lists."""
    if isinstance(optimizer, dict):
        return {key: steps_of(value) for key, value in optimizer.items()}
    if isinstance(optimizer, list):
        return [steps_of(value) for value in optimizer]
    return type(optimizer).__name__ if hasattr(optimizer, "storage_offset") else optimizer


def step_of(path: Path) -> float | None:
    """Return the step in the file of a common state."""
    import torch

    tree = torch.load(path, weights_only=False)["optimizer"]
    inner = tree.get("optimizer", tree)
    step = inner.get("state", {}).get("common_step")
    return None if step is None else float(step)


@pytest.mark.parametrize("form", ["dcp", "torchsave", "safetensors"])
@pytest.mark.parametrize("name", REAL)
def test_a_real_job_comes_back_through_another_format(
    name: str, form: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = Content.of(open_checkpoint(real_set(name, "iter_0000003", tmp_path_factory)))
    between, _ = written(source, form, tmp_path / "between")
    for request in (SAME, OTHER) if examples(0, 1) else (REAL[name],):
        place = tmp_path / str(len(request))
        direct, _ = written(source, "megatron-dist", place / "direct", **request)
        content = Content.of(between)
        there, layout = written(content, "megatron-dist", place / "there", **request)
        assert any("seeds them anew" in note.message for note in layout.notes)
        # What files of ranks say of a state that no rank gets, a store says too.
        anew = any("reruns" in note.message for note in layout.notes)
        assert anew is ("rerun_state_machine" in common_of(direct))
        assert layout.content is not None
        prove(layout.content, there, SameObject)
        require_same(there, direct)


@pytest.mark.parametrize("form", ["dcp", "torchsave", "safetensors"])
@pytest.mark.parametrize("name", JOBS)
def test_any_form_of_an_optimizer_comes_back(name: str, form: str, tmp_path: Path) -> None:
    path = write(tmp_path / "source", replace(JOBS[name], recorded=RECORDED)).path
    source = Content.of(open_checkpoint(path))
    direct, _ = written(source, "megatron-dist", tmp_path / "direct")
    between, _ = written(source, form, tmp_path / "between")
    there, layout = written(Content.of(between), "megatron-dist", tmp_path / "there")
    assert layout.content is not None
    prove(layout.content, there, SameObject)
    require_same(there, direct)
    if "experts" not in name:
        file = "common.pt"
        assert step_of(tmp_path / "there" / file) == step_of(tmp_path / "direct" / file)
        assert (step_of(tmp_path / "there" / file) is None) == (name == "distributed")


def test_what_is_not_certain_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = write(tmp_path / "source", replace(JOBS["masters"], recorded=RECORDED)).path
    between, _ = written(Content.of(open_checkpoint(path)), "safetensors", tmp_path / "between")
    content = Content.of(between)
    for gone, says in (
        (["rank_*.optimizer"], "the groups of its parameters"),
        (["exp_avg:decoder.layers.1.*"], "has no exp_avg:decoder"),
    ):
        with pytest.raises(UnsupportedError, match=says) as caught:
            WRITER.layout(drop(content, gone), LayoutRequest())
        assert "--only model" in caught.value.hint


def test_steps_that_differ_are_refused(tmp_path: Path) -> None:
    import torch

    path = write(tmp_path / "source", replace(JOBS["fp32"], recorded=RECORDED)).path
    file = next(path.rglob("model_optim_rng.pt"))
    tree = torch.load(file, weights_only=False)
    state = tree["optimizer"].get("optimizer", tree["optimizer"])["state"]
    next(iter(state.values()))["step"] += 1
    torch.save(tree, file)
    between, _ = written(Content.of(open_checkpoint(path)), "torchsave", tmp_path / "between")
    with pytest.raises(UnsupportedError, match="another number of steps"):
        WRITER.layout(Content.of(between), LayoutRequest())


# --- what groups of ranks recorded ---------------------------------------------------------------


@pytest.mark.parametrize("form", ["dcp", "torchsave", "safetensors"])
def test_settings_that_groups_of_ranks_recorded_come_back(
    form: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = "mcore0161_tp2dp2_dpreshard"
    source = Content.of(open_checkpoint(real_set(name, "iter_0000003", tmp_path_factory)))
    direct, _ = written(source, "megatron-dist", tmp_path / "direct")
    between, _ = written(source, form, tmp_path / "between")
    content = Content.of(between)
    if form == "dcp":  # an entry that no job has, taken apart
        content = drop(content, ["content_metadata_note.*"])
    there, layout = written(content, "megatron-dist", tmp_path / "there")
    assert layout.content is not None
    prove(layout.content, there, SameObject)
    assert_same_tensors(there, direct)
    (ours, theirs) = (common_of(one)["optimizer"] for one in (there, direct))
    assert ours["param_state_sharding_type"] == "fully_reshardable"
    assert ours == theirs


@pytest.mark.parametrize("chained", ["", "chained_1."])
def test_groups_of_ranks_must_agree(chained: str) -> None:
    names = [f"{chained}optimizer.distributed.dp_group_idx_{g}.optimizer/shard_0_1" for g in (0, 1)]
    sizes = names[0].replace(".optimizer/", ".per_bucket_numel/")
    state = GroupState()
    for name in names:
        assert state.takes((name, 0))
        state.put((name, 0, "param_groups", 0, "lr"), 0.5)
    state.put((sizes, 0, 0), 7)
    made = {"param_groups": [{"lr": 0.5}]}
    one = {"optimizer": made, "param_state_sharding_type": "fully_reshardable"}
    before = {"param_state_sharding_type": "dp_reshardable"}
    if chained:
        assert state.shared({0: before, 1: before}) == {0: before, 1: one}
    else:
        assert state.shared(before) == one
    state.put((names[1], 0, "param_groups", 0, "min_lr"), 0.25)
    with pytest.raises(UnsupportedError, match=r"dp_group_idx_1.* differs from .*dp_group_idx_0"):
        state.shared(before)


def test_the_state_of_all_parameters_in_one_object_is_not_taken() -> None:
    name = "optimizer.distributed.dp_group_idx_0.param_state/shard_0_1"
    assert not GroupState().takes((name,))
    assert GroupState().shared(None) is None
