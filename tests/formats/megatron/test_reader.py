"""Legacy Megatron: every layout of one model reads back as that model."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.checkpoint import CommitState
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import ExitCode
from ftckpt.formats.megatron import Megatron
from ftckpt.formats.megatron.job.stages import Stage
from tests.builders.megatron_files import opened, require, write
from tests.builders.megatron_model import Job
from tests.campaign import examples
from tests.conformance.formats import FormatTests, Made


class TestMegatron(FormatTests):
    format = Megatron()
    truncated = frozenset({"bad-zip", "truncated-file"})
    missing = frozenset({"missing-rank"})
    empty = frozenset({"bad-zip", "truncated-file"})

    def make(self, root: Path) -> list[Made]:
        return [
            write(root / "plain", Job(tp=2, pp=2, vp=2, optimizer="masters")),
            write(root / "flat", Job(tp=2, dp=2, optimizer="distributed", bucket=1500)),
            write(root / "experts", Job(ep=2, dp=2, experts=4, layers=2, optimizer="distributed")),
        ]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Draw a job that Megatron would run."""
    tp, pp, vp = draw(st.sampled_from((1, 2, 4))), draw(st.integers(1, 3)), 1
    if pp > 1:
        vp = draw(st.integers(1, 3))
    experts = draw(st.sampled_from((0, 4)))
    ep = draw(st.sampled_from((1, 2))) if experts else 1
    etp = draw(st.sampled_from((None, 1))) if ep > 1 else None
    stages = tuple(draw(st.integers(1, 3)) for _ in range(pp * vp))
    return Job(
        tp=tp, pp=pp, vp=vp, ep=ep, etp=etp, dp=2 * draw(st.integers(1, 3)), layers=sum(stages),
        stages=stages, experts=experts, gated=draw(st.booleans()), bias=draw(st.booleans()),
        tied=draw(st.booleans()), style=draw(st.sampled_from(("sequential", "grouped", "stacked"))),
        optimizer=draw(st.sampled_from(("none", "fp32", "masters", "distributed"))),
        bucket=draw(st.none() | st.integers(1, 4000)),
    )  # fmt: skip


LAYOUTS = [(tp, pp, vp) for tp, pp, vp in product((1, 2, 4), (1, 2), (1, 2)) if pp > 1 or vp == 1]


class TestLayouts:
    """TP = 4 exceeds the two KV groups: a rank then holds rows of queries only."""

    @pytest.mark.parametrize(("tp", "pp", "vp"), LAYOUTS)
    @pytest.mark.parametrize("optimizer", ["fp32", "masters", "distributed"])
    def test_every_layout_is_the_same_model(
        self, tp: int, pp: int, vp: int, optimizer: Any, tmp_path: Path
    ) -> None:
        job = Job(tp=tp, pp=pp, vp=vp, dp=3, optimizer=optimizer, bucket=1500)
        checkpoint = require(write(tmp_path, job))
        layout = checkpoint.layout
        assert (layout.grid.tp, layout.grid.pp, layout.chunks) == (tp, pp, vp)
        assert sum(layout.layers.values()) == job.layers
        assert checkpoint.step == 100
        assert checkpoint.topology.world_size == tp * pp * 3
        assert checkpoint.commit.state is CommitState.NO_MARKER

    @pytest.mark.parametrize(("tp", "pp", "vp"), [(1, 1, 1), (2, 2, 1), (2, 2, 2), (4, 2, 1)])
    @pytest.mark.parametrize("optimizer", ["masters", "distributed"])
    def test_tied_embeddings_are_replicas(
        self, tp: int, pp: int, vp: int, optimizer: Any, tmp_path: Path
    ) -> None:
        job = Job(tp=tp, pp=pp, vp=vp, dp=2, tied=True, optimizer=optimizer, bucket=900)
        checkpoint = require(write(tmp_path, job))
        aliases = {"output_layer.weight": "embedding.word_embeddings.weight"} if pp > 1 else {}
        assert checkpoint.aliases == aliases
        for key in ("embedding.word_embeddings.weight", "exp_avg:embedding.word_embeddings.weight"):
            pieces = checkpoint.tensors[key].pieces
            assert sorted(p.replica for p in pieces) == [n for n in range(pp) for _ in range(tp)]
            # The first stage's is the main copy.
            assert {p.rank for p in pieces if not p.replica} == set(range(0, tp * pp, pp))

    @pytest.mark.parametrize("style", ["sequential", "grouped", "stacked"])
    @pytest.mark.parametrize(
        ("tp", "pp", "ep", "etp", "dp"),
        [(1, 1, 1, None, 1), (1, 1, 2, None, 2), (2, 1, 2, None, 2), (2, 2, 2, 1, 2),
         (4, 1, 2, 2, 1), (2, 1, 1, 1, 1), (4, 1, 1, 2, 2)],
    )  # fmt: skip
    @pytest.mark.parametrize("optimizer", ["masters", "distributed"])
    def test_experts(
        self, style: Any, tp: int, pp: int, ep: int, etp: int | None, dp: int, optimizer: Any,
        tmp_path: Path,
    ) -> None:  # fmt: skip
        job = Job(tp=tp, pp=pp, ep=ep, etp=etp, dp=dp, layers=2, experts=4, style=style,
                  optimizer=optimizer)  # fmt: skip
        require(write(tmp_path, job))

    def test_biases_and_a_plain_mlp(self, tmp_path: Path) -> None:
        require(write(tmp_path / "a", Job(tp=2, bias=True, gated=False, optimizer="masters")))
        require(write(tmp_path / "b", Job(tp=2, bias=True, optimizer="distributed")))

    @pytest.mark.parametrize(
        ("job", "said"),
        [
            (Job(pp=3, layers=7, stages=(2, 4, 1)),
             {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 1}),
            (Job(pp=2, layers=4, stages=(1, 3)), {"pipeline_model_parallel_layout": "Et|t*3L"}),
            (Job(pp=2, vp=2, layers=6, stages=(1, 2, 2, 1)),
             {"pipeline_model_parallel_layout": "Et|(tt|)*2,tL"}),
            (Job(pp=2, layers=3, stages=(1, 2)),
             {"account_for_embedding_in_pipeline_split": True}),
            (Job(pp=2, layers=4, stages=(3, 1)), {}),
        ],
    )  # fmt: skip
    def test_uneven_stages(self, job: Job, said: dict[str, Any], tmp_path: Path) -> None:
        checkpoint = require(write(tmp_path, replace(job, recorded=tuple(said.items()))))
        assert job.stages is not None
        stages = [Stage(n % job.pp, n // job.pp) for n in range(len(job.stages))]
        assert checkpoint.layout.layers == dict(zip(stages, job.stages, strict=True))

    def test_a_part_of_a_gated_layer_is_two_boxes(self, tmp_path: Path) -> None:
        checkpoint = require(write(tmp_path, Job(tp=2, layers=1)))
        boxes = [p.box for p in checkpoint.tensors["decoder.layers.0.mlp.linear_fc1.weight"].pieces]
        assert [(b.offsets[0], b.sizes[0]) for b in boxes] == [
            (0, 10),
            (20, 10),
            (10, 10),
            (30, 10),
        ]

    def test_more_than_99_ranks(self, tmp_path: Path) -> None:
        made = write(tmp_path, Job(pp=2, layers=2))
        (made.path / "mp_rank_00_001").rename(made.path / "mp_rank_00_1")
        assert [f for f in opened(made.path).check() if f.code is not ExitCode.OK] == []
        made = write(tmp_path / "many", Job(ep=104, dp=104, experts=104, layers=1, style="grouped"))
        checkpoint = opened(made.path)
        assert list(checkpoint.check()) == []
        weight = "decoder.layers.0.mlp.experts.linear_fc1.weight103"
        assert read_tensor(checkpoint, weight) == made.truth[weight].data


class TestAnyLayout:
    @settings(max_examples=examples(short=15, full=200), deadline=None)
    @given(job=jobs())
    def test_it_is_the_same_model(self, job: Job) -> None:
        with TemporaryDirectory() as place:
            require(write(Path(place), job))
