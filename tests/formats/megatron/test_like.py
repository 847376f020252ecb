"""Files of ranks laid out as a checkpoint of the target job: its layout, the source's values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ftckpt as api
from ftckpt.errors import FtckptError, IncompleteError, UnsupportedError, UsageError
from ftckpt.formats.megatron.writer import MegatronWriter
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest
from ftckpt.transfer.request.narrowing import Only, drop, only
from tests.builders.checkpoints import open_checkpoint
from tests.builders.materialise import materialise
from tests.builders.megatron_files import opened, require, write
from tests.builders.megatron_model import Job
from tests.builders.megatron_trees import assert_same_files
from tests.builders.real_sets import real_set
from tests.campaign import examples
from tests.conformance.formats import Made
from tests.formats.megatron.test_trained import DISTRIBUTED, MASTERS, RECORDED, between
from tests.formats.megatron.test_writer import pairs

WRITER = MegatronWriter()
FIRST_STEP = 5


def example_of(place: Path, job: Job) -> Made:
    """Write what a job saved at its first steps; none of its tensors has a value of use."""
    import torch

    made = write(place, replace(job, iteration=FIRST_STEP))
    for file in made.path.rglob("*.pt"):
        tree = torch.load(file, weights_only=False)
        for tensor in _tensors(tree):
            tensor.fill_(77)
        torch.save(tree, file)
    return made


def _tensors(tree: Any) -> list[Any]:
    import torch

    if isinstance(tree, torch.Tensor):
        return [tree]
    inside = tree.values() if isinstance(tree, dict) else tree
    return [t for one in inside for t in _tensors(one)] if isinstance(tree, (dict, list)) else []


def laid(content: Content, example: Path, to: Path, **request: Any) -> Layout:
    layout = WRITER.layout(content, LayoutRequest(like=opened(example), **request))
    assert list(layout.unplaced) == []
    materialise(layout, content.checkpoint, to)
    return layout


@settings(max_examples=examples(short=6, full=200), deadline=None)
@given(jobs=pairs(), form=st.sampled_from(("megatron", "megatron-dist", "safetensors", "dcp")))
def test_any_job_of_any_format_becomes_the_example_with_its_values(
    jobs: tuple[Job, Job], form: str
) -> None:
    one, two = (replace(job, recorded=RECORDED) for job in jobs)
    if form == "megatron-dist" and one.style != "sequential":
        form = "megatron"  # torch_dist stores them otherwise, or under Transformer Engine's names
    with TemporaryDirectory() as name:
        place = Path(name)
        source = write(place / "source", one).path
        content = Content.of(open_checkpoint(source))
        if form != "megatron":
            content = between(source, form, place / "between")
        if one.tied and one.pp > 1 and form == "dcp":  # which stores the last stage's copy
            content = drop(content, ["output_layer.weight"])
        example = example_of(place / "example", two)
        before = {file: file.read_bytes() for file in example.path.rglob("*.pt")}
        laid(content, example.path, place / "made")
        assert {file: file.read_bytes() for file in example.path.rglob("*.pt")} == before
        expected = write(place / "expected", two)
        distributed = two.optimizer == "distributed"
        assert_same_files(place / "made", expected.path, without=("rng_state",), places=distributed)
        truth = {k: v for k, v in expected.truth.items() if "rng_state" not in k}
        require(expected._replace(path=place / "made", truth=truth))


def test_the_whole_way_with_its_proof(tmp_path: Path) -> None:
    source = write(tmp_path / "source", replace(DISTRIBUTED, tp=2)).path
    api.convert(str(source), str(tmp_path / "store"), "megatron-dist")
    example = example_of(tmp_path / "example", replace(DISTRIBUTED, pp=2, bucket=900))
    request = LayoutRequest(like=opened(example.path), pp=2)
    report = api.convert(str(tmp_path / "store"), str(tmp_path / "made"), request=request)
    assert report.proof is not None
    assert report.format == "megatron"
    plain = example_of(tmp_path / "plain", replace(MASTERS, tp=2))
    masters = write(tmp_path / "masters", MASTERS).path
    api.convert(str(masters), str(tmp_path / "between"), "megatron-dist")
    request = LayoutRequest(like=opened(plain.path))
    again = api.convert(str(tmp_path / "between"), str(tmp_path / "steps"), request=request)
    assert again.proof is not None  # of steps that torch_dist counts once, too
    request = replace(request, tp=4)
    with pytest.raises(UsageError, match="--tp 4 contradicts"):
        api.convert(str(masters), str(tmp_path / "no"), request=request)


def test_an_example_of_another_form(tmp_path: Path) -> None:
    """Masters and moments are the same in flat buffers and in torch's form."""
    plain, flat = replace(MASTERS, tp=2), replace(DISTRIBUTED, pp=2)
    source = write(tmp_path / "plain", plain).path
    example = example_of(tmp_path / "flat", flat)
    laid(Content.of(open_checkpoint(source)), example.path, tmp_path / "made")
    found = opened(tmp_path / "made")
    wanted = opened(write(tmp_path / "expected", flat).path)
    for key, info in wanted.tensors.items():
        if info.component in ("model", "optimizer"):
            assert key in found.tensors
    at = found.layout.grid.directories()[0]
    (group,) = found.tree(at)["optimizer"]["optimizer"]["param_groups"]
    assert group["step"] == 100  # counted by each parameter in the source
    back = example_of(tmp_path / "back", plain)
    laid(Content.of(found), back.path, tmp_path / "again")
    assert_same_files(tmp_path / "again", source, without=("rng_state",))


def test_an_example_saved_before_its_first_step(tmp_path: Path) -> None:
    import torch

    job = Job(optimizer="fp32", tp=2, recorded=RECORDED)
    source = write(tmp_path / "source", job).path
    example = example_of(tmp_path / "example", job)
    for file in example.path.rglob("model_optim_rng.pt"):
        tree = torch.load(file, weights_only=False)
        tree["optimizer"]["state"] = {}
        torch.save(tree, file)
    laid(Content.of(open_checkpoint(source)), example.path, tmp_path / "made")
    assert_same_files(tmp_path / "made", source, without=("rng_state",))


def test_weights_alone(tmp_path: Path) -> None:
    source = write(tmp_path / "source", replace(MASTERS, tp=2)).path
    example = example_of(tmp_path / "example", MASTERS)
    content = only(Content.of(open_checkpoint(source)), Only.MODEL)
    layout = laid(content, example.path, tmp_path / "made")
    assert "weights alone" in layout.notes[-1].message
    found = opened(tmp_path / "made")
    assert {info.component for info in found.tensors.values()} == {"model"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": 5}, r"lacks decoder\.layers\.4.* of the example's model"),
        ({"bias": True}, "the source lacks"),
        ({"gated": False}, "has the shape"),
        ({"optimizer": "fp32"}, "is bfloat16 in the source and float32 in the example"),
        ({"optimizer": "none"}, None),
    ],
)
def test_an_example_of_another_model(change: Any, says: str | None, tmp_path: Path) -> None:
    source = write(tmp_path / "source", MASTERS).path
    example = opened(example_of(tmp_path / "example", replace(MASTERS, **change)).path)
    content = Content.of(open_checkpoint(source))
    if says is None:  # it keeps no optimizer, so that the source's has no place
        layout = WRITER.layout(content, LayoutRequest(like=example))
        assert "exp_avg:output_layer.weight" in layout.unplaced
        return
    with pytest.raises(UnsupportedError, match=says):
        WRITER.layout(content, LayoutRequest(like=example))


def test_other_names_are_told_of_both_sides(tmp_path: Path) -> None:
    source = between(write(tmp_path / "source", MASTERS).path, "dcp", tmp_path / "between")
    other = source.with_tensors(
        w._replace(name=f"odd.{w.name}") for w in source.tensors.values() if w.component == "model"
    )
    example = opened(example_of(tmp_path / "example", MASTERS).path)
    with pytest.raises(UnsupportedError, match="and the example lacks odd") as caught:
        WRITER.layout(other, LayoutRequest(like=example))
    assert "--rename" in caught.value.hint


def test_state_that_the_source_lacks_is_named(tmp_path: Path) -> None:
    source = Content.of(open_checkpoint(write(tmp_path / "source", MASTERS).path))
    example = opened(example_of(tmp_path / "example", MASTERS).path)
    for gone, says in (
        ("exp_avg:decoder.layers.2.*", "no exp_avg:decoder"),
        ("master:output_layer.weight", "no master:output_layer"),
        ("optimizer:*.step", "no step of"),
    ):
        with pytest.raises(UnsupportedError, match=says):
            WRITER.layout(drop(source, [gone]), LayoutRequest(like=example))


def test_a_loss_scale_comes_from_the_source_alone(tmp_path: Path) -> None:
    import torch

    def scaled(place: Path, scale: float | None) -> Path:
        made = write(place, MASTERS)
        file = made.path / "mp_rank_00" / "model_optim_rng.pt"
        tree = torch.load(file, weights_only=False)
        if scale is not None:
            tree["optimizer"]["grad_scaler"] = {"scale": torch.tensor([scale])}
        torch.save(tree, file)
        return made.path

    example = scaled(tmp_path / "example", 1.0)
    source = scaled(tmp_path / "source", 1024.0)
    laid(Content.of(open_checkpoint(source)), example, tmp_path / "made")
    made = torch.load(tmp_path / "made/mp_rank_00/model_optim_rng.pt", weights_only=False)
    assert made["optimizer"]["grad_scaler"]["scale"].item() == 1024.0
    bare = Content.of(open_checkpoint(scaled(tmp_path / "bare", None)))
    with pytest.raises(UnsupportedError, match=r"no optimizer\.grad_scaler\.scale"):
        WRITER.layout(bare, LayoutRequest(like=opened(example)))


def test_damage_to_the_example_is_found(tmp_path: Path) -> None:
    source = write(tmp_path / "source", DISTRIBUTED).path
    made = example_of(tmp_path / "example", DISTRIBUTED)
    file = made.path / "mp_rank_00" / "distrib_optim.pt"
    data = file.read_bytes()

    def convert() -> None:
        request = LayoutRequest(like=opened(made.path))
        api.convert(str(source), str(tmp_path / "out"), request=request)

    for bad in (data[: len(data) // 2], b""):
        file.write_bytes(bad)
        with pytest.raises(FtckptError):
            convert()
    file.unlink()
    with pytest.raises(IncompleteError, match=r"distrib_optim\.pt is missing"):
        convert()
    assert not (tmp_path / "out").exists()


def test_real_jobs(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A store of a real job, laid out as the legacy checkpoint that such a job saved."""
    store = real_set("mcore_torchdist_tp2dp2_fullyreshard_bf16", "iter_0000003", tmp_path_factory)
    real = real_set("mcore_torch_tp2dp2_distopt_bf16", "iter_0000003", tmp_path_factory)
    like, straight = tmp_path / "like", tmp_path / "straight"
    report = api.convert(str(store), str(like), request=LayoutRequest(like=opened(real)))
    assert report.proof is not None
    assert report.proof.tensors == 27 * 4
    api.convert(str(store), str(straight), "megatron")
    assert_same_files(
        like, straight, without=["args", "rng_state"], places=True, extra_states=False
    )
