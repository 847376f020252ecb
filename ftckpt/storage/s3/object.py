"""Bucket and key of one S3 object."""

from __future__ import annotations

from typing import NamedTuple


class S3Object(NamedTuple):
    """Where one object lies."""

    bucket: str
    key: str
    path: str
    url: str
