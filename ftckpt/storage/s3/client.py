"""One S3 client: its configuration, and the counting and retrying of requests.

s3fs gives the session (profiles, environment, refreshing credentials) and the event loop. Requests
use its aiobotocore client, because s3fs' own calls hide statuses (a failed condition is EINVAL),
retry without limits of ours, and cache listings.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

from ftckpt.errors import UnavailableError
from ftckpt.storage.options import StoreOptions
from ftckpt.storage.retry import Backoff

from .body import PartBody, unless_stalled
from .errors import is_transient, translate
from .fast_reads import FastReads

T = TypeVar("T")

PARALLEL = 16


@lru_cache(maxsize=1)
def _loader() -> Any:
    """Return the loader of S3's API description, shared because it takes 100 ms per client."""
    from botocore.loaders import create_loader

    return create_loader()


def read_time(value: Any) -> datetime:
    """Parse a time of an answer; botocore's way takes three quarters of a listing's time."""
    from botocore.utils import parse_timestamp

    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError):  # headers spell times differently
        found: datetime = parse_timestamp(value)
        return found


class S3Client:
    """Requests to one S3 service; safe to use from many threads."""

    def __init__(self, options: StoreOptions) -> None:
        import s3fs
        from aiobotocore.session import AioSession
        from botocore.handlers import add_expect_header
        from fsspec.asyn import get_loop

        self.requests = 0
        # Whether damaged bodies are refused; None before the probe.
        self.refuses_damage: bool | None = None
        self.asking = threading.Lock()
        self.bytes_read = 0
        self.options = options
        self.fast = FastReads(options, PARALLEL)
        self._loop: asyncio.AbstractEventLoop = get_loop()
        self._slots = asyncio.Semaphore(PARALLEL)
        session = AioSession(profile=options.profile or None)
        session.register_component("data_loader", _loader())
        # aiohttp waits forever for the "100 Continue" of a service or proxy that sends none.
        session.unregister("before-call.s3", add_expect_header)
        parsers = session.get_component("response_parser_factory")
        parsers.set_parser_defaults(timestamp_parser=read_time)
        self._fs = s3fs.S3FileSystem(
            anon=options.anonymous,
            endpoint_url=options.endpoint or None,
            client_kwargs={"region_name": options.region} if options.region else {},
            config_kwargs={
                "connect_timeout": min(10.0, options.timeout),
                "read_timeout": options.timeout,
                "max_pool_connections": 2 * PARALLEL,
                # We count and limit every attempt ourselves.
                "retries": {"total_max_attempts": 1, "mode": "standard"},
                # Imitations send the whole object's checksum with a range, and refuse trailing
                # ones; our uploads are signed, and reads are checked against our own digests.
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
            use_listings_cache=False,
            skip_instance_cache=True,
            default_cache_type="none",
            session=session,
        )

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop and return its result; cancel it if we are stopped."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def once(self, operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """Send one request once and return the parsed answer; raises botocore's exceptions."""
        async with self._slots:
            client = await self._fs.set_session()
            self.requests += 1
            return await self._ask(client, operation, parameters)

    async def attempt(
        self, once: Callable[[Any], Awaitable[T]], *, url: str, file: str, doing: str
    ) -> T:
        """Await `once(client)`, retrying transient failures.

        Raises:
            UnavailableError: it still failed at the end of `StoreOptions.retry_seconds`.
            FtckptError: any other failure, by `s3.errors.translate`.
        """
        backoff = Backoff(self.options.retry_seconds)
        while True:
            try:
                async with self._slots:
                    client = await self._fs.set_session()
                    self.requests += 1
                    return await once(client)
            except Exception as error:
                if not is_transient(error):
                    raise translate(error, url, file, doing) from error
                wait = backoff.pause()
                if wait is None:
                    said = str(error) or type(error).__name__
                    raise UnavailableError(
                        f"cannot {doing} {url}: {said} ({backoff.attempts} attempts)",
                        hint="try again later, or check the endpoint and the network",
                        file=file,
                    ) from error
            await asyncio.sleep(wait)

    async def call(
        self, operation: str, *, url: str, file: str, doing: str, **parameters: Any
    ) -> dict[str, Any]:
        """Send one request and return the parsed answer, which has no streamed body.

        A `Body` among the parameters is sent without a copy and must not change meanwhile.
        """
        parameters = self.payer(parameters)

        async def once(client: Any) -> dict[str, Any]:
            return await self._ask(client, operation, parameters)

        return await self.attempt(once, url=url, file=file, doing=doing)

    async def _ask(self, client: Any, operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
        request = getattr(client, operation)
        answer: dict[str, Any]
        if "Body" not in parameters:
            answer = await request(**parameters)
            return answer
        body = PartBody(memoryview(parameters["Body"]))
        sent = request(**parameters | {"Body": body})
        answer = await unless_stalled(sent, body, self.options.timeout)
        return answer

    def payer(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Add the requester-pays parameter if it is set."""
        if self.options.requester_pays:
            return parameters | {"RequestPayer": "requester"}
        return parameters


async def gather(*work: Awaitable[T]) -> list[T]:
    """Await all; on the first failure cancel the rest and raise it."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
