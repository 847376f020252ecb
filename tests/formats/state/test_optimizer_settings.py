"""What real trainers' checkpoints say of their optimizers."""

from __future__ import annotations

import pytest

from ftckpt.checkpoint import Checkpoint
from ftckpt.delta.pack.pair import pair
from ftckpt.discovery.candidates import newest_child
from ftckpt.discovery.listing import open_part
from ftckpt.discovery.resolve import open_target
from ftckpt.formats.catalog import FORMATS
from ftckpt.formats.state.optimizer_settings import settings_of
from ftckpt.storage import StoreOptions
from tests.builders.real_sets import real_set


def _opened(name: str, inside: str, temporary: pytest.TempPathFactory) -> Checkpoint:
    target = open_target(str(real_set(name, inside, temporary)), FORMATS, StoreOptions())
    if target.root is None:
        return target.open()
    return open_part(target.root.store, newest_child(target.root).part)


@pytest.mark.parametrize(
    ("name", "inside", "beta2", "decays"),
    [
        ("dcp_fsdp2_nested", "step-4", 0.95, {0.0, 0.1}),
        ("dcp_fsdp2_titan", "", 0.95, {0.0, 0.1}),
        ("lightning_ddp", "", 0.999, {0.01}),
    ],
)
def test_settings_of_each_parameter(
    name: str,
    inside: str,
    beta2: float,
    decays: set[float],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    target = _opened(name, inside, tmp_path_factory)
    settings = settings_of(target, target)
    trained = {i.name for i in target.tensors.values() if i.component == "optimizer"}
    found = [settings(one) for one in pair(target.tensors.values(), {}) if one.info.name in trained]
    assert found
    assert {one.beta2 for one in found} == {beta2}
    assert {one.weight_decay for one in found} - {None} == decays
    assert all(one.lr and one.lr < 0.01 and one.step for one in found)


def test_steps_apart(tmp_path_factory: pytest.TempPathFactory) -> None:
    before = _opened("dcp_fsdp2_nested", "step-3", tmp_path_factory)
    after = _opened("dcp_fsdp2_nested", "step-4", tmp_path_factory)
    (one,) = pair([next(iter(after.tensors.values()))], {})
    assert settings_of(after, before)(one).distance == 1
    assert settings_of(before, after)(one).distance is None
    assert settings_of(after, None)(one).lr is None
