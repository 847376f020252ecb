"""Run the command line in this process, whole or in parts, and return what it answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftckpt.commands.cli.app import run
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import json_text
from ftckpt.errors import ExitCode

# What may differ from one run to the next.
TIMED = ("seconds", "created", "time")


def answer(*words: object) -> tuple[Result, dict[str, Any]]:
    """Run one command line; return how it ended, and the fields of its document."""
    texts = [*map(str, words)]
    invocation = Invocation(verb=texts[0], words=texts, json=True, quiet=True)
    result = run(texts, invocation)
    invocation.close()
    document = json.loads(json_text(invocation.document))
    return result, untimed(document)


def untimed(value: Any) -> Any:
    """Return a document without what depends on the clock; findings in one order."""
    if isinstance(value, dict):
        return {k: untimed(v) for k, v in value.items() if k not in TIMED}
    if isinstance(value, list):
        made = [untimed(one) for one in value]
        return sorted(made, key=str) if made and isinstance(made[0], dict) else made
    return value


def in_parts(number: int, place: Path, *words: object, finish: bool = True) -> Any:
    """Run a command line as a number of parts, the last first, and finish it."""
    for part in reversed(range(number)):
        result, _ = answer(*words, "--part", f"{part}/{number}", "--parts", place)
        assert result.code in (ExitCode.OK, ExitCode.CORRUPT, ExitCode.UNSAFE), result
    return answer(*words, "--parts", place, "--finish") if finish else None


def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tasks so small that a checkpoint of a test has many."""
    monkeypatch.setattr("ftckpt.verification.records.SPAN", 1 << 9)
    monkeypatch.setattr("ftckpt.verification.selfchecks._TASK", 1 << 9)


def small_blocks(monkeypatch: pytest.MonkeyPatch, size: int = 4096) -> None:
    """Make blocks of a few KiB, so that little data has many."""
    for name in (
        "digests.blocks", "manifest", "manifest.parse", "replication.carry_files",
        "replication.trusted_manifest", "replication.share", "transfer.staging.object",
        "transfer.staging.local", "transfer.staging.remote",
        "verification.blocks",
    ):  # fmt: skip
        monkeypatch.setattr(f"ftckpt.{name}.BLOCK", size)
