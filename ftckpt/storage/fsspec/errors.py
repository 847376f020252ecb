"""Map errors of fsspec's filesystems to ftckpt's errors."""

from __future__ import annotations

import asyncio
import sys

from ftckpt.errors import (
    DeniedError,
    ExistsError,
    FtckptError,
    NotFoundError,
    TruncatedError,
    UnavailableError,
    UnsupportedError,
)
from ftckpt.storage.secrets import hidden


def _status(error: BaseException) -> int:
    """Return the HTTP status in exceptions of gcsfs, adlfs and aiohttp."""
    for name in ("status", "code", "status_code"):
        value = getattr(error, name, None)
        if isinstance(value, int):
            return value
        if isinstance(value, str) and value.isdigit():
            return int(value)
    return 0


def _meant(error: BaseException) -> BaseException:
    """Return the real error: fsspec's HTTP raises FileNotFoundError for any failure.

    A server that does not answer, or refuses to, has not said that something is absent.
    """
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or cause is None:
        return error
    told = _is_lost_connection(cause) or _status(cause) not in (0, 404, 410)
    return cause if told else error


def _is_lost_connection(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, asyncio.TimeoutError, TimeoutError)):
        return True
    aiohttp = sys.modules.get("aiohttp")  # if it was not imported, none of its errors can occur
    return aiohttp is not None and isinstance(error, aiohttp.ClientConnectionError)


def is_transient(error: BaseException) -> bool:
    """Whether another attempt may succeed."""
    error = _meant(error)
    if _is_lost_connection(error):
        return True
    status = _status(error)
    return status in (408, 429) or (status >= 500 and status not in (501, 507))


def translate(error: BaseException, url: str, path: str, doing: str) -> FtckptError:
    """Return the ftckpt error for a filesystem's exception while `doing` something at `url`."""
    error = _meant(error)
    message = f"cannot {doing} {url}: {hidden(str(error)) or type(error).__name__}"
    status = _status(error)
    if isinstance(error, FileExistsError) or status == 412:
        return ExistsError(f"{url} exists already", file=path)
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
        return NotFoundError(f"{url} does not exist", file=path)
    if status == 404:
        return NotFoundError(f"{url} does not exist", file=path)
    if status == 416:  # a range of which the object has nothing
        return TruncatedError(f"{url} ends before the range that was asked for", file=path)
    if isinstance(error, PermissionError) or status in (401, 403):
        return DeniedError(message, hint="check the credentials", file=path)
    if isinstance(error, (NotImplementedError, TypeError)) or status in (405, 501):
        return UnsupportedError(message, file=path)
    hint = "try again later, or check the address and the network"
    return UnavailableError(message, hint=hint * _is_lost_connection(error), file=path)
