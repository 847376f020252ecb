"""moto: a mock of S3, for archive tiers, which no server here can be made to show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.servers.s3 import S3Service


@contextmanager
def moto_server() -> Iterator[S3Service]:
    """Run it in threads of this process and yield how to reach it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3Service(f"http://{host}:{port}", "testing", "testing")
    finally:
        server.stop()
