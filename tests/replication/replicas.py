"""Make, seal and look at replicas."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ftckpt.checkpoint import Checkpoint
from ftckpt.discovery.resolve import files_at, open_source, open_target
from ftckpt.formats.catalog import FORMATS
from ftckpt.manifest.seal import seal
from ftckpt.replication.copy import CopyReport, copy
from ftckpt.replication.options import ReplicationOptions
from ftckpt.replication.repair import RepairReport, repair, settle
from ftckpt.storage import StoreOptions
from ftckpt.verification import Level, VerifyOptions, verify
from ftckpt.workers import Work

STORES = StoreOptions(retry_seconds=5)
# The file with tensors of more than a block, and a byte inside of one of its records.
VICTIM, INSIDE = "__0_1.distcp", 20_000


def opened(path: Path | str) -> Checkpoint:
    return open_target(str(path), FORMATS, STORES).open()


def sealed(path: Path) -> Path:
    seal(opened(path))
    return path


def copied(
    source: Path | str, destination: Path | str, *, jobs: int = 2, **options: Any
) -> CopyReport:
    """Copy, from a fresh listing."""
    how = ReplicationOptions(Work(threads=jobs), **options)
    return copy(opened(source), str(destination), options=how, stores=STORES)


def repaired(
    path: Path | str,
    replica: Path | str,
    *,
    to: str = "",
    dry_run: bool = False,
    jobs: int = 2,
    **options: Any,
) -> RepairReport:
    """Repair, from fresh listings."""
    settle(files_at(str(path), FORMATS, STORES))
    return repair(
        files_at(str(path), FORMATS, STORES),
        files_at(str(replica), FORMATS, STORES),
        opened=partial(open_source, formats=FORMATS),
        to=to,
        dry_run=dry_run,
        options=ReplicationOptions(Work(threads=jobs), **options),
        stores=STORES,
    )


def state(path: Path) -> Mapping[str, object]:
    """Everything that a write would change."""
    return {
        str(p.relative_to(path)): (p.read_bytes(), p.lstat().st_mtime_ns, p.lstat().st_ino)
        for p in sorted(path.rglob("*"))
        if p.is_file()
    }


def contents(path: Path) -> Mapping[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def require_good(path: Path | str) -> None:
    """Verify every byte by the manifest."""
    checks = VerifyOptions(level=Level.CONTENT, require_content=True)
    report = verify(opened(path), checks)
    assert report.code == 0, report.message
    assert report.evidence == "manifest"


def flip(path: Path, at: int) -> None:
    """Flip one bit, and leave the times as they were."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class KilledError(BaseException):
    """The process is gone."""


@contextmanager
def killed(
    patch: pytest.MonkeyPatch, point: int, owners: Mapping[type[Any], tuple[str, ...]]
) -> Iterator[Callable[[], int]]:
    """End at the `point`-th change of a store; nothing can be changed afterwards, as by `kill -9`.

    Yields what tells how many changes were let through.
    """
    done = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            nonlocal done
            if done + 1 >= point:
                raise KilledError
            done += 1
            return real(*args, **named)

        return call

    with patch.context() as context:
        for owner, names in owners.items():
            for name in names:
                context.setattr(owner, name, counted(getattr(owner, name)))
        yield lambda: done
