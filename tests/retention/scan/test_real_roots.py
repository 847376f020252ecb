"""Roots that real trainers and libraries wrote, and one on a real object store."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

import pytest

from ftckpt.discovery import resolve as opening
from ftckpt.formats.catalog import FORMATS
from ftckpt.retention.apply.prepare import Prepared, prepare
from ftckpt.retention.policy import Policy
from ftckpt.retention.records import log, pins
from ftckpt.retention.scan.entries import EntryClass
from ftckpt.storage import StoreOptions, open_store
from tests.builders.archives import extract
from tests.builders.small_format import Small, read
from tests.servers.s3 import BUCKET

ARCHIVES = Path(__file__).parents[4] / "shared" / "checkpoints"
LENIENT = Policy(keep_last=1, min_survivors=1)
DAY = 86400.0


def plan_of(root: Path | str, policy: Policy = LENIENT, now: float | None = None) -> Prepared:
    place = opening.locate(str(root), StoreOptions())
    return prepare(place, FORMATS, policy, time.time() if now is None else now)


def classes(prepared: Prepared) -> dict[str, EntryClass]:
    return {name: found.entry.entry_class for name, found in prepared.found.items()}


@pytest.fixture
def unpacked(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    archive = ARCHIVES / f"{request.param}.tar.xz"
    if not archive.exists():
        pytest.skip(f"no real checkpoints at {ARCHIVES}")
    extract(archive, tmp_path)
    name: str = request.param
    return tmp_path / name / "ckpt"


@pytest.mark.parametrize(
    ("unpacked", "kept", "dropped"),
    [
        ("dcp_fsdp2_nested", {"step-4"}, ["step-3"]),
        ("lightning_ddp", {"last.ckpt", "step=4.ckpt"}, ["step=2.ckpt"]),
        ("verl_fsdp", {"global_step_3"}, []),
        ("mcore_torch_tp2pp2", {"iter_0000003"}, []),
        ("mcore_torchdist_tp2pp2", {"iter_0000003"}, []),
        ("ds_z2_w2_bf16", {"global_step3"}, []),
    ],
    indirect=["unpacked"],
)
def test_real_trainers(unpacked: Path, kept: set[str], dropped: list[str]) -> None:
    prepared = plan_of(unpacked)
    assert {d.entry.name for d in prepared.plan.keep} >= kept
    assert [d.entry.name for d in prepared.plan.drop] == dropped
    for name in kept:
        entry = prepared.found[name].entry
        assert (entry.entry_class, entry.checked) == (EntryClass.COMMITTED, True), entry.why
    pointed = [e.entry for e in prepared.found.values() if e.entry.pointers]
    assert len(pointed) == len(list(unpacked.glob("latest*")))


def save_dcp(root: Path, step: int) -> None:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = {"model": {"weight": torch.full((16, 8), float(step))}, "step": step}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process saves is what is meant
        save(state, storage_writer=FileSystemWriter(root / f"step-{step}"), no_dist=True)


def test_damage_and_torn_saves_of_torch(tmp_path: Path) -> None:
    for step in range(1, 8):
        save_dcp(tmp_path, step)
    data = tmp_path / "step-7/__0_0.distcp"
    os.truncate(data, data.stat().st_size - 100)
    (tmp_path / "step-6/.metadata").unlink()
    prepared = plan_of(tmp_path, Policy(keep_last=2))
    assert prepared.found["step-7"].entry.entry_class is EntryClass.CORRUPT
    assert prepared.found["step-6"].entry.entry_class is EntryClass.STAGING
    assert [d.entry.name for d in prepared.plan.drop] == ["step-1", "step-2", "step-3"]
    # Two days later the torn one was not finished, and nothing was saved after it.
    later = plan_of(tmp_path, Policy(keep_last=2), time.time() + 2 * DAY)
    assert later.found["step-6"].entry.entry_class is EntryClass.ABANDONED
    kept = {d.entry.name: {r.rule for r in d.reasons} for d in later.plan.keep}
    assert kept["step-6"] == {"unfinished"}


def test_a_file_in_flight_is_no_evidence_of_damage(tmp_path: Path) -> None:
    import torch

    for step in range(1, 5):
        torch.save({"model": {"w": torch.ones(64)}, "step": step}, tmp_path / f"step-{step}.pt")
    os.truncate(tmp_path / "step-4.pt", 200)
    prepared = plan_of(tmp_path, Policy(keep_last=2))
    assert classes(prepared) == {
        "step-1.pt": EntryClass.COMMITTED,
        "step-2.pt": EntryClass.COMMITTED,
        "step-3.pt": EntryClass.COMMITTED,
        "step-4.pt": EntryClass.STAGING,
    }
    assert [d.entry.name for d in prepared.plan.drop] == ["step-1.pt"]
    old = plan_of(tmp_path, Policy(keep_last=2), time.time() + 2 * DAY)
    assert old.found["step-4.pt"].entry.entry_class is EntryClass.CORRUPT


@pytest.mark.s3
def test_object_storage_is_listed_once(s3_url: str) -> None:
    store = open_store(s3_url)
    for step in range(1, 7):
        for name in ("data-0", "data-1", "deep/data-2"):
            store.put(f"step-{step}/{name}", bytes(100))
        text = b'{"step": %d, "state": "good"}' % step
        store.put(f"step-{step}/marker", text)
    store.put("latest", b"step-1")
    root = read(s3_url)
    pins.pin(root, "step-2", owner="alice@host", reason="figure 3", now=time.time())
    log.append(root, log.APPLIED, 1.0, {"dropped": []})
    place = opening.locate(s3_url, StoreOptions())
    before = place.store.usage().requests
    prepared = prepare(place, [Small()], Policy(keep_last=2), time.time() + 60)
    requests = place.store.usage().requests - before
    assert [d.entry.name for d in prepared.plan.drop] == ["step-3", "step-4"]
    contents = prepared.found["step-3"].entry.contents
    assert contents is not None
    assert (contents.files, contents.nbytes) == (4, 300 + len(text))
    assert log.last_applied(root) == 1.0
    # One listing an entry; a few requests for pointers, pins, leases, tags and the log, and a few
    # to check each of the four that stay.
    assert requests < 6 + 18 + 4 * 6
    assert s3_url.startswith(f"s3://{BUCKET}/")
