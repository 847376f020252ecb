"""What `plan` and its companions print, whole; and what they refuse."""

from __future__ import annotations

import json
import math
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from ftckpt.commands.cli import app
from ftckpt.commands.cli.invocation import Invocation
from ftckpt.planning.models import young_daly
from tests.commands.golden import RUN, check_golden, ftckpt
from tests.json_run import ftckpt_json


def plan(line: str) -> dict[str, Any]:
    return ftckpt_json("plan", *shlex.split(line))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "plan",
            "plan --gpus 16384 --gpu-mtbf 50000h --save 60s --restart 8m --detect 2m",
        ),
        (
            "plan-money",
            "plan --preset llama3 --params 405B --storage-bw 2TB/s --set step-time=4.2s "
            "--gpu-hour 2.33 --set tb-month=20 --run 54d --keep-every 10",
        ),
        (
            "plan-bounds",
            "plan --failures 419/54d --gpus 16384 --bytes 5.7TB --snapshot 1.5s --flush 40s "
            "--set slowdown=2% --max-loss 3m --set max-overhead=1% --set "
            "host-ram=4GB --set detection-latency=1h "
            "--set step-time=4.2s",
        ),
        (
            "plan-tiers",
            "plan --mtbf 3h --detect 2m --tier name=ram,cost=1s,restore=10s,covers=80% "
            "--tier name=nvme,cost=8s,restore=1m,covers=81% --tier name=shared,cost=60s,restore=5m",
        ),
        (
            "plan-parts",
            "plan --gpus 4096 --gpu-mtbf 25000h --set host-mtbf=8000h --set switches=32 "
            "--set switch-mtbf=100000h --component cdu=8@9%/y --set "
            "job-mtbf=40h --set burn-in=1.3 --save 60s",
        ),
        ("plan-terminal", "plan --mtbf 3h --save 60s --restart 8m --plot -"),
        ("plan-presets", "plan --preset list"),
        ("plan-sweep", "plan sweep --over gpus=1k..128k --gpu-mtbf 50000h --save 60s --restart 8m"),
        ("plan-matrix", "plan sweep --over mtbf=1h..8h --over save=10s..160s"),
        (
            "plan-elastic",
            "plan elastic --from 64 --to 48 --batch 2048 --lr 1e-3 --restart 6m",
        ),
        (
            "plan-compress",
            "plan compress --bytes 100GB --ratio 2.5 --codec-bw 4GB/s --storage-bw 1.5GB/s",
        ),
        ("plan-risk", "plan risk --gpus 16384 --gpu-mtbf 50000h --run 54d --restart 10m"),
    ],
)
def test_answers_are_as_kept(name: str, line: str) -> None:
    check_golden(f"{name}.txt", ftckpt(*shlex.split(line)), timed=False)


def run(line: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command line in this process: exit code and stderr."""
    words = shlex.split(line)
    result = app.run(words, Invocation(verb=app.scan(words).verb))
    return int(result.code), capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("plan", "nothing says how often the job fails"),
        ("plan --save 60s --mtbf 3", "write 3s, 3m, 3h or 3d"),
        ("plan --mtbf 3h --save 60", "write 60s, 60m, 60h or 60d"),
        ("plan --mtbf 0s --save 60s", "above zero"),
        ("plan --mtbf -1h --save 60s", "--mtbf"),
        ("plan --mtbf nan --save 60s", "--mtbf"),
        ("plan --mtbf 1e300h --save 60s", "beyond any plan"),
        ("plan --mtbf 3h --save nan", "--save"),
        ("plan --mtbf 3h --save 0s", "costs nothing"),
        ("plan --mtbf 3h --save 6h", "a save stops training for 6 h and the job fails every 3 h"),
        ("plan --mtbf 3h --snapshot 2s --flush 8h", "durable only after 8 h"),
        ("plan --mtbf 3h --save 60s --restart 7h", "a restart takes 7 h"),
        ("plan --mtbf 3h", "nothing says what a save costs"),
        ("plan --mtbf 3h --save 60s --flush 60s", "--save is a blocking save"),
        ("plan --mtbf 3h --flush 60s", "--flush needs the snapshot"),
        ("plan --mtbf 3h --snapshot 1s --flush 60s --set slowdown=100%", "a blocking save"),
        ("plan --mtbf 3h --snapshot 1s --flush 60s --set slowdown=101%", "--set slowdown"),
        ("plan --mtbf 3h --save 60s --set slowdown=101%", "--set slowdown=101%"),
        ("plan --mtbf 3h --tier name=s,cost=60s --set slowdown=101%", "--set slowdown=101%"),
        ("plan --gpus 8 --gpu-mtbf 9% --save 60s", "%/y (AFR)"),
        ("plan --mtbf 3h --failures 4/5d --save 60s", "--mtbf and --failures"),
        ("plan --failures 0/54d --save 60s", "nothing ever fails"),
        ("plan --failures 419 --save 60s", "419/54d"),
        ("plan --failures 48/1d --save 60s --detect 30m", "takes all of the 24 h"),
        ("plan --preset nope --save 60s", "llama3"),
        ("plan --preset rsc1 --save 60s", "--gpus"),
        ("plan --gpu-mtbf 5h --save 60s", "how many there are"),
        ("plan --set hosts=5 --mtbf 3h --save 60s", "--set host-mtbf"),
        ("plan --component x --save 60s", "name=N@RATE"),
        ("plan --mtbf 3h --params 7B", "nothing says what a save costs"),
        ("plan --mtbf 3h --storage-bw 5GB/s", "the size of a checkpoint"),
        ("plan --mtbf 3h --params 7B --set write-bw=5GB/s", "--set ranks"),
        ("plan --mtbf 3h --params 7B --bytes 5GB --storage-bw 5GB/s", "--bytes and --params"),
        ("plan --mtbf 3h --params 7B --set bytes-per-param=int4 --storage-bw 5GB/s", "adamw"),
        ("plan --mtbf 3h --tier ram --tier name=s,cost=60s", "this is not a tier"),
        ("plan --mtbf 3h --tier name=a,cost=1s --tier name=s,cost=60s", "which failures"),
        ("plan --mtbf 3h --tier name=a,cost=1s,replicas=2 --tier name=s,cost=60s", "--gpus"),
        ("plan --mtbf 3h --tier name=a,cost=1s,covers=78%", "no tier cures every failure"),
        ("plan --mtbf 3h --tier name=s,cost=60s --save 60s", "--tier and --save"),
        ("plan --mtbf 3h --save 60s --set verify-cost=5s", "--set silent-mtbf"),
        ("plan --mtbf 3h --save 60s --set notice=120s", "--set preempt-mtbf"),
        ("plan --mtbf 3h --save 60s --set law=weibull:0.7", "--simulate"),
        ("plan --mtbf 3h --save 60s --set law=pareto --simulate", "weibull:0.7"),
        ("plan --mtbf 3h --save 60s --plot x.pdf", ".png, .svg or .html"),
        ("plan --mtbf 3h --save 60s --gpu-hour 2", "--gpus"),
        ("plan --gpus 8 --mtbf 3h --save 60s --gpu-hour 2 --set tb-month=2EUR", "EUR and USD"),
        ("plan --mtbf 3h --save 60s --set host-ram=5GB", "--set host-ram needs"),
        ("plan --mtbf 3h --save 60s --from a --from-log b", "give one"),
        ("plan sweep --over save=1s..9s --mtbf 3h --set weights-between=2", "of one plan"),
        ("plan --mtbf 3h --save 60s --set rewarm=5m", "--set rewarm needs --set weights-between"),
        (
            ("plan --mtbf 3h --save 60s --set weights-between=2 --set bytes-per-param=14"),
            "weights-only save",
        ),
        (
            ("plan --mtbf 3h --tier name=s,cost=60s --set weights-between=2"),
            "not planned for together",
        ),
        ("plan --mtbf 3h --save 60s --set read-bw=1GB/s", "--set read-bw needs the size"),
        ("plan --mtbf 3h --save 60s --set ageing=gpu=0.7", "add --simulate"),
        ("plan --mtbf 3h --save 60s --simulate --set ageing=job=0.7", "nothing says how many"),
        ("plan --mtbf 3h --save 60s --simulate --set ageing=gpu=0.7", "how often these fail"),
        (
            "plan --gpus 8 --gpu-mtbf 9h --save 9s --simulate --set ageing=gpu=9 --set burn-in=2",
            "new parts",
        ),
        ("plan --gpus 8 --gpu-mtbf 9h --save 9s --simulate --set ageing=gpu", "above zero"),
        ("plan --mtbf 3h --save 9s --simulate --set law=weibull:2 --set ageing=gpu=2", "give one"),
        ("plan sweep --over gpus", "this is not a range"),
        ("plan sweep --over gpu=1..2", "one of gpus, mtbf"),
        ("plan sweep --over gpus=8..8", "must rise"),
        ("plan sweep --over save=1..2", "write 1s"),
        ("plan sweep --over save=1s..2s --points 1 --mtbf 3h", "--points"),
        ("plan sweep --over save=1s..2s --over save=1s..2s --mtbf 3h", "given twice"),
        ("plan sweep --over a --over b --over c", "one or two"),
        ("plan elastic --from 64 --to 48 --batch 2047 --lr 1", "does not divide"),
        ("plan elastic --from 6 --to 6 --batch 6 --lr 1 --restart 1s", "no GPU was lost"),
        ("plan compress --bytes 5 --ratio 2 --codec-bw 1GB/s --storage-bw 1GB/s", "5TB"),
        ("plan risk --gpus 5 --gpu-mtbf 0% --run 3d", "above zero"),
        ("plan risk --gpus 5 --gpu-mtbf 5% --run nan", "--run"),
        ("plan risk --gpus 5 --gpu-mtbf 5% --run=-1d", "--run"),
    ],
)
def test_nonsense_is_a_sentence_and_2(
    line: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, error = run(line, capfd)
    assert code == 2, error
    assert said in error
    assert "Traceback" not in error


def test_json_has_full_precision_and_agrees_with_the_mathematics() -> None:
    answer = plan("--gpus 16384 --gpu-mtbf 50000h --save 60s --restart 8m --detect 2m")
    mtbf = 50_000 * 3600 / 16_384
    best = young_daly.optimum(60.0, mtbf)
    assert answer["rates"]["mtbf_s"] == pytest.approx(mtbf, rel=1e-12)
    assert answer["interval"]["exact_s"] == pytest.approx(best, rel=1e-12)
    outcome = young_daly.outcome(best, 60.0, mtbf, restart=480.0, detect=120.0)
    goodput = answer["goodput"]
    assert goodput["value"] == pytest.approx(outcome.useful, rel=1e-12)
    parts = ("value", "save", "lost", "detect_restart", "waiting")
    assert sum(goodput[part] for part in parts) == pytest.approx(1)
    assert answer["waste_first_order"] > 1 - goodput["value"]
    assert answer["inputs"]["save_s"] == 60.0


def test_what_a_rule_predicts_is_for_the_interval_given() -> None:
    goodput = plan("--mtbf 3h --save 60s --model young --interval 2h")["goodput"]
    assert goodput["predicted"] == pytest.approx(1 - 60 / 7200 - 7200 / (2 * 3 * 3600))


def test_a_size_and_bandwidths_give_the_save() -> None:
    inputs = plan(
        "--mtbf 3h --params 1T --set ranks=8000 --set snapshot-bw=25GB/s --storage-bw 500GB/s"
    )
    assert inputs["inputs"]["bytes"] == 14e12
    assert inputs["inputs"]["save_s"] == pytest.approx(0.07)
    assert inputs["inputs"]["flush_s"] == pytest.approx(28.0)
    slow = plan("--mtbf 3h --params 671B --set ranks=2 --set write-bw=40Gb/s --storage-bw 80GB/s")
    assert slow["inputs"]["save_s"] == pytest.approx(939.4)
    assert any("2 ranks set the pace" in remark for remark in slow["remarks"])


def test_copies_in_the_memory_of_peers_give_the_coverage() -> None:
    answer = plan(
        "--gpus 1024 --mtbf 3h --tier name=ram,cost=1s,replicas=2,lost=2 --tier name=s,cost=60s"
    )
    assert answer["tiers"][0]["covers"] == pytest.approx(0.9921259842519685)


def test_a_preset_is_scaled_and_says_so() -> None:
    answer = plan("--preset llama3 --gpus 8k --save 60s")
    assert answer["rates"]["mtbf_s"] == pytest.approx(2 * 54 * 86400 / 419)
    assert any("scaled from 16,384 to 8,192" in remark for remark in answer["remarks"])
    assert answer["rates"]["ci"]["low_mtbf_s"] < answer["rates"]["mtbf_s"]


def test_a_simulation_agrees_and_is_repeatable() -> None:
    line = (
        "--mtbf 3h --save 60s --restart 5m --simulate --runs 40 "
        "--set failures-per-run=100 --set seed=3"
    )
    first, second = plan(line), plan(line)
    assert first["simulation"] == second["simulation"]
    assert first["simulation"]["agrees"] is True
    assert abs(first["simulation"]["z"]) <= 4
    assert first["simulation"]["failures"] == 4000
    assert first["simulation"]["closed"] == first["goodput"]["value"]


def test_failures_from_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "gaps.txt"
    trace.write_text("# hours between failures\n1h\n\n2h  # a cable\n90m\n")
    line = (
        "--mtbf 90m --save 60s --simulate --runs 4 --set "
        f"failures-per-run=30 --set law=trace:{trace}"
    )
    assert plan(line)["simulation"]["law"] == "trace of 3 failures"
    trace.write_text("1h\n5400\n")
    done = ftckpt("plan", *shlex.split(line))
    assert done.returncode == 2
    assert f"line 2 of {trace}" in done.stderr


def test_a_broken_constraint_is_a_warning() -> None:
    done = ftckpt(*shlex.split("plan --mtbf 3h --save 60s --set max-overhead=1% --max-loss 5m"))
    assert done.returncode == 0
    assert "warning: does not hold: saving overhead" in done.stderr


def saved_root(root: Path) -> Path:
    """Make a root of real checkpoints: every 500 steps and 600 s, with one gap of an hour."""
    for number in range(1, 9):
        folder = root / f"step-{number * 500}"
        folder.mkdir(parents=True)
        for order, file in enumerate(sorted((RUN / "step-1").iterdir())):
            (folder / file.name).write_bytes(file.read_bytes())
            time = 1_700_000_000 + 600 * number + 3600 * (number > 4) + 10 * order
            os.utime(folder / file.name, (time, time))
    return root


def test_from_a_root(tmp_path: Path) -> None:
    root = saved_root(tmp_path / "ckpt")
    files = len(list((RUN / "step-1").iterdir()))
    answer = plan(f"--from {root} --mtbf 3h")
    assert answer["measured"]["every_s"] == 600
    assert answer["inputs"]["save_s"] == 10 * (files - 1)
    assert answer["inputs"]["step_s"] == pytest.approx(1.2)
    assert answer["inputs"]["bytes"] == answer["measured"]["bytes"] > 0
    said = " ".join(answer["remarks"])
    assert "every 500 steps = 10 min" in said
    text = ftckpt("plan", "--from", str(root), "--mtbf", "3h").stdout
    assert "now it saves after every" in text
    # The gap of an hour is the one possible interruption, where nothing else is known.
    counted = plan(f"--from {root}")["inputs"]["counted"]
    assert [(c["failures"], c["seconds"]) for c in counted] == [(1, 7 * 600 + 3600)]


def test_what_is_typed_wins_over_what_was_measured(tmp_path: Path) -> None:
    root = saved_root(tmp_path / "ckpt")
    answer = plan(f"--from {root} --mtbf 3h --save 45s --bytes 1GB --set step-time=2s")
    assert answer["inputs"]["save_s"] == 45.0
    assert (answer["inputs"]["bytes"], answer["inputs"]["step_s"]) == (1e9, 2.0)


def test_from_a_log(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    events = [{"event": "start", "time": 0}, {"event": "end", "time": 360_000}]
    events += [{"event": "save", "seconds": 50 + 20 * (k % 2), "bytes": 2e12} for k in range(4)]
    events += [{"event": "failure", "detect": 60, "restart": 300, "class": "gpu"}] * 40
    log.write_text("\n".join(map(json.dumps, events)))
    answer = plan(f"--from-log {log}")
    # Nothing fails in the 60 s until a failure is noticed.
    assert answer["rates"]["mtbf_s"] == pytest.approx(9000.0 - 60)
    assert answer["inputs"]["save_s"] == 60.0
    assert (answer["inputs"]["detect_s"], answer["inputs"]["restart_s"]) == (60.0, 300.0)
    assert answer["interval"]["low_s"] < answer["interval"]["exact_s"]
    log.write_text('{"event": "save"}\nsoon\n')
    done = ftckpt("plan", "--from-log", str(log))
    assert (done.returncode, "line 2 of" in done.stderr) == (2, True)


def test_a_recovery_is_detection_start_and_load() -> None:
    line = (
        "--mtbf 3h --bytes 6TB --storage-bw 100GB/s --set read-bw=200GB/s --restart 2m --detect 1m"
    )
    answer = plan(line)
    assert answer["inputs"]["load_s"] == 30
    assert (answer["inputs"]["restart_s"], answer["inputs"]["start_s"]) == (150, 120)
    alone = plan(
        line.replace("--set read-bw=200GB/s ", "").replace("--restart 2m", "--restart 150s")
    )
    assert answer["goodput"]["value"] == alone["goodput"]["value"]
    assert "reading twice as fast" in [one["change"] for one in answer["improvements"]]


def test_a_load_that_a_log_already_holds_is_not_added(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    log.write_text('{"event": "failure", "time": 9e8, "detect": 60, "restart": 300}\n' * 2)
    line = f"--from-log {log} --mtbf 3h --bytes 6TB --storage-bw 1TB/s --set read-bw=1TB/s"
    assert plan(line)["result"]["code"] == 2
    assert plan(f"{line} --restart 4m")["inputs"]["restart_s"] == 246


def test_what_weights_between_full_saves_are_worth() -> None:
    weights = plan("--mtbf 3h --save 70s --set weights-between=3 --set rewarm=1m")["weights"]
    assert weights["save_s"] == pytest.approx(10)  # 2 of 14 bytes
    assert weights["gain"] > weights["cost"] > 0
    assert plan("--mtbf 3h --save 70s --set weights-between=3")["weights"]["gain"] == 0


def test_errors_that_are_noticed_late_are_planned_and_simulated() -> None:
    line = (
        "--mtbf 3h --save 60s --set silent-mtbf=30h --set "
        "detection-latency=2h --keep-last 3 --simulate"
    )
    answer = plan(f"{line} --restart 5m --runs 20 --set failures-per-run=200")
    assert answer["simulation"]["agrees"]
    assert 0 < answer["simulation"]["unreached"] < 1
    verified = plan(
        "--mtbf 3h --save 60s --set silent-mtbf=30h --set verify-cost=20s --simulate --runs 20"
    )
    assert verified["simulation"]["agrees"]
    assert verified["simulation"]["unreached"] is None


def test_detection_is_no_time_in_which_a_job_can_fail(tmp_path: Path) -> None:
    answer = plan("--failures 80/240h --detect 30m --save 60s")
    assert answer["rates"]["mtbf_s"] == pytest.approx(2.5 * 3600)
    assert any("until a failure is noticed" in remark for remark in answer["remarks"])
    log = tmp_path / "run.jsonl"
    events: list[dict[str, object]] = [{"event": "start", "time": 0}]
    events += [{"event": "failure", "time": 10800 * k} for k in range(1, 80)]
    events += [{"event": "failure", "time": 10800 * 79 + 60}, {"event": "end", "time": 864_000}]
    log.write_text("\n".join(map(json.dumps, events)))
    answer = plan(f"--from-log {log} --save 60s --detect 30m")
    assert answer["rates"]["mtbf_s"] == pytest.approx((864_000 - 79 * 1800 - 60) / 79)
    assert answer["measured"]["exposed_failures"] == 79
    assert any("1 of the failures" in remark for remark in answer["remarks"])


@pytest.mark.parametrize("option", ["--from", "--from-log"])
def test_what_is_not_there_is_9(option: str) -> None:
    assert ftckpt("plan", option, "/nowhere", "--mtbf", "3h", "--save", "60s").returncode == 9


def test_a_sweep_says_where_it_cannot_go_on() -> None:
    answer = ftckpt_json(*shlex.split("plan sweep --over save=1s..10h --mtbf 1h"))
    refused = [row for row in answer["rows"] if row["refused"]]
    assert refused
    assert all(row["goodput"] is None and row["stall_s"] >= 7200 for row in refused)
    planned = [row for row in answer["rows"] if not row["refused"]]
    goodputs = [row["goodput"]["value"] for row in planned]
    assert goodputs == sorted(goodputs, reverse=True)


def test_what_depends_on_the_swept_input_follows_it() -> None:
    line = "plan sweep --over gpus=8..64 --set host-mtbf=8000h --params 7B --set write-bw=1GB/s"
    rows = ftckpt_json(*shlex.split(line))["rows"]
    assert [row["gpus"] for row in rows] == [8, 16, 32, 64]
    for row in rows:
        hosts = row["gpus"] / 8
        assert row["mtbf_s"] == pytest.approx(8000 * 3600 / hosts)
        assert row["stall_s"] == pytest.approx(7e9 * 14 / (row["gpus"] * 1e9))


def test_points_are_evenly_spaced_on_a_logarithmic_scale() -> None:
    line = "plan sweep --over save=1s..100s --points 5 --mtbf 3h"
    values = ftckpt_json(*shlex.split(line))["axes"][0]["values"]
    assert values == pytest.approx([1, math.sqrt(10), 10, 10 * math.sqrt(10), 100])


def test_risk_without_checkpoints_does_not_overflow() -> None:
    answer = ftckpt_json(*shlex.split("plan risk --gpus 1M --gpu-mtbf 1h --run 3650d"))
    assert answer["probability"] == 1.0
    assert answer["log10_completion_s"] > 1e9
