"""Local files: links, special files, faults of the system, killed writers."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import (
    DeniedError,
    ExistsError,
    FtckptError,
    IncompleteError,
    NoResourceError,
    NotFoundError,
    RefusedError,
    TruncatedError,
    UnavailableError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from ftckpt.own_files import is_leftover
from ftckpt.storage import open_store
from ftckpt.storage.local.store import LocalStore
from ftckpt.storage.source import Source
from ftckpt.storage.store import EntryKind
from tests.conformance.stores import Place, StoreTests


class TestLocalStore(StoreTests):
    @pytest.fixture
    def place(self, local_url: str) -> Place:
        root = Path(local_url)

        def put(path: str, data: bytes) -> None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)

        def get(path: str) -> bytes | None:
            return (root / path).read_bytes() if (root / path).exists() else None

        return Place(open_store(local_url), put, get)


def replaced(file: Path, content: bytes) -> None:
    """Rename another file of the same size and times over one, as a restore of a copy does."""
    known = file.stat()
    other = file.with_name("other")
    other.write_bytes(content)
    os.utime(other, ns=(known.st_atime_ns, known.st_mtime_ns))
    other.replace(file)


def test_what_was_opened_is_read_whole_when_a_longer_one_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"12")
    real = LocalStore.open

    def late(self: LocalStore, path: str) -> Any:
        reader = real(self, path)
        replaced(file, b"1234")
        return reader

    monkeypatch.setattr(LocalStore, "open", late)
    store = open_store(str(tmp_path))
    assert store.read("x") == b"12"
    assert store.read("x", 1) == b"234"


@pytest.fixture
def listed(tmp_path: Path) -> Source:
    (tmp_path / "x").write_bytes(b"123")
    return Source.directory(open_store(str(tmp_path)))


def test_a_file_renamed_over_another_is_seen(listed: Source, tmp_path: Path) -> None:
    assert listed.changed(["x"]) == []
    single = Source.file(listed.store, listed.store.stat("x"))
    replaced(tmp_path / "x", b"124")
    assert listed.changed(["x"]) == single.changed(["x"]) == ["x"]
    with pytest.raises(IncompleteError):
        listed.store.require_still(listed.entries["x"])
    (refused,) = listed.store.erase([listed.entries["x"]])
    assert isinstance(refused, RefusedError)
    assert (tmp_path / "x").read_bytes() == b"124"


def test_a_link_to_another_file_is_seen(tmp_path: Path) -> None:
    for name, content in (("one", b"123"), ("two", b"124")):
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").symlink_to(tmp_path / "one")
    listed = Source.directory(open_store(str(tmp_path / "a")))
    assert listed.changed(["x"]) == []
    (tmp_path / "a" / "new").symlink_to(tmp_path / "two")
    (tmp_path / "a" / "new").replace(tmp_path / "a" / "x")
    assert listed.changed(["x"]) == ["x"]


@pytest.mark.parametrize(
    "touch",
    [
        lambda x: os.link(x, x.with_name("y")),  # cp -al, rsync --link-dest, ftckpt repair
        lambda x: x.chmod(0o400),
        lambda x: x.rename(x.with_name("z")) and x.with_name("z").rename(x),
        lambda x: os.utime(x, ns=(0, x.stat().st_mtime_ns)),  # a backup that puts atime back
    ],
)
def test_what_leaves_the_content_is_no_change(
    listed: Source, tmp_path: Path, touch: Callable[[Path], object]
) -> None:
    touch(tmp_path / "x")
    now = listed.store.stat("x")
    assert now.inode != listed.entries["x"].inode
    assert listed.changed(["x"]) == []


def test_a_number_that_a_mount_gives_anew_is_no_change(listed: Source) -> None:
    """FUSE numbers files as they are asked for, and may forget that it did."""
    entry = listed.entries["x"]
    assert entry.inode is not None
    number, changed = entry.inode
    assert entry.same_version(entry._replace(inode=(number + 1, changed)))
    assert not entry.same_version(entry._replace(inode=(number + 1, changed + 1)))
    assert entry.same_version(entry._replace(inode=None))


def test_file_urls_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"1")
    assert open_store(f"file://{tmp_path}").read("x") == b"1"
    assert open_store(f"file://{tmp_path}").local_path("x") == str(tmp_path / "x")
    for scheme in ("FILE", "File", "LOCAL"):  # of no case: RFC 3986, 3.1
        assert open_store(f"{scheme}://{tmp_path}").local_path("x") == str(tmp_path / "x")
    with pytest.raises(UsageError, match="chains filesystems"):
        open_store("SimpleCache::S3://bucket/x")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~").read("x") == b"1"
    monkeypatch.chdir(tmp_path)
    assert [e.path for e in open_store(".").walk()] == ["x"]


def test_empty_directory_has_no_children(local_url: str) -> None:
    assert open_store(local_url).children() == []
    assert open_store(local_url).walk() == []


class TestLinks:
    @pytest.fixture
    def root(self, local_url: str) -> Path:
        root = Path(local_url)
        (root / "step-100").mkdir()
        (root / "step-100" / "w").write_bytes(b"123")
        return root

    def test_link_to_a_file_is_a_file(self, root: Path) -> None:
        (root / "l").symlink_to("step-100/w")
        entry = open_store(str(root)).stat("l")
        assert (entry.kind, entry.size, entry.link) == (EntryKind.FILE, 3, "step-100/w")
        assert entry in open_store(str(root)).walk()
        assert open_store(str(root)).read("l") == b"123"

    def test_link_to_a_directory_is_entered_only_when_asked_for(self, root: Path) -> None:
        (root / "latest").symlink_to("step-100")
        store = open_store(str(root))
        assert store.stat("latest").kind is EntryKind.DIRECTORY
        assert store.stat("latest").link == "step-100"
        assert [e.path for e in store.walk("latest")] == ["latest/w"]
        assert [(e.kind, e.link) for e in store.children() if e.path == "latest"] == [
            (EntryKind.DIRECTORY, "step-100")
        ]
        assert [(e.path, e.kind) for e in store.walk()] == [
            ("latest", EntryKind.SPECIAL),
            ("step-100/w", EntryKind.FILE),
        ]

    @pytest.mark.parametrize("target", ["nowhere", "loop", "step-100/w/x"])
    def test_links_to_nothing_are_special(self, root: Path, target: str) -> None:
        (root / "loop").symlink_to(target)
        store = open_store(str(root))
        entry = store.stat("loop")
        assert (entry.kind, entry.link) == (EntryKind.SPECIAL, target)
        assert entry in store.walk()
        with pytest.raises((NotFoundError, UnsafeError)):
            store.open("loop")

    def test_loop_of_directories_ends(self, root: Path) -> None:
        (root / "step-100" / "up").symlink_to("..")
        assert [e.path for e in open_store(str(root)).walk()] == ["step-100/up", "step-100/w"]

    def test_writing_never_follows(self, root: Path) -> None:
        (root / "l").symlink_to("step-100/w")
        (root / "dangling").symlink_to("made-by-create")
        store = open_store(str(root))
        with pytest.raises(ExistsError):
            store.create("dangling", b"new")
        assert not (root / "made-by-create").exists()
        store.put("l", b"new")
        assert (root / "step-100" / "w").read_bytes() == b"123"
        assert not (root / "l").is_symlink()

    def test_deleting_never_follows(self, root: Path) -> None:
        (root / "l").symlink_to("step-100/w")
        assert open_store(str(root)).delete(["l"]) == {"l": None}
        assert (root / "step-100" / "w").exists()


class TestSpecialFiles:
    def test_fifo_never_blocks(self, local_url: str) -> None:
        os.mkfifo(Path(local_url) / "f")
        store = open_store(local_url)
        assert [e.kind for e in store.walk()] == [EntryKind.SPECIAL]
        with pytest.raises(UnsafeError) as caught:
            store.open("f")
        assert caught.value.kind == "special-file"

    def test_fifo_that_appears_after_the_check(
        self, local_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = Path(local_url) / "f"
        path.write_bytes(b"1")
        status = path.stat()
        path.unlink()
        os.mkfifo(path)
        monkeypatch.setattr("ftckpt.storage.local.store.os.stat", lambda _: status)
        with pytest.raises(UnsafeError):
            open_store(local_url).open("f")

    def test_device(self, local_url: str) -> None:
        (Path(local_url) / "z").symlink_to("/dev/zero")
        store = open_store(local_url)
        assert [e.kind for e in store.walk()] == [EntryKind.SPECIAL]
        with pytest.raises(UnsafeError):
            store.open("z")

    def test_socket(self, local_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(local_url)
        with socket.socket(socket.AF_UNIX) as s:
            s.bind("s")
            with pytest.raises(UnsafeError):
                open_store(local_url).open("s")

    def test_directory_is_no_object(self, local_url: str) -> None:
        (Path(local_url) / "d").mkdir()
        with pytest.raises(NotFoundError):
            open_store(local_url).open("d")
        assert isinstance(open_store(local_url).delete(["d"])["d"], FtckptError)


def failing(code: int, times: int, then: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that fails with `code` the first `times` times."""
    left = times

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if left > 0:
            left -= 1
            raise OSError(code, os.strerror(code))
        return then(*args, **kwargs)

    return call


class TestFaults:
    @pytest.fixture
    def store(self, local_url: str) -> LocalStore:
        (Path(local_url) / "x").write_bytes(b"123")
        return LocalStore(local_url)

    def test_read_error_is_tried_once_more(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read = os.preadv
        with store.open("x") as reader:
            monkeypatch.setattr(os, "preadv", failing(errno.EIO, 1, read))
            assert reader.read(0, 3) == b"123"
            monkeypatch.setattr(os, "preadv", failing(errno.EIO, 2, read))
            with pytest.raises(UnavailableError):
                reader.read(0, 3)

    def test_short_reads_go_on(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        read = os.preadv
        with store.open("x") as reader:
            monkeypatch.setattr(os, "preadv", lambda fd, v, o, *f: read(fd, [v[0][:1]], o, *f))
            assert reader.read(0, 3) == b"123"

    def test_file_cut_short_while_open(self, store: LocalStore) -> None:
        with store.open("x") as reader:
            os.truncate(store.local_path("x"), 1)
            with pytest.raises(TruncatedError):
                reader.read(0, 3)

    @pytest.mark.parametrize(
        ("code", "error"),
        [
            (errno.ENOSPC, NoResourceError),
            (errno.EDQUOT, NoResourceError),
            (errno.EMFILE, NoResourceError),
            (errno.EACCES, DeniedError),
            (errno.EPERM, DeniedError),
            (errno.EROFS, DeniedError),
            (errno.EIO, UnavailableError),
            (errno.ESTALE, UnavailableError),
            (errno.ENAMETOOLONG, UnsupportedError),
        ],
    )
    @pytest.mark.parametrize("call", ["open", "write", "fsync", "rename"])
    def test_failed_put_changes_nothing(
        self,
        store: LocalStore,
        monkeypatch: pytest.MonkeyPatch,
        call: str,
        code: int,
        error: type[FtckptError],
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(
                f"ftckpt.storage.local.atomic.os.{call}", failing(code, 1, getattr(os, call))
            )
            with pytest.raises(error):
                store.put("x", b"new")
        assert Path(store.local_path("x")).read_bytes() == b"123"
        assert [e.path for e in store.walk()] == ["x"]

    def test_unreadable_directory_is_no_empty_one(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (Path(store.url) / "sub").mkdir()
        scan = os.scandir

        def refuse(path: str) -> Any:
            if path.endswith("sub"):
                raise PermissionError(errno.EACCES, "Permission denied")
            return scan(path)

        monkeypatch.setattr(os, "scandir", refuse)
        with pytest.raises(DeniedError):
            store.walk()

    def test_unreadable_file(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "open", failing(errno.EACCES, 1, os.open))
        with pytest.raises(DeniedError):
            store.open("x")

    def test_no_hard_links(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "link", failing(errno.EOPNOTSUPP, 1, os.link))
        with pytest.raises(UnsupportedError):
            store.create("new", b"1")
        assert [e.path for e in store.walk()] == ["x"]

    def test_link_whose_answer_was_lost_is_ours(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        link = os.link

        def link_twice(source: str, target: str, **kwargs: bool) -> None:
            link(source, target)
            link(source, target)

        monkeypatch.setattr(os, "link", link_twice)
        store.create("new", b"ours")
        assert store.read("new") == b"ours"


@pytest.mark.parametrize("call", ["rename", "link"])
def test_killed_between_writing_and_showing(local_url: str, call: str) -> None:
    script = f"""
import os, signal
from ftckpt.storage import open_store
os.{call} = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
open_store({local_url!r}).{"put" if call == "rename" else "create"}("x", b"1" * 1000)
"""
    ended = subprocess.run([sys.executable, "-c", script], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    store = open_store(local_url)
    (left,) = store.walk()
    assert is_leftover(left.path)
    assert not is_leftover("dir/x")
    store.create("x", b"2")
    assert store.read("x") == b"2"


def test_nothing_of_ours_outlives_the_main_thread(local_url: str) -> None:
    open_store(local_url).put("x", b"1")
    assert [t for t in threading.enumerate() if not t.daemon] == [threading.main_thread()]


def test_names_have_the_kinds_of_what_they_lead_to(local_url: str) -> None:
    root = Path(local_url)
    (root / "d").mkdir()
    (root / "f").write_text("12")
    os.mkfifo(root / "p")
    for link, target in (("to-d", "d"), ("to-f", "f"), ("to-nothing", "x"), ("to-p", "p")):
        (root / link).symlink_to(target)
    store = LocalStore(local_url)
    assert store.names() == {e.path: e.kind for e in store.children()}
    assert list(store.names()) == sorted(store.names())


def test_a_file_of_several_names_says_so(local_url: str) -> None:
    root = Path(local_url)
    (root / "a").write_text("12")
    assert LocalStore(local_url).stat("a").shared is None
    os.link(root / "a", root / "b")
    first, second = LocalStore(local_url).children()
    status = (root / "a").stat()
    assert first.shared == second.shared == (f"{status.st_dev}:{status.st_ino}", 2)
