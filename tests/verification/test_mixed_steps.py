"""Files of two saves in one checkpoint, for each kind with a real sample.

One file after the other is that of a save of one step later (tests/builders/second_save.py), where
it counts steps. Damage (4) where the framework counts alike in all files; a warning or a note where
its clocks may drift apart. What remains unseen stands here by name.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from ftckpt.errors import ExitCode, FtckptError
from ftckpt.findings import Finding, from_error
from ftckpt.verification import Level, VerifyOptions, verify
from tests.builders.archives import extract
from tests.builders.checkpoints import open_checkpoint
from tests.builders.second_save import later_files

DATA = Path(__file__).parents[1] / "data"
PROVEN, TOLD, UNSEEN = "proven", "told", "unseen"
# What is said of a mixture that proves nothing.
_SAYS = frozenset({"clocks-differ", "step-disagrees", "step-name"})
# What becomes of each file that counts steps, by patterns of its path; proven where none fits.
PLACES: dict[str, dict[str, str]] = {
    # The iteration is in one file, the optimizer's count in the others.
    "dcp/fsdp2/step-3": {"__0_0.distcp": TOLD},
    "dcp/tp/step-3": {"*": TOLD},  # no optimizer: the name alone
    "dcp/schedulefree/step-3": {"*": TOLD},  # it keeps no step in a tensor
    **{
        f"deepspeed/{name}/global_step2": {"mp_rank_00_model_states.pt": TOLD}
        for name in ("z1", "z2", "bf16", "wrap", "lora_z2", "moe_z1", "moe_z2")
    },
    "deepspeed/z3/global_step2": {},
    "deepspeed/lora_z3/global_step2": {},
    "deepspeed/pipe/global_step2": {},
    "deepspeed/tp/global_step2": {},
    "deepspeed/autotp/global_step2": {},
    "ranks/fsdp1/actor": {},
    "ranks/tp_fsdp2/actor": {},
    "trainer_dirs/trainer": {"*": TOLD},
    "trainer_dirs/trainer_peft": {"*": TOLD},
    # DeepSpeed's engine may count fewer steps than the Trainer.
    "trainer_dirs/trainer_zero2": {"trainer_state.json": TOLD},
    "trainer_dirs/trainer_zero3": {"trainer_state.json": TOLD},
    # A script of the user's own decides what it steps, and how often.
    "trainer_dirs/accelerate": {"*": UNSEEN},
    "megatron_dist/buckets_pp2vp2": {"common.pt": TOLD},
    # The experts' optimizer has one group, and so one counter.
    "megatron_dist/buckets_experts": {
        "common.pt": TOLD, "__0_1.distcp": TOLD, "__1_0.distcp": TOLD,
    },
}  # fmt: skip


def placed(name: str, root: Path) -> Path:
    archive = DATA / f"{name}.tar.xz"
    if not archive.exists():
        return Path(shutil.copytree(DATA / name, root / Path(name).name))
    extract(archive, root)
    return root / Path(name).name / "iter_0000002"


def findings(place: Path) -> tuple[ExitCode, list[Finding]]:
    try:
        report = verify(open_checkpoint(place), VerifyOptions(level=Level.STRUCTURE))
    except FtckptError as error:
        found = from_error(error)
        return found.code, [found]
    return report.code, list(report.findings)


def outcomes(place: Path) -> Iterator[tuple[str, str]]:
    """Yield each file that counts steps, and what is seen where it alone is of a later save."""
    later = later_files(place)
    assert sum(file.counters > 0 for file in later.values()) > 0
    for file, new in later.items():
        if not new.counters:
            continue
        old = file.read_bytes()
        assert old != new.data
        file.write_bytes(new.data)
        code, found = findings(place)
        file.write_bytes(old)
        told = any(f.kind in _SAYS for f in found)
        warned = [f.message for f in found if f.kind == "clocks-differ"]
        noted = [f.file for f in found if f.kind == "step-disagrees"]
        assert not [f for f in noted if any(str(f) in message for message in warned)]  # once
        seen = PROVEN if code is ExitCode.CORRUPT else TOLD if told else UNSEEN
        yield file.relative_to(place).as_posix(), seen


@pytest.mark.parametrize("name", PLACES)
def test_a_file_of_another_save(name: str, tmp_path: Path) -> None:
    place = placed(name, tmp_path)
    code, found = findings(place)
    assert (code, [f for f in found if f.kind in _SAYS]) == (ExitCode.OK, [])
    wanted = {}
    seen = dict(outcomes(place))
    for file in seen:
        fits = (how for pattern, how in PLACES[name].items() if fnmatch(file, pattern))
        wanted[file] = next(fits, PROVEN)
    assert seen == wanted


@pytest.mark.parametrize(
    "name",
    ["deepspeed/z2/global_step2", "trainer_dirs/trainer", "ranks/fsdp1/actor", "dcp/fsdp2/step-3"],
)
def test_the_later_save_itself_is_whole(name: str, tmp_path: Path) -> None:
    """So that in the mixtures nothing but the mixing is found."""
    place = placed(name, tmp_path)
    for file, new in later_files(place).items():
        file.write_bytes(new.data)
    code, found = findings(place)
    assert (code, [f for f in found if f.kind in _SAYS - {"step-name"}]) == (ExitCode.OK, [])
