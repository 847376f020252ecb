"""The benchmarks: one command knows all of them, runs one, and makes one table."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks"


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        capture_output=True, text=True, check=False, timeout=300, cwd=ROOT,
    )  # fmt: skip


def test_every_benchmark_is_run_or_it_is_said_why_not() -> None:
    done = command("--list")
    assert (done.returncode, done.stderr) == (0, "")
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert len(lines) == len(done.stdout.splitlines())
    for path in SCRIPTS.glob("*.py"):
        own = [n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
        if "main" in own and not path.stem.endswith(("__main__", "_data")):
            assert path.stem in lines, path.name
    for peer in ("HuggingFaceStorageReader", "_consolidate_hf_safetensors", "rclone copy",
                 "s5cmd", "zipnn", "cat", "cp"):  # fmt: skip
        assert peer in done.stdout, peer


def test_one_of_them_makes_a_row_for_each_contestant() -> None:
    done = command("--only", "plan", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (planning,) = document["benchmarks"]
    assert planning["benchmark"] == "planning"
    assert all(row["seconds"] and row["ratio"] > 0 for row in planning["rows"])
    assert any(line.startswith("delta: ") for line in document["skipped"])
    assert not any(line.startswith("plan: ") for line in document["skipped"])


def test_a_benchmark_that_fails_is_named() -> None:
    done = command("--only", "diff", "--size", "nonsense")
    assert done.returncode == 1
    assert "  diff: failed: code " in done.stdout


def test_a_row_of_processor_time_is_shown_too() -> None:
    script = (
        "import json, runpy, sys\n"
        "made = runpy.run_path('benchmarks/__main__.py', run_name='other')\n"
        "print('\\n'.join(made['table'](json.load(sys.stdin))))\n"
    )
    rows = [{"name": "ours", "command s": 2.0}, {"name": "theirs", "command s": 5.0}]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60,
        input=json.dumps([{"benchmark": "b", "rows": rows}]), cwd=ROOT,
    )  # fmt: skip
    words = [line.split() for line in done.stdout.splitlines()[-2:]]
    assert words == [["ours", "2.000", "1.00x"], ["theirs", "5.000", "2.50x"]]
