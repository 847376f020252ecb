"""Real checkpoints dropped, had back and reclaimed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ftckpt.discovery import resolve as opening
from ftckpt.errors import ExitCode
from ftckpt.formats.catalog import FORMATS
from ftckpt.formats.delta.bases import bases
from ftckpt.retention.apply.prepare import prepare
from ftckpt.retention.apply.purge import purge, trashed, undelete
from ftckpt.retention.apply.run import apply
from ftckpt.retention.policy import Policy
from ftckpt.storage import StoreOptions
from tests.builders.archives import extract
from tests.retention.carrying import DAY, saved

ARCHIVES = Path(__file__).parents[4] / "shared" / "checkpoints"


@pytest.mark.parametrize(
    ("name", "step"), [("dcp_fsdp2_nested", "step-3"), ("lightning_ddp", "step=2.ckpt")]
)
def test_what_real_trainers_wrote_goes_and_comes_back(tmp_path: Path, name: str, step: str) -> None:
    archive = ARCHIVES / f"{name}.tar.xz"
    if not archive.exists():
        pytest.skip(f"no real checkpoints at {ARCHIVES}")
    extract(archive, tmp_path)
    root = tmp_path / name / "ckpt"
    before = saved(root)
    place = opening.locate(str(root), StoreOptions())
    plan = prepare(
        place, FORMATS, Policy(keep_last=1, min_survivors=1), time.time(), bases=bases
    ).plan
    assert plan.order == (step,)
    applied = apply(plan, place, FORMATS, actor="me", now=time.time, bases=bases)
    assert (applied.code, applied.waiting) == (ExitCode.OK, plan.frees)
    assert not (root / step).exists()
    assert [t.name for t in trashed(place, FORMATS)] == [step]
    back = undelete(place, FORMATS, [step], actor="me", now=time.time)
    assert back.code is ExitCode.OK
    assert saved(root) == before
    apply(plan, place, FORMATS, actor="me", now=time.time, bases=bases)
    purged = purge(
        place, FORMATS, actor="me", now=lambda: time.time() + DAY, bases=bases, trash_ttl=DAY
    )
    assert purged.freed == plan.frees
    kept = {k: v for k, v in before.items() if k != step and not k.startswith(f"{step}/")}
    assert saved(root) == kept
