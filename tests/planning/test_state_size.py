from __future__ import annotations

import pytest

from ftckpt.errors import UsageError
from ftckpt.planning.state_size import bytes_per_parameter, state_parts


@pytest.mark.parametrize(
    ("recipe", "size"),
    [
        ("bf16-adamw", 14),
        ("fp32-adamw", 12),
        ("bf16-adamw8", 8),
        ("purebf16-adamw16", 6),
        ("purebf16-none", 2),
        ("purebf16", 2),
        ("fp8-adamw16", 9),
        ("bf16-muon", 10),
    ],
)
def test_bytes_per_parameter(recipe: str, size: int) -> None:
    assert bytes_per_parameter(recipe) == size


def test_parts_are_named() -> None:
    assert [name for name, _ in state_parts("bf16-adamw")] == [
        "bf16 weights",
        "fp32 master",
        "fp32 exp_avg",
        "fp32 exp_avg_sq",
    ]


@pytest.mark.parametrize("recipe", ["", "int4", "bf16-adam-w", "bf16_adamw", "14"])
def test_unknown_recipes_list_the_known(recipe: str) -> None:
    with pytest.raises(UsageError) as raised:
        bytes_per_parameter(recipe)
    assert "adamw" in raised.value.hint
