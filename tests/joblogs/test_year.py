"""A year whose truth is known: what the logs say of it, and what a plan makes of that."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from ftckpt.joblogs import read_logs, report_of
from ftckpt.joblogs.report import trend_of
from ftckpt.joblogs.sources import TOGETHER
from ftckpt.planning.exposure import mean_limits
from tests.builders.incident_year import Year, simulate
from tests.builders.run_logs import read_log
from tests.campaign import examples
from tests.json_run import ftckpt_json

HOUR = 3600.0
MTBF = {"gpu": 9 * HOUR, "host": 20 * HOUR, "software": 40 * HOUR}
STEP, STEPS, SAVE, RECOVERY = 4.0, 500, 90.0, 900.0


@pytest.fixture(scope="module")
def year() -> Year:
    return simulate(
        Random(7), MTBF, days=examples(120, 365), steps=STEPS, save=SAVE, recovery=RECOVERY,
        worst=12.0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def logs(year: Year, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("year")
    paths = {}
    for name in ("job", "kernel", "records"):
        path = folder / f"{name}.log"
        path.write_text("\n".join(getattr(year, name)) + "\n")
        paths[name] = str(path)
    return paths


def test_every_failure_of_the_year_is_found_and_named(year: Year, logs: dict[str, str]) -> None:
    found = read_logs([logs["job"], logs["kernel"]])
    report = report_of(found.collections, TOGETHER)
    # A failure right after a restart, before any line of a step, is one with the failure before.
    missed = sum(year.struck.values()) - len(report.incidents)
    assert 0 <= missed <= 0.03 * sum(year.struck.values())
    by = {rate.name: rate.incidents for rate in report.components}
    for component, true in year.struck.items():
        assert by[component] == pytest.approx(true, abs=0.05 * true)
    assert [one.node for one in report.lemons] == ["n0"]
    assert report.steps is not None
    assert report.steps.p50_s == pytest.approx(STEP, rel=0.01)
    # Lines come every hundred steps: what was done behind the last of them is not seen.
    assert report.wasted is not None
    assert year.rewound - 100 * len(report.incidents) < report.wasted.steps <= year.rewound
    assert report.recovery is not None
    assert report.recovery.mean_s == pytest.approx(RECOVERY, rel=0.05)


@pytest.mark.parametrize("named", [("records",), ("job", "kernel")])
def test_the_plan_is_within_one_percent_of_the_year(
    year: Year, logs: dict[str, str], named: tuple[str, ...]
) -> None:
    words = [word for name in named for word in ("--from-log", logs[name])]
    answer = ftckpt_json("plan", *words, "--interval", f"{STEPS * STEP:g}s", "--save", f"{SAVE:g}s")
    truth = year.useful / year.wall
    assert answer["goodput"]["value"] == pytest.approx(truth, rel=0.01)
    failures = sum(year.struck.values())
    # In lines of every hundredth step, what fails before the first of them is not told apart.
    far = 0.005 if named == ("records",) else 0.04
    assert answer["rates"]["mtbf_s"] == pytest.approx(year.running / failures, rel=far)
    for component, share in answer["rates"]["share"].items():
        assert share == pytest.approx(year.struck[component] / failures, abs=0.01)
    changes = [one["change"] for one in answer["improvements"]]
    assert "n0 replaced by a node like the others" in changes
    assert "failures of gpu half as often" in changes


def test_limits_by_component_hold_as_often_as_they_promise() -> None:
    """Exact Poisson limits cover the truth in at least 95 %."""
    seeds, hits, total = examples(60, 2000), 0, 0
    for seed in range(seeds):
        run = simulate(
            Random(seed), MTBF, days=20, steps=100, step=60, save=SAVE, recovery=RECOVERY
        )
        log = read_log(run.records, "records")
        assert log.exposed_s is not None
        for component, mtbf in MTBF.items():
            low, high = mean_limits(log.components.get(component, 0))
            hits += low <= log.exposed_s / mtbf <= high
            total += 1
    assert hits / total >= 0.95 - 4 * (0.95 * 0.05 / total) ** 0.5


def test_the_limits_of_a_trend_hold_as_often_as_they_promise() -> None:
    random, hits, runs = Random(5), 0, examples(200, 4000)
    for _ in range(runs):
        times = sorted(random.uniform(0, 1e7) for _ in range(25))
        # A slope of 3 a day below noise that is not normal.
        points = [(t, 3 * t / 86400 + random.expovariate(1 / 400)) for t in times]
        found = trend_of(points)
        assert found is not None
        hits += found.low <= 3 <= found.high
    assert hits / runs == pytest.approx(0.95, abs=4 * (0.95 * 0.05 / runs) ** 0.5 + 0.01)


def test_too_few_points_have_no_trend() -> None:
    assert trend_of([(0, 1), (1, 2), (2, 3)]) is None
    assert trend_of([(5, float(n)) for n in range(9)]) is None


def test_an_empty_log_plans_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("hello\n")
    answer = ftckpt_json("plan", "--from-log", str(path), "--mtbf", "3h", "--save", "60s")
    assert answer["result"]["code"] == 2
    assert "no line says anything" in answer["result"]["message"]
