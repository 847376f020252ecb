"""Is every byte what it was: against a manifest, the CRC-32s in the files, or a replica."""

from __future__ import annotations

from .blocks import check_manifest
from .evidence import ContentResult, Emit, Owner, Owners, StopChecking
from .records import check_records
from .replica import check_against, check_tensors_against

__all__ = [
    "ContentResult",
    "Emit",
    "Owner",
    "Owners",
    "StopChecking",
    "check_against",
    "check_manifest",
    "check_records",
    "check_tensors_against",
]
