"""Real checkpoints of real trainers: packed against each other, and back bit for bit."""

from __future__ import annotations

import pytest

from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.delta import FitSettings, content_digest
from ftckpt.digests.tensors import digest_tensor
from tests.builders.checkpoints import open_checkpoint
from tests.builders.real_sets import real_set
from tests.delta.packing import State, pack, reparsed


def state_of(path: str, temporary: pytest.TempPathFactory, name: str) -> State:
    """Read a checkpoint into memory, its tied tensors once."""
    checkpoint = open_checkpoint(real_set(name, path, temporary))
    state = State()
    for key, info in checkpoint.tensors.items():
        if key not in checkpoint.aliases:
            state.infos[key] = info
            state.data[key] = read_tensor(checkpoint, key)
            assert state.digest(key) == digest_tensor(checkpoint, info)
    return state


def test_two_saves_of_a_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    base, target = (
        state_of(f"step-{step}", tmp_path_factory, "dcp_fsdp2_nested") for step in (3, 4)
    )
    assert base.data != target.data
    whole = sum(map(len, target.data.values()))
    alone = pack(target)
    upon = pack(target, base, settings=FitSettings(distance=1), digests=True)
    assert reparsed(alone).unpack() == target.data
    packed = reparsed(upon)
    assert packed.unpack(base.fill) == target.data
    assert upon.nbytes < alone.nbytes < whole
    assert packed.index.base is not None
    assert packed.index.base.content == base.content()
    assert packed.index.content() == content_digest({k: target.digest(k) for k in target.data})


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("ds_z1_w4_bf16", "global_step3"),
        ("mcore_torch_tp2dp2_distopt_bf16", "iter_0000003"),
        ("dcp_2d_tpfsdp", "step-3"),
    ],
)
def test_one_save_alone(name: str, path: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    target = state_of(path, tmp_path_factory, name)
    packed = reparsed(pack(target))
    assert packed.unpack() == target.data
    rules = {tensor.fit.rule.name for tensor in packed.index.tensors if tensor.fit is not None}
    assert ("cast-bfloat16" in rules) == name.endswith("bf16")
