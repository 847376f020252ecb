"""What `status --parts` says of parts that are done, run, are lost or are slow."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ftckpt.errors import ExitCode, NotFoundError
from ftckpt.parts import WorkPart
from ftckpt.parts.finish import watch
from ftckpt.parts.plan import ShareRecord, WorkPlan
from ftckpt.parts.shared_folder import Heartbeat, PartsPlace
from ftckpt.progress import NULL
from ftckpt.storage import StoreOptions, open_store

from .answers import answer

PLAN = WorkPlan("verify", "/ckpt/step-9", "a" * 32, "b" * 32)


@pytest.fixture
def place(tmp_path: Path) -> PartsPlace:
    return PartsPlace(open_store(str(tmp_path)), "parts", PLAN)


def done(place: PartsPlace, number: int, host: str, nbytes: int, seconds: float) -> None:
    units = {f"hash {n} f": "0" * 32 for n in range(500)}  # longer than what is read of it
    place.create(
        ShareRecord(PLAN, WorkPart(number, 12), units, host=host, seconds=seconds, nbytes=nbytes)
    )


def test_done_running_lost_and_slow(place: PartsPlace, tmp_path: Path) -> None:
    for number, host, nbytes in ((0, "n1", 100), (1, "n2", 90), (2, "n3", 95), (3, "n4", 9)):
        done(place, number, host, nbytes, 2.0)
    done(place, 4, "n1", 100, 2.0)
    place.note("5-12.running", {"host": "n1", "bytes": 40})
    place.note("6-12.running", {"host": "n4", "bytes": 1})
    lost = tmp_path / "parts" / PLAN.digest / "6-12.running.json"
    os.utime(lost, (time.time() - 600,) * 2)
    (found,) = watch(str(tmp_path), StoreOptions())
    assert (found.verb, found.target, found.of) == ("verify", "/ckpt/step-9", 12)
    assert list(found.done) == [0, 1, 2, 3, 4]
    assert [(one.number, one.host, one.nbytes) for one in found.running] == [(5, "n1", 40)]
    assert [(one.number, one.host) for one in found.lost] == [(6, "n4")]
    assert found.waiting == "6-11"
    assert {one.host: (one.parts, one.nbytes) for one in found.nodes}["n1"] == (2, 200)
    assert [one.host for one in found.nodes if one.slow] == ["n4"]
    assert found.left == 14.0
    result, document = answer("status", "--parts", tmp_path)
    assert result.code is ExitCode.PARTIAL
    assert "part 6 on n4" in result.message
    assert document["divided"][0]["waiting"] == "6-11"


def test_a_part_says_that_it_lives_as_it_gets_on(
    place: PartsPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftckpt.parts.shared_folder.BEAT", 0.0)
    with Heartbeat(place, WorkPart(1, 2), NULL) as beating:
        first = place.look("1-2.running")
        beating.add(7)
        second = place.look("1-2.running")
    assert first is not None
    assert second is not None
    assert (first["beat"], second["beat"], second["bytes"]) == (1, 2, 7)
    assert place.look("1-2.running") is None


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        watch(str(tmp_path), StoreOptions())
    assert answer("status")[0].code is ExitCode.USAGE


def test_a_dead_plan_is_named_and_not_lost(place: PartsPlace, tmp_path: Path) -> None:
    done(place, 0, "n1", 100, 2.0)
    place.note("1-12.running", {"host": "n4", "bytes": 1})
    for path in (tmp_path / "parts").rglob("*.json"):
        os.utime(path, (time.time() - 8 * 86400,) * 2)
    result, document = answer("status", "--parts", tmp_path)
    assert result.code is ExitCode.OK
    assert document["divided"][0]["dead"] is True
