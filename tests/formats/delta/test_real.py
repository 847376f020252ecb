"""Real checkpoints of real trainers as deltas: they reshard and verify as if they were full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ftckpt as api
from ftckpt.delta.pack.assemble import PackOptions
from ftckpt.errors import ExitCode
from ftckpt.formats.delta.pack import pack_checkpoint
from ftckpt.storage import StoreOptions
from ftckpt.transfer.layout import LayoutRequest
from ftckpt.workers import Work
from tests.builders.checkpoints import open_checkpoint
from tests.builders.real_sets import real_set


def pack(target: Path, base: Path | None, out: Path) -> None:
    pack_checkpoint(
        open_checkpoint(target),
        None if base is None else open_checkpoint(base),
        str(out),
        options=PackOptions(work=Work(threads=2)),
        store_options=StoreOptions(),
    )


def keys_of(path: Path) -> set[Any]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return set(FileSystemReader(path).read_metadata().state_dict_metadata)


def test_successive_saves_reshard_and_verify(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before, after = (real_set("dcp_fsdp2_nested", f"step-{n}", tmp_path_factory) for n in (3, 4))
    pack(after, before, tmp_path / "step-4")
    report = api.verify(str(tmp_path / "step-4"), level="content", jobs=2)
    assert (report.code, report.evidence) == (ExitCode.OK, "manifest")
    api.convert(str(tmp_path / "step-4"), str(tmp_path / "two"), request=LayoutRequest(dp=2))
    assert api.diff(str(tmp_path / "two"), str(after)).code is ExitCode.OK
    assert keys_of(tmp_path / "two") == keys_of(after)


def test_names_that_a_trainer_keeps_at_the_top_come_back(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    saved = real_set("dcp_fsdp2_titan", "step-3", tmp_path_factory)
    pack(saved, None, tmp_path / "full")
    pack(tmp_path / "full", saved, tmp_path / "again")  # what is packed is a delta itself
    for number, delta in enumerate((tmp_path / "full", tmp_path / "again")):
        api.convert(str(delta), str(tmp_path / f"back-{number}"))
        assert keys_of(tmp_path / f"back-{number}") == keys_of(saved)


@pytest.mark.parametrize(
    ("name", "inside"),
    [("mcore_torchdist_tp2pp2", "iter_0000003"), ("ds_z2_w2_bf16", "global_step3")],
)
def test_state_of_other_trainers(
    name: str, inside: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    saved = real_set(name, inside, tmp_path_factory)
    pack(saved, None, tmp_path / "full")
    assert api.diff(str(tmp_path / "full"), str(saved)).code is ExitCode.OK
    ours, theirs = api.inspect(str(tmp_path / "full")), api.inspect(str(saved))
    assert (ours.step, ours.tensors.count, ours.parameters) == (
        theirs.step, theirs.tensors.count, theirs.parameters
    )  # fmt: skip
    assert ours.topology.world_size == theirs.topology.world_size
