"""`ftckpt replay` as a user runs it; the trainings here write their logs themselves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ftckpt.replay.record.log import SCHEMA, StepRecord, line
from tests.builders.checkpoints import save_dcp
from tests.commands.golden import RUN, ftckpt
from tests.commands.replay.replaying import replay
from tests.json_run import ftckpt_json
from tests.replay.made import events
from tests.test_docs import validate


def test_a_restart_that_is_exact(script: Path) -> None:
    answer = replay(script)
    assert answer["result"]["code"] == 0, answer["result"]
    assert answer["result"]["message"] == "the restart is exact for 4 steps (4 to 7, 1 rank)"
    assert answer["at"] == 3
    ends = {run["name"]: run["end"] for run in answer["runs"]}
    recorded = "recorded all that was asked for"
    assert ends == {
        "interrupted": "stopped where it was to be", "baseline-1": recorded,
        "baseline-2": recorded, "restart-1": recorded, "restart-2": recorded,
    }  # fmt: skip
    printed = (script.parent / "trial" / "restart-1" / "output.txt").read_text()
    assert printed == "step 4\nstep 5\nstep 6\nstep 7\n"


def test_a_generator_that_nobody_seeds_or_draws_from_is_no_difference(script: Path) -> None:
    answer = replay(script, fault="idle")
    assert answer["result"]["code"] == 0, answer["result"]
    note = "Python RNG: seeded by nobody, and nothing drew from it: left out"
    assert note in answer["notes"]
    logs = [script.parent / "trial" / run / "log" for run in ("restart-1", "restart-2")]
    reference = script.parent / "trial" / "baseline-1" / "log"
    done = ftckpt("replay", "compare", *logs, "--reference", reference)
    assert done.returncode == 0, done.stderr
    assert note in done.stdout


def test_a_restart_that_forgets_something(script: Path) -> None:
    page = script.parent / "page.html"
    answer = replay(script, "--html", str(page), fault="forgets")
    assert answer["result"]["code"] == 3
    assert answer["verdict"] == "state"
    assert [(c["component"], c["step"]) for c in answer["causes"]] == [("computation", 5)]
    text = page.read_text()
    assert text.count("class='bad first'") == 1
    # Losses of the interrupted run; losses and weights of U' and B; of A the first loss alone.
    assert text.count("class=good>=") == 3 + 2 * 4 + 2 * 4 + (1 + 4)
    assert "<script" not in text
    assert "://" not in text


def test_a_restart_that_crashes_after_a_difference(script: Path) -> None:
    answer = replay(script, fault="forgets and crashes")
    assert (answer["result"]["code"], answer["verdict"]) == (3, "state"), answer["result"]
    assert [(c["component"], c["step"]) for c in answer["causes"]] == [("computation", 5)]
    crash = "restart A crashed with code 1 after step 6; it last printed: out of memory"
    assert answer["problems"][0] == crash


def test_what_began_between_two_readings_is_looked_at_closer(script: Path) -> None:
    answer = replay(script, "--every", "4", "--steps", "8", fault="drifts")
    assert answer["verdict"] == "state"
    # Tensors were read before steps 4 and 8; the weights differ from step 6 on.
    across, closer = answer["comparisons"][-1], answer["comparisons"][-2]
    assert across["first"][0]["step"] == 8
    assert closer["first"][0]["step"] == 6
    assert [(c["component"], c["step"]) for c in answer["causes"]] == [("weights", 6)]
    assert [run["name"] for run in answer["runs"]][-4:] == [
        "baseline-closer", "restart-closer", "baseline-closeup", "restart-closeup",
    ]  # fmt: skip
    # 6.0 and 7.0 are a quarter of a power of two apart.
    [shown] = answer["closeups"]
    assert (shown["step"], shown["item"], shown["ulps"]) == (6, "w", 1 << 21)
    assert (shown["reference"], shown["other"]) == (
        "float32 0x1.8000000000000p+2", "float32 0x1.c000000000000p+2",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "code", "verdict", "said"),
    [
        ("noise", 3, "framework", "two uninterrupted runs differ"),
        ("nan", 6, "not_compared", "NaN at step 5"),
        ("short", 6, "not_compared", "step 5 is the first that is missing"),
        ("crash", 6, "not_compared", "with code 1 after step 4; it last printed: out of memory"),
        ("hang", 6, "not_compared", "timed out after step 4; it last printed: step 4"),
        ("unsaved", 6, "not_compared", "before it had saved anything"),
    ],
)
def test_what_goes_wrong_is_never_a_pass(
    script: Path, fault: str, code: int, verdict: str, said: str
) -> None:
    timeout = "3s" if fault == "hang" else "60s"
    answer = replay(script, "--timeout", timeout, fault=fault)
    assert (answer["result"]["code"], answer["verdict"]) == (code, verdict), answer["result"]
    assert said in answer["result"]["message"]


def test_a_working_directory_of_its_own(script: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "train.py").write_text(script.read_text())
    arguments = (
        "--steps", "2", "--runs", "1", "--dir", "trial", "--", sys.executable, "train.py", ".",
    )  # fmt: skip
    done = ftckpt("replay", "run", *arguments, cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert "the restart is exact for 2 steps" in done.stdout
    assert "was not repeated" in done.stdout
    assert sorted(p.name for p in elsewhere.iterdir()) == ["train.py", "trial"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--checkpoint", "x", "--at", "3"], "does not show the uninterrupted run"),
        (["--reference", "x"], "belong to --checkpoint"),
        (["--timeout", "soon"], "not a duration"),
    ],
)
def test_a_trial_that_makes_no_sense(script: Path, arguments: list[str], said: str) -> None:
    answer = replay(script, *arguments)
    assert answer["result"]["code"] == 2
    assert said in answer["result"]["message"]
    assert not (script.parent / "trial").exists()


def test_a_checkpoint_of_ones_own_against_a_log(script: Path, tmp_path: Path) -> None:
    assert replay(script)["result"]["code"] == 0
    trial = tmp_path / "trial"
    done = ftckpt(
        "replay", "run", "--dir", tmp_path / "second", "--steps", "4", "--runs", "1", "--at", "3",
        "--checkpoint", trial / "interrupted" / "state",
        "--reference", trial / "baseline-1" / "log",
        "--", sys.executable, script, "{checkpoint}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "exact for 4 steps" in done.stdout


def save_log(folder: Path, steps: range, shift: int = 0) -> str:
    folder.mkdir()
    head = json.dumps({"log": SCHEMA, "rank": 0, "world_size": 1})
    rows = [line(StepRecord(step, 0, events(step + shift, 0))) for step in steps]
    (folder / "rank-0.jsonl").write_text("\n".join([head, *rows]) + "\n")
    return str(folder)


def test_logs_are_compared(tmp_path: Path) -> None:
    u, a = save_log(tmp_path / "u", range(1, 9)), save_log(tmp_path / "a", range(5, 9))
    same = ftckpt_json("replay", "compare", a, a, "--reference", u)
    validate(same)
    assert (same["result"]["code"], same["compared"]) == (0, {"first": 5, "last": 8})
    late = save_log(tmp_path / "late", range(5, 9), shift=-1)
    differ = ftckpt_json("replay", "compare", u, late)
    validate(differ)
    assert (differ["result"]["code"], differ["causes"][0]["component"]) == (3, "checkpoint")
    apart = ftckpt_json("replay", "compare", a, save_log(tmp_path / "b", range(9, 12)))
    validate(apart)
    assert apart["result"]["code"] == 6
    assert ftckpt_json("replay", "compare", a, str(tmp_path / "absent"))["result"]["code"] == 9


def test_logs_of_other_programs_are_compared(tmp_path: Path) -> None:
    for name, loss in (("a", "2.30"), ("b", "2.31")):
        (tmp_path / name).write_text(f"step 1 loss 2.50\nstep 2 loss {loss}\n")
    done = ftckpt("replay", "compare", tmp_path / "a", tmp_path / "b")
    assert done.returncode == 3
    assert "2.31 instead of 2.30" in done.stdout
    assert "3 digits at the most; no state" in done.stdout


def test_an_audit_lists_what_is_absent(tmp_path: Path) -> None:
    for step in (7, 8):
        save_dcp(tmp_path / f"step-{step}")
    path = str(tmp_path / "step-7")
    answer = ftckpt_json("replay", "audit", path)
    validate(answer)
    absent = {item["key"] for item in answer["resume"] if item["presence"] == "absent"}
    assert "rng-torch" in absent
    assert {r["topic"] for r in answer["remarks"] if r["weight"] == "contradiction"} == set()
    assert answer["result"]["code"] == 0
    assert ftckpt_json("replay", "audit", path, "--strict")["result"]["code"] == 3
    stale = ftckpt_json("replay", "audit", path, "--against", str(tmp_path / "step-8"))
    validate(stale)
    assert stale["result"]["code"] == 3
    assert "bit for bit those of the next checkpoint" in stale["result"]["message"]


def test_an_audit_of_real_saves(tmp_path: Path) -> None:
    first, second = (str(RUN / name) for name in ("step-1", "step-2"))
    answer = ftckpt_json("replay", "audit", first, "--against", second)
    validate(answer)
    assert [r for r in answer["remarks"] if r["topic"] == "stale"] == []
