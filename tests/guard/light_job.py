"""A guard of this process around the light trainer."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ftckpt.errors import ExitCode
from ftckpt.guard import watch
from ftckpt.guard.decisions import Limits
from ftckpt.guard.journal import GuardJournal
from ftckpt.guard.terms import Ended, GuardSettings
from ftckpt.observer import Observer
from ftckpt.operations.guarded import GuardChoice, guarded
from ftckpt.operations.opening import open_checkpoint
from ftckpt.verification import Level, VerifyOptions, verify

TRAINER = Path(__file__).with_name("trainer.py")
SCHEMA = TRAINER.parents[2] / "docs" / "schemas" / "guard.schema.json"
QUICK = GuardSettings(limits=Limits(3, 0.0, 0.0), grace=1.0, patience=0.0, every=0.05, settled=0.1)


class Listener(Observer):
    """Keeps what a guard said and warned."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def note(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.said.append(text)


@dataclass
class Job:
    """A root, its trainer, and a guard around it.

    Attributes:
        said: what the guard said and warned.
        journals: its log.
    """

    supply: Path
    root: Path
    log: Path
    said: list[str] = field(default_factory=list)
    journals: list[GuardJournal] = field(default_factory=list)

    def words(self, last: int = 3) -> list[str]:
        line = [sys.executable, "-I", "-S", str(TRAINER), str(self.supply), str(self.log)]
        return [*line, str(self.root), str(last), "--resume", "{}"]

    def have(self, *steps: int) -> None:
        for step in steps:
            shutil.copytree(self.supply / f"step-{step}", self.root / f"step-{step}")

    def flip(self, step: int) -> None:
        file = self.root / f"step-{step}" / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)

    def run(
        self,
        last: int = 3,
        settings: GuardSettings = QUICK,
        *,
        words: list[str] | None = None,
        faults: dict[int, dict[str, Any]] | None = None,
        choice: dict[str, Any] | None = None,
        wait_lock: float = 0.0,
        keep_faults: bool = False,
        **flags: Any,
    ) -> Ended:
        if not keep_faults:
            os.environ["FAULTS"] = json.dumps({str(n): f for n, f in (faults or {}).items()})
        place = GuardChoice(str(self.root), **({"timeout": 0.0} | (choice or {})))
        try:
            return guarded(
                words or self.words(last), place, settings, wait_lock=wait_lock,
                on=Listener(self.said), told=self.journals.append, **flags,
            )  # fmt: skip
        finally:
            for one in self.journals[-1:]:
                require_documented(one)

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """What the trainer told."""
        if not self.log.exists():
            return []
        told = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [one for one in told if kind in ("", one["event"])]

    def starts(self) -> list[int]:
        return [one["step"] for one in self.events("start")]

    def logged(self, kind: str = "") -> list[dict[str, Any]]:
        """The lines of the guard's log."""
        lines = (self.root / ".ftckpt" / "guard.jsonl").read_text().splitlines()
        return [one for one in map(json.loads, lines) if kind in ("", one["event"])]


def require_documented(journal: GuardJournal) -> None:
    """Hold what a guard logged to the schema of its JSON answer."""
    from jsonschema import Draft202012Validator

    shape = json.loads(SCHEMA.read_text())["properties"]["decisions"]
    Draft202012Validator(shape).validate(json.loads(json.dumps(journal.own)))


def verify_here(self: watch.Verifier, path: str) -> tuple[ExitCode, str] | None:
    if self._stopped:
        return None
    report = verify(open_checkpoint(path), VerifyOptions(Level.CONTENT, require_content=True))
    return report.code, report.message


def quick(**changed: Any) -> GuardSettings:
    return replace(QUICK, **changed)
