"""Microsoft's own Azurite, where AZURITE is its blob address and adlfs is installed.

azurite-blob --blobPort 10000 --skipApiVersionCheck      (npm install azurite)
AZURITE=http://127.0.0.1:10000 pytest tests/storage/test_clouds.py
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from contextlib import suppress

CONTAINER = "checkpoints"
_ADDRESS = os.environ.get("AZURITE", "")
# The account that Azurite's documentation gives to everybody.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def azure_environment() -> Mapping[str, str] | None:
    """Make the container, and return the environment that leads there; None without a server.

    The container keeps what earlier runs wrote.
    """
    if not _ADDRESS or not importlib.util.find_spec("adlfs"):
        return None
    import fsspec

    words = {
        "DefaultEndpointsProtocol": "http",
        "AccountName": "devstoreaccount1",
        "AccountKey": _KEY,
        "BlobEndpoint": f"{_ADDRESS}/devstoreaccount1",
    }
    connection = ";".join(f"{name}={value}" for name, value in words.items())
    with suppress(FileExistsError):
        fsspec.filesystem("az", connection_string=connection).mkdir(CONTAINER)
    return {"AZURE_STORAGE_CONNECTION_STRING": connection}
