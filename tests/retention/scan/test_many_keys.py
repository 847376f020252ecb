"""A root of many keys: every page of them is asked for once."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ftckpt.storage import open_store
from ftckpt.storage.s3.client import S3Client
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
        # Those that stay are opened, and so listed again. What they may lack is told by the names
        # of the steps beside them, once for each.
        kept = step > STEPS - 2
        assert pages <= len(mine) <= pages * (6 if kept else 5)
    assert len(asked) < (STEPS + 2) * pages + 18 + STEPS * 3 * pages
