"""What a pipeline's layers keep beside their weights: read, carried, or said."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.checkpoint import Checkpoint
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.universal.writer import DeepSpeedUniversalWriter
from ftckpt.formats.deepspeed.writer import DeepSpeedWriter
from ftckpt.formats.state.same_object import SameObject
from ftckpt.formats.writers import format_and_writer
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest, Writer
from ftckpt.transfer.prove.against_source import prove
from ftckpt.transfer.request.narrowing import drop
from tests.builders.checkpoints import open_checkpoint
from tests.builders.materialise import materialise
from tests.conformance.writers import assert_sound
from tests.formats.deepspeed.grids import FRESH, TRAINED, GridJob, State, save_grid
from tests.formats.deepspeed.sets import opened
from tests.formats.deepspeed.trees import trees

SHAPES = {"0.column": (4, 3), "1.row": (3, 2), "2.same": (5,)}
STAGES = [[["0.column"]], [["1.row"], ["2.same"]]]
OTHER_STAGES = [[["0.column", "1.row"]], [["2.same"]]]
NAMES = [
    "module.1._extra_state",
    "module.1.count",
    "tp1.module.1._extra_state",
    "tp1.module.1.count",
]


def grid(**changes: Any) -> GridJob:
    return GridJob("a", STAGES, 2, 2, 1)._replace(**changes)


def saved(folder: Path, job: GridJob, state: State, extra: Mapping[str, Any] | None) -> Any:
    """Save a pipeline; layer 1 keeps `extra`, of which each slice has its own."""
    save_grid(job, SHAPES, state, folder)
    if extra is not None:
        for slice_ in range(job.tp):
            middle = f"model_{slice_:02d}-" if job.tp > 1 else ""
            path = folder / f"layer_01-{middle}model_states.pt"
            own = {key: _of_slice(value, slice_) for key, value in extra.items()}
            torch.save({**torch.load(path), **own}, path)
    return opened(folder)


def _of_slice(value: Any, slice_: int) -> Any:
    return {**value, "slice": slice_} if isinstance(value, dict) else value


TRUE = {"_extra_state": {"amax": [1.5, 2.5]}, "count": 7, "nothing": None}
START = {"_extra_state": {"amax": [0.0]}, "count": 0, "nothing": None}


def layout(writer: Writer, source: Checkpoint | Content, **request: Any) -> Layout:
    content = source if isinstance(source, Content) else Content.of(source)
    return writer.layout(content, LayoutRequest(**request))


def written(
    writer: Writer, source: Checkpoint | Content, to: Path, **request: Any
) -> DeepSpeedCheckpoint:
    made = layout(writer, source, **request)
    assert list(made.unplaced) == []
    materialise(made, source.checkpoint if isinstance(source, Content) else source, to)
    result = open_checkpoint(to)
    assert isinstance(result, DeepSpeedCheckpoint)
    assert result.format == writer.name
    assert made.content is not None
    prove(made.content, result, SameObject)
    return result


def test_each_slice_has_its_own_under_the_name_of_its_layer(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", grid(), TRAINED, TRUE)
    assert sorted(set(source.objects) & set(NAMES)) == NAMES
    assert source.load_object("module.1._extra_state") == {"amax": [1.5, 2.5], "slice": 0}
    assert source.load_object("tp1.module.1._extra_state") == {"amax": [1.5, 2.5], "slice": 1}
    assert [source.objects[name].rank for name in NAMES] == [4, 4, 5, 5]  # of the second stage
    assert not any("nothing" in name for name in source.objects)
    assert_sound(source)


@pytest.mark.parametrize("change", [{"dp": 1}, {"dp": 3}])
def test_other_partitions_keep_it(change: dict[str, int], tmp_path: Path) -> None:
    extra = {**TRUE, "deep": {"scale": torch.tensor([2.0, 3.0]), "n": 1}}
    source = saved(tmp_path / "a", grid(), TRAINED, extra)
    result = written(DeepSpeedWriter(), source, tmp_path / "b", **change)
    truth = saved(tmp_path / "c", grid(dp=change["dp"]), TRAINED, extra)
    assert trees(result) == trees(truth)
    assert set(result.tensors) == set(truth.tensors)


def test_a_universal_checkpoint_keeps_it(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", grid(), TRAINED, TRUE)
    content = drop(Content.of(source), ["*param_groups"])
    result = written(DeepSpeedUniversalWriter(), content, tmp_path / "b")
    assert set(NAMES) <= set(result.objects)


def test_what_is_dropped_is_gone(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", grid(), TRAINED, TRUE)
    content = drop(Content.of(source), ["*module.1.count"])
    result = written(DeepSpeedWriter(), content, tmp_path / "b", dp=1)
    assert sorted(set(result.objects) & set(NAMES)) == [n for n in NAMES if "count" not in n]


@pytest.mark.parametrize("form", ["", "torchsave", "dcp", "safetensors"])
def test_an_example_gets_the_sources(form: str, tmp_path: Path) -> None:
    source: Checkpoint = saved(tmp_path / "a", grid(), TRAINED, TRUE)
    if form:
        _, writer = format_and_writer(form)
        made = layout(writer, source)
        assert list(made.unplaced) == []
        materialise(made, source, tmp_path / "other")
        one = tmp_path / "other" / made.files[0].path
        source = open_checkpoint(one if writer.single else tmp_path / "other")
    other = grid(stages=OTHER_STAGES, dp=1)
    example = saved(tmp_path / "b", other, FRESH, START)
    made = layout(DeepSpeedWriter(), source, like=example)
    assert not any("layer files" in note.message for note in made.notes)
    result = written(DeepSpeedWriter(), source, tmp_path / "c", like=example)
    truth = saved(tmp_path / "d", other, TRAINED, TRUE)
    assert trees(result) == trees(truth)


def test_what_the_source_lacks_is_the_examples_and_said(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", grid(), TRAINED, {"count": 7})
    example = saved(tmp_path / "b", grid(dp=1), FRESH, START)
    made = layout(DeepSpeedWriter(), source, like=example)
    (note,) = [one.message for one in made.notes if "layer files" in one.message]
    assert note == (
        "the source has no module.1._extra_state, tp1.module.1._extra_state, which the example's"
        " layer files have: the example's is kept"
    )
    result = written(DeepSpeedWriter(), source, tmp_path / "c", like=example)
    assert result.load_object("module.1.count") == 7
    assert result.load_object("module.1._extra_state") == {"amax": [0.0], "slice": 0}


def test_what_the_example_has_no_place_for_is_named(tmp_path: Path) -> None:
    extra = {**TRUE, "deep": {"scale": torch.tensor([2.0, 3.0])}}
    source = saved(tmp_path / "a", grid(tp=1), TRAINED, extra)
    example = saved(tmp_path / "b", grid(tp=1, dp=1), FRESH, {"count": 0})
    made = layout(DeepSpeedWriter(), source, like=example)
    names = ["_extra_state", "deep"]
    own = [f"module.1.{name}" for name in names]
    assert made.unplaced == ["extra:rank2:module.1.deep.scale", *own]
    (tmp_path / "one").mkdir()
    whole = saved(
        tmp_path / "one/a", grid(stages=[[["0.column", "1.row", "2.same"]]], tp=1), FRESH, None
    )
    made = layout(DeepSpeedWriter(), source, like=whole)
    assert set(made.unplaced) >= {"module.1._extra_state", "module.1.count"}


def test_a_modules_extra_state_has_no_place_in_a_pipeline(tmp_path: Path) -> None:
    job = grid(stages=[[["0.column", "1.row", "2.same"]]], tp=1)
    save_grid(job, SHAPES, TRAINED, tmp_path / "a")
    for path in (tmp_path / "a").glob("mp_rank_*model_states.pt"):
        tree = torch.load(path, weights_only=False)
        tree["module"]["1._extra_state"] = {"amax": 1}
        torch.save(tree, path)
    example = saved(tmp_path / "b", grid(tp=1), FRESH, None)
    made = layout(DeepSpeedWriter(), opened(tmp_path / "a"), like=example)
    assert made.unplaced == ["module.1._extra_state"]
