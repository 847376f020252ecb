"""Bulk reads past the event loop: a range comes by a plain connection, straight into its place.

aiobotocore handles every chunk of a body in Python, on one thread. Here a thread of its own sends
the same signed request and lets the system copy the body into the caller's memory, without the
interpreter's lock: half the processor time a gigabyte, and as many cores as there are threads.

Only the plain case is done here: an answer with the range that was asked for. Whatever else comes
(a refusal, a redirect, a broken connection) the ordinary client asks for again, so that waiting,
limits, errors and their messages are that one's.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import weakref
from concurrent.futures import Executor
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.storage.options import StoreOptions

if TYPE_CHECKING:
    from http.client import HTTPConnection

LEAST = 256 << 10  # bytes of a range that is worth it
_PIECE = 1 << 20  # bytes after which a reader looks whether it is still wanted
_FAILURES = 3  # in a row, after which it is not tried any more
_CONNECT = 10.0  # seconds


class AnsweredRange(NamedTuple):
    """What an answer says that it holds, by the names of aiobotocore's answers."""

    etag: str | None
    said: dict[str, Any]


class FastReads:
    """Reads ranges of the objects of one service; asked on the event loop alone.

    Args:
        options: how to reach it.
        threads: number of ranges that are read at a time.
    """

    def __init__(self, options: StoreOptions, threads: int) -> None:
        self._options = options
        self._threads = threads
        self._left = _FAILURES
        self._place: _Service | None = None

    def takes(self, length: int) -> bool:
        """Say whether a range of this length should be read here."""
        return self._left > 0 and length >= LEAST

    async def begin(self, client: Any, bucket: str, key: str, first: int, last: int) -> Body:
        """Ask for bytes `first` to `last` of an object, the last included.

        Args:
            client: of aiobotocore, with the endpoint and the credentials.
            bucket: of the object.
            key: of the object.
            first: the first byte.
            last: the last one.

        Raises:
            Exception: anything; the ordinary client is to be asked.
        """
        try:
            if self._place is None:
                self._place = _Service(client, self._options, self._threads)
            headers: dict[str, str] = {"Range": f"bytes={first}-{last}"}
            if self._options.requester_pays:
                headers["x-amz-request-payer"] = "requester"
            path = self._place.path(bucket, key)
            await self._place.sign(client, path, headers)
            body = await self._place.ask(path, headers)
        except Exception:
            self._left -= 1
            raise
        self._left = _FAILURES
        return body


class Body:
    """The body of one answer, which nobody has read yet.

    Args:
        service: whose it is.
        connection: on which it comes.
        answer: of http.client.

    Attributes:
        range: what the answer says that it holds.
    """

    def __init__(self, service: _Service, connection: HTTPConnection, answer: Any) -> None:
        self.range = AnsweredRange(
            answer.getheader("ETag"),
            {"ContentRange": answer.getheader("Content-Range"), "ContentLength": answer.length},
        )
        self._service, self._connection, self._answer = service, connection, answer
        self._unwanted = threading.Event()
        self._begun = False

    async def fill(self, view: memoryview) -> int:
        """Put the body into a view; return how many bytes came. It cannot be read again.

        Cancelled, it returns when no thread writes into the view any more.
        """
        self._begun = True
        filling = asyncio.wrap_future(self._service.threads.submit(self._fill, view))
        try:
            return await asyncio.shield(filling)
        except asyncio.CancelledError:
            self._unwanted.set()
            _hang_up(self._connection)
            with suppress(Exception):
                await filling
            raise

    def close_unread(self) -> None:
        """Give the body up if nobody has asked for it."""
        if not self._begun:
            self._let_go()

    def _fill(self, view: memoryview) -> int:
        done = 0
        with suppress(OSError, ValueError):  # how far it came says the rest
            while done < len(view) and not self._unwanted.is_set():
                got = self._answer.readinto(view[done : done + _PIECE])
                if not got:
                    break
                done += got
        if done == len(view) and not self._answer.length:
            self._answer.read()
            self._service.keep(self._connection)
        else:
            self._let_go()
        return done

    def _let_go(self) -> None:
        self._answer.close()  # it holds the socket too
        self._connection.close()


class _Service:
    """Connections to the endpoint that a client of aiobotocore has found.

    Raises:
        ConnectionError: it is behind a proxy, or another signature is asked for.
    """

    def __init__(self, client: Any, options: StoreOptions, threads: int) -> None:
        from http.client import HTTPConnection
        from urllib.parse import urlsplit
        from urllib.request import getproxies, proxy_bypass

        from ftckpt.workers.threads import DaemonThreads

        url = urlsplit(str(client.meta.endpoint_url))
        config = client.meta.config
        behind = url.scheme in getproxies() and not proxy_bypass(url.hostname or "")
        version = getattr(config, "signature_version", "")
        plain = options.anonymous or version in ("s3v4", None)
        styled = (getattr(config, "s3", None) or {}).get("addressing_style") == "virtual"
        if behind or config.proxies or config.client_cert or styled or not plain:
            raise ConnectionError("only the ordinary client can ask this service")
        self.threads: Executor = DaemonThreads(threads)
        # Who forgets a store closes it: neither connections nor threads stay.
        weakref.finalize(self, _end, self.threads, free := list[HTTPConnection]())
        self._url = url
        self._timeout = options.timeout
        self._anonymous = options.anonymous
        self._free = free
        self._lock = threading.Lock()

    def path(self, bucket: str, key: str) -> str:
        """Return how a request names an object."""
        from botocore.utils import percent_encode

        return f"{self._url.path.rstrip('/')}/{bucket}/{percent_encode(key, safe='/~')}"

    async def sign(self, client: Any, path: str, headers: dict[str, str]) -> None:
        """Add to the headers of a request what proves whose it is."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest

        if self._anonymous:
            return
        found = client._request_signer._credentials
        if found is None:
            raise ConnectionError("there are no credentials")
        frozen = await found.get_frozen_credentials()
        request = AWSRequest("GET", f"{self._url.scheme}://{self._url.netloc}{path}", headers)
        request.context["signing"] = {}
        region = client.meta.region_name or "us-east-1"
        S3SigV4Auth(frozen, "s3", region).add_auth(request)
        headers.update(request.headers.items())

    async def ask(self, path: str, headers: dict[str, str]) -> Body:
        """Send a request and return its body; raises where it is not the range."""
        asking = asyncio.wrap_future(self.threads.submit(self._ask, path, headers))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(_give_up)
            raise

    def keep(self, connection: HTTPConnection) -> None:
        """Take a connection back on which another request can be sent."""
        with self._lock:
            self._free.append(connection)

    def _ask(self, path: str, headers: dict[str, str]) -> Body:
        from http.client import HTTPException

        with self._lock:
            connection = self._free.pop() if self._free else None
        if connection is not None:
            try:
                return self._sent(connection, path, headers)
            except (OSError, HTTPException):  # the service had closed it meanwhile
                connection.close()
        return self._sent(self._connected(), path, headers)

    def _sent(self, connection: HTTPConnection, path: str, headers: dict[str, str]) -> Body:
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
        except BaseException:
            connection.close()
            raise
        body = Body(self, connection, answer)
        if answer.status not in (200, 206) or answer.getheader("Content-Encoding"):
            body.close_unread()
            raise _OtherAnswer(answer.status)
        return body

    def _connected(self) -> HTTPConnection:
        from http.client import HTTPConnection, HTTPSConnection

        host, port = self._url.hostname or "", self._url.port
        connection: HTTPConnection
        if self._url.scheme == "https":
            connection = HTTPSConnection(host, port, timeout=_CONNECT, context=_certificates())
        else:
            connection = HTTPConnection(host, port, timeout=_CONNECT)
        connection.connect()
        connection.sock.settimeout(self._timeout)
        return connection


class _OtherAnswer(Exception):
    """The service said something else than the range."""


def _give_up(asked: asyncio.Future[Body]) -> None:
    if not asked.cancelled() and asked.exception() is None:
        asked.result().close_unread()


def _end(threads: Executor, free: list[HTTPConnection]) -> None:
    threads.shutdown(wait=False)
    for connection in free:
        connection.close()


def _hang_up(connection: HTTPConnection) -> None:
    """Wake a thread that waits for bytes of a connection."""
    if connection.sock is not None:
        with suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


@cache
def _certificates() -> Any:
    """Return whom to trust, as botocore does."""
    import os
    import ssl

    from botocore.httpsession import get_cert_path

    given = os.environ.get("AWS_CA_BUNDLE") or os.environ.get("REQUESTS_CA_BUNDLE")
    return ssl.create_default_context(cafile=given or get_cert_path(True))
