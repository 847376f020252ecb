"""Write the errors of tasks as JSON."""

from __future__ import annotations

from typing import Any

from ftckpt import errors
from ftckpt.errors import FtckptError


def dump_error(error: FtckptError | None) -> Any:
    """Return an error in JSON's types."""
    if error is None:
        return None
    fields = ("message", "hint", "kind", "file", "tensor", "offset", "length")
    return {"error": type(error).__name__} | {name: getattr(error, name) for name in fields}


def load_error(value: Any) -> FtckptError | None:
    """Return an error from JSON's types.

    Raises:
        ValueError, TypeError, KeyError: it is none.
    """
    if value is None:
        return None
    fields = dict(value)
    kind = getattr(errors, fields.pop("error"))
    if not (isinstance(kind, type) and issubclass(kind, FtckptError)):
        raise ValueError("it is not an error")
    return kind(fields.pop("message"), **fields)
