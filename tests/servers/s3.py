"""One S3 service under test: how to reach it, and raw access that goes round our store."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

BUCKET = "ftckpt-tests"


@dataclass(frozen=True)
class S3Service:
    """An S3-compatible service on loopback."""

    endpoint: str
    key: str
    secret: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead a client to it."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Set the environment that leads to it, for this process and its children."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)

    @cached_property
    def client(self) -> Any:
        """A boto3 client: other code than the store under test uses."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
            config=Config(
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                retries={"total_max_attempts": 3, "mode": "standard"},
            ),
        )

    def put(self, key: str, data: bytes) -> None:
        """Store an object."""
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def get(self, key: str) -> bytes | None:
        """Return an object's bytes, None where it is absent."""
        from botocore.exceptions import ClientError

        try:
            body = self.client.get_object(Bucket=BUCKET, Key=key)["Body"]
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                return None
            raise
        with body:
            data: bytes = body.read()
            return data


def upload_tree(directory: str | os.PathLike[str], url: str) -> None:
    """Copy every file below a local directory to `s3://bucket/prefix` of the environment's service.

    Links are followed, as a user's upload would.
    """
    import boto3

    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    root = Path(directory)
    try:
        for path in sorted(root.rglob("*")):
            if path.is_file():
                key = "/".join((prefix.rstrip("/"), *path.relative_to(root).parts)).lstrip("/")
                client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
    finally:
        client.close()
