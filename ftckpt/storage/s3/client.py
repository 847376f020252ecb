"""One S3 client: its configuration, and the counting and retrying of requests.

s3fs gives the session (profiles, environment, refreshing credentials) and the event loop. Requests
use its aiobotocore client, because s3fs' own calls hide statuses (a failed condition is EINVAL),
retry without limits of ours, and cache listings.

The bodies of parts: sent from memory without a copy, checked against a digest.

The signature of a request covers the SHA-256 of its body, and a service that compares the two
refuses a body that was damaged in transit. Most do; some that imitate S3 check neither. So ftckpt
probes the service with a deliberately damaged part. If it accepts that, the MD5 of every part is
compared with what it reports as stored: twice the work, and the only evidence then.

Map an S3 service's refusals: retry, or one of our errors.

Sources: the error code tables of the S3 API reference, and the answers of Ceph, Swift, MinIO and
rclone in the same situations.

Bucket and key of one S3 object.
"""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from ftckpt.errors import (
    DeniedError,
    FtckptError,
    NoResourceError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    UsageError,
)
from ftckpt.storage.options import StoreOptions
from ftckpt.storage.retry import Backoff

from .fast_reads import FastReads

T = TypeVar("T")


class PartBody(io.BytesIO):
    """A view as the file that botocore hashes and aiohttp sends; one for each attempt.

    aiohttp sends a BytesIO from the event loop and any other file through a thread, but copies the
    content of a real one to learn its length. The view must not change until the answer.
    """

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view = view
        self._at = 0

    def read(self, size: int | None = -1, /) -> Any:
        """Return a view of the next `size` bytes; of all that is left by default."""
        end = len(self._view) if size is None or size < 0 else self._at + size
        part = self._view[self._at : end]
        self._at += len(part)
        return part

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a place and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._at

    def getbuffer(self) -> memoryview:
        """Return the bytes."""
        return self._view[:]


class Damaged(PartBody):
    """A body with one byte that differs between hashing and sending."""

    def __init__(self) -> None:
        super().__init__(memoryview(b"0"))

    def read(self, size: int | None = -1, /) -> Any:
        """Return bytes that do not match the digest."""
        part = super().read(size)
        if not part:
            self._view = memoryview(b"1")
        return part


async def unless_stalled(answer: Awaitable[T], body: PartBody, seconds: float) -> T:
    """Await the answer to a request while its body is being sent.

    aiohttp counts seconds without a byte only after the end of the body: it would wait forever for
    a service that stops reading but holds the connection.

    Args:
        answer: of the service.
        body: of the request; nothing else reads it.
        seconds: maximum time without progress in the body.

    Raises:
        TimeoutError: no progress and no answer for that long.
    """
    asked = asyncio.ensure_future(answer)
    quiet = 0
    try:
        while True:
            before = body.tell()
            await asyncio.wait([asked], timeout=seconds)
            if asked.done():
                return asked.result()
            quiet = quiet + 1 if body.tell() == before else 0
            # aiohttp holds the last bytes, and then applies that timeout itself.
            if quiet > (before == len(body.getbuffer())):
                raise TimeoutError(f"no more than {before:,} bytes were taken in {seconds:g} s")
    finally:
        asked.cancel()


# The body does not match its digest; another attempt may.
DAMAGED = frozenset({"BadDigest", "XAmzContentSHA256Mismatch"})
_TRANSIENT = DAMAGED | frozenset(
    {
        "SlowDown",
        "ServiceUnavailable",
        "InternalError",
        "RequestTimeout",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "BandwidthLimitExceeded",
        "ConditionalRequestConflict",
        "OperationAborted",
    }
)
_CREDENTIALS = frozenset(
    {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId", "AuthFailure"}
)
_FULL = frozenset({"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "AccountProblem"})
_REDIRECT = frozenset(
    {
        "PermanentRedirect",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
        "TemporaryRedirect",
    }
)


def status_of(error: BaseException) -> int:
    """Return the HTTP status of a botocore ClientError, 0 for anything else."""
    response: dict[str, Any] = getattr(error, "response", None) or {}
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: BaseException) -> str:
    """Return the S3 error code of a botocore ClientError, "" for anything else."""
    response: dict[str, Any] = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def is_transient(error: BaseException) -> bool:
    """Whether another attempt can help."""
    import aiohttp
    from botocore import exceptions as boto

    if isinstance(error, boto.ClientError):
        status = status_of(error)
        if status in (501, 507):
            return False
        return status >= 500 or status in (408, 429) or code_of(error) in _TRANSIENT
    if isinstance(error, (boto.SSLError, boto.InvalidProxiesConfigError)):
        return False
    return isinstance(
        error,
        (
            boto.HTTPClientError,
            boto.ConnectionError,
            boto.IncompleteReadError,
            aiohttp.ClientError,
            asyncio.TimeoutError,
            ConnectionError,
        ),
    )


def translate(error: Exception, url: str, file: str, doing: str) -> FtckptError:
    """Return the ftckpt error for a failed request.

    Args:
        error: raised by aiobotocore.
        url: the object, prefix or bucket as the user would type it.
        file: its key in the store.
        doing: the action, as in "cannot <doing> <url>".
    """
    from botocore import exceptions as boto

    if isinstance(error, FtckptError):
        return error
    # botocore's own retry count is always 0: we retry.
    said = str(error).replace(" (reached max retries: 0)", "") or type(error).__name__
    message = f"cannot {doing} {url}: {said}"
    if isinstance(error, boto.ClientError):
        return _translate_status(error, message, url, file)
    if isinstance(error, boto.ProfileNotFound):
        return UsageError(message, hint="aws configure list-profiles says which there are")
    if isinstance(error, boto.ParamValidationError):
        return UsageError(message)
    if isinstance(error, boto.SSLError):
        hint = "is the endpoint https:// or http://, and its certificate known (AWS_CA_BUNDLE)?"
        return UnavailableError(message, hint=hint, file=file)
    if isinstance(
        error,
        (
            boto.NoCredentialsError,
            boto.PartialCredentialsError,
            boto.CredentialRetrievalError,
            boto.TokenRetrievalError,
            boto.UnauthorizedSSOTokenError,
        ),
    ):
        return DeniedError(message, hint="set AWS_PROFILE or AWS_ACCESS_KEY_ID", file=file)
    if isinstance(error, (boto.NoRegionError, ValueError)):
        return UsageError(message, hint="check the endpoint and the region")
    return UnavailableError(message, file=file)


def _translate_status(error: Exception, message: str, url: str, file: str) -> FtckptError:
    status, code = status_of(error), code_of(error)
    if code == "InvalidObjectState":
        return archived(url, file)
    if code == "NoSuchBucket":
        return NotFoundError(f"the bucket of {url} does not exist", file=file)
    if status == 404:
        return NotFoundError(f"{url} does not exist", file=file)
    if code in _REDIRECT:
        return UsageError(message, hint="the bucket is in another region: give --region")
    if code == "RequestTimeTooSkewed":
        return DeniedError(message, hint="set this machine's clock", file=file)
    # HEAD has no body, so expired credentials (400 ExpiredToken) come as a bare 400.
    if status in (401, 403) or code in _CREDENTIALS or (status == 400 and code in ("400", "")):
        return DeniedError(message, hint="check the credentials and the bucket's policy", file=file)
    if status == 507 or code in _FULL:
        return NoResourceError(message, file=file)
    if status in (405, 501) or code == "NotImplemented":
        return UnsupportedError(message, file=file)
    return UnavailableError(message, file=file)


def archived(url: str, file: str) -> UnsupportedError:
    """Return the error for an object that lies in an archive tier."""
    return UnsupportedError(
        f"{url} is in an archive tier and cannot be read before it is restored",
        hint="restore it (aws s3api restore-object), wait, and try again",
        kind="archived-object",
        file=file,
    )


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


class S3Object(NamedTuple):
    """The address of one object."""

    bucket: str
    key: str
    path: str
    url: str
