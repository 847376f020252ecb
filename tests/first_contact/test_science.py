"""Answers about replays and plans that were once wrong of real trainings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

import ftckpt
from ftckpt.errors import UnverifiedError
from ftckpt.planning import Counted, combine
from ftckpt.planning.exposure import dispersion
from ftckpt.planning.models import arithmetic
from ftckpt.replay.compare.logs import compare
from ftckpt.replay.compare.verdict import Verdict, judge
from ftckpt.replay.record.log import ENDED, Log
from ftckpt.replay.record.log import line as line_of
from tests.json_run import ftckpt_json
from tests.replay.made import events, log, stream


def altered(of: Log, step: int, **changes: Any) -> Log:
    """Return a log with one record changed."""
    records = dict(of.steps[0])
    records[step] = replace(records[step], **changes)
    return replace(of, steps={0: records})


class TestCutRecords:
    """A record that was cut short shows nothing of what comes after the cut."""

    def two_modules(self, name: str) -> Log:
        def change(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
            of["input"] = {"0": f"float32[2]:{step:032x}", "1:0": f"float32[2]:{step + 9:032x}"}

        return log(range(1, 9), name, change=change)

    def test_the_second_module_of_a_step_that_was_ended(self) -> None:
        whole, restart = self.two_modules("U"), self.two_modules("A")
        cut = dict(restart.steps[0][7].events)
        cut["input"] = {"0": cut["input"]["0"]}
        restart = altered(restart, 7, events=cut, partial=True)
        assert judge([whole], [restart], 4, 6).verdict is Verdict.EXACT

    def test_what_stands_before_the_cut_still_counts(self) -> None:
        whole, restart = self.two_modules("U"), self.two_modules("A")
        cut = {**restart.steps[0][7].events, "input": {"0": "float32[2]:" + 32 * "f"}}
        restart = altered(restart, 7, events=cut, partial=True)
        assert judge([whole], [restart], 4, 6).verdict is Verdict.STATE

    def test_a_whole_record_without_the_second_module_differs(self) -> None:
        whole, restart = self.two_modules("U"), self.two_modules("A")
        less = dict(restart.steps[0][6].events)
        less["input"] = {"0": less["input"]["0"]}
        assert not compare(whole, altered(restart, 6, events=less), 4, 6).equal

    def test_a_training_that_ended_has_drawn_nothing_for_a_further_step(self) -> None:
        whole, restart = log(range(1, 9), "U"), log(range(1, 9), "A")
        ended = {**events(8, 0), "rng_start": {"python": stream(3)}}
        restart = altered(restart, 8, events=ended, partial=True, notes=(ENDED,))
        found = judge([whole], [restart], 4, 8, ends=True)
        assert [cause.component for cause in found.causes] == ["step"]
        assert "ended by itself after step 7" in found.sentence


class TestCounters:
    """Two optimizers make two optimizer steps, which a log counts, for each of the training's."""

    def counted(self, name: str, saves: dict[int, int]) -> Log:
        def change(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
            if step in saves:
                of["counter"] = {"step": f"{saves[step]} {step}"}

        return log(range(1, 15), name, change=change)

    @pytest.mark.parametrize(
        ("reference", "other", "said"),
        [
            ({6: 3, 12: 6}, {10: 6}, "step is 6 after step 10 instead of 5"),
            ({6: 3, 12: 6}, {12: 7}, "step is 7 after step 12 instead of 6"),
            ({4: 4, 8: 8}, {5: 6}, "step is 6 after step 5 instead of 5"),
            # Not of one pace, so only the same count at another step shows it.
            ({5: 3, 9: 4, 14: 9}, {8: 4}, "step is 4 after step 8 instead of step 9"),
        ],
    )
    def test_a_count_of_another_step_is_found(
        self, reference: dict[int, int], other: dict[int, int], said: str
    ) -> None:
        found = judge([self.counted("U", reference)], [self.counted("A", other)], 4, 14)
        assert found.verdict is Verdict.STATE
        assert said in found.sentence

    @pytest.mark.parametrize("saves", [{12: 6}, {9: 5}, {9: 4}, {}])
    def test_a_right_count_is_exact(self, saves: dict[int, int]) -> None:
        found = judge([self.counted("U", {6: 3, 12: 6})], [self.counted("A", saves)], 4, 14)
        assert found.verdict is Verdict.EXACT


def written(place: Path, of: Log, **header: Any) -> str:
    place.mkdir()
    head = {"log": "ftckpt.replay/1", "rank": 0, "world_size": 1, **header}
    lines = [json.dumps(head), *(line_of(record) for record in of.steps[0].values())]
    (place / "rank-0.jsonl").write_text("\n".join(lines) + "\n")
    return str(place)


class TestCompare:
    def test_a_shorter_log_is_not_exact(self, tmp_path: Path) -> None:
        long = written(tmp_path / "long", log(range(1, 9)))
        short = written(tmp_path / "short", log(range(1, 6)))
        found = ftckpt.replay_compare(long, short)
        assert found.verdict is Verdict.NOT_COMPARED
        assert "logged 5 of the 8 steps; step 6 is the first that is missing" in found.sentence
        assert ftckpt_json("replay", "compare", long, short)["result"]["code"] == 6
        assert ftckpt.replay_compare(long, short, last=5).verdict is Verdict.EXACT

    def test_a_restart_that_counts_from_1_has_no_known_place(self, tmp_path: Path) -> None:
        whole = written(tmp_path / "U", log(range(1, 9)), numbered="counted")
        late = log(range(4, 9)).renumbered(-3)
        a, b = (written(tmp_path / n, late, numbered="counted") for n in "AB")
        with pytest.raises(UnverifiedError, match="counts its steps from 1"):
            ftckpt.replay_compare(a, b, reference=whole)
        assert ftckpt_json("replay", "compare", a, b, "--reference", whole)["result"]["code"] == 6
        told = [written(tmp_path / n, log(range(4, 9)), numbered="told") for n in ("C", "D")]
        assert ftckpt.replay_compare(*told, reference=whole).verdict is Verdict.EXACT


def test_a_record_says_where_its_numbers_come_from(tmp_path: Path) -> None:
    import subprocess
    import sys

    script = (
        "import torch, sys\nfrom ftckpt import hook\nhook.install()\n"
        "m = torch.nn.Linear(2, 2); o = torch.optim.SGD(m.parameters(), lr=.1)\n"
        "for s in range(3, 5):\n"
        "    l = m(torch.ones(1, 2)).sum(); o.zero_grad(); l.backward(); o.step()\n"
        "    if sys.argv[1:]: hook.step(step=s, loss=l)\n"
    )
    from ftckpt.replay.record.log import read_log

    seen = {}
    for name, arguments, more in (
        ("counted", [], {}), ("told", ["x"], {}), ("given", [], {"FTCKPT_REPLAY_AT": "2"}),
    ):  # fmt: skip
        import os

        environment = os.environ | {"FTCKPT_REPLAY_LOG": str(tmp_path / name)} | more
        subprocess.run([sys.executable, "-c", script, *arguments], env=environment, check=True)
        found = read_log(tmp_path / name)
        seen[found.numbered] = found.finished()[0]
    assert seen == {"counted": 1, "told": 3, "given": 3}


class TestPlans:
    def test_the_headline_has_the_weights_only_saves_in_it(self) -> None:
        asked = "plan --mtbf 3h --save 90s --set weights-between=3 --set weights-save=500s"
        plan = ftckpt_json(*asked.split())
        assert plan["goodput"]["value"] == pytest.approx(0.397, abs=0.001)
        assert "39.7" in plan["result"]["message"]
        shares = ("value", "save", "lost", "detection", "restart", "waiting")
        assert sum(plan["goodput"][name] for name in shares) == pytest.approx(1)
        without = ftckpt_json(*["plan", "--mtbf", "3h", "--save", "90s"])["goodput"]["value"]
        assert plan["weights"]["cost"] == pytest.approx(without - plan["goodput"]["value"])
        free = ftckpt_json(*asked.replace("500s", "0s").split())
        assert free["goodput"]["value"] == pytest.approx(without)

    def test_a_simulation_agrees_with_it(self) -> None:
        asked = (
            "plan --mtbf 3h --save 90s --set weights-between=3 --set weights-save=200s --simulate"
        )
        found = ftckpt_json(*asked.split(), "--runs", "20")["simulation"]
        assert found["agrees"]

    def test_a_free_verification_is_said(self, capsys: pytest.CaptureFixture[str]) -> None:
        asked = "plan --mtbf 1d --set silent-mtbf=1h --save 60s --restart 1m --detect 1m"
        assert "verification taken as free" in ftckpt_json(*asked.split())["result"]["message"]
        paid = ftckpt_json(*asked.split(), "--set", "verify-cost=60s")["result"]["message"]
        assert "free" not in paid

    @pytest.mark.parametrize("size", ["0", "0GB", "0TB"])
    def test_nothing_is_not_compressed(self, size: str) -> None:
        asked = ["--ratio", "2", "--codec-bw", "4GB/s", "--storage-bw", "1GB/s"]
        result = ftckpt_json("plan", "compress", "--bytes", size, *asked)["result"]
        assert result["code"] == 2
        assert f"--bytes {size}" in result["message"]

    def test_capacity_that_comes_back_must_stay_to_be_worth_a_restart(self) -> None:
        asked = "plan elastic --from 48 --to 64 --batch 1920 --lr 1e-3 --restart 6m"
        stay = ftckpt_json(*asked.split())["grow_above_s"]
        assert stay == pytest.approx(360 * 64 / 16)
        # After that time both ways have done the same work.
        assert 64 * (stay - 360) == pytest.approx(48 * stay)
        assert arithmetic.grow_above(0, 8, 1) == 0
        same = asked.replace("64", "48")
        assert ftckpt_json(*same.split())["result"]["code"] == 2


class TestClusters:
    """Limits of counted failures, where each failure brings more of them soon after."""

    def trial(self, random: Random, seconds: float, more: float) -> list[float]:
        times: list[float] = []
        now = 0.0
        while True:
            now += random.expovariate((1 - more) / 100)
            if now >= seconds:
                return sorted(times)
            times.append(now)
            while random.random() < more:
                times.append(min(seconds, now + random.expovariate(1 / 5)))

    @pytest.mark.parametrize(("more", "least"), [(0.0, 0.92), (0.5, 0.88)])
    def test_the_limits_hold_where_the_log_shows_clusters(self, more: float, least: float) -> None:
        random, held, narrow, trials = Random(3), 0, 0, 300
        for _ in range(trials):
            times = self.trial(random, 10_000.0, more)
            scatter = dispersion(times, 10_000.0)
            found = combine([], [Counted("seen", len(times), 10_000.0, dispersion=scatter)])
            plain = combine([], [Counted("seen", len(times), 10_000.0)])
            held += found.low <= 1 / 100 <= found.high
            narrow += plain.low <= 1 / 100 <= plain.high
        assert held / trials >= least
        assert (narrow / trials < 0.89) is (more > 0)

    def test_few_failures_show_no_clusters(self) -> None:
        assert dispersion([1.0] * 15, 1000.0) == 1
        assert dispersion([1.0] * 16, 1000.0) > 1
        assert dispersion([], 0.0) == 1
