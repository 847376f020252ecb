"""Muon in torch_dist: its momentum is a state of its weight, in every layout of ranks.

The sample is of megatron-core 0.16.1 (tests/data/megatron_dist/make_muon.py). Its own loader took
what was written here, and trained on bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import ftckpt as api
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.formats.megatron.torch_dist.names import CHAINED
from ftckpt.formats.megatron.torch_dist.reader import MegatronDistCheckpoint
from tests.builders.checkpoints import open_checkpoint
from tests.formats.megatron.torch_dist.test_reader import of_data

MOMENTUM = "decoder.layers.mlp.linear_fc2.weight"


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_another_layout_has_it_where_megatron_looks(tp: int, pp: int, tmp_path: Path) -> None:
    made = of_data("muon", tmp_path / "of")
    path = made.path
    out = tmp_path / "out"
    api.reshard(str(path), str(out), tp=tp, pp=pp)
    result = open_checkpoint(out)
    assert result.tensors.keys() == made.truth.keys()
    for key, (_, shape, data) in made.truth.items():
        assert result.tensors[key].shape == shape
        assert read_tensor(result, key) == data, key
    before, after = (stored(place) for place in (path, out))
    # The same stored tensors: state first, layers on a leading axis.
    assert before == after
    assert before[f"optimizer.state.momentum_buffer.{MOMENTUM}"] == (2, 8, 12)


def stored(path: Path) -> dict[str, tuple[int, ...]]:
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, MegatronDistCheckpoint)
    return {
        CHAINED.sub("", name, count=1): tuple(tensor.size)
        for name, tensor in checkpoint.meta.tensors.items()
    }
