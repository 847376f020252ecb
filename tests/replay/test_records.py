"""Logs: what is written is read back, what is damaged is refused, floats keep their bits."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import CorruptError, NotFoundError, UnsupportedError, UsageError
from ftckpt.replay.compare.import_logs import read_any
from ftckpt.replay.record.log import SCHEMA, StepRecord, line, read_log, ulps, value_of, written
from tests.replay.made import events


def save(folder: Path, records: list[StepRecord], rank: int = 0, world: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    head = json.dumps({"log": SCHEMA, "rank": rank, "world_size": world, "threads": 2, "x": 3})
    file = folder / f"rank-{rank}.jsonl"
    file.write_text("\n".join([head, *map(line, records)]) + "\n")
    return file


def test_a_log_is_read_back(tmp_path: Path) -> None:
    for rank in (0, 1):
        records = [StepRecord(step, rank, events(step, rank), ("saved x",)) for step in (4, 5)]
        save(tmp_path / "log", [*records, StepRecord(6, rank, {}, partial=True)], rank, 2)
    log = read_log(tmp_path / "log")
    assert (log.ranks, log.world_size, log.finished()) == ((0, 1), 2, (4, 5))
    assert log.conditions == {"threads": 2}
    assert log.steps[1][5] == StepRecord(5, 1, events(5, 1), ("saved x",))


def test_a_line_half_written_at_the_end_is_no_damage(tmp_path: Path) -> None:
    file = save(tmp_path / "log", [StepRecord(1, 0, {}), StepRecord(2, 0, {})])
    file.write_bytes(file.read_bytes()[:-5])
    assert read_log(tmp_path / "log").finished() == (1,)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"step": 1}', '{"step": -1, "rank": 0, "events": {}}',
     '{"step": 1, "rank": true, "events": {}}', '{"step": 1, "rank": 0, "events": {"x": {}}}',
     '{"step": 1, "rank": 0, "events": {"loss": {"0": 1.5}}}',
     '{"step": 1, "rank": 0, "events": {}, "notes": [1]}', "[" * 100_000],
)  # fmt: skip
def test_damage_inside_is_refused(tmp_path: Path, text: str) -> None:
    file = save(tmp_path / "log", [])
    file.write_text(file.read_text() + text + "\n" + line(StepRecord(9, 0, {})) + "\n")
    with pytest.raises(CorruptError, match="line 2 of rank-0"):
        read_log(file)


def test_two_runs_in_one_log_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "log", [StepRecord(1, 0, {}), StepRecord(1, 0, {})])
    with pytest.raises(CorruptError, match="stands twice"):
        read_log(tmp_path / "log")
    with pytest.raises(NotFoundError):
        read_log(tmp_path)


@given(st.floats(width=32))
def test_floats_keep_their_value(value: float) -> None:
    back = value_of(written(value, "float32"))
    assert back is not None
    assert math.isnan(back) if math.isnan(value) else back == value


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [1.0, -1.0, 0.0, 3.1415])
def test_ulps_are_counted_as_torch_steps(dtype: str, value: float) -> None:
    start = torch.tensor(value, dtype=getattr(torch, dtype))
    now = start
    for count in range(4):
        texts = [written(float(t), dtype) for t in (start, now)]
        assert ulps(*texts) == count
        now = torch.nextafter(now, torch.tensor(9.0, dtype=now.dtype))


def test_ulps_of_what_has_none() -> None:
    assert ulps(written(1.0, "float32"), written(1.0, "float64")) is None
    assert ulps(written(math.nan), written(1.0)) is None
    assert ulps("text", "other text") is None


@pytest.mark.parametrize(
    "text",
    [
        "step 3 loss 2.25\nstep 4 loss 2.20\n",
        "junk\n iteration        3/     100 | lr: 1E-3 | lm loss: 2.25E+00 |\n iteration 4/ 100 |"
        " lm loss: 2.20E+00 |\n",
        "{'step': 3, 'loss': 2.25}\n{'step': 4, 'loss': 2.20}\n",
        '{"step": 3, "loss": 2.25}\nnot json\n{"global_step": 4, "loss": 2.20}\n',
    ],
)
def test_logs_of_other_programs(tmp_path: Path, text: str) -> None:
    file = tmp_path / "log.txt"
    file.write_text(text)
    log = read_any(file)
    assert log.finished() == (3, 4)
    values = [value_of(str(log.steps[0][step].events["loss"]["loss"])) for step in (3, 4)]
    assert values == [2.25, 2.20]
    assert log.limits == ("numbers as they were printed, 3 digits at the most; no state",)


def test_a_pattern_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    file.write_text("it=1 l=2.0 g=7\nit=1 l=3.0 g=8\n")
    log = read_any(file, r"it=(?P<step>\d+) l=(?P<loss>\S+) g=(?P<norm>\S+)")
    assert log.steps[0][1].events == {
        "loss": {"loss": "decimal 3.0"}, "metric": {"norm": "decimal 8"},
    }  # fmt: skip
    assert "more than once" in log.limits[1]
    with pytest.raises(UsageError, match="no group"):
        read_any(file, "x")
    with pytest.raises(UsageError, match="not a regular expression"):
        read_any(file, "(")
    with pytest.raises(UnsupportedError):
        read_any(file, r"nothing(?P<step>\d+)")
    with pytest.raises(NotFoundError):
        read_any(tmp_path / "absent")
