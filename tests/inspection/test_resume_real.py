"""The resume check on checkpoints that real trainers wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftckpt.discovery.resolve import open_target
from ftckpt.formats.catalog import FORMATS
from ftckpt.inspection.resume import Presence, ResumeItem, resume_check
from ftckpt.storage import StoreOptions
from tests.builders.archives import extract

SHARED = Path(__file__).parents[3] / "shared" / "checkpoints"
PRESENT, ABSENT, CANNOT_TELL = Presence.PRESENT, Presence.ABSENT, Presence.CANNOT_TELL
RNG = ("rng-python", "rng-numpy", "rng-torch", "rng-cuda")

# Checkpoint -> what its generator is known to have saved, and to have left out.
SETS: dict[str, dict[str, Presence]] = {
    "dcp_fsdp2_nested/ckpt/step-3": {
        "weights": PRESENT, "scheduler": PRESENT, "data": PRESENT, "step": PRESENT,
        "rng-torch": PRESENT, "rng-python": ABSENT, "rng-numpy": ABSENT,
    },
    "dcp_fsdp2_titan/ckpt/step-3": {
        "weights": PRESENT, "scheduler": PRESENT, "data": PRESENT, "step": PRESENT,
        **dict.fromkeys(RNG, ABSENT),
    },
    "dcp_2d_tpfsdp/ckpt/step-3": {
        "weights": PRESENT, "scheduler": ABSENT, "data": ABSENT, "step": PRESENT,
        **dict.fromkeys(RNG, ABSENT),
    },
    "hf_llama/ckpt": {
        "weights": PRESENT, "moments": ABSENT, "masters": ABSENT, "scheduler": ABSENT,
        "data": ABSENT, "step": ABSENT, **dict.fromkeys(RNG, ABSENT),
    },
    "mcore_torchdist_tp2pp2/ckpt/iter_0000003": {
        "weights": PRESENT, "moments": PRESENT, "scheduler": PRESENT, "step": PRESENT,
        "data": PRESENT, **dict.fromkeys(RNG, PRESENT),
    },
    "verl_fsdp/ckpt/global_step_3": {
        "weights": PRESENT, "moments": PRESENT, "scheduler": PRESENT, "data": ABSENT,
        "rng-python": PRESENT, "rng-numpy": PRESENT, "rng-torch": PRESENT, "rng-cuda": ABSENT,
        "step": CANNOT_TELL,
    },
}  # fmt: skip


def items_of(name: str, root: Path) -> dict[str, ResumeItem]:
    made = name.partition("/")[0]
    archive = SHARED / f"{made}.tar.xz"
    if not archive.exists():
        pytest.skip(f"{archive} is not here")
    extract(archive, root)
    checkpoint = open_target(str(root / name), FORMATS, StoreOptions()).open()
    return {item.key: item for item in resume_check(checkpoint)}


@pytest.mark.parametrize("name", SETS)
def test_what_is_known_of_a_real_checkpoint(name: str, tmp_path: Path) -> None:
    found = items_of(name, tmp_path)
    assert {key: found[key].presence for key in SETS[name]} == SETS[name]


def test_a_float_buffer_is_all_that_has_no_moments(tmp_path: Path) -> None:
    # A state_dict does not tell a float buffer from a frozen parameter; that the optimizer never
    # had it, its groups tell.
    item = items_of("dcp_fsdp2_nested/ckpt/step-3", tmp_path)["moments"]
    assert (item.presence, item.missing) == (Presence.PRESENT, ())
    assert "rope_freq" in item.reason


def test_ranks_of_a_real_checkpoint_are_all_there(tmp_path: Path) -> None:
    item = items_of("dcp_fsdp2_nested/ckpt/step-3", tmp_path)["rng-torch"]
    assert item.ranks == 4
