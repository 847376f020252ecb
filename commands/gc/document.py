"""The plan of an earlier `ftckpt gc --json`, read back to be carried out exactly."""

from __future__ import annotations

import json
import sys

from ftckpt.errors import UsageError
from ftckpt.retention.document import load_plan
from ftckpt.retention.policy.plan import RetentionPlan
from ftckpt.strict_json import JsonError, decode

# What `ftckpt gc --json` prints holds the plan under this key.
KEY = "plan"


def read_plan(path: str) -> RetentionPlan:
    """Return the plan of a document: what `ftckpt gc --json` printed, or its `plan` alone.

    Args:
        path: of the file; `-` is standard input.

    Raises:
        UsageError: it cannot be read, or is not a plan of this version, or was changed.
    """
    name = "standard input" if path == "-" else path
    try:
        if path == "-":
            data = sys.stdin.buffer.read()
        else:
            with open(path, "rb") as file:
                data = file.read()
    except OSError as error:
        raise UsageError(f"cannot read the plan {name}: {error.strerror or error}") from error
    return load_plan(_inner(data), name)


def _inner(data: bytes) -> bytes:
    """Return the plan inside the verb's document; `data` itself where it is something else."""
    try:
        document = decode(data)
    except JsonError:
        return data
    inner = document.get(KEY) if isinstance(document, dict) else None
    return json.dumps(inner).encode() if isinstance(inner, dict) else data
