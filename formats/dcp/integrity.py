"""Megatron's `integrity.json`: the SHA-256 of every file at the top of a checkpoint.

    {"algorithm": "sha256", "files": {".metadata": "9f86…", "__0_0.distcp": "…"}}

Source: megatron/core/dist_checkpointing/integrity.py (Megatron-LM, 2026); rank 0 writes it last.
"""

from __future__ import annotations

import re

from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.storage.source import Source, safe_name
from ftckpt.strict_json import JsonLimits, parse, shown

from .names import INTEGRITY

_JSON = JsonLimits(depth=2, objects=2, keys=1_000_000, items=1_000_000, naturals=False)
_MOST_BYTES = 128 << 20
_ALGORITHM = "sha256"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def read_integrity(source: Source) -> dict[str, str]:
    """Return the recorded SHA-256 of each file, in hexadecimal digits; empty without a record.

    Raises:
        CorruptError: it cannot be parsed, or holds something else than names and digests.
        UnsafeError: a name leaves the checkpoint, or the JSON is ambiguous.
        UnsupportedError: it is of another algorithm, or too large.
    """
    if INTEGRITY not in source.entries:
        return {}
    size = source.size(INTEGRITY)
    if size > _MOST_BYTES:
        raise UnsupportedError(f"{INTEGRITY} has {size} bytes", file=INTEGRITY)
    said = parse(source.read(INTEGRITY), _JSON, file=INTEGRITY, what="record of digests",
                 bad="bad-index", unsafe="unsafe-index")  # fmt: skip
    files = said.get("files") if isinstance(said, dict) else None
    if not isinstance(files, dict):
        raise CorruptError(f"{INTEGRITY} holds no digests of files", kind="bad-index",
                           file=INTEGRITY)  # fmt: skip
    algorithm = said.get("algorithm", _ALGORITHM)
    if algorithm != _ALGORITHM:
        what = f"{INTEGRITY} holds digests of {shown(algorithm)}, and only {_ALGORITHM} is known"
        raise UnsupportedError(what, file=INTEGRITY)
    for name, digest in files.items():
        safe_name(name, named_by=INTEGRITY)
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise CorruptError(
                f"{INTEGRITY} has {shown(digest)} for {shown(name)}, not a SHA-256",
                kind="bad-index",
                file=INTEGRITY,
            )
    return files
