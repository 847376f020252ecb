"""Roots that a test may damage, and stores whose system calls fail."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands.golden import RUN
from tests.faults.place import Place
from tests.servers.faults import fault_proxy
from tests.servers.s3 import S3Service, upload_tree

SAVED = 1_700_000_000  # long ago, so that what is written in a test has another time


@pytest.fixture
def local(tmp_path: Path) -> Place:
    root = tmp_path / "run"
    shutil.copytree(RUN, root)
    for path in root.rglob("*"):
        os.utime(path, (SAVED, SAVED))
    return Place(str(root))


@pytest.fixture
def s3(swift: S3Service, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """The same root on a real S3 service, behind a proxy that can break its answers."""
    upload_tree(RUN, s3_url)
    with fault_proxy(swift.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        # A fault that lasts must not last as long as a user would wait.
        yield Place(s3_url, swift, proxy, ["--retry-seconds", "0.6"])


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest) -> Place:
    """The root on each back end."""
    found: Place = request.getfixturevalue(request.param)
    return found


Answer = Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], None]:
    """Return what puts a function between the local store and the operating system.

    It is given the name of a call of `os`, the call, and its arguments, and answers in its place.
    """
    from ftckpt.storage.local import atomic, pagecache
    from ftckpt.storage.local import store as local

    def install(answer: Answer) -> None:
        class System:
            def __getattr__(self, name: str) -> Any:
                call = getattr(os, name)
                if not callable(call):
                    return call
                return lambda *given, **named: answer(name, lambda *g: call(*g, **named), given)

        for module in (atomic, local, pagecache):
            monkeypatch.setattr(module, "os", System())

    return install
