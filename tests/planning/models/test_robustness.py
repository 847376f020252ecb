"""For every question: an answer, or a sentence; and no numpy for one number."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ftckpt.errors import UsageError
from ftckpt.planning.models import asynchronous, silent, spot, tiers, young_daly
from ftckpt.planning.models.spot import CopyTier, Pattern
from ftckpt.planning.models.young_daly import Outcome

ANY = st.one_of(
    st.floats(),
    st.sampled_from(
        [0.0, -1.0, 1e-300, 1e-30, 1e-9, 1.0, 60.0, 1e6, 1e12, 1e30, 1e300, math.inf, math.nan]
    ),
)

MODELS: dict[str, Callable[[float, float, float, float, float], object]] = {
    "exact": lambda t, c, m, r, d: young_daly.outcome(t, c, m, restart=r, detect=d),
    "safe": lambda t, c, m, r, d: young_daly.outcome(
        t, c, m, restart=r, detect=d, safe_recovery=True
    ),
    "asynchronous": lambda t, c, m, r, d: asynchronous.outcome(
        t, c, m, flush=r, slowdown=0.25, restart=d
    ),
    "silent": lambda t, c, m, r, d: silent.outcome(t, c, c, d, m, restart=r),
    "spot": lambda t, c, m, r, d: spot.outcome(t, c, m, d, flush=r, restart=r),
    "tiers": lambda t, c, m, r, d: tiers.outcome(
        Pattern((CopyTier("near", c, d, 0.9), CopyTier("far", c, r, 1)), t, (3,)), m, detect=d
    ),
    "exact optimum": lambda t, c, m, r, d: young_daly.optimum(c, m),
    "asynchronous optimum": lambda t, c, m, r, d: asynchronous.optimum(c, m, flush=r),
    "young": lambda t, c, m, r, d: young_daly.young(c, m),
    "daly": lambda t, c, m, r, d: young_daly.daly(c, m),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@given(ANY, ANY, ANY, ANY, ANY)
@example(1e30, 1e30, 1e-30, 1e30, 1e30)
@example(1e-30, 0.0, 1e30, 0.0, 0.0)
@example(1.0, 1.0, 1.0, 1e6, 0.0)
@example(1e6, 1.0, 1.0, 0.0, 0.0)
@example(1.0, 1e-300, 1e-30, 0.0, 0.0)
def test_an_answer_is_a_number_or_a_sentence(
    name: str, interval: float, save: float, mtbf: float, restart: float, detect: float
) -> None:
    try:
        found = MODELS[name](interval, save, mtbf, restart, detect)
    except UsageError as error:
        found = error
    if isinstance(found, UsageError):
        assert " must be " in found.message
        return
    if not isinstance(found, Outcome):
        assert isinstance(found, float | int)
        assert found >= 0
        return
    for field in fields(found):
        value = getattr(found, field.name)
        if isinstance(value, float):
            assert not math.isnan(value), field.name
            if field.name != "interval":
                assert -1e-6 <= value <= 1 + 1e-6, field.name


def test_one_number_needs_no_numpy() -> None:
    script = (
        "import sys\n"
        "from ftckpt.planning import rates\n"
        "from ftckpt.planning.models import asynchronous, silent, spot, tiers, young_daly\n"
        "from ftckpt.planning.models.spot import CopyTier\n"
        "rates.observed(419, 54 * 86400)\n"
        "best = young_daly.optimum(60.0, 11135.0)\n"
        "young_daly.outcome(best, 60.0, 11135.0, restart=480, detect=120)\n"
        "asynchronous.outcome(300, 2, 3600, flush=200, slowdown=0.3)\n"
        "tiers.optimum((CopyTier('a', 4, 10, 0.9), CopyTier('b', 90, 120, 1)), 10800)\n"
        "silent.optimum(20, 60, 1e-5, 1e-4)\n"
        "spot.optimum(20, 1e-5, 1e-4)\n"
        "print(sorted({'numpy', 'torch'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"
