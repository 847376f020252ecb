"""What the pages and the job scripts do with each exit code: one answer everywhere."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from ftckpt.commands.cli.render import MEANINGS
from ftckpt.errors import PRECEDENCE, ExitCode

DOCS = Path(__file__).parents[1] / "docs"
# What `latest` can end with before a restart; nobody reads its output through a pipe there.
CODES = [c for c in ExitCode if c not in (ExitCode.CLOSED_PIPE, ExitCode.REQUEUE)]
SCRIPTS = {
    "restart.sbatch": (DOCS / "jobs" / "restart.sbatch").read_text(),
    "tiers.sbatch": (DOCS / "jobs" / "tiers.sbatch").read_text(),
    "verify.md": re.findall(r"```sh\n(CKPT=.*?)```", (DOCS / "verify.md").read_text(), re.DOTALL)[
        0
    ],
}


def test_every_job_script_is_tried() -> None:
    others = {"train.sbatch", "parts.sbatch"}  # below; no restart
    assert {p.name for p in (DOCS / "jobs").glob("*.sbatch")} <= {*SCRIPTS, *others}


@pytest.mark.parametrize("code", ExitCode, ids=lambda code: code.name)
def test_the_guarded_script_requeues_75_and_10_and_passes_on_the_rest(
    code: ExitCode, tmp_path: Path
) -> None:
    stubs = {"srun": f"exit {int(code)}", "scontrol": '[ "$1" = show ] || echo "$1"'}
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(DOCS / "jobs" / "train.sbatch")],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "ROOT": "/root", "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if code in (ExitCode.UNAVAILABLE, ExitCode.REQUEUE):
        assert (done.returncode, done.stdout) == (0, "requeue\n")
    else:
        assert (done.returncode, done.stdout) == (int(code), "")


def rows(page: str) -> dict[int, list[str]]:
    """Return the cells of the first table of a page whose rows begin with exit codes."""
    found = {}
    for line in (DOCS / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.replace(r"\|", "").strip("|").split("|")]
        if re.fullmatch(r"\d+(?:, \d+)*", cells[0]):
            found.update({int(code): cells for code in cells[0].split(", ")})
    return found


ACTIONS = {code: cells[5] for code, cells in rows("exit-codes.md").items()}


def test_every_code_is_in_the_table_as_the_code_has_it() -> None:
    table = rows("exit-codes.md")
    assert set(table) == {int(code) for code in ExitCode}
    for code, (meaning, retry) in MEANINGS.items():
        assert table[code][1:4] == [code.name, meaning, retry]
    order = ", ".join(str(int(c)) for c in PRECEDENCE if c is not ExitCode.OK)
    assert order in " ".join((DOCS / "exit-codes.md").read_text().split())


def test_only_9_starts_afresh_and_only_10_is_requeued() -> None:
    by_action: dict[str, set[int]] = {}
    for code, action in ACTIONS.items():
        by_action.setdefault(action, set()).add(code)
    assert by_action.pop("-") == {75, 141}
    assert by_action.pop("resume") == {0}
    assert by_action.pop("start afresh") == {9}
    assert by_action.pop("requeue") == {10}
    assert list(by_action) == ["stop"]


def test_the_page_about_jobs_says_the_same() -> None:
    for code, cells in rows("jobs.md").items():
        said = re.match(r"\*\*(.*?)\*\*", cells[1])
        if code == 14:  # no code of `latest`
            assert said is None
        else:
            assert said is not None, code
            assert said[1] == ACTIONS[code], code
    assert set(rows("jobs.md")) >= {int(c) for c in CODES} - {1, 3}


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("script", SCRIPTS)
def test_each_script_does_what_the_table_says(script: str, code: ExitCode, tmp_path: Path) -> None:
    stubs = {
        "ftckpt": f'[ {int(code)} -ne 0 ] || echo "$2/step-7"; exit {int(code)}',
        "srun": 'exec "$@"',
        "torchrun": 'echo "train $*"',
        "scontrol": 'echo "$1"',
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", SCRIPTS[script], "job"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "ROOT": "/root"}
        | {"SCRATCH": "/scratch", "SLURM_JOB_ID": "7", "TIER": "cold:run7"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.stdout.startswith("train "):
        action = "resume" if "--resume /root/step-7" in done.stdout else "start afresh"
    else:
        requeued = done.stdout == "requeue\n" or done.returncode == os.EX_TEMPFAIL
        action = "requeue" if requeued else "stop"
        assert requeued or done.returncode != 0
    assert action == ACTIONS[code]
