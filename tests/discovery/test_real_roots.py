"""Roots that real frameworks wrote: what is chosen, and what their own pointers say of it."""

from __future__ import annotations

from pathlib import Path

import pytest

import ftckpt
from ftckpt.errors import ExitCode
from tests.builders.archives import extract

ARCHIVES = Path(__file__).parents[3] / "shared" / "checkpoints"


@pytest.fixture
def unpacked(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    archive = ARCHIVES / f"{request.param}.tar.xz"
    if not archive.exists():
        pytest.skip(f"no real checkpoints at {ARCHIVES}")
    extract(archive, tmp_path)
    name: str = request.param
    return tmp_path / name / "ckpt"


@pytest.mark.parametrize(
    ("unpacked", "format_", "chosen", "step", "pointers"),
    [
        ("dcp_fsdp2_nested", "dcp", "step-4", 4, {}),
        ("lightning_ddp", "torchsave", "step=4.ckpt", 4, {}),
        ("verl_fsdp", "ranks", "global_step_3", 3, {"latest_checkpointed_iteration.txt": True}),
        (
            "mcore_torch_tp2pp2",
            "megatron",
            "iter_0000003",
            3,
            {"latest_checkpointed_iteration.txt": True},
        ),
        (
            "mcore_torchdist_tp2pp2",
            "megatron-dist",
            "iter_0000003",
            3,
            {"latest_checkpointed_iteration.txt": True},
        ),
        ("ds_z2_w2_bf16", "deepspeed", "global_step3", 3, {"latest": True}),
        ("ds_pp2dp2_z1_bf16", "deepspeed", "global_step2", 2, {"latest": True}),
    ],
    indirect=["unpacked"],
)
def test_the_newest_is_chosen(
    unpacked: Path, format_: str, chosen: str, step: int, pointers: dict[str, bool]
) -> None:
    found = ftckpt.latest(str(unpacked))
    assert found.code is ExitCode.OK, found.message
    assert (found.path, found.step, found.format) == (f"{unpacked}/{chosen}", step, format_)
    assert {p.name: p.agrees for p in found.pointers} == pointers
    assert found.skipped == ()


def test_what_is_not_read_stops_the_search(tmp_path: Path) -> None:
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "model.pdparams").write_text("{}")  # Paddle
    found = ftckpt.latest(str(tmp_path), skip_unverified=True)
    assert (found.code, found.path) == (ExitCode.UNSUPPORTED, None)
    assert "does not read" in found.message


@pytest.mark.parametrize("unpacked", ["dcp_fsdp2_nested"], indirect=True)
def test_an_older_step_on_request(unpacked: Path) -> None:
    found = ftckpt.latest(str(unpacked), step_at_most=3)
    assert (found.path, found.step) == (f"{unpacked}/step-3", 3)
