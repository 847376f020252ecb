"""Map an S3 service's refusals: retry, or one of our errors.

Sources: the error code tables of the S3 API reference, and the answers of Ceph, Swift, MinIO and
rclone in the same situations.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ftckpt.errors import (
    DeniedError,
    FtckptError,
    NoResourceError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    UsageError,
)

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
