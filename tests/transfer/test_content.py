"""Contents describe tensors when asked, and whole tensors as any box of them."""

from __future__ import annotations

import pytest

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.extents import Box
from ftckpt.transfer.content import Content, Copy, ShardBox, TargetTensor
from tests.transfer.contents import content_of

TENSORS = {
    "w": ("model", "param", (4, 3), "bfloat16"),
    "scale": ("model", "param", (), "float32"),
    "nothing": ("model", "buffer", (0, 3), "float32"),
    "w2": ("optimizer", "exp_avg", (4, 3), "float32"),
}


def test_the_tensors_of_a_checkpoint_are_its_own_in_its_order() -> None:
    content = content_of(TENSORS)
    assert list(content.tensors) == ["w", "scale", "nothing", "exp_avg:w2"]
    assert len(content.tensors) == 4
    assert "exp_avg:w2" in content.tensors
    assert "w2" not in content.tensors
    with pytest.raises(KeyError):
        content.tensors["w2"]
    box = Box((0, 0), (4, 3))
    assert content.tensors["w"] == TargetTensor(
        "model", "w", Kind.PARAM, (4, 3), DTYPES["bfloat16"], (Copy(box, "w", box),)
    )


def _joined() -> Content:
    """A tensor of five rows: two of `w`, a row that nothing fills, two more of `w`."""
    content = content_of(TENSORS)
    copies = tuple(
        Copy(Box((row, 0), (2, 3)), "w", Box((start, 0), (2, 3))) for row, start in ((0, 2), (3, 0))
    )
    return content.with_tensors(
        [TargetTensor("model", "joined", Kind.PARAM, (5, 3), DTYPES["bfloat16"], copies)]
    )


@pytest.mark.parametrize(
    ("content", "key"),
    [(content_of(TENSORS), key) for key in ("w", "scale", "nothing")] + [(_joined(), "joined")],
    ids=["matrix", "scalar", "empty", "joined"],
)
def test_a_whole_tensor_is_the_shard_of_its_whole_box(content: Content, key: str) -> None:
    wanted = content.tensors[key]
    box = Box.whole(wanted.shape)
    expected = content.shard(wanted.shape, wanted.dtype, [ShardBox(box, key, box)])
    assert content.whole(key) == expected
    assert content.part(key, box) == expected


def test_a_part_of_a_joined_tensor_takes_what_its_box_meets() -> None:
    part = _joined().part("joined", Box((1, 0), (3, 3)))
    assert part.shape == (3, 3)
    assert [(fill.local, fill.source) for fill in part.fills] == [
        (Box((0, 0), (1, 3)), Box((3, 0), (1, 3))),
        (Box((2, 0), (1, 3)), Box((0, 0), (1, 3))),
    ]
