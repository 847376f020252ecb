"""A proxy on loopback that breaks chosen answers of a service, as networks and services do."""

from __future__ import annotations

import re
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal


@dataclass
class Fault:
    """What happens to the requests whose `METHOD path?query` matches.

    Attributes:
        match: regular expression.
        times: how many requests it hits; the others pass.
        status: answer with this status instead of asking the service.
        code: S3 error code in that answer; empty for an empty body.
        cut: what happens to the answer at byte `at` of its body: `close`, `reset` or `stall` of
            the connection, `flip` of one bit; `lose` resets before anything of it is sent.
        at: see `cut`.
        sent: one bit of this byte of the request's body is flipped on the way.
        held: the request's body is not taken, as long as the client waits; see `FaultProxy.held`.
        whole: answer 200 with these bytes, whatever range was asked for.
        then: called before the request is passed on, for what happens meanwhile.
    """

    match: str
    times: int = 1
    status: int = 0
    code: str = "SlowDown"
    cut: Literal["", "close", "reset", "stall", "flip", "lose"] = ""
    at: int = 0
    sent: int | None = None
    held: bool = False
    whole: bytes = b""
    then: Callable[[], object] | None = None


class FaultProxy(socketserver.ThreadingTCPServer):
    """A running proxy: set `faults`, then read `log` (request lines) and `heads`.

    `held` is how many requests whose body was not taken waited for 60 s.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, host: str, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = (host, port)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.faults: list[Fault] = []
        self.log: list[str] = []
        self.heads: list[str] = []
        self.held = 0
        self.stopped = threading.Event()
        self._lock = threading.Lock()

    def seen(self, match: str) -> int:
        """Return how many requests matched."""
        return sum(bool(re.search(match, line)) for line in self.log)

    def note(self, head: str) -> Fault:
        """Log a request and return what happens to it."""
        line = head.split("\r\n", 1)[0].rsplit(" ", 1)[0]
        with self._lock:
            self.log.append(line)
            self.heads.append(head)
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.match, line):
                    fault.times -= 1
                    return fault
        return Fault("")


class _Handler(socketserver.StreamRequestHandler):
    """One connection, for one request."""

    server: FaultProxy
    timeout = 60

    def handle(self) -> None:
        try:
            self._serve()
        except OSError:
            return  # either side went away, which is what is being tested

    def _serve(self) -> None:
        head = "".join(iter(lambda: self.rfile.readline().decode("latin-1"), "\r\n"))
        if not head:
            return
        length = re.search(r"(?im)^content-length: *(\d+)", head)
        if re.search(r"(?im)^expect: *100-continue", head):
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        fault = self.server.note(head)
        if fault.held:
            self.server.held += not self.server.stopped.wait(60)
            return
        sent = self.rfile.read(int(length[1])) if length else b""
        if fault.then is not None:
            fault.then()
        if fault.sent is not None:
            sent = _flip(sent, fault.sent)
        if fault.whole:
            self.wfile.write(_answer(200, fault.whole))
        elif fault.status:
            body = f"<Error><Code>{fault.code}</Code></Error>" if fault.code else ""
            answer = _answer(fault.status, body.encode())
            if head.startswith("HEAD"):
                answer = answer.removesuffix(body.encode())
            self.wfile.write(answer)
        else:
            self._forward(fault, re.sub(r"(?im)^(connection|expect): *[^\r]*\r\n", "", head), sent)

    def _forward(self, fault: Fault, head: str, sent: bytes) -> None:
        with socket.create_connection(self.server.upstream, 60) as upstream:
            upstream.sendall(f"{head}Connection: close\r\n\r\n".encode("latin-1") + sent)
            with upstream.makefile("rb") as answer:
                lines = b"".join(iter(answer.readline, b"\r\n")) + b"\r\n"
                if fault.cut == "lose":
                    answer.read()
                    self._reset()
                    return
                self.wfile.write(lines)
                passed = 0
                while data := answer.read1(1 << 16):
                    if fault.cut and passed <= fault.at < passed + len(data):
                        data = self._cut(fault, data, fault.at - passed)
                        if not data:
                            return
                    self.wfile.write(data)
                    passed += len(data)

    def _cut(self, fault: Fault, data: bytes, at: int) -> bytes:
        """Break the answer at byte `at` of `data`; return what goes on, empty for the end."""
        if fault.cut == "flip":
            return _flip(data, at)
        self.wfile.write(data[:at])
        if fault.cut == "stall":
            self.server.stopped.wait(60)
        if fault.cut == "reset":
            self.server.stopped.wait(0.05)  # let the client read what came before
            self._reset()
        return b""

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


def _flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _answer(status: int, body: bytes) -> bytes:
    head = f'HTTP/1.1 {status} Injected\r\nETag: "e"\r\nContent-Length: {len(body)}\r\n'
    return f"{head}Connection: close\r\n\r\n".encode() + body


@contextmanager
def fault_proxy(endpoint: str) -> Iterator[FaultProxy]:
    """Run a proxy before `http://host:port` in threads of this process."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    with FaultProxy(host, int(port)) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield proxy
        finally:
            proxy.stopped.set()
            proxy.shutdown()
