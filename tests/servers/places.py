"""Places on an S3 service, for the store suite."""

from __future__ import annotations

from ftckpt.storage import StoreOptions, open_store
from tests.conformance.stores import Place
from tests.servers.s3 import BUCKET, S3Service

# Tests of failures must not wait as long as a user would want to.
QUICK = StoreOptions(retry_seconds=3, timeout=2)
PATIENT = StoreOptions(retry_seconds=20, timeout=10)


def key_of(url: str, path: str) -> str:
    """Return the key in the bucket of a path below a URL."""
    return f"{url.removeprefix(f's3://{BUCKET}/')}/{path}"


def place_on(service: S3Service, url: str) -> Place:
    """Return a store at `url` and access with boto3, which the store does not use."""
    return Place(
        open_store(url, PATIENT),
        lambda path, data: service.put(key_of(url, path), data),
        lambda path: service.get(key_of(url, path)),
    )
