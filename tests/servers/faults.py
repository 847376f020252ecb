"""A proxy on loopback that breaks chosen answers of a service, as networks and services do."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Fault:
    """What happens to the requests whose `METHOD path?query` matches.

    Attributes:
        match: regular expression.
        times: how many requests it hits; the others pass.
        status: answer with this status instead of asking the service.
        code: S3 error code in that answer.
        cut: what happens to the answer at byte `at` of its body: `close`, `reset` or `stall` of
            the connection, `flip` of one bit; `lose` resets before anything of it is sent.
        at: see `cut`.
        no_range: hide the range from the service, which then answers 200 with everything.
    """

    match: str
    times: int = 1
    status: int = 0
    code: str = "SlowDown"
    cut: Literal["", "close", "reset", "stall", "flip", "lose"] = ""
    at: int = 0
    no_range: bool = False


@dataclass
class FaultProxy:
    """A running proxy: set `faults`, then read `log` (request lines) and `heads`."""

    host: str
    port: int
    endpoint: str = ""
    faults: list[Fault] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)

    def seen(self, match: str) -> int:
        """Return how many requests matched."""
        return sum(bool(re.search(match, line)) for line in self.log)

    def _fault(self, line: str) -> Fault:
        for fault in self.faults:
            if fault.times > 0 and re.search(fault.match, line):
                fault.times -= 1
                return fault
        return Fault("")

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, for one request."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            line = head.split(b"\r\n", 1)[0].decode().rsplit(" ", 1)[0]
            fault = self._fault(line)
            self.log.append(line)
            self.heads.append(head.decode("latin-1"))
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            if fault.status:
                if length and b"100-continue" not in head.lower():
                    await reader.readexactly(int(length[1]))
                body = b"<Error><Code>%s</Code></Error>" % fault.code.encode()
                writer.write(
                    b"HTTP/1.1 %d Injected\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
                    % (fault.status, len(body))
                )
                writer.write(b"" if line.startswith("HEAD") else body)
                await writer.drain()
            else:
                await self._forward(fault, head, reader, writer)
        with contextlib.suppress(OSError):
            writer.close()
            await writer.wait_closed()

    async def _forward(
        self,
        fault: Fault,
        head: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if fault.no_range:
            head = re.sub(rb"(?im)^range: *[^\r]*\r\n", b"", head)
        head = re.sub(rb"(?im)^connection: *[^\r]*\r\n", b"", head)
        up_reader, up_writer = await asyncio.open_connection(self.host, self.port)
        up_writer.write(head[:-2] + b"Connection: close\r\n\r\n")
        upload = asyncio.ensure_future(_copy(reader, up_writer))
        try:
            answer = await up_reader.readuntil(b"\r\n\r\n")
            while answer.startswith(b"HTTP/1.1 100"):
                writer.write(answer)
                answer = await up_reader.readuntil(b"\r\n\r\n")
            if fault.cut == "lose":
                await up_reader.read(-1)
                _reset(writer)
                return
            writer.write(answer)
            await self._body(fault, up_reader, writer)
        finally:
            upload.cancel()
            up_writer.close()

    async def _body(
        self, fault: Fault, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        passed = 0
        while data := await source.read(1 << 16):
            hit = bool(fault.cut) and passed <= fault.at < passed + len(data)
            if hit and fault.cut == "flip":
                broken = bytearray(data)
                broken[fault.at - passed] ^= 1
                data = bytes(broken)
            elif hit:
                target.write(data[: fault.at - passed])
                await target.drain()
                if fault.cut == "stall":
                    await asyncio.sleep(60)
                if fault.cut == "reset":
                    await asyncio.sleep(0.05)
                    _reset(target)
                return
            target.write(data)
            await target.drain()
            passed += len(data)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 18):
            target.write(data)
            await target.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextmanager
def fault_proxy(endpoint: str) -> Iterator[FaultProxy]:
    """Run a proxy before `http://host:port` in a thread of this process."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    proxy = FaultProxy(host, int(port))
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0, limit=1 << 20)
        proxy.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def run() -> None:
        loop.run_until_complete(serve())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
