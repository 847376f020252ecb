from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.amounts import SECONDS
from ftckpt.errors import UsageError
from ftckpt.planning import quantities

HOUR, DAY, YEAR = 3600.0, 86400.0, 365 * 86400.0


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (quantities.duration, "500ms", 0.5),
        (quantities.duration, "90s", 90.0),
        (quantities.duration, "1.5 h", 5400.0),
        (quantities.duration, "5m", 300.0),
        (quantities.duration, "54d", 54 * DAY),
        (quantities.duration, "0s", 0.0),
        (quantities.size, "5.7TB", 5.7e12),
        (quantities.size, "1.5GiB", 1.5 * (1 << 30)),
        (quantities.size, "512B", 512.0),
        (quantities.bandwidth, "80GB/s", 80e9),
        (quantities.bandwidth, "400Gb/s", 50e9),
        (quantities.bandwidth, "400Gbps", 50e9),
        (quantities.bandwidth, "2GiB/s", float(2 << 30)),
        (quantities.share, "5%", 0.05),
        (quantities.share, "0.05", 0.05),
        (quantities.share, "0%", 0.0),
        (quantities.factor, "1.3", 1.3),
        (quantities.count, "16384", 16384),
        (quantities.count, "405e9", 405_000_000_000),
        (quantities.count, "70B", 70_000_000_000),
        (quantities.count, "1.5T", 1_500_000_000_000),
        (quantities.money, "2.33", (2.33, "USD")),
        (quantities.money, "$2.33", (2.33, "USD")),
        (quantities.money, "2.10EUR", (2.10, "EUR")),
        (quantities.observed, "419/54d", (419, 54 * DAY)),
        (quantities.observed, "0/10h", (0, 10 * HOUR)),
        (quantities.failure_rate, "50000h", 1 / (50_000 * HOUR)),
        (quantities.failure_rate, "180d", 1 / (180 * DAY)),
        (quantities.failure_rate, "9%/y", 0.09 / YEAR),
        (quantities.failure_rate, "2300FIT", 2300 / (1e9 * HOUR)),
        (quantities.failure_rate, "0.0065/node-day", 0.0065 / 8 / DAY),
        (quantities.failure_rate, "1%/day", 0.01 / DAY),
        (quantities.failure_rate, "0.005/d", 0.005 / DAY),
    ],
)
def test_what_people_write(parse: Callable[[str, str], Any], text: str, value: Any) -> None:
    assert (
        parse(text, "--flag") == pytest.approx(value)
        if isinstance(value, float)
        else (parse(text, "--flag") == value)
    )


@pytest.mark.parametrize(
    ("parse", "text", "shown"),
    [
        (quantities.duration, "60", "60s, 60m, 60h or 60d"),
        (quantities.size, "5.7", "5.7GB, 5.7GiB or 5.7TB"),
        (quantities.bandwidth, "80", "80GB/s, or 80Gb/s for bits"),
        (quantities.failure_rate, "50000", "50000h (MTBF), 50000%/y (AFR)"),
    ],
)
def test_a_bare_number_is_told_its_units(
    parse: Callable[[str, str], Any], text: str, shown: str
) -> None:
    with pytest.raises(UsageError) as raised:
        parse(text, "--flag")
    assert raised.value.message.startswith(f"--flag {text}: ")
    assert "needs its unit" in raised.value.message
    assert shown in raised.value.hint


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *(
            (quantities.duration, t)
            for t in ("", "-5s", "nan", "nans", "infs", "5 parsecs", "1e999h")
        ),
        *((quantities.size, t) for t in ("", "-1GB", "10Gb", "512M", "GB", "1e3GB")),
        *((quantities.bandwidth, t) for t in ("0GB/s", "-1GB/s", "80GB", "400Gb", "nanGB/s")),
        *((quantities.share, t) for t in ("", "-1%", "101%", "1.5", "nan", "5%%")),
        *((quantities.factor, t) for t in ("0", "-1", "nan", "inf", "")),
        *((quantities.count, t) for t in ("0", "-1", "1.5", "nan", "1e30", "")),
        *((quantities.money, t) for t in ("", "-1", "$1EUR", "nan", "1 dollar")),
        *((quantities.observed, t) for t in ("419", "419/54", "-1/5d", "1.5/5d", "5/0s", "/5d")),
        *(
            (quantities.failure_rate, t)
            for t in ("0h", "0%/y", "9%", "-5%", "nan", "5/week", "1e-999FIT")
        ),
        *((quantities.component, t) for t in ("nic", "nic=5", "nic@5h", "=5@5h", "nic=0@5h")),
    ],
)
def test_nonsense_is_a_sentence_that_names_the_flag(
    parse: Callable[[str, str], Any], text: str
) -> None:
    with pytest.raises(UsageError) as raised:
        parse(text, "--flag")
    assert raised.value.message.startswith("--flag ")


def test_k_is_what_the_caller_says() -> None:
    assert quantities.count("16k", "--gpus", kilo=1024) == 16_384
    assert quantities.count("16k", "--params") == 16_000


def test_a_component_and_the_size_of_a_node() -> None:
    name, number, rate = quantities.component("cdu=64@1000h", "--component")
    assert (name, number) == ("cdu", 64)
    assert rate == pytest.approx(1 / (1000 * HOUR))
    per_node = quantities.component("gpu=8@0.008/node-day", "--component", per_node=4)
    assert per_node.rate == pytest.approx(0.002 / DAY)


@given(st.text(max_size=12))
def test_any_text_is_a_number_or_a_usage_error(text: str) -> None:
    for parse in (
        quantities.duration,
        quantities.size,
        quantities.bandwidth,
        quantities.share,
        quantities.factor,
        quantities.count,
        quantities.failure_rate,
    ):
        try:
            value = parse(text, "--flag")
        except UsageError:
            continue
        assert math.isfinite(value)
        assert value >= 0


@given(st.floats(1e-3, 1e6), st.sampled_from(sorted(SECONDS)))
def test_durations_keep_their_value(value: float, unit: str) -> None:
    text = f"{value!r}{unit}"
    assert quantities.duration(text, "--flag") == pytest.approx(value * SECONDS[unit])
