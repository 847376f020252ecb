"""A fourth attack: records of torch_checkpointing that a load fails on, or that do not end."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt import verify
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.discovery.resolve import locate
from ftckpt.errors import ExitCode, FtckptError, NewerWriterError, NoStateError
from ftckpt.formats.catalog import FORMATS
from ftckpt.formats.pickles.write import dumps
from ftckpt.formats.ranks.writer import Placed
from ftckpt.formats.torch_checkpointing.metadata import read_metadata
from ftckpt.formats.torch_checkpointing.names import METADATA
from ftckpt.formats.torch_checkpointing.writer import _ITEMS, _metadata
from ftckpt.retention.apply.prepare import prepare
from ftckpt.retention.policy import DAY, Policy
from ftckpt.retention.scan.entries import EntryClass
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.source import Source
from tests.builders.checkpoints import open_checkpoint, save_dcp
from tests.first_contact.test_second_attack import ends_within

DATA = Path(__file__).parents[1] / "data" / "torch_checkpointing"


@pytest.fixture
def files_as_old_as_they_say() -> None:
    """Let an inode say when a file came, in place of the fixture of all other tests."""


def changed(kind: str, to: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Copy a sample, with other metadata."""
    step = to / "step-10"
    shutil.copytree(DATA / kind / "step-10", step)
    record = pickle.loads((step / METADATA).read_bytes())
    change(record)
    (step / METADATA).write_bytes(pickle.dumps(record, protocol=4))
    return step


def groups(record: dict[str, Any]) -> list[Any]:
    """Return the groups of one tensor."""
    found: list[Any] = record["metadata"]["model"]["nested_path_to_metadata"]['["layers.0.w"]']
    return found


def data(record: dict[str, Any]) -> dict[str, Any]:
    """Return the sharding of one tensor."""
    found: dict[str, Any] = groups(record)[0]["sharding_metadata"]["data"]
    return found


def layouts(record: dict[str, Any]) -> dict[Any, Any]:
    """Return where the files of the model lie."""
    found: dict[Any, Any] = record["metadata"]["model"]["rank_to_layout_info"]
    return found


def renamed(mapping: dict[Any, Any], key: object) -> None:
    """Give a value another key, as one flipped bit does."""
    mapping["x"] = mapping.pop(key)


def at(path: object) -> dict[str, object]:
    return {"file_path": path, "serialization_format": {"type": "TorchSerialization"}}


# A load by the package fails on each, or reads another rank's values.
WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], ExitCode]] = {
    "stride": (lambda r: renamed(data(r), "stride"), ExitCode.UNSUPPORTED),
    "device": (lambda r: renamed(data(r)["mesh_spec"], "device_type"), ExitCode.UNSUPPORTED),
    "names": (lambda r: renamed(data(r)["mesh_spec"], "mesh_dim_names"), ExitCode.UNSUPPORTED),
    "names-type": (
        lambda r: data(r)["mesh_spec"].update(mesh_dim_names=5), ExitCode.UNSUPPORTED,
    ),
    "file-of-another-rank": (lambda r: layouts(r).update({0: at("model_1.pt")}), ExitCode.CORRUPT),
    "file-of-another-item": (
        lambda r: layouts(r).update({0: at("optimizer_0.pt")}), ExitCode.CORRUPT,
    ),
    "one-file-for-two": (
        lambda r: layouts(r).update({0: at("model_0.pt"), 1: at("model_0.pt")}), ExitCode.CORRUPT,
    ),
    "own-file": (lambda r: layouts(r).update({0: at(".ftckpt/x.pt")}), ExitCode.CORRUPT),
    "rank-without-layout": (lambda r: renamed(layouts(r), 0), ExitCode.UNSUPPORTED),
    "another-rank": (lambda r: layouts(r).update({7: layouts(r).pop(0)}), ExitCode.CORRUPT),
    "no-groups": (lambda r: groups(r).clear(), ExitCode.CORRUPT),
    "no-ranks": (lambda r: groups(r)[0].update(ranks=()), ExitCode.CORRUPT),
    "rank-twice": (lambda r: groups(r)[0].update(ranks=(0, 1, 1)), ExitCode.CORRUPT),
    "two-groups": (lambda r: groups(r).append(dict(groups(r)[0])), ExitCode.CORRUPT),
    "axes": (lambda r: data(r)["mesh_spec"].update(mesh_shape=[1] * 100), ExitCode.CORRUPT),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_the_package_does_not_load_is_not_ok(case: str, tmp_path: Path) -> None:
    change, code = WRONG[case]
    step = changed("fsdp", tmp_path, change)
    assert verify(str(step), level="content").code == code


def test_an_item_alone_is_no_path(tmp_path: Path) -> None:
    def old(record: dict[str, Any]) -> None:
        record.update(version="1.0", metadata={"[]": []}, rank_to_layout_info_mappings={})

    assert verify(str(changed("fsdp", tmp_path, old))).code == ExitCode.UNSUPPORTED


def test_a_mesh_of_a_million_axes_ends(tmp_path: Path) -> None:
    """The product of a million large numbers took hours."""

    def large(record: dict[str, Any]) -> None:
        data(record)["mesh_spec"]["mesh_shape"] = [(1 << 61) + n for n in range(200_000)]

    step = changed("fsdp", tmp_path, large)
    with ends_within(30):
        assert verify(str(step)).code == ExitCode.CORRUPT


def test_what_is_quoted_has_an_end() -> None:
    error = NewerWriterError.of("a path", expected="a list", found="9" * 100_000)
    assert isinstance(error, FtckptError)
    assert len(str(error)) < 400


def test_a_save_for_many_ranks_is_read_back(tmp_path: Path) -> None:
    """Its tensors shared one list of ranks, and the reader took that for a bomb."""
    role = next(iter(_ITEMS))
    placed = [Placed(role, ("layers", n, "w"), (64, 8), DTYPES["float32"], 0) for n in range(1500)]
    world = 512
    (tmp_path / METADATA).write_bytes(dumps(_metadata(placed, world)))
    assert read_metadata(Source.directory(open_store(str(tmp_path)))).world_size == world


@pytest.mark.usefixtures("files_as_old_as_they_say")
def test_a_save_that_arrives_with_old_times_is_not_abandoned(tmp_path: Path) -> None:
    """`rsync -a` gives a file its time of last week as soon as it is there."""
    for step in (1, 2, 3):
        save_dcp(tmp_path / f"step-{step}", step=step)
    arriving = tmp_path / "step-1"
    (arriving / ".metadata").unlink()
    for path in (*arriving.iterdir(), arriving):
        os.utime(path, (time.time() - 9 * DAY,) * 2)

    def class_at(now: float) -> EntryClass:
        place = locate(str(tmp_path), StoreOptions())
        return prepare(place, FORMATS, Policy(keep_last=2), now).found["step-1"].entry.entry_class

    assert class_at(time.time()) is EntryClass.STAGING
    assert class_at(time.time() + 2 * DAY) is EntryClass.ABANDONED


@pytest.mark.parametrize(
    "member", [{"a": torch.ones(2)}, {"state": {}, "param_groups": [{"params": [0], "lr": 1.0}]}]
)
def test_a_tuple_of_many_states_takes_one_pass(member: object, tmp_path: Path) -> None:
    """Each member was looked for among all: 50,000 took minutes."""
    torch.save(tuple([member] * 30_000), tmp_path / "many.pt")
    with ends_within(60), suppress(NoStateError):
        open_checkpoint(tmp_path / "many.pt")
