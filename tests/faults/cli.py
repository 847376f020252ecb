"""Run the command line, in this process or in one of its own, and hold it to what it promises."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftckpt.commands.cli.app import document, run, scan
from ftckpt.commands.cli.invocation import Invocation
from ftckpt.commands.cli.render import json_text
from ftckpt.errors import ExitCode
from tests.workers import forked

# What may stand on stderr: remarks, then one sentence and what to do.
_SENTENCE = re.compile(r"^ftckpt: \S[^\n]*\n(hint: [^\n]+\n)?\Z", re.MULTILINE)
_RUDE = ("Traceback", "Exception ignored", "\x1b")


@dataclass(frozen=True)
class Done:
    """How a run ended.

    Attributes:
        code: exit code.
        document: the JSON answer.
        stderr: everything else that it said.
    """

    code: int
    document: Mapping[str, Any]
    stderr: str

    @property
    def kinds(self) -> set[str]:
        """Kinds of the findings."""
        return {f["kind"] for f in self.document.get("findings", ())}

    @property
    def told(self) -> str:
        """The sentence and the hint of the answer."""
        result = self.document["result"]
        return f"{result['message']}\n{result['hint']}"


def held(code: int, stdout: str, stderr: str) -> Done:
    """Return how a run with `--json` ended, its manners checked.

    One document whose code is the exit code; a failure says one sentence and perhaps a hint; no
    traceback, no control sequence, no message of the interpreter.
    """
    answer = json.loads(stdout)
    assert answer["result"]["code"] == code, stderr
    assert code != ExitCode.INTERNAL, stderr
    for rude in _RUDE:
        assert rude not in stderr
        assert rude not in stdout
    if code:
        assert _SENTENCE.search(stderr), stderr
        assert len(stderr.splitlines()) < 40, stderr
    return Done(code, answer, stderr)


def here(*words: str | Path) -> Done:
    """Run a command line with `--json` in this process."""
    line = [*map(str, words), "--json"]
    begun = scan(line)
    invocation = Invocation(verb=begun.verb, json=True)
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        result = run(line, invocation)
    answer = out.getvalue() + json_text(document(invocation, result))
    return held(int(result.code), answer, err.getvalue())


def command(*words: str | Path) -> list[str]:
    """Return the command line for a process of its own."""
    return [sys.executable, "-m", "ftckpt", *map(str, words)]


def apart(
    *words: str | Path, before: Sequence[str] = (), cwd: Path | None = None, **environment: str
) -> Done:
    """Run a command line with `--json` in a process of its own, without a terminal.

    Args:
        words: verb and arguments.
        before: what runs it (`strace …`, `setpriv …`).
        cwd: where.
        environment: changes of the environment; an empty value takes a variable away.
    """
    variables = {k: v for k, v in (os.environ | environment).items() if environment.get(k) != ""}
    if not before:
        done = forked.run([*map(str, words), "--json"], variables, cwd)
    else:
        variables["PYTHONPATH"] = str(Path(__file__).parents[2])
        done = forked.start([*before, *command(*words), "--json"], variables, cwd)
    assert done.stdout, done.stderr
    return held(done.returncode, done.stdout, done.stderr)
