"""Run a command line in this process, and return every byte that it printed."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

import pytest

from ftckpt.commands.cli import app


class Printed(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


def printed(*words: str) -> Printed:
    """Run a command line as a script does: nothing is a terminal."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        app.main(words)
    return Printed(int(ended.value.code or 0), out.getvalue(), err.getvalue())
