"""Legacy Megatron, written: each rank's files are those that Megatron would have written itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import UsageError
from ftckpt.formats.megatron_writer import MegatronWriter
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, Wishes
from tests.materialise import materialise
from tests.megatron_files import opened, require, write
from tests.megatron_model import Job
from tests.megatron_trees import assert_same_files

WRITER = MegatronWriter()


def laid(source: Path, **wishes: Any) -> Layout:
    return WRITER.layout(Content.of(opened(source)), Wishes(**wishes))


def reshard(source: Path, to: Path, **wishes: Any) -> Path:
    """Write another layout, with nothing left out but what a note says."""
    layout = laid(source, **wishes)
    assert list(layout.unplaced) == []
    materialise(layout, opened(source), to)
    return to


def wishes_of(job: Job) -> dict[str, int]:
    return {"tp": job.tp, "pp": job.pp, "vp": job.vp, "ep": job.ep, "dp": job.dp}


def require_files(job: Job, target: Job, place: Path) -> None:
    """Require that `job`, laid out as `target`, is what `target` writes of itself."""
    source = write(place / "source", job).path
    made = reshard(source, place / "made", **wishes_of(target))
    expected = write(place / "expected", target)
    streams = () if (job.tp, job.pp, job.vp, job.ep, job.etp) == (
        target.tp, target.pp, target.vp, target.ep, target.etp
    ) else ("rng_state",)  # fmt: skip
    distributed = job.optimizer == "distributed"
    assert_same_files(made, expected.path, without=streams, places=distributed)
    truth = {k: v for k, v in expected.truth.items() if not streams or "rng_state" not in k}
    require(expected._replace(path=made, truth=truth))


def sizes(tp: int, pp: int = 1, vp: int = 1) -> dict[str, int]:
    return {"tp": tp, "pp": pp, "vp": vp}


LAYOUTS = (sizes(1), sizes(4), sizes(2, 2), sizes(1, 4), sizes(2, 2, 2))


@pytest.mark.parametrize("optimizer", ["none", "fp32", "masters", "distributed"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_layout_becomes_every_other(optimizer: Any, tied: bool, tmp_path: Path) -> None:
    base = Job(optimizer=optimizer, tied=tied, dp=2, bucket=1500)
    for number, (one, two) in enumerate(product(LAYOUTS, LAYOUTS)):
        if number % 3 == ("none", "fp32", "masters", "distributed").index(optimizer) % 3:
            job, target = replace(base, **one), replace(base, **two)
            require_files(job, target, tmp_path / str(number))


EXPERTS: tuple[Mapping[str, Any], ...] = (
    {"tp": 1, "ep": 1, "dp": 2},
    {"tp": 1, "ep": 2, "dp": 2},
    {"tp": 2, "ep": 2, "pp": 2, "dp": 2},
    {"tp": 2, "ep": 4, "dp": 4},
)


@pytest.mark.parametrize("style", ["sequential", "grouped", "stacked"])
@pytest.mark.parametrize("optimizer", ["masters", "distributed"])
def test_experts_go_to_other_ranks(style: Any, optimizer: Any, tmp_path: Path) -> None:
    base = Job(layers=2, experts=4, style=style, optimizer=optimizer)
    for number, (one, two) in enumerate(product(EXPERTS, EXPERTS)):
        if number % 3 == len(style) % 3:
            job, target = replace(base, **one), replace(base, **two)
            require_files(job, target, tmp_path / str(number))


@pytest.mark.parametrize("optimizer", ["fp32", "distributed"])
def test_experts_with_tensor_ranks_of_their_own(optimizer: Any, tmp_path: Path) -> None:
    base = Job(layers=2, experts=4, optimizer=optimizer, etp=1)
    require_files(
        replace(base, tp=2, pp=2, ep=2, dp=2), replace(base, tp=2, dp=4), tmp_path / "less"
    )
    require_files(
        replace(base, tp=2, dp=4), replace(base, tp=4, ep=4, pp=2, dp=1), tmp_path / "more"
    )


def test_sizes_that_do_not_divide(tmp_path: Path) -> None:
    source = write(tmp_path / "a", Job(optimizer="masters")).path
    with pytest.raises(UsageError, match="4 attention heads cannot be divided over 3 tensor ranks"):
        laid(source, tp=3)
    with pytest.raises(UsageError, match="4 layers cannot be divided over 3 pipeline stages"):
        laid(source, pp=3)
    with pytest.raises(UsageError, match="a model without experts"):
        laid(source, ep=2)
    experts = write(tmp_path / "b", Job(layers=2, experts=4, dp=2)).path
    with pytest.raises(UsageError, match="4 experts cannot be divided over 3 expert ranks"):
        laid(experts, ep=3)
    with pytest.raises(UsageError, match="4 ranks of a pipeline stage") as caught:
        laid(experts, tp=2, ep=4)
    assert caught.value.hint == "--dp 4 would do"
