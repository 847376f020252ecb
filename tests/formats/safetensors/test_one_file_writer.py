"""Weights as one safetensors file: what `load_file` takes, and nothing left out unsaid."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ftckpt as api
from ftckpt.errors import ExistsError, ExitCode, RefusedError, UnsupportedError, UsageError
from ftckpt.formats.safetensors import layout as safetensors_file
from ftckpt.formats.safetensors.layout import FILE, SafetensorsFileWriter
from ftckpt.formats.writers import format_and_writer
from ftckpt.own_files import SUFFIX
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from ftckpt.transfer.request.narrowing import Only, only
from ftckpt.verification import verify
from tests.builders.checkpoints import open_checkpoint
from tests.builders.real_sets import real_set
from tests.campaign import examples
from tests.conformance.writers import assert_same_tensors, write
from tests.killing import kill_points, run_until

WRITER = SafetensorsFileWriter()
TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]


def saved(path: Path, state: Mapping[str, Any]) -> str:
    torch.save(dict(state), path)
    return str(path)


def training_state() -> dict[str, Any]:
    embed = torch.randn(7, 4)
    model = {"embed.weight": embed, "mask": torch.ones(3, dtype=torch.bool), "head.weight": embed}
    state = {"embed.weight": {"step": torch.tensor(3.0), "exp_avg": torch.randn(7, 4)}}
    groups = [{"lr": 0.1, "params": ["embed.weight"]}]
    return {
        "model": model,
        "ema": {"embed.weight": torch.randn(7, 4)},
        "optimizer": {"state": state, "param_groups": groups},
        "epoch": 4,
    }


def weights(path: str) -> Content:
    return only(Content.of(open_checkpoint(path)), Only.MODEL)


@pytest.mark.parametrize(
    ("ending", "single"),
    [("x.safetensors", True), ("x.safetensors/", False), ("safetensors", False), ("", False)],
)
@pytest.mark.parametrize("place", ["", "a/b/", "s3://bucket/a/"])
def test_the_name_of_the_destination_asks_for_it(place: str, ending: str, single: bool) -> None:
    assert format_and_writer("safetensors", destination=place + ending)[1].single is single
    for other in ("dcp", "torchsave"):
        if single:
            with pytest.raises(UsageError, match=f"is a name of safetensors, and {other} is"):
                format_and_writer(other, destination=place + ending)
        else:
            assert format_and_writer(other, destination=place + ending)[1].name == other


@settings(deadline=None, max_examples=examples(20, 120))
@given(data=st.data())
def test_any_weights_come_back(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    names = data.draw(st.lists(st.text('aé."_', min_size=1), min_size=1, max_size=6, unique=True))
    shapes = st.lists(st.integers(0, 5), max_size=3)
    state = {
        name: torch.randint(0, 2, data.draw(shapes)).to(data.draw(st.sampled_from(TYPES)))
        for name in names
    }
    folder = tmp_path_factory.mktemp("any")
    save_file(state, folder / "source.safetensors")
    source = open_checkpoint(folder / "source.safetensors")
    result = write(WRITER, source, folder / "out")
    assert_same_tensors(result, source)
    assert (folder / "out" / FILE).read_bytes() == _by_the_library(state, folder)


def _by_the_library(state: Mapping[str, torch.Tensor], folder: Path) -> bytes:
    save_file(dict(state), folder / "library.safetensors", metadata={"format": "pt"})
    return (folder / "library.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "inside"),
    [("dcp_fsdp2_titan", "step-3"), ("hf_mixtral", ""), ("lightning_ddp", "step=4.ckpt")],
)
def test_real_weights_come_back(
    name: str, inside: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = open_checkpoint(real_set(name, inside, tmp_path_factory))
    content = only(Content.of(source), Only.MODEL)
    result = write(WRITER, content, tmp_path)
    assert set(result.tensors) == set(content.tensors)
    assert verify(result).code is ExitCode.OK


def test_it_is_one_checkpoint_for_every_verb(tmp_path: Path) -> None:
    state = training_state()
    source = saved(tmp_path / "state.pt", state)
    one = tmp_path / "one.safetensors"

    def part(content: Content) -> Content:
        return only(content, Only.MODEL)

    report = api.convert(source, str(one), "safetensors", derive=part)
    assert report.files == 1
    assert sorted(os.listdir(tmp_path)) == [one.name, f"{one.name}{SUFFIX}", "state.pt"]
    loaded = load_file(one)
    assert set(loaded) == {"embed.weight", "mask"}  # the tied head is an alias in the header
    assert all(loaded[name].equal(state["model"][name]) for name in loaded)
    assert api.inspect(str(one)).tensors.count == 2
    assert api.verify(str(one)).code is ExitCode.OK
    with pytest.raises(ExistsError):
        api.convert(source, str(one), "safetensors", derive=part)
    again = tmp_path / "again.safetensors"
    api.convert(str(one), str(again))  # for no other ranks: the same file
    assert again.read_bytes() == one.read_bytes()
    api.convert(str(one), str(tmp_path / "back.pt"), "torchsave")
    assert api.diff(str(one), str(tmp_path / "back.pt")).code is ExitCode.OK


def test_a_slash_asks_for_a_folder(tmp_path: Path) -> None:
    source = saved(tmp_path / "state.pt", training_state())
    api.convert(source, f"{tmp_path}/all.safetensors/", "safetensors")
    assert (tmp_path / "all.safetensors" / "model.safetensors").exists()
    assert api.diff(source, f"{tmp_path}/all.safetensors").code is ExitCode.OK


def test_other_state_is_named_and_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "state.pt", training_state())
    layout = WRITER.layout(Content.of(open_checkpoint(source)), LayoutRequest())
    assert set(layout.unplaced) == {
        "ema:embed.weight",
        "exp_avg:embed.weight",
        "optimizer:embed.weight.step",
        "epoch",
        "optimizer.param_groups",
    }
    with pytest.raises(UnsupportedError, match="no place for") as caught:
        api.convert(source, f"{tmp_path}/x.safetensors", "safetensors")
    assert "--only model" in caught.value.hint
    assert sorted(os.listdir(tmp_path)) == ["state.pt"]


def test_what_lies_beside_weights_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "LICENSE"):
        (folder / name).write_text("{}")
    layout = WRITER.layout(weights(str(folder)), LayoutRequest())
    assert [note.message for note in layout.notes] == [
        "one file has no place for LICENSE, config.json, tokenizer.json: not written"
    ]
    assert not layout.unplaced


def test_one_file_is_not_divided(tmp_path: Path) -> None:
    content = weights(saved(tmp_path / "x.pt", {"w": torch.ones(3)}))
    with pytest.raises(UsageError, match="--max-shard-size for several") as caught:
        WRITER.layout(content, LayoutRequest(max_shard_size=2))
    assert "DST/ with a slash" in caught.value.hint


@pytest.mark.parametrize(
    ("limit", "says"), [("MAX_HEADER", "a header of"), ("MAX_TENSORS", "hold 3 tensors")]
)
def test_more_than_a_header_takes_is_refused(
    limit: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = weights(saved(tmp_path / "x.pt", {n: torch.ones(1) for n in "abc"}))
    assert WRITER.layout(content, LayoutRequest()).files
    monkeypatch.setattr(safetensors_file, limit, 2)
    with pytest.raises(UnsupportedError, match=says) as caught:
        WRITER.layout(content, LayoutRequest())
    assert "folder" in caught.value.hint


def test_killed_at_any_change_it_is_absent_or_whole(tmp_path: Path) -> None:
    source = saved(tmp_path / "state.pt", {"w": torch.ones(3), "b": torch.zeros(2, 2)})
    out = tmp_path / "results"
    out.mkdir()
    one = out / "one.safetensors"
    of_a_run = {one.name, f"{one.name}{SUFFIX}", f".{one.name}.ftckpt-staging"}

    def work() -> None:
        api.convert(source, str(one), "safetensors")

    seen = set()
    for _ in kill_points(work, each=True):
        assert set(os.listdir(out)) <= of_a_run
        seen.add(one.exists())
    assert seen == {False, True}
    assert sorted(os.listdir(out)) == [one.name, f"{one.name}{SUFFIX}"]
    assert api.verify(str(one)).evidence == "manifest"


def test_killed_at_any_change_it_costs_another_nothing_but_a_word(tmp_path: Path) -> None:
    """What a killed run leaves is finished, forgotten on `--restart`, or named to be removed."""
    first = saved(tmp_path / "first.pt", {"w": torch.ones(3)})
    second = saved(tmp_path / "second.pt", {"w": torch.zeros(3)})
    out = tmp_path / "results"
    one, beside = out / "one.safetensors", out / f"one.safetensors{SUFFIX}"
    place = out / ".one.safetensors.ftckpt-staging"
    answers = set()
    for point in itertools.count(1):
        out.mkdir()
        if run_until(lambda: api.convert(first, str(one), "safetensors"), point) == 0:
            break
        try:
            api.convert(second, str(one), "safetensors")
            answers.add("done")
        except ExistsError:
            assert one.exists()
            assert not place.exists()
            answers.add("finished before")
        except RefusedError as error:
            answers.add(f"{error.hint}, {'a' if beside.exists() else 'no'} manifest")
            api.convert(second, str(one), "safetensors", restart=True)
        assert sorted(os.listdir(out)) == [one.name, beside.name]
        assert api.verify(str(one)).evidence == "manifest"
        shutil.rmtree(out)
    again = "run that one again to finish it, or --restart to forget it"
    assert answers == {"done", "finished before", f"{again}, a manifest", f"{again}, no manifest"}


def test_a_manifest_whose_file_is_gone_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    source = saved(tmp_path / "state.pt", {"w": torch.ones(3)})
    one = tmp_path / "results of mine" / "one.safetensors"
    one.parent.mkdir()
    api.convert(source, str(one), "safetensors")
    one.unlink()
    with pytest.raises(
        ExistsError, match=r"json exists already, and no one\.safetensors"
    ) as caught:
        api.convert(source, str(one), "safetensors")
    remove, path = shlex.split(caught.value.hint)[:2]
    assert remove == "rm"
    assert os.listdir(one.parent) == [f"{one.name}{SUFFIX}"]
    os.unlink(path)
    api.convert(source, str(one), "safetensors")
    assert api.verify(str(one)).evidence == "manifest"
