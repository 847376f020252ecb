"""All of Swift in one process: `python -P one_process.py ETC PORT ACCOUNT CONTAINER OBJECT`.

A small request costs Swift 7 to 15 ms of processor time, and half of it is what lies between its
servers: a TCP connection for each question that one asks another, a round trip to memcached for
each thing that it remembers, and threads for a disk that here is memory. So the proxy listens, and
the servers behind it get one end of a pair of sockets; what is remembered is in this process.
Pipelines, requests, answers and files are Swift's own, and each server still waits for the others
where it would.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

KINDS = ("account", "container", "object")
_peers = itertools.count(1)


class Memory:
    """What Swift asks of memcached, as it answers: values go through JSON, and none expires."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: Any, **_: Any) -> None:
        self._values[key] = json.dumps(value)

    def get(self, key: str, **_: Any) -> Any:
        value = self._values.get(key)
        return None if value is None else json.loads(value)

    def set_multi(self, mapping: dict[str, Any], *_: Any, **__: Any) -> None:
        for key, value in mapping.items():
            self.set(key, value)

    def get_multi(self, keys: list[str], *_: Any, **__: Any) -> list[Any]:
        return [self.get(key) for key in keys]

    def delete(self, key: str, **_: Any) -> None:
        self._values.pop(key, None)


def _connect_to(servers: dict[int, Any]) -> None:
    """Let Swift ask what listens on a port of `servers` through a pair of sockets."""
    import eventlet
    from eventlet import greenio, patcher
    from swift.common import bufferedhttp

    pair = patcher.original("socket").socketpair

    def connect(self: Any) -> None:
        self._connected_time = time.time()
        ours, theirs = map(greenio.GreenSocket, pair())
        server = servers[self.port]
        theirs.settimeout(server.socket_timeout)
        # An address that no other connection has, "idle" as a new one is.
        eventlet.spawn_n(
            server.process_request, [("127.0.0.1", next(_peers)), theirs, eventlet.wsgi.STATE_IDLE]
        )
        self.sock = ours

    bufferedhttp.BufferedHTTPConnection.connect = connect


def main(etc: str, port: str, *behind: str) -> None:
    """Serve S3 on a port of loopback until this process is ended."""
    os.environ.update(TZ="UTC+0", EVENTLET_THREADPOOL_SIZE="0")
    time.tzset()
    import eventlet
    import eventlet.wsgi
    from swift.common import utils, wsgi
    from swift.common.http_protocol import SwiftHttpProtocol
    from swift.common.middleware import memcache

    eventlet.hubs.use_hub(wsgi.get_hub())
    utils.monkey_patch()
    utils.set_swift_dir(etc)
    memory = Memory()
    memcache.load_memcache = lambda conf, logger: memory
    utils.FALLOCATE_RESERVE, utils.FALLOCATE_IS_PERCENT = 0, False
    settings = {
        "protocol": SwiftHttpProtocol,
        "socket_timeout": 60.0,
        "capitalize_response_headers": False,
    }
    log = utils.NullLogger()
    servers: dict[int, Any] = {}
    for kind, number in zip(KINDS, map(int, behind), strict=True):
        app = wsgi.loadapp(str(Path(etc) / f"{kind}.conf"), global_conf={"log_name": kind})
        servers[number] = eventlet.wsgi.Server(None, None, app, log, **settings)
    _connect_to(servers)
    conf = str(Path(etc) / "proxy.conf")
    app = wsgi.loadapp(conf, global_conf={"log_name": "proxy"}, allow_modify_pipeline=False)
    gc.collect()
    gc.freeze()
    listening = eventlet.listen(("127.0.0.1", int(port)), backlog=128)
    eventlet.wsgi.server(listening, app, log, **settings)


if __name__ == "__main__":
    main(*sys.argv[1:])
