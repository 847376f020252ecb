"""What the filesystems of fsspec raise, by the decision that a caller can take."""

from __future__ import annotations

import asyncio

from ftckpt.errors import (
    DeniedError,
    ExistsError,
    FtckptError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)


def _status(error: BaseException) -> int:
    """Return the HTTP status that the exceptions of gcsfs, adlfs and aiohttp carry."""
    for name in ("code", "status", "status_code"):
        value = getattr(error, name, None)
        if isinstance(value, int):
            return value
        if isinstance(value, str) and value.isdigit():
            return int(value)
    return 0


def is_transient(error: Exception) -> bool:
    """Say whether another attempt may succeed."""
    if isinstance(error, (ConnectionError, asyncio.TimeoutError, TimeoutError)):
        return True
    status = _status(error)
    return status in (408, 429) or (status >= 500 and status not in (501, 507))


def translate(error: Exception, url: str, path: str, doing: str) -> FtckptError:
    """Return the ftckpt error for what a filesystem raised while `doing` something at `url`."""
    message = f"cannot {doing} {url}: {str(error) or type(error).__name__}"
    status = _status(error)
    if isinstance(error, FileExistsError) or status == 412:
        return ExistsError(f"{url} exists already", file=path)
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
        return NotFoundError(f"{url} does not exist", file=path)
    if status == 404:
        return NotFoundError(f"{url} does not exist", file=path)
    if isinstance(error, PermissionError) or status in (401, 403):
        return DeniedError(message, hint="check the credentials", file=path)
    if isinstance(error, (NotImplementedError, TypeError)) or status in (405, 501):
        return UnsupportedError(message, file=path)
    return UnavailableError(message, file=path)
