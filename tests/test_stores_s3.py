"""S3 through a real server: what only S3 can do or get wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftckpt.stores import open_store
from tests.servers.s3 import upload_tree

pytestmark = pytest.mark.s3


def test_uploaded_tree_is_listed(tmp_path: Path, s3_url: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.bin").write_bytes(b"bb")
    (tmp_path / "a").write_bytes(b"a")
    upload_tree(tmp_path, s3_url)
    assert [(e.path, e.size) for e in open_store(s3_url).walk()] == [("a", 1), ("sub/b.bin", 2)]
