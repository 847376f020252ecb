"""What a transfer costs in memory, and how many threads a budget carries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ftckpt.errors import NoResourceError
from ftckpt.transfer.request.dry_run import affordable_jobs
from ftckpt.workers import budget as budgets
from ftckpt.workers.budget import budget, held, set_budget

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _own_budget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = budget()
    monkeypatch.setattr(budgets, "held", lambda *, mapped=False: 80 * MIB)
    yield
    set_budget(before)


def test_threads_are_as_many_as_the_budget_carries() -> None:
    set_budget(1024 * MIB)
    assert affordable_jobs(2, local=True) == 2
    assert affordable_jobs(16, local=True) == 16
    assert affordable_jobs(2, local=False) == 2
    assert affordable_jobs(16, local=False) == 4  # each holds three blocks of 64 MiB
    set_budget(300 * MIB)
    assert affordable_jobs(16, local=False) == 1
    assert 8 <= affordable_jobs(1000, local=True) < 20


def test_a_budget_for_less_than_one_is_refused() -> None:
    set_budget(200 * MIB)
    with pytest.raises(NoResourceError) as caught:
        affordable_jobs(1, local=False)
    assert "--max-memory" in caught.value.hint
    assert affordable_jobs(1, local=True) == 1


def test_what_is_held_is_measured() -> None:
    before = held()
    block = bytearray(b"1") * (64 * MIB)
    assert held() - before > 32 * MIB
    assert held(mapped=True) - held() > MIB  # the interpreter itself, and its libraries
    del block
