"""Stores through plain fsspec, as gs:// and az:// are: the suite, and how errors come."""

from __future__ import annotations

import itertools
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ftckpt.errors import (
    DeniedError,
    ExistsError,
    FtckptError,
    NotFoundError,
    TruncatedError,
    UnavailableError,
    UnsupportedError,
)
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.fsspec.store import FsspecStore
from ftckpt.storage.store import Store
from tests.conformance.stores import Place, StoreTests

_numbers = itertools.count()


class _Exclusive(MemoryFileSystem):  # type: ignore[misc]
    """fsspec's store in memory, with the exclusive write that gcsfs and adlfs have."""

    cachable = False

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        super().pipe_file(path, value, **kwargs)


class TestFsspecStore(StoreTests):
    atomic_race = False  # neither filesystem locks
    hidden_uploads = False  # this filesystem shows what is being written

    @pytest.fixture
    def filesystem(self) -> MemoryFileSystem:
        return _Exclusive()

    @pytest.fixture
    def place(self, filesystem: MemoryFileSystem) -> Place:
        url = f"memory://fsspec-{next(_numbers)}/p"
        base = url.removeprefix("memory:/")

        def put(path: str, data: bytes) -> None:
            MemoryFileSystem().pipe_file(f"{base}/{path}", data)

        def get(path: str) -> bytes | None:
            fs = MemoryFileSystem()
            name = f"{base}/{path}"
            return bytes(fs.cat_file(name)) if fs.exists(name) else None

        return Place(FsspecStore(url, filesystem, StoreOptions(retry_seconds=1)), put, get)

    def reopen(self, place: Place, path: str) -> Store:
        store = place.store
        assert isinstance(store, FsspecStore)
        return FsspecStore(store.describe(path), store._fs, StoreOptions())


class _Overwriting(MemoryFileSystem):  # type: ignore[misc]
    cachable = False

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value, **kwargs)


class TestFsspecStoreWithoutExclusiveWrites(TestFsspecStore):
    conditional_put = False

    @pytest.fixture
    def filesystem(self) -> MemoryFileSystem:
        return _Overwriting()


class _HttpError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"status {code}")
        self.code = code


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (_HttpError(404), NotFoundError),
        (_HttpError(403), DeniedError),
        (_HttpError(412), ExistsError),
        (_HttpError(416), TruncatedError),
        (_HttpError(501), UnsupportedError),
        (_HttpError(503), UnavailableError),
        (PermissionError("no"), DeniedError),
        (FileNotFoundError("no"), NotFoundError),
        (TimeoutError("slow"), UnavailableError),
        (RuntimeError("?"), UnavailableError),
    ],
    ids=lambda x: getattr(x, "__name__", repr(x)),
)
def test_no_foreign_exception_leaves(
    raised: Exception, expected: type[FtckptError], monkeypatch: pytest.MonkeyPatch
) -> None:
    filesystem = _Exclusive()
    store = FsspecStore("memory://broken", filesystem, StoreOptions(retry_seconds=0.3))
    calls = 0

    def fail(*_: Any, **__: Any) -> None:
        nonlocal calls
        calls += 1
        raise raised

    for name in ("info", "find", "pipe_file"):
        monkeypatch.setattr(filesystem, name, fail)
    for attempt in (store.walk, lambda: store.stat("x"), lambda: store.put("x", b"")):
        calls = 0
        with pytest.raises(expected):
            attempt()
        lasting = isinstance(raised, TimeoutError) or getattr(raised, "code", 0) == 503
        assert (calls > 1) is lasting


def test_a_server_that_does_not_answer_has_not_said_that_it_is_absent() -> None:
    with pytest.raises(UnavailableError) as caught:
        open_store("http://127.0.0.1:9/x", StoreOptions(retry_seconds=0)).stat("")
    assert "network" in caught.value.hint


@pytest.mark.parametrize(
    ("status", "expected"), [(404, NotFoundError), (403, DeniedError), (503, UnavailableError)]
)
def test_what_a_web_server_says(status: int, expected: type[FtckptError]) -> None:
    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refuse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/x"
        with pytest.raises(expected):
            open_store(url, StoreOptions(retry_seconds=0)).stat("")
        server.shutdown()


@pytest.mark.parametrize(
    ("url", "expected"),
    [("ftp://127.0.0.1:9/x", UnavailableError), ("github://x/y", UnsupportedError)],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_filesystem_that_cannot_be_made(url: str, expected: type[FtckptError]) -> None:
    with pytest.raises(expected, match="cannot reach"):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "module"),
    [
        ("gs://b/k", "gcsfs"),
        ("az://c/k", "adlfs"),
        ("abfs://c/k", "adlfs"),
    ],
)
def test_missing_package_names_the_line_that_installs_it(
    url: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnsupportedError) as caught:
        open_store(url)
    assert caught.value.hint == f"pip install {module}"
