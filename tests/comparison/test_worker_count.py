"""Comparing by as many threads as the memory that is allowed carries."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from ftckpt.checkpoint import STORED, Checkpoint, Decoding
from ftckpt.commands.cli.app import run
from ftckpt.commands.cli.invocation import Invocation
from ftckpt.comparison import read as affording
from ftckpt.comparison.read import within_budget
from ftckpt.errors import ExitCode, NotFoundError
from ftckpt.storage import open_store
from ftckpt.storage.memory import MemoryStore
from ftckpt.storage.source import Source
from ftckpt.storage.store import Store
from ftckpt.workers import Work
from ftckpt.workers import budget as budgets
from ftckpt.workers.budget import budget, set_budget
from ftckpt.workers.limits import RateLimit
from tests.builders.raw_checkpoint import RawCheckpoint

MIB = 1 << 20
STEPS = Path(__file__).parents[1] / "data" / "dcp" / "fsdp2"


@pytest.fixture(autouse=True)
def _own_budget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = budget()
    monkeypatch.setattr(budgets, "held", lambda *, mapped=False: (60 + 20 * mapped) * MIB)
    monkeypatch.setitem(sys.modules, "numpy", np)  # imported already
    yield
    set_budget(before)


def threads(wanted: int, sides: Sequence[Checkpoint]) -> int:
    return within_budget(Work(threads=wanted), sides).threads


def processes(wanted: int, sides: Sequence[Checkpoint]) -> int:
    return within_budget(Work(threads=wanted), sides).processes


def _at(store: Store) -> RawCheckpoint:
    return RawCheckpoint(source=Source(store, "", {}), tensors={}, objects={})


def test_threads_are_as_many_as_the_budget_carries(tmp_path: Path) -> None:
    near, far = _at(open_store(str(tmp_path))), _at(MemoryStore("memory://far"))
    far.source.store.traits = far.source.store.traits._replace(gap=MIB)
    set_budget(1024 * MIB)
    assert threads(2, (near, far)) == 2
    assert threads(999, (near, near)) == (1024 - 80) // 8
    # What is read ahead is counted too.
    assert threads(999, (near, far)) == (1024 - 80 - 64) // 32
    assert threads(999, (far, far)) == (1024 - 80 - 2 * 64) // 32
    set_budget(64 * MIB)
    assert threads(999, (far, far)) == 1


def test_libraries_that_are_to_be_imported_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = _at(open_store(str(tmp_path)))
    set_budget(256 * MIB)
    assert threads(999, (side, side)) == (256 - 80) // 8
    monkeypatch.delitem(sys.modules, "numpy")
    assert threads(999, (side, side)) == (256 - 80 - 20) // 8


class _Decoded(Decoding):
    def __bool__(self) -> bool:
        return True


def test_a_delta_decodes_in_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side = _at(open_store(str(tmp_path)))
    set_budget(1024 * MIB)
    monkeypatch.setattr(RawCheckpoint, "decoding", _Decoded())
    assert threads(999, (side, side)) == (512 - 80) // 8


def test_the_verb_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def hearing(work: Work, sides: tuple[object, ...]) -> Work:
        asked.append((work.threads, len(sides)))
        return work

    monkeypatch.setattr(affording, "within_budget", hearing)
    words = ["diff", str(STEPS / "step-3"), str(STEPS / "step-4"), "--jobs", "40"]
    assert run(words, Invocation()).code is ExitCode.DIFFERENT
    assert asked == [(40, 2)]


def test_copies_are_made_where_a_side_is_decoded_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = _at(open_store(str(tmp_path))), _at(MemoryStore("memory://far"))
    decoded, missing = _at(open_store(str(tmp_path))), _at(open_store(str(tmp_path)))

    class Three(Decoding):
        def slots(self) -> int:
            return 3

    class Gone(Decoding):
        def slots(self) -> int:
            raise NotFoundError("its base is nowhere")

    monkeypatch.setattr(RawCheckpoint, "decoding", property(lambda one: ways.get(id(one), STORED)))
    ways: dict[int, Decoding] = {id(decoded): Three(), id(missing): Gone()}
    set_budget(4096 * MIB)
    assert processes(2, (near, near)) == 0
    assert processes(2, (near, decoded)) == processes(2, (decoded, near)) == 2
    assert processes(99, (decoded, decoded)) == 3
    assert processes(2, (far, decoded)) == 0
    assert processes(2, (near, missing)) == 0
    limited = within_budget(Work(threads=2, processes=2, limiter=RateLimit(1)), (near, decoded))
    assert (limited.threads, limited.processes) == (2, 0)
