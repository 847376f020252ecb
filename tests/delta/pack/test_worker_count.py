"""Packing by as many threads as the memory that is allowed carries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ftckpt.checkpoint import Kind, TensorInfo
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.delta.pack.worker_count import affordable
from ftckpt.errors import NoResourceError
from ftckpt.storage.memory import MemoryStore
from ftckpt.workers import budget as budgets
from ftckpt.workers.budget import budget, set_budget

MIB = 1 << 20
LARGE = [TensorInfo("model", "w", Kind.PARAM, (4096, 4096), DTYPES["float32"], ())]
FAR = MemoryStore("memory://far")
FAR.traits = FAR.traits._replace(gap=MIB)


@pytest.fixture(autouse=True)
def _own_budget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = budget()
    monkeypatch.setattr(budgets, "held", lambda *, mapped=False: 80 * MIB)
    yield
    set_budget(before)


def jobs(wanted: int, **where: Any) -> int:
    return affordable(wanted, LARGE, **({"local": True, "chained": False} | where)).jobs


def test_what_is_read_ahead_of_each_source_is_counted() -> None:
    set_budget(1024 * MIB)
    near = jobs(99, sources=[MemoryStore("memory://n")])
    assert jobs(99) == near == (1024 - 80) // 80  # twenty blocks of 4 MiB each
    far = [jobs(99, sources=[FAR] * n) for n in (1, 2)]
    assert far == [(1024 - 80 - 64) // 80, (1024 - 80 - 2 * 64) // 80]


def test_elsewhere_and_upon_a_chain_there_are_fewer() -> None:
    set_budget(1024 * MIB)
    assert jobs(99, local=False) == (1024 - 80) // (80 + 3 * 64)
    assert jobs(99, chained=True) == (512 - 80) // 80
    assert jobs(2) == 2


def test_processes_are_taken_where_they_do_more_than_the_threads_that_fit() -> None:
    set_budget(1024 * MIB)
    assert affordable(2, LARGE, local=True, chained=False) == (2, 2)
    assert affordable(99, LARGE, local=True, chained=False) == (11, (1024 - 80) // (80 + 40))
    assert affordable(2, LARGE, local=False, chained=False).processes == 0
    assert affordable(1, LARGE, local=True, chained=False).processes == 0
    set_budget(400 * MIB)
    assert affordable(99, LARGE, local=True, chained=False) == (4, 0)  # three processes


def test_a_budget_for_less_than_one_is_refused() -> None:
    set_budget(100 * MIB)
    with pytest.raises(NoResourceError) as caught:
        affordable(1, LARGE, local=True, chained=False)
    assert "--max-memory" in caught.value.hint
