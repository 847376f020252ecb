"""Megatron's `integrity.json`: the SHA-256 of every file at the top of a checkpoint.

    {"algorithm": "sha256", "files": {".metadata": "9f86…", "__0_0.distcp": "…"}}

Source: megatron/core/dist_checkpointing/integrity.py (Megatron-LM, 2026); rank 0 writes it last.
"""

from __future__ import annotations

import json
import re

from ftckpt.errors import (
    CorruptError,
    IncompleteError,
    NewerWriterError,
    RefusedError,
    UnsupportedError,
    UsageError,
)
from ftckpt.own_files import is_own
from ftckpt.storage.source import Source, safe_name
from ftckpt.strict_json import JsonLimits, parse, shown
from ftckpt.workers import ALONE, Work

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
        raise NewerWriterError.of(f"files of {INTEGRITY}", expected="names and digests",
                                  found=files, file=INTEGRITY)  # fmt: skip
    algorithm = said.get("algorithm", _ALGORITHM)
    if algorithm != _ALGORITHM:
        what = f"{INTEGRITY} holds digests of {shown(algorithm)}, and only {_ALGORITHM} is known"
        raise UnsupportedError(what, file=INTEGRITY)
    for name, digest in files.items():
        safe_name(name, named_by=INTEGRITY)
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise CorruptError(  # the algorithm is the known one
                f"{INTEGRITY} has {shown(digest)} for {shown(name)}, not a SHA-256",
                kind="bad-index",
                file=INTEGRITY,
            )
    return files


def require_checked(format_name: str) -> None:
    """Require a format whose framework checks the record.

    Raises:
        UsageError: no framework looks for it there.
    """
    if format_name != "megatron-dist":
        raise UsageError(
            f"--integrity is for checkpoints of Megatron's torch_dist, and this is {format_name}",
            hint="the manifest has digests of every format",
        )


def write_integrity(source: Source, *, work: Work = ALONE) -> bool:
    """Write the record that Megatron checks with `--verify-integrity`; say whether it was written.

    It lists the files that Megatron's own does: those at the top. A record that stands is never
    replaced.

    Raises:
        RefusedError: one stands that does not list all files.
        IncompleteError: a file changed meanwhile (`changed-file`).
        FtckptError: a file cannot be read, or the record cannot be written.
    """
    from ftckpt.verification.file_digests import sha256_of

    names = [n for n in source.entries if "/" not in n and n != INTEGRITY and not is_own(n)]
    standing = read_integrity(source)
    if INTEGRITY in source.entries:
        lacking = sorted(set(names) - set(standing))
        if lacking:
            raise RefusedError(
                f"{INTEGRITY} stands there and does not list {lacking[0]}",
                hint="remove it if nothing needs it",
            )
        return False
    files = sha256_of(source, names, work=work)
    for name in source.changed(names):
        raise IncompleteError(
            f"{name} changed while it was being read", kind="changed-file", file=name
        )
    said = {"algorithm": _ALGORITHM, "files": files}
    source.store.create(source.path(INTEGRITY), json.dumps(said, indent=2).encode())
    return True
