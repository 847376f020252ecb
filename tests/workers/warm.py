"""Reads what each client of S3 reads first: a process that is forked from this one has it.

Importing it does so: the server that forks can be told modules alone. No thread is left behind.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from operator import attrgetter

from aiobotocore.session import AioSession
from botocore.exceptions import BotoCoreError

from ftckpt.storage.s3.client import _loader
from ftckpt.storage.store import Entry


async def _open() -> None:
    session = AioSession()
    session.register_component("data_loader", _loader())
    settings = {"aws_access_key_id": "none", "aws_secret_access_key": "none"}
    async with session.create_client("s3", region_name="us-east-1", **settings):
        pass


# What a user's own settings refuse here costs time alone.
with suppress(BotoCoreError, OSError):
    asyncio.run(_open())

# Files are as old as a test made them here too: nobody can set when an inode changed.
setattr(Entry, "touched", property(attrgetter("mtime")))  # noqa: B010 - no assignment is typed
