"""The order of parameters that flat buffers keep and no file names."""

from __future__ import annotations

from ftckpt.formats.megatron.job.registration import constructed, registrations

LAYER = "decoder.layers.0.mlp.experts."
ORDER = [
    f"linear_fc{linear}.{member}{expert}"
    for linear in (1, 2)
    for expert in range(11)
    for member in ("weight", "bias")
]


def test_grouped_experts_have_their_weight_and_their_bias_together() -> None:
    names = [LAYER + name for name in ORDER]
    assert constructed(reversed(names)) == names


def test_grouped_experts_of_a_store_have_that_order_too() -> None:
    """torch_dist spells them as modules of their own, which are in one other order."""
    found = {r.layers[0] for r in registrations(_separate(name) for name in ORDER)}
    grouped = tuple(map(_separate, ORDER))
    apart = tuple(sorted(grouped, key=lambda name: int(name.split(".")[6])))
    assert grouped in found
    assert apart in found
    assert len(found) == 2


def _separate(name: str) -> str:
    linear, member = name.split(".")
    word = member.rstrip("0123456789")
    return f"{LAYER[:-1]}.local_experts.{member.removeprefix(word)}.{linear}.{word}"
