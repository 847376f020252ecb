"""A memcached in forty lines: Swift answers two to three times faster with one beside it."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        while line := self.rfile.readline():
            words = line.split()
            if not words:
                continue
            self.wfile.write(self._answer(words))
            self.wfile.flush()

    def _answer(self, words: list[bytes]) -> bytes:
        verb, keys, values = words[0], words[1:], self.server.values
        if verb in (b"set", b"add"):
            data = self.rfile.read(int(words[4]) + 2)[:-2]
            with self.server.lock:
                if verb == b"add" and keys[0] in values:
                    return b"NOT_STORED\r\n"
                values[keys[0]] = (words[2], data)
            return b"STORED\r\n"
        if verb == b"get":
            found = [(k, *values[k]) for k in keys if k in values]
            items = (b"VALUE %s %s %d\r\n%s\r\n" % (k, f, len(d), d) for k, f, d in found)
            return b"".join(items) + b"END\r\n"
        if verb == b"delete":
            gone = values.pop(keys[0], None)
            return b"NOT_FOUND\r\n" if gone is None else b"DELETED\r\n"
        return b"NOT_FOUND\r\n" if verb in (b"incr", b"decr", b"touch") else b"ERROR\r\n"


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.values: dict[bytes, tuple[bytes, bytes]] = {}
        self.lock = threading.Lock()


@contextmanager
def memcache_server() -> Iterator[int]:
    """Run one in threads of this process and yield its port."""
    with _Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
