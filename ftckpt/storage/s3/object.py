"""Bucket and key of one S3 object."""

from __future__ import annotations

from typing import NamedTuple


class S3Object(NamedTuple):
    """The address of one object."""

    bucket: str
    key: str
    path: str
    url: str
