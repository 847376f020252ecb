"""The samples that loading is tried on: by default one or two a format, all of them when asked."""

from __future__ import annotations

from pathlib import Path

from ftckpt.formats.support import LAYOUTS

DATA = Path(__file__).parents[1] / "data"
WAYS = ("whole", "rows", "columns", "grid")
# What a load needs to be told beside the place.
FLAGS = {"delta": {"bases": [str(DATA / "delta" / "base")]}}

# One a format, and each way to lie: packed, flat, strided, compressed, of several parts.
USUAL = (
    "dcp/fsdp2/step-3", "consolidated/three", "by_hand/compressed/ckpt_100.pt.zst",
    "trainer_dirs/accelerate_two", "ranks/tp_fsdp2/actor", "by_hand/stages",
    "deepspeed/z1/global_step2", "deepspeed/z3/global_step2",
    "deepspeed/universal_tp/global_step2_universal", "orbax/everything", "delta",
    "torch_checkpointing/fsdp_tp/step-10",
)  # fmt: skip


def samples() -> list[tuple[str, str]]:
    """Return the format and the place in `tests/data` of every sample of the table of support."""
    found = [(row.format, one) for row in LAYOUTS for one in row.samples if ":" not in one]
    return [one for one in found if one[1] not in UNLISTED]


# Samples that need what another test makes.
UNLISTED: tuple[str, ...] = ()
