"""A Megatron job's optimizer in files of ranks, out of a source that is none: the same files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ftckpt as api
from ftckpt.checkpoint import Topology
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.megatron.optimizer import write_distrib_optim as megatron_distrib_writer
from ftckpt.formats.megatron.rank_files.grid import Coordinate
from ftckpt.formats.writers import format_and_writer
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest
from ftckpt.transfer.request.narrowing import Only, drop, only
from tests.builders.checkpoints import open_checkpoint
from tests.builders.materialise import materialise
from tests.builders.megatron_files import altered, opened, require, write
from tests.builders.megatron_model import Job
from tests.builders.megatron_trees import assert_same_files
from tests.builders.real_sets import real_set
from tests.campaign import examples

WRITER = format_and_writer("megatron")[1]
RECORDED = (("transformer_impl", "local"), ("accumulate_allreduce_grads_in_fp32", True))
# What the writer of torch_dist says of itself.
OF_STORES = ("dist_ckpt_optim_fully_reshardable",)


def laid(content: Content, to: Path, **request: Any) -> Layout:
    """Write files of ranks, with nothing left out."""
    layout = WRITER.layout(content, LayoutRequest(**request))
    assert list(layout.unplaced) == []
    materialise(layout, content.checkpoint, to)
    return layout


def between(source: Path, form: str, to: Path) -> Content:
    """Return a content in another format."""
    content = Content.of(open_checkpoint(source))
    writer = format_and_writer(form)[1]
    layout = writer.layout(content, LayoutRequest())
    assert list(layout.unplaced) == []
    materialise(layout, content.checkpoint, to)
    return Content.of(open_checkpoint(to / layout.files[0].path if writer.single else to))


# --- real jobs ------------------------------------------------------------------------------------

LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"tp": 1, "pp": 2}, {"tp": 4, "pp": 1, "dp": 1})


@pytest.mark.parametrize("form", ["megatron-dist", "safetensors", "dcp", "torchsave"])
@pytest.mark.parametrize("name", ["mcore_torch_tp2dp2_distopt_bf16", "mcore_torch_tp2pp2"])
def test_through_another_format_it_is_what_reshard_makes(
    name: str, form: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = real_set(name, "iter_0000003", tmp_path_factory)
    content = between(source, form, tmp_path / "between")
    for number, request in enumerate(LAYOUTS if examples(0, 1) else LAYOUTS[::2]):
        place = tmp_path / str(number)
        direct = WRITER.layout(Content.of(open_checkpoint(source)), LayoutRequest(**request))
        materialise(direct, open_checkpoint(source), place / "direct")
        layout = laid(content, place / "there", **request)
        kept = not request and form == "megatron-dist"
        assert any("--no-load-rng" in note.message for note in layout.notes) is not kept
        assert_same_files(
            place / "there",
            place / "direct",
            without=OF_STORES if kept else (*OF_STORES, "rng_state"),
            places="distopt" in name,
            extra_states=False,
        )


@pytest.mark.parametrize(
    "name", ["mcore_torchdist_tp2dp2_fullyreshard_bf16", "mcore_torchdist_tp2pp2"]
)
def test_a_real_store_becomes_files_that_are_proven(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = real_set(name, "iter_0000003", tmp_path_factory)
    first = api.convert(str(source), str(tmp_path / "ranks"), "megatron")
    assert first.proof is not None
    # Each of 27 parameters has a master or a step, and two moments.
    assert first.proof.tensors == 27 * 4
    request = LayoutRequest(tp=1, pp=2, dp=1)
    api.convert(str(source), str(tmp_path / "other"), "megatron", request=request)
    api.convert(str(tmp_path / "ranks"), str(tmp_path / "twice"), request=request)
    assert_same_files(tmp_path / "other", tmp_path / "twice", places=True)


def test_arguments_that_say_too_little_are_refused(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    source = real_set("mcore0161_tp2dp2_dpreshard", "iter_0000003", tmp_path_factory)
    with pytest.raises(UnsupportedError, match="overlap_grad_reduce") as caught:
        WRITER.layout(Content.of(open_checkpoint(source)), LayoutRequest(dp=2))
    assert "--like" in caught.value.hint


# --- any job --------------------------------------------------------------------------------------


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Job, Job]:
    """Draw two layouts of one job."""
    experts = draw(st.sampled_from((0, 4)))
    optimizer: Any = draw(st.sampled_from(("fp32", "masters", "distributed")))
    base = Job(
        experts=experts, gated=draw(st.booleans()), tied=draw(st.booleans()),
        bias=draw(st.booleans()) and not experts, optimizer=optimizer,
        bucket=draw(st.none() | st.integers(1, 4000)), recorded=RECORDED,
    )  # fmt: skip
    # Groups of the distributed optimizer are not taken apart here: they say nothing of decay.
    expert_ranks = (2, 4) if optimizer == "distributed" else (1, 2, 4)
    found = []
    for _ in range(2):
        pp = draw(st.sampled_from((1, 2, 4)))
        ep = draw(st.sampled_from(expert_ranks)) if experts else 1
        one = replace(
            base, tp=draw(st.sampled_from((1, 2, 4))), pp=pp, ep=ep,
            vp=draw(st.sampled_from((1, 4 // pp))) if pp > 1 else 1,
            dp=ep * draw(st.integers(1, 3)),
        )  # fmt: skip
        found.append(one)
    return found[0], found[1]


@settings(max_examples=examples(short=6, full=200), deadline=None)
@given(jobs=pairs(), form=st.sampled_from(("megatron-dist", "safetensors", "dcp", "torchsave")))
def test_any_job_through_any_format_is_what_megatron_writes(
    jobs: tuple[Job, Job], form: str
) -> None:
    one, two = jobs
    with TemporaryDirectory() as name:
        place = Path(name)
        content = between(write(place / "source", one).path, form, place / "between")
        if one.tied and one.pp > 1 and form == "dcp":  # which stores the last stage's copy
            with pytest.raises(AssertionError, match="output_layer"):
                laid(content, place / "refused")
            content = drop(content, ["output_layer.weight"])
        sizes = {"tp": two.tp, "pp": two.pp, "vp": two.vp, "ep": two.ep, "dp": two.dp}
        layout = laid(content, place / "made", **sizes)
        expected = write(place / "expected", two)
        kept = not any("--no-load-rng" in note.message for note in layout.notes)
        without = ("ckpt_format", "use_dist_ckpt")  # which the small arguments do not record
        distributed = one.optimizer == "distributed"
        assert_same_files(
            place / "made",
            expected.path,
            without=without if kept else (*without, "rng_state"),
            places=distributed,
            extra_states=False,
        )
        truth = {k: v for k, v in expected.truth.items() if kept or "rng_state" not in k}
        require(expected._replace(path=place / "made", truth=truth))


# --- what is not certain --------------------------------------------------------------------------


def store(tmp_path: Path, job: Job, **args: Any) -> Content:
    """Return a job in torch_dist, whose arguments say something else; None takes one out."""
    made = write(tmp_path / "source", job)
    changes = {f"args__{name}": value for name, value in args.items()}
    altered(made, "mp_rank_00", **changes)
    return between(made.path, "megatron-dist", tmp_path / "between")


DISTRIBUTED = Job(optimizer="distributed", dp=2, recorded=RECORDED)
MASTERS = Job(optimizer="masters", recorded=RECORDED)


@pytest.mark.parametrize(
    ("job", "args", "says"),
    [
        (DISTRIBUTED, {"overlap_grad_reduce": None}, "record overlap_grad_reduce"),
        (DISTRIBUTED, {"accumulate_allreduce_grads_in_fp32": None}, "buffers have a type"),
        (DISTRIBUTED, {"use_distributed_optimizer": False}, "do not agree on"),
        (MASTERS, {"use_distributed_optimizer": True}, "do not agree on"),
        (DISTRIBUTED, {"use_precision_aware_optimizer": True}, "use_precision_aware_optimizer"),
        (MASTERS, {"optimizer": "sgd"}, "the optimizer is sgd"),
        (MASTERS, {"embedding_init_method_std": 0.1}, "changes the groups of its parameters"),
    ],
)
def test_what_is_not_certain_is_refused(
    job: Job, args: Mapping[str, Any], says: str, tmp_path: Path
) -> None:
    content = store(tmp_path, job, **args)
    with pytest.raises(UnsupportedError, match=says) as caught:
        WRITER.layout(content, LayoutRequest())
    assert "--like" in caught.value.hint
    assert "--only model" in caught.value.hint
    alone = WRITER.layout(only(content, Only.MODEL), LayoutRequest())
    assert any("weights alone" in note.message for note in alone.notes)


def test_the_form_is_seen_where_the_arguments_do_not_say_it(tmp_path: Path) -> None:
    content = store(tmp_path, MASTERS, use_distributed_optimizer=None)
    laid(content, tmp_path / "there")


def test_the_data_ranks_must_be_known(tmp_path: Path) -> None:
    job = replace(DISTRIBUTED, dp=1)
    content = store(tmp_path, job, data_parallel_size=None, world_size=None)
    content = replace(content, topology=Topology())
    with pytest.raises(UsageError, match="data-parallel ranks") as caught:
        WRITER.layout(content, LayoutRequest())
    assert "--dp" in caught.value.hint
    laid(content, tmp_path / "there", dp=2)


def test_groups_that_would_be_taken_apart_must_show_their_parameters(tmp_path: Path) -> None:
    job = replace(DISTRIBUTED, experts=4)  # its groups say nothing of decay
    content = store(tmp_path, job)
    laid(content, tmp_path / "there")
    with pytest.raises(UnsupportedError, match="in which group of parameters"):
        WRITER.layout(content, LayoutRequest(ep=2))


def test_experts_that_lose_their_optimizer_leave_no_list_of_one(tmp_path: Path) -> None:
    """The flat buffers of one optimizer stand alone, as reshard writes them."""
    import torch

    made = write(tmp_path / "source", replace(DISTRIBUTED, experts=4, ep=2))
    for file in made.path.rglob("model_optim_rng.pt"):
        tree = torch.load(file, weights_only=False)
        for own, decays in zip(tree["optimizer"], ((1.0, 0.0), (1.0,)), strict=True):
            (group,) = own["optimizer"]["param_groups"]
            own["optimizer"]["param_groups"] = [
                group | {"wd_mult": decay, "is_expert_parallel": len(decays) == 1}
                for decay in decays
            ]
        torch.save(tree, file)
    sizes = {"ep": 1, "dp": 2}
    straight = Content.of(open_checkpoint(made.path))
    laid(straight, tmp_path / "straight", **sizes)
    laid(between(made.path, "megatron-dist", tmp_path / "between"), tmp_path / "made", **sizes)
    (file,) = (tmp_path / "made").rglob("distrib_optim.pt")
    assert isinstance(torch.load(file, weights_only=False), dict)
    without = ("rng_state", "ckpt_format", "use_dist_ckpt", *OF_STORES)
    assert_same_files(
        tmp_path / "made",
        tmp_path / "straight",
        without=without,
        places=True,
        extra_states=False,
    )


def test_versions_that_end_buckets_elsewhere_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = store(tmp_path, DISTRIBUTED)
    monkeypatch.setattr(megatron_distrib_writer, "limits", lambda group, rank: (100, 1000))
    with pytest.raises(UnsupportedError, match="where buckets") as caught:
        WRITER.layout(content, LayoutRequest())
    assert "--like" in caught.value.hint
    # A legacy source shows it: its own layout was found by its sizes.
    source = open_checkpoint(tmp_path / "source" / "iter_0000100")
    assert WRITER.layout(Content.of(source), LayoutRequest(tp=2)).files


def test_a_parameter_without_state_is_refused(tmp_path: Path) -> None:
    content = drop(store(tmp_path, MASTERS), ["exp_avg:decoder.layers.2.*"])
    with pytest.raises(UnsupportedError, match=r"has no exp_avg:decoder\.layers\.2"):
        WRITER.layout(content, LayoutRequest())


def test_groups_that_are_left_out_are_missed(tmp_path: Path) -> None:
    source = write(tmp_path / "source", MASTERS).path
    content = between(source, "safetensors", tmp_path / "between")
    with pytest.raises(UnsupportedError, match="the groups of its parameters") as caught:
        WRITER.layout(drop(content, ["rank_*.optimizer"]), LayoutRequest())
    assert "--like" in caught.value.hint


@pytest.mark.parametrize("form", ["megatron-dist", "safetensors", "dcp", "torchsave"])
def test_the_loss_scale_comes_with_it(form: str, tmp_path: Path) -> None:
    import torch

    made = write(tmp_path / "source", MASTERS)
    file = made.path / "mp_rank_00" / "model_optim_rng.pt"
    tree = torch.load(file, weights_only=False)
    scaler = {"scale": torch.tensor([1024.0]), "growth_tracker": 7}
    held = tree["optimizer"]
    tree["optimizer"] = {"optimizer": held.pop("optimizer"), "grad_scaler": scaler} | held
    torch.save(tree, file)
    laid(between(made.path, form, tmp_path / "between"), tmp_path / "there")
    found = torch.load(tmp_path / "there/mp_rank_00/model_optim_rng.pt", weights_only=False)
    assert found["optimizer"].keys() == tree["optimizer"].keys()
    assert found["optimizer"]["grad_scaler"] == scaler


def test_a_step_that_is_no_number_is_refused(tmp_path: Path) -> None:
    import torch

    source = between(write(tmp_path / "source", MASTERS).path, "megatron-dist", tmp_path / "store")
    file = tmp_path / "store" / "common.pt"
    common = torch.load(file, weights_only=False)
    common["optimizer"]["optimizer"]["state"]["common_step"] = torch.zeros(1000)
    torch.save(common, file)
    source = Content.of(open_checkpoint(tmp_path / "store"))
    with pytest.raises(UnsupportedError, match="is not a number"):
        WRITER.layout(source, LayoutRequest())


@pytest.mark.parametrize("form", ["", "dcp", "safetensors", "torchsave"])
@pytest.mark.parametrize("tensor", [True, False])
def test_flat_buffers_lose_no_step_that_is_one_for_all(
    tensor: bool, form: str, tmp_path: Path
) -> None:
    """They count steps in their groups; a step beside the moments is of torch's form."""
    import torch

    between(write(tmp_path / "source", DISTRIBUTED).path, "megatron-dist", tmp_path / "store")
    file = tmp_path / "store" / "common.pt"
    common = torch.load(file, weights_only=False)
    inner = common["optimizer"]["optimizer"]
    assert all(group.pop("step") for group in inner["param_groups"])
    inner["state"] = {"common_step": torch.tensor(5.0) if tensor else 5}
    torch.save(common, file)
    content = Content.of(open_checkpoint(tmp_path / "store"))
    content = between(tmp_path / "store", form, tmp_path / "there") if form else content
    with pytest.raises(UnsupportedError, match="do not agree on use_distributed_optimizer"):
        WRITER.layout(content, LayoutRequest())


@pytest.mark.parametrize("groups", [7, [3], "text", [], None])
def test_groups_of_no_form_are_refused(groups: Any, tmp_path: Path) -> None:
    import torch

    between(write(tmp_path / "source", MASTERS).path, "megatron-dist", tmp_path / "store")
    file = tmp_path / "store" / "common.pt"
    common = torch.load(file, weights_only=False)
    common["optimizer"]["optimizer"]["param_groups"] = groups
    torch.save(common, file)
    with pytest.raises(UnsupportedError, match="the groups of its parameters"):
        WRITER.layout(Content.of(open_checkpoint(tmp_path / "store")), LayoutRequest())


def test_what_differs_between_ranks_is_said(tmp_path: Path) -> None:
    made = write(tmp_path / "source", replace(MASTERS, tp=2))
    altered(made, "mp_rank_01", opt_param_scheduler={"num_steps": 7, "max_lr": 1e-3})
    content = between(made.path, "safetensors", tmp_path / "between")
    layout = laid(content, tmp_path / "there")
    assert any("opt_param_scheduler differs" in note.message for note in layout.notes)


def test_the_state_of_reruns_begins_anew(tmp_path: Path) -> None:
    made = write(tmp_path / "source", MASTERS)
    altered(made, "mp_rank_00", rerun_state_machine={"mode": "disabled"})
    content = between(made.path, "safetensors", tmp_path / "between")
    layout = laid(content, tmp_path / "there")
    assert any("reruns" in note.message for note in layout.notes)
    assert "rerun_state_machine" not in opened(tmp_path / "there").tree(Coordinate(0, 0, 0))
