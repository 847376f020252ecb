"""Reading leaves the page cache as it was: what was cached stays, what only we brought in goes."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from ftckpt.storage import open_store
from ftckpt.storage.local import pagecache


def refuse_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files be on a filesystem that knows no flags of a read."""
    read = os.preadv

    def refuse(fd: int, views: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return read(fd, views, offset)

    monkeypatch.setattr(os, "preadv", refuse)


def has_cachestat() -> bool:
    """Say whether this system can tell what is cached."""
    with tempfile.TemporaryFile() as file:
        file.write(b"x")
        file.flush()
        return pagecache.is_cached(file.fileno(), 0, 1)


class TestPageCache:
    """Pages that were cached stay, pages that only we brought in go."""

    size = 8 << 20

    @pytest.fixture
    def half_cached(self, tmp_path: Path) -> tuple[Path, int]:
        """Return a file whose second and last quarters alone are cached, and a descriptor."""
        path = tmp_path / "big"
        path.write_bytes(os.urandom(self.size))
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if sum(pagecache.resident_pages(fd, 0, self.size)):
            os.close(fd)
            pytest.skip("this filesystem lives in the page cache")
        quarter = self.size // 4
        os.pread(fd, quarter, quarter)
        os.pread(fd, quarter, 3 * quarter)
        return path, fd

    @pytest.mark.parametrize(
        ("dontcache", "cachestat"), [(True, True), (False, True), (False, False)]
    )
    def test_reading_leaves_it_as_it_was(
        self, half_cached: tuple[Path, int], monkeypatch: pytest.MonkeyPatch,
        dontcache: bool, cachestat: bool,
    ) -> None:  # fmt: skip
        path, fd = half_cached
        if dontcache and not pagecache._has_dontcache():
            pytest.skip("needs Linux 6.16")
        if not cachestat:
            monkeypatch.setattr(pagecache, "_CACHESTAT", -1)
        monkeypatch.setattr(pagecache, "_has_dontcache", lambda: dontcache)
        before = pagecache.resident_pages(fd, 0, self.size)
        content = bytearray()
        with open_store(str(path.parent)).open(path.name) as reader:
            for offset in range(0, self.size, 1 << 20):
                content += reader.read(offset, 1 << 20)
        after = pagecache.resident_pages(fd, 0, self.size)
        os.close(fd)
        assert content == path.read_bytes()
        lost = sum(b and not a for b, a in zip(before, after, strict=True))
        gained = sum(a and not b for b, a in zip(before, after, strict=True))
        assert lost <= 8  # the kernel may reclaim a page by itself
        assert gained == 0

    def test_refused_flag_falls_back(
        self, half_cached: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, fd = half_cached
        os.close(fd)
        monkeypatch.setattr(pagecache, "_has_dontcache", lambda: True)
        refuse_flags(monkeypatch)
        with open_store(str(path.parent)).open(path.name) as reader:
            assert reader.read(0, self.size) == path.read_bytes()

    def test_what_is_all_cached_is_not_mapped_to_learn_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every thread of a process waits for an unmapping."""
        if not has_cachestat():
            pytest.skip("needs Linux 6.5")
        path = tmp_path / "big"
        path.write_bytes(os.urandom(self.size))

        def mapped(*args: object) -> bytes:
            raise AssertionError("it was mapped")

        refuse_flags(monkeypatch)
        monkeypatch.setattr(pagecache, "in_memory", lambda fd: False)
        monkeypatch.setattr(pagecache, "resident_pages", mapped)
        with open_store(str(tmp_path)).open("big") as reader:
            found = b"".join(reader.read(at, 1 << 20) for at in range(0, self.size, 1 << 20))
        assert found == path.read_bytes()

    def test_what_is_cached_is_read_and_nothing_else(
        self, half_cached: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A read that may not wait would begin to read ahead."""
        if not has_cachestat():
            pytest.skip("needs Linux 6.5")
        path, fd = half_cached
        quarter = self.size // 4
        view = memoryview(bytearray(quarter))
        asked: list[int] = []
        read = os.preadv

        def preadv(fd: int, views: list[memoryview], offset: int, flags: int = 0) -> int:
            asked.append(offset)
            return read(fd, views, offset, flags)

        monkeypatch.setattr(os, "preadv", preadv)
        for offset in (0, quarter // 2, self.size - 9):
            assert not pagecache.read_cached(fd, offset, view)
        assert pagecache.read_cached(fd, quarter, view)
        os.close(fd)
        assert asked == [quarter]
        assert view == path.read_bytes()[quarter : 2 * quarter]

    def test_what_is_cached_is_read_where_the_filesystem_refuses_flags(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As those over a network do, which a job's checkpoints lie on."""
        if not has_cachestat():
            pytest.skip("needs Linux 6.5")
        path = tmp_path / "big"
        path.write_bytes(os.urandom(self.size))
        refuse_flags(monkeypatch)
        monkeypatch.setattr(pagecache, "in_memory", lambda fd: False)
        view = memoryview(bytearray(self.size))
        with path.open("rb") as file:
            assert pagecache.read_cached(file.fileno(), 0, view)
        assert view == path.read_bytes()

    def test_a_file_in_memory_is_asked_nothing(
        self, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = os.urandom(self.size)
        (tmpfs / "big").write_bytes(data)
        asked: list[str] = []
        for name in ("_cachestat", "resident_pages"):
            monkeypatch.setattr(pagecache, name, lambda *_, name=name: asked.append(name))
        monkeypatch.setattr(os, "posix_fadvise", lambda *_: asked.append("advice"))
        with open_store(str(tmpfs)).open("big") as reader:
            found = b"".join(reader.read(at, 1 << 20) for at in range(0, self.size, 1 << 20))
        assert found == data
        assert asked == []
