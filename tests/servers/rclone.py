"""rclone's S3 server: a lookalike that ignores conditions and answers ranges with 200."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.process import free_ports, listens, running
from tests.servers.s3 import S3Service


@contextmanager
def rclone_server(root: Path) -> Iterator[S3Service]:
    """Run it over a directory and yield how to reach it."""
    (port,) = free_ports(1)
    (root / "data").mkdir()
    key, secret = "AKIATEST", "SECRETSECRET"
    command = [
        str(Path(sys.executable).parent / "rclone"),
        *("serve", "s3", str(root / "data")),
        *("--addr", f"127.0.0.1:{port}"),
        *("--auth-key", f"{key},{secret}"),
        *("--config", os.devnull),
    ]
    with running([command], root / "log", lambda: listens(port)):
        yield S3Service(f"http://127.0.0.1:{port}", key, secret)
