"""Google's own storage-testbench, where STORAGE_TESTBENCH is its address and gcsfs is installed.

It is github.com/googleapis/storage-testbench, and holds conditions on generations as the service
does. gcsfs ends the lines of a multipart body by LF, which the service takes; `parse_multipart` of
testbench 0.45 takes CRLF alone and has to be changed for it.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from urllib.error import HTTPError
from urllib.request import Request, urlopen

BUCKET = "checkpoints"
_ADDRESS = os.environ.get("STORAGE_TESTBENCH", "")  # such as http://127.0.0.1:9000


def gcs_environment() -> Mapping[str, str] | None:
    """Make the bucket, and return the environment that leads there; None where there is no server.

    The bucket keeps what earlier runs wrote.
    """
    if not _ADDRESS or not importlib.util.find_spec("gcsfs"):
        return None
    asked = Request(
        f"{_ADDRESS}/storage/v1/b?project=test",
        json.dumps({"name": BUCKET}).encode(),
        {"Content-Type": "application/json"},
    )
    with suppress(HTTPError):  # it is there
        urlopen(asked).close()
    return {
        "STORAGE_EMULATOR_HOST": _ADDRESS,
        "FSSPEC_GS_TOKEN": "anon",
        # gcsfs asks an account what kind of bucket it is, and warns where there is none.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }
