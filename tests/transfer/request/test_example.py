"""An example of the layout: who may use one, what contradicts it, and how far it is trusted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import ftckpt as api
from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import (
    CorruptError,
    IncompleteError,
    NotFoundError,
    RefusedError,
    UnsupportedError,
    UsageError,
)
from ftckpt.formats.torchsave.writer import TorchSaveWriter
from ftckpt.storage import open_store
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest
from ftckpt.transfer.request.example import lay_out
from ftckpt.transfer.request.narrowing import drop
from tests.builders.checkpoints import flip, open_checkpoint, save_dcp


class Following(TorchSaveWriter):
    """Has a job of two tensor slices."""

    supported_options: Any = ("tp", "zero_stage", "max_shard_size")

    def axes(self, example: Checkpoint) -> Mapping[str, int]:
        return {"tp": 2}

    def layout(self, content: Content, request: LayoutRequest) -> Layout:
        return super().layout(content, LayoutRequest())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    import torch

    torch.save({"weight": torch.ones(300)}, tmp_path / "model.pt")
    torch.save({"weight": torch.zeros(300)}, tmp_path / "example.pt")
    return tmp_path / "model.pt"


def laid_out(source: Path, writer: Any = None, to: str = "out.pt", **request: Any) -> Layout:
    like = open_checkpoint(source.parent / "example.pt")
    content, place = Content.of(open_checkpoint(source)), open_store(str(source.parent / to))
    return lay_out(writer or Following(), content, LayoutRequest(like=like, **request), place)


def test_a_writer_that_follows_gets_the_example(source: Path) -> None:
    assert laid_out(source, tp=2, ep=1).nbytes == laid_out(source).nbytes > 1200


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ({"tp": 4}, "--tp 4 contradicts --like: the example has 2"),
        ({"zero_stage": 2}, "--zero-stage 2 contradicts --like: the example decides that itself"),
        ({"max_shard_size": 9}, "--max-shard-size 9"),
    ],
)
def test_what_contradicts_the_example_is_refused(
    wish: dict[str, Any], says: str, source: Path
) -> None:
    with pytest.raises(UsageError, match=says):
        laid_out(source, **wish)


def test_a_writer_that_cannot_use_an_example_says_so(source: Path) -> None:
    with pytest.raises(UsageError, match="torchsave checkpoints are not laid out by an example"):
        laid_out(source, TorchSaveWriter())
    like = open_checkpoint(source.parent / "example.pt")
    with pytest.raises(UsageError, match="not laid out by an example"):
        api.convert(str(source), str(source.parent / "out"), request=LayoutRequest(like=like))
    assert not (source.parent / "out").exists()


def test_an_example_of_another_format_is_refused(source: Path) -> None:
    class Other(Following):
        name = "other"

    with pytest.raises(UsageError, match="is a torchsave checkpoint, and other is to be written"):
        laid_out(source, Other())


def test_an_example_with_a_defect_is_refused(tmp_path: Path) -> None:
    """It opens, and nothing says whether what is missing would show another layout."""

    class Other(Following):
        name = "dcp"

    example = save_dcp(tmp_path / "example")
    next(example.glob("*.distcp")).unlink()
    request, place = LayoutRequest(like=open_checkpoint(example)), open_store(str(tmp_path / "out"))
    with pytest.raises(CorruptError, match=r"the example .*example cannot be trusted") as caught:
        lay_out(Other(), Content.of(open_checkpoint(example)), request, place)
    assert "first step" in caught.value.hint


def test_tensors_of_the_example_are_not_read(source: Path) -> None:
    """What they hold is never used: damage in them is nobody's."""
    example = source.parent / "example.pt"
    flip(example, example.read_bytes().index(bytes(1200)) + 600)
    assert laid_out(source).nbytes > 1200


def test_nothing_is_written_into_the_example(source: Path) -> None:
    with pytest.raises(RefusedError, match="lies inside the example"):
        laid_out(source, to="example.pt/out.pt")


def test_an_example_that_changes_meanwhile_is_refused(source: Path) -> None:
    class Slow(Following):
        def layout(self, content: Content, request: LayoutRequest) -> Layout:
            made = super().layout(content, request)
            with (source.parent / "example.pt").open("ab") as file:
                file.write(b"more")
            return made

    with pytest.raises(IncompleteError, match="of the example changed"):
        laid_out(source, Slow())


@pytest.mark.parametrize("to", ["dcp", "torchsave", "ranks", "safetensors", "deepspeed-universal"])
def test_nothing_is_not_written(source: Path, to: str) -> None:
    import torch

    torch.save({}, source)
    with pytest.raises(UnsupportedError, match=r"torch\.save without a tensor"):
        api.convert(str(source), str(source.parent / "out"), to)
    torch.save({"weight": torch.ones(3)}, source)
    with pytest.raises(NotFoundError, match=r"of .*model\.pt nothing is left to write"):
        api.convert(
            str(source), str(source.parent / "out"), to, derive=lambda all_of: drop(all_of, ["*"])
        )
    assert sorted(p.name for p in source.parent.iterdir()) == ["example.pt", "model.pt"]


@pytest.mark.parametrize("to", ["dcp", "torchsave", "ranks", "safetensors"])
def test_a_counter_alone_is_not_a_checkpoint(source: Path, to: str) -> None:
    import torch

    torch.save({"step": 3}, source)
    with pytest.raises(UnsupportedError, match="without a tensor") as caught:
        api.convert(str(source), str(source.parent / "out"), to)
    assert "staging" not in str(caught.value)
    assert sorted(p.name for p in source.parent.iterdir()) == ["example.pt", "model.pt"]
