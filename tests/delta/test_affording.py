"""Packing by as many threads as the memory that is allowed carries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ftckpt.checkpoint import Kind, TensorInfo
from ftckpt.delta import affording
from ftckpt.delta.affording import affordable_jobs
from ftckpt.dtypes import DTYPES
from ftckpt.errors import NoResourceError
from ftckpt.memory import budget, set_budget
from ftckpt.stores.memory import MemoryStore

MIB = 1 << 20
LARGE = [TensorInfo("model", "w", Kind.PARAM, (4096, 4096), DTYPES["float32"], ())]
FAR = MemoryStore("memory://far")
FAR.traits = FAR.traits._replace(gap=MIB)


@pytest.fixture(autouse=True)
def _own_budget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = budget()
    monkeypatch.setattr(affording, "held", lambda: 80 * MIB)
    yield
    set_budget(before)


def test_what_is_read_ahead_of_each_source_is_counted() -> None:
    set_budget(1024 * MIB)
    here = affordable_jobs(99, LARGE, local=True, chained=False)
    near = affordable_jobs(
        99, LARGE, local=True, chained=False, sources=[MemoryStore("memory://n")]
    )
    assert here == near == (1024 - 80) // 80  # twenty blocks of 4 MiB each
    far = [affordable_jobs(99, LARGE, local=True, chained=False, sources=[FAR] * n) for n in (1, 2)]
    assert far == [(1024 - 80 - 64) // 80, (1024 - 80 - 2 * 64) // 80]


def test_elsewhere_and_upon_a_chain_there_are_fewer() -> None:
    set_budget(1024 * MIB)
    assert affordable_jobs(99, LARGE, local=False, chained=False) == (1024 - 80) // (80 + 3 * 64)
    assert affordable_jobs(99, LARGE, local=True, chained=True) == (512 - 80) // 80
    assert affordable_jobs(2, LARGE, local=True, chained=False) == 2


def test_a_budget_for_less_than_one_is_refused() -> None:
    set_budget(100 * MIB)
    with pytest.raises(NoResourceError) as caught:
        affordable_jobs(1, LARGE, local=True, chained=False)
    assert "--max-memory" in caught.value.hint
