"""A root of many keys: every page of them is asked for once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import ftckpt
from ftckpt.storage import open_store
from ftckpt.storage.s3.client import S3Client
from tests.builders.checkpoints import save_dcp
from tests.retention.remote_roots import planned, save
from tests.servers.places import QUICK
from tests.servers.s3 import BUCKET, S3Service

pytestmark = pytest.mark.s3

PAGE = 10
FILES = 35
STEPS = 6


def test_a_page_is_listed_once(moto: S3Service, monkeypatch: pytest.MonkeyPatch) -> None:
    moto.enter(monkeypatch)
    url = f"s3://{BUCKET}/many-keys"
    store = open_store(url, QUICK)
    for step in range(1, STEPS + 1):
        for number in range(FILES - 3):
            moto.put(f"many-keys/step-{step}/shard-{number}", b"1")
        save(store, f"step-{step}", step)
    call = S3Client.call
    asked: list[tuple[str, str]] = []

    async def counted(self: S3Client, operation: str, **parameters: Any) -> Any:
        if operation == "list_objects_v2":
            asked.append((parameters["Prefix"], parameters.get("ContinuationToken", "")))
            parameters["MaxKeys"] = PAGE
        return await call(self, operation, **parameters)

    monkeypatch.setattr(S3Client, "call", counted)
    prepared = planned(open_store(url, QUICK), now=time.time() + 60)
    assert len(prepared.plan.drop) == STEPS - 2
    assert all(d.entry.contents is not None for d in prepared.plan.drop)
    pages = -(-FILES // PAGE)
    for step in range(1, STEPS + 1):
        mine = [token for prefix, token in asked if prefix == f"many-keys/step-{step}/"]
        kept = step > STEPS - 2  # those are opened, and so listed again
        assert len(mine) == pages * (2 if kept else 1)
    assert len(asked) < (STEPS + 2) * pages + 18


@pytest.mark.parametrize("step", ["/step-2", "@2"])
def test_one_step_is_listed_alone(
    moto: S3Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: str
) -> None:
    """Whatever lies beside it."""
    moto.enter(monkeypatch)
    save_dcp(tmp_path / "step")
    call = S3Client.call
    asked: list[str] = []

    async def counted(self: S3Client, operation: str, **parameters: Any) -> Any:
        asked.append(operation)
        return await call(self, operation, **parameters)

    monkeypatch.setattr(S3Client, "call", counted)
    needed = []
    for steps in (4, 9):
        folder = f"alone-{steps}-{len(step)}"
        for number in range(1, steps + 1):
            for file in (tmp_path / "step").iterdir():
                moto.put(f"{folder}/step-{number}/{file.name}", file.read_bytes())
        asked.clear()
        (row,) = ftckpt.ls(f"s3://{BUCKET}/{folder}{step}", stores=QUICK)
        assert (row.step, row.entry_class) == (2, "COMMITTED")
        assert row.path == f"s3://{BUCKET}/{folder}/step-2"
        needed.append(len(asked))
    assert needed[0] == needed[1]
