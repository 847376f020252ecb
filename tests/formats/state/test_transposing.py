"""Exchanged axes as a view: every way in which a matrix is stored."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ftckpt.checkpoint import Checkpoint, Decoding, Extent, Kind, Look, Piece, TensorInfo
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import UnsupportedError
from ftckpt.extents import Box
from ftckpt.formats.safetensors.writer import SafetensorsWriter
from ftckpt.formats.state.transposing import transposed
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from ftckpt.transfer.write.peek_output import Written
from tests.builders.checkpoints import open_checkpoint
from tests.builders.materialise import materialise
from tests.transfer.contents import Imagined, content_of


def require_transposed(source: Checkpoint, values: dict[str, Any], folder: Path) -> None:
    """Require all matrices of a checkpoint to come out transposed, written and read."""
    from safetensors.torch import load_file

    content = Content.of(source)
    keys = [key for key, info in source.tensors.items() if len(info.shape) == 2]
    made = transposed(content, keys)
    assert made.checkpoint.step == source.step
    materialise(SafetensorsWriter().layout(made, LayoutRequest()), made.checkpoint, folder)
    loaded = load_file(folder / "model.safetensors")
    for name, value in values.items():
        assert loaded[name].equal(value.T if value.dim() == 2 else value), name
    for key in keys:  # the source's own tensors are as they were
        assert read_tensor(made.checkpoint, key) == read_tensor(source, key)


def test_dense_strided_and_square_matrices(tmp_path: Path) -> None:
    import torch

    values = {
        "dense": torch.randn(3, 5),
        "strided": torch.randn(5, 4).T,
        "part": torch.randn(8, 6)[1:7:2, 2:],
        "square": torch.randn(4, 4),
        "row": torch.randn(1, 7),
        "empty": torch.zeros(0, 3),
        "vector": torch.randn(9),
    }
    torch.save(values, tmp_path / "x.pt")
    require_transposed(open_checkpoint(tmp_path / "x.pt"), values, tmp_path / "out")


def test_records_that_their_format_must_open(tmp_path: Path) -> None:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    values = {"w": torch.randn(6, 5), "b": torch.randn(6)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process saves is what is meant
        save({"model": values}, storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    require_transposed(open_checkpoint(tmp_path / "dcp"), values, tmp_path / "out")


def test_nothing_to_turn_is_the_same_content() -> None:
    content = content_of({"w": ("model", "param", (2, 3), "float32")})
    assert transposed(content, ()) is content


def test_what_others_are_decoded_upon_is_found_where_it_is_not_turned() -> None:
    looks: list[Look] = []

    class Helped(Decoding):
        def helpers(self) -> Mapping[str, Sequence[str]]:
            return {"turned": ["kept", "turned too"]}

        @contextmanager
        def reusing(self, look: Look) -> Iterator[None]:
            looks.append(look)
            yield

    class Needing(Imagined):
        decoding = Helped()

    content = content_of(
        dict.fromkeys(["turned", "turned too", "kept"], ("model", "param", (2, 3), "float32"))
    )
    base = content.checkpoint
    source = Needing(source=base.source, tensors=base.tensors, objects={})
    made = transposed(Content.of(source), ["turned", "turned too"])
    layout = SafetensorsWriter().layout(made, LayoutRequest())
    written = Written(layout, made.checkpoint, lambda *_: True)
    with made.checkpoint.decoding.reusing(written.look):
        (look,) = looks
    view = memoryview(bytearray(24))
    assert look("kept", 0, view)
    assert not look("turned too", 0, view)


def test_a_partition_that_ends_inside_a_row_is_refused() -> None:
    box = Box.whole((2, 3))
    pieces = [Piece(box, Extent("x", 0, 16), (0, 4)), Piece(box, Extent("y", 0, 8), (4, 6))]
    info = TensorInfo("model", "w", Kind.PARAM, (2, 3), DTYPES["float32"], pieces)
    base = content_of({}).checkpoint
    source = Imagined(source=base.source, tensors={"w": info}, objects={})
    with pytest.raises(UnsupportedError, match="end in the middle of rows"):
        transposed(Content.of(source), ["w"])
