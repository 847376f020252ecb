"""`--on-alert` of status, gc, sync and a scrub: told once, and the verdict is what it was."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ftckpt.manifest.seal import seal
from tests.builders.checkpoints import open_checkpoint
from tests.commands.saves import HOUR, answer, save
from tests.test_docs import validate


class Ops:
    """A root, and who is told of it."""

    def __init__(self, path: Path) -> None:
        self.root, self.box = path / "run", path / "box"
        for number in (1, 2, 3):
            save(self.root, f"checkpoint-{number}00", (4 - number) * HOUR)
        self.flags = ["--on-alert", f"cat >> {self.box}", "--alert-state"]
        self.state = path / "told"

    def run(self, *words: str) -> tuple[int, list[tuple[str, str, list[str]]]]:
        self.box.unlink(missing_ok=True)
        code = answer(*words, *self.flags, f"{self.state}-{words[0]}")["result"]["code"]
        lines = self.box.read_text().splitlines() if self.box.exists() else []
        documents: list[dict[str, Any]] = [json.loads(line) for line in lines]
        for one in documents:
            validate(one)
            assert one["verb"] == words[0]
        return code, [(d["event"], d["kind"], d["about"]) for d in documents]


@pytest.fixture
def ops(tmp_path: Path) -> Ops:
    return Ops(tmp_path)


def test_status(ops: Ops) -> None:
    late = ("status", str(ops.root), "--expect-interval", "10m")
    assert ops.run(*late) == (14, [("raised", "stale", [])])
    assert ops.run(*late) == (14, [])
    (ops.root / "latest").write_text("checkpoint-900")
    assert ops.run(*late) == (14, [("raised", "pointer", ["latest"])])
    # A root that is away says nothing about its saves.
    ops.root.rename(ops.root.with_name("away"))
    assert ops.run(*late) == (9, [("raised", "not-found", [])])
    assert ops.run(*late) == (9, [])
    ops.root.with_name("away").rename(ops.root)
    assert ops.run(*late) == (14, [("cleared", "not-found", [])])
    save(ops.root, "checkpoint-400", 60)
    (ops.root / "latest").unlink()
    code, told = ops.run(*late)
    assert code == 0
    assert sorted(told) == [("cleared", "pointer", []), ("cleared", "stale", [])]
    assert ops.run(*late) == (0, [])


def test_gc(ops: Ops) -> None:
    few = ("gc", str(ops.root), "--keep-last", "1", "--apply")
    assert ops.run(*few) == (8, [("raised", "refused", [])])
    assert ops.run(*few) == (8, [])
    for dry in (("--keep-last", "3"), ("--keep-last", "1", "--min-survivors", "1")):
        assert ops.run("gc", str(ops.root), *dry) == (0, [])  # it tries nothing
    assert ops.run(*few, "--min-survivors", "1") == (0, [("cleared", "refused", [])])


def test_sync_and_a_scrub(ops: Ops, tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    tier.mkdir()
    path = ops.root / "checkpoint-100"
    then = path.stat().st_mtime
    seal(open_checkpoint(path))
    data = path / "model.safetensors"
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(raw)
    for each in (data, path):
        os.utime(each, (then, then))
    scrub = ("scrub", str(ops.root))
    assert ops.run(*scrub) == (4, [("raised", "corrupt", ["checkpoint-100"])])
    assert ops.run(*scrub) == (4, [])
    sync = ("sync", str(ops.root), str(tier))
    assert ops.run(*sync) == (4, [("raised", "not-shipped", ["checkpoint-100"])])
    assert ops.run(*sync) == (4, [])
    assert ops.run(*sync, "--dry-run") == (4, [])  # it is known by now, and told already
    assert ops.run(*sync) == (4, [])
    shutil.rmtree(path)
    assert ops.run(*scrub) == (0, [("cleared", "corrupt", [])])
    assert ops.run(*sync) == (0, [("cleared", "not-shipped", [])])


def test_a_hook_that_fails_changes_nothing(ops: Ops, capsys: pytest.CaptureFixture[str]) -> None:
    late = ("status", str(ops.root), "--expect-interval", "10m", "--alert-state", str(ops.state))
    assert answer(*late, "--on-alert", "exit 7")["result"]["code"] == 14
    assert "alert stale (raised): --on-alert ended with 7" in capsys.readouterr().err
    assert answer(*late, "--alert-url", "http://127.0.0.1:9/")["result"]["code"] == 14
    assert "--alert-url failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ("status", "--alert-url", "file:///etc/passwd"),
        ("status", "--alert-state", "x"),
        ("verify", "--on-alert", "true"),
    ],
)
def test_usage(ops: Ops, flags: tuple[str, ...]) -> None:
    verb, *rest = flags
    assert answer(verb, str(ops.root), *rest)["result"]["code"] == 2


def test_the_token_of_a_webhook_is_not_in_the_answer(
    ops: Ops,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[defaults.status]\nalert-url = "http://127.0.0.1:9/secret-token"\n')
    monkeypatch.setenv("FTCKPT_CONFIG", str(file))
    late = ("status", str(ops.root), "--expect-interval", "10m", "--alert-state", str(ops.state))
    found = answer(*late)
    assert found["settings"] == {"alert_url": "(hidden)"}
    shown = answer("config"), answer("config", "status")
    assert "secret" not in json.dumps([found, *shown]) + capsys.readouterr().err
