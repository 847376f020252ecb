"""Random roots on disk, read and planned, against what the page says must stay.

`--campaign full` tries 3,000 of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from ftckpt.discovery import resolve as opening
from ftckpt.retention.apply.prepare import Prepared, prepare
from ftckpt.storage import StoreOptions
from tests.retention import oracle
from tests.retention.history import any_policy, asked_by
from tests.retention.oracle import Thing
from tests.retention.random_root import DAY, NOW, Everything, RandomRun, bases

_SHORT, _FULL, _CHUNKS = 150, 3_000, 3


@pytest.mark.parametrize("chunk", range(_CHUNKS))
def test_random_roots(chunk: int, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    full = pytestconfig.getoption("campaign") == "full"
    number = (_FULL if full else _SHORT) // _CHUNKS
    for seed in range(chunk * number, (chunk + 1) * number):
        place = tmp_path / f"{seed}" / "place"
        try:
            agrees(Random(seed), place)
        except Exception as error:
            error.add_note(f"root {seed}")
            raise
        shutil.rmtree(place.parent)


def agrees(choose: Random, place: Path) -> None:
    """Make a root, plan it, and hold the plan to the page."""
    runs = ("a", "b") if choose.random() < 0.2 else ("",)
    things = [t for run in runs for t in RandomRun(choose, place, run).things.values()]
    last_run = NOW - choose.choice((5, 40)) * DAY / 10 if choose.random() < 0.3 else None
    for run in runs if last_run is not None else ():
        (place / run / ".ftckpt").mkdir(exist_ok=True)
        event = {"schema": "ftckpt.log/1", "time": last_run, "event": "applied"}
        (place / run / ".ftckpt/log.jsonl").write_text(json.dumps(event) + "\n")
    policy = any_policy(choose)
    found = opening.locate(str(place), StoreOptions())
    prepared = prepare(found, [Everything()], policy, NOW, bases=bases)
    asked = asked_by(policy)
    turned_out, words = oracle.opened(things, asked, NOW)
    check_classes(prepared, turned_out)
    kept = {d.entry.name: {r.rule for r in d.reasons} for d in prepared.plan.keep}
    assert kept == {name: held for name, held in words.items() if held}
    dropped = {d.entry.name for d in prepared.plan.drop}
    assert dropped == {name for name, held in words.items() if not held}
    checked = [replace(t, checked=bool(words[t.name])) for t in turned_out]
    floors = oracle.broken(checked, dropped, asked, NOW, last_run)
    assert {b.floor for b in prepared.plan.broken} == floors


def check_classes(prepared: Prepared, things: Sequence[Thing]) -> None:
    """Hold what was read to what is true."""
    read = {name: str(f.entry.entry_class) for name, f in prepared.found.items()}
    assert read == {t.name: t.kind for t in things}
    for thing in things:
        entry = prepared.found[thing.name].entry
        if thing.kind in ("COMMITTED", "ABANDONED"):
            assert (entry.step, entry.time) == (thing.step, thing.time)
            said = "no marker" if thing.name.endswith(".pt") else "committed"
            if thing.kind == "COMMITTED":
                assert entry.commit == said
        if thing.damaged:
            assert entry.looked in ("names", "headers")
