"""Legacy Megatron, written: each rank's files are those that Megatron would have written itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.checkpoint.sharding import Rule, Rules
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.megatron.writer import MegatronWriter
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest
from ftckpt.transfer.request.change_dtype import retype
from ftckpt.transfer.request.narrowing import Only, drop, only
from tests.builders.materialise import materialise
from tests.builders.megatron_files import altered, opened, require, write
from tests.builders.megatron_model import Job
from tests.builders.megatron_trees import assert_same_files
from tests.campaign import examples
from tests.conformance.formats import Made

WRITER = MegatronWriter()


def laid(source: Path, **request: Any) -> Layout:
    return WRITER.layout(Content.of(opened(source)), LayoutRequest(**request))


def reshard(source: Path, to: Path, **request: Any) -> Path:
    """Write another layout, with nothing left out but what a note says."""
    layout = laid(source, **request)
    assert list(layout.unplaced) == []
    materialise(layout, opened(source), to)
    return to


def torch_bytes(count: int) -> Any:
    import torch

    return torch.arange(count, dtype=torch.uint8)


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


def sizes(tp: int, pp: int = 1, vp: int = 1) -> dict[str, Any]:
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


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Job, Job]:
    """Draw two layouts of one job that Megatron would run."""
    experts = draw(st.sampled_from((0, 4)))
    base = Job(
        experts=experts, gated=draw(st.booleans()), bias=draw(st.booleans()),
        tied=draw(st.booleans()), style=draw(st.sampled_from(("sequential", "grouped", "stacked"))),
        optimizer=draw(st.sampled_from(("none", "fp32", "masters", "distributed"))),
        bucket=draw(st.none() | st.integers(1, 4000)),
    )  # fmt: skip
    found = []
    for _ in range(2):
        pp = draw(st.sampled_from((1, 2, 4)))
        ep = draw(st.sampled_from((1, 2, 4))) if experts else 1
        one = replace(
            base, tp=draw(st.sampled_from((1, 2, 4))), pp=pp, ep=ep,
            vp=draw(st.sampled_from((1, 4 // pp))) if pp > 1 else 1,
            dp=ep * draw(st.integers(1, 3)),
        )  # fmt: skip
        found.append(one)
    return found[0], found[1]


@settings(max_examples=examples(short=6, full=200), deadline=None)
@given(jobs=pairs())
def test_there_and_back_again(jobs: tuple[Job, Job]) -> None:
    """What Megatron writes, another layout of it, and the first again: the same files."""
    one, two = jobs
    with TemporaryDirectory() as name:
        place = Path(name)
        require_files(one, two, place)
        back = reshard(place / "made", place / "back", **wishes_of(one))
        distributed = one.optimizer == "distributed"
        source = write(place / "again", one)
        assert_same_files(back, source.path, without=("rng_state",), places=distributed)
        for name, tensor in opened(back).tensors.items():
            if not tensor.component.startswith("extra:"):
                assert source.truth[name].shape == tensor.shape


UNEVEN = {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 1}


def test_uneven_stages_stay_where_sizes_allow(tmp_path: Path) -> None:
    said = tuple(UNEVEN.items())
    job = Job(tp=2, pp=3, layers=6, stages=(2, 3, 1), recorded=said, optimizer="masters")
    require_files(job, replace(job, tp=4), tmp_path / "same")
    # Two stages between the ends share three layers: they cannot, and six over four cannot either.
    source = write(tmp_path / "a", job).path
    with pytest.raises(UsageError, match="6 layers cannot be divided over 4 pipeline stages"):
        laid(source, pp=4)
    five = replace(job, pp=5, stages=(2, 1, 1, 1, 1))
    require_files(job, five, tmp_path / "five")


def test_uneven_stages_become_even_where_they_must(tmp_path: Path) -> None:
    job = Job(pp=3, layers=6, stages=(2, 3, 1), recorded=tuple(UNEVEN.items()))
    even = replace(job, pp=2, stages=(3, 3), recorded=tuple((name, None) for name in UNEVEN))
    require_files(job, even, tmp_path)


def test_arguments_follow_the_layout(tmp_path: Path) -> None:
    import torch

    recorded = {
        "rank": 0, "tensor_parallel_num_weight_shards": 2, "num_layers_per_virtual_pipeline_stage":
        1, "transformer_pipeline_model_parallel_size": 2, "local_rank": 0, "seed": 1234,
    }  # fmt: skip
    source = write(tmp_path / "a", Job(tp=2, pp=2, vp=2, recorded=tuple(recorded.items())))
    made = reshard(source.path, tmp_path / "b", tp=4, pp=2, vp=1, dp=3)
    for t, p in product(range(4), range(2)):
        file = made / f"mp_rank_{t:02d}_{p:03d}" / "model_optim_rng.pt"
        args = vars(torch.load(file, weights_only=False)["args"])
        assert args["rank"] == t + p * 12
        assert args["world_size"] == 24
        assert args["data_parallel_size"] == 3
        assert args["tensor_parallel_num_weight_shards"] == 4
        assert args["expert_tensor_parallel_size"] == 4
        assert args["virtual_pipeline_model_parallel_size"] is None
        assert args["num_layers_per_virtual_pipeline_stage"] is None
        assert (args["seed"], args["local_rank"]) == (1234, 0)


class TestVocabulary:
    RECORDED = (("make_vocab_size_divisible_by", 8),)

    def test_padding_is_cut_and_made_anew(self, tmp_path: Path) -> None:
        import torch

        job = Job(tp=1, optimizer="masters", recorded=self.RECORDED)
        source = write(tmp_path / "a", job)
        for tp, true, rows in ((2, 50, 64), (2, 41, 48), (4, 33, 64), (1, 33, 40)):
            made = reshard(source.path, tmp_path / f"{tp}-{true}", tp=tp, true_vocab_size=true)
            checkpoint = opened(made)
            for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                for prefix in ("", "master:", "exp_avg:", "exp_avg_sq:"):
                    want = source.truth[prefix + name]
                    moment = prefix.startswith("exp") and rows != 64
                    size = 12 * (2 if not prefix else 4)
                    kept = (true if moment else rows) * size
                    data = read_tensor(checkpoint, prefix + name)
                    assert checkpoint.tensors[prefix + name].shape == (rows, 12)
                    assert data == want.data[:kept] + bytes(rows * size - kept)
            args = torch.load(made / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)[
                "args"
            ]
            assert args.padded_vocab_size == rows

    def test_more_padding_than_there_was_is_zero(self, tmp_path: Path) -> None:
        recorded = (("make_vocab_size_divisible_by", 24),)
        source = write(tmp_path / "a", Job(tp=2, tied=True, optimizer="masters", recorded=recorded))
        made = reshard(source.path, tmp_path / "b", tp=4, pp=2, true_vocab_size=60)
        checkpoint = opened(made)
        weight = read_tensor(checkpoint, "embedding.word_embeddings.weight")
        assert weight == source.truth["embedding.word_embeddings.weight"].data + bytes(32 * 24)
        moment = read_tensor(checkpoint, "exp_avg:embedding.word_embeddings.weight")
        whole = source.truth["exp_avg:embedding.word_embeddings.weight"].data
        assert moment == whole[: 60 * 48] + bytes(36 * 48)

    def test_padding_that_megatron_may_not_ask_for_is_said(self, tmp_path: Path) -> None:
        source = write(tmp_path / "a", Job(tp=2, recorded=self.RECORDED)).path
        told = [n.message for n in laid(source, tp=1).notes]
        assert "embedding.word_embeddings.weight keeps its 64 rows" in told[1]
        assert "--true-vocab-size" in told[1]
        assert len(laid(source, tp=4).notes) == len(laid(source, tp=1, true_vocab_size=60).notes)
        assert len(laid(source, tp=4).notes) == 1

    def test_rows_that_cannot_be_divided(self, tmp_path: Path) -> None:
        source = write(tmp_path / "a", Job(recorded=(("num_attention_heads", 12),))).path
        with pytest.raises(UsageError, match="the 64 rows of embedding") as caught:
            laid(source, tp=6)
        assert "--true-vocab-size" in caught.value.hint
        with pytest.raises(UsageError, match="fewer than --true-vocab-size 65"):
            laid(source, true_vocab_size=65)


@pytest.mark.parametrize("make", ["local", "transformer_engine", None])
def test_latent_attention_of_one_tensor_rank(make: str | None, tmp_path: Path) -> None:
    """One rank has all rows of the projections down, whether or not several would share them."""
    import torch

    recorded = (("kv_lora_rank", 6), ("qk_pos_emb_head_dim", 2), ("transformer_impl", make))
    source = write(tmp_path / "a", Job(layers=1, recorded=recorded)).path
    name = "decoder.layers.0.self_attention.linear_kv_down_proj.weight"
    file = source / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    state["model"][name] = torch.randn(8, 12)
    torch.save(state, file)
    if make is None:
        with pytest.raises(UnsupportedError, match="linear_kv_down_proj"):
            laid(source, tp=2)
        return
    made = reshard(source, tmp_path / "b", tp=2)
    for rank in range(2):
        part = torch.load(made / f"mp_rank_{rank:02d}/model_optim_rng.pt", weights_only=False)
        own = state["model"][name]
        expected = own.chunk(2)[rank] if make == "local" else own
        assert torch.equal(part["model"][name], expected)


class TestStateOfRanks:
    def test_streams_stay_with_their_ranks_or_are_left_out(self, tmp_path: Path) -> None:
        source = write(tmp_path / "a", Job(tp=2, pp=2, dp=2, optimizer="distributed"))
        same = reshard(source.path, tmp_path / "same", dp=4)
        require(source._replace(path=same))
        assert list(laid(source.path, dp=4).notes) == []
        layout = laid(source.path, tp=1)
        (note,) = layout.notes
        assert "random streams of 4 ranks were not written" in note.message
        assert "--no-load-rng" in note.message
        assert layout.content is not None
        assert not [k for k in layout.content.tensors if "rng_state" in k]

    def test_streams_of_data_parallel_ranks(self, tmp_path: Path) -> None:
        source = write(tmp_path / "a", Job(tp=2, dp=2))
        for place in source.path.iterdir():
            stream = {"cuda_rng_state": torch_bytes(4)}
            altered(source, place.name, rng_state=[stream, stream])
        assert [n.message for n in laid(source.path).notes] == []
        assert "not written" in laid(source.path, dp=3).notes[0].message

    def test_what_differs_between_ranks_is_said(self, tmp_path: Path) -> None:
        source = write(tmp_path / "a", Job(pp=2))
        altered(source, "mp_rank_00_001", rerun_state_machine={"mode": 1})
        altered(source, "mp_rank_00_000", rerun_state_machine={"mode": 0})
        messages = [n.message for n in laid(source.path, pp=1).notes]
        assert "rerun_state_machine differs between ranks" in messages[1]
        made = reshard(source.path, tmp_path / "b", pp=1)
        assert opened(made).load_object("rank_0.rerun_state_machine") == {"mode": 0}
        same = reshard(source.path, tmp_path / "c", dp=2)
        assert opened(same).load_object("rank_1.rerun_state_machine") == {"mode": 1}

    def test_other_state_goes_to_every_rank_as_it_is(self, tmp_path: Path) -> None:
        source = write(tmp_path / "a", Job(tp=1))
        odd = {"nested": [(1, {"x": torch_bytes(3)}), {2, 3}], "plain": {"t": torch_bytes(5)}}
        altered(source, "mp_rank_00", modelopt_state=odd)
        made = opened(reshard(source.path, tmp_path / "b", tp=2, pp=2))
        for rank in range(4):
            assert made.load_object(f"rank_{rank}.iteration") == 100
            data = read_tensor(made, f"extra:rank{rank}:modelopt_state.plain.t")
            assert data == bytes(range(5))
            assert made.load_object(f"rank_{rank}.modelopt_state")["nested"][1] == {2, 3}

    def test_state_that_was_kept_by_rank(self, tmp_path: Path) -> None:
        """An optimizer whose state cannot be given to parameters stays with its ranks."""
        import torch

        source = write(tmp_path / "a", Job(tp=2, optimizer="fp32"))
        for place in source.path.iterdir():
            state = torch.load(place / "model_optim_rng.pt", weights_only=False)
            for one in state["optimizer"]["state"].values():
                one["exp_avg_sq_row"] = torch.ones(7)
            torch.save(state, place / "model_optim_rng.pt")
        made = reshard(source.path, tmp_path / "b")
        assert_same_files(made, source.path)
        with pytest.raises(UnsupportedError, match="kept by rank"):
            laid(source.path, tp=1)

    def test_buffers_that_were_kept_by_rank(self, tmp_path: Path) -> None:
        source = write(tmp_path / "a", Job(tp=2, dp=2, optimizer="distributed", bucket=1500))
        for place in source.path.iterdir():
            altered(source, place.name, args__ddp_bucket_size=1000)
        made = reshard(source.path, tmp_path / "b")
        name = "mp_rank_01/distrib_optim.pt"
        assert (made / name).read_bytes() == (source.path / name).read_bytes()
        assert_same_files(made, source.path)
        with pytest.raises(UnsupportedError, match="kept by rank"):
            laid(source.path, dp=3)
        dropped = drop(Content.of(opened(source.path)), ["extra:*:distrib_optim.*"])
        layout = WRITER.layout(dropped, LayoutRequest(dp=3))
        assert [name for name in layout.unplaced if "distrib_optim" not in name] == []

    def test_states_of_quantised_arithmetic_stay_with_their_ranks(self, tmp_path: Path) -> None:
        import io

        import torch

        source = write(tmp_path / "a", Job(tp=2, layers=1))
        for place in source.path.iterdir():
            file = place / "model_optim_rng.pt"
            state = torch.load(file, weights_only=False)
            key = "decoder.layers.0.mlp.linear_fc1._extra_state"
            state["model"][key] = torch_bytes(9)
            state["model"][key.replace("fc1", "fc2")] = io.BytesIO(place.name.encode())
            torch.save(state, file)
        made = reshard(source.path, tmp_path / "b")
        for place in made.iterdir():
            model = torch.load(place / "model_optim_rng.pt", weights_only=False)["model"]
            assert torch.equal(model[key], torch_bytes(9))
            assert model[key.replace("fc1", "fc2")].getvalue() == place.name.encode()
        unplaced = list(laid(source.path, tp=1).unplaced)
        assert f"extra:rank1:model.{key}" in unplaced
        assert "rank_0.model" in unplaced
        dropped = drop(Content.of(opened(source.path)), ["extra:*_extra_state", "rank_*.model"])
        layout = WRITER.layout(dropped, LayoutRequest(tp=1))
        assert list(layout.unplaced) == []
        materialise(layout, opened(source.path), tmp_path / "c")
        model = torch.load(tmp_path / "c/mp_rank_00/model_optim_rng.pt", weights_only=False)[
            "model"
        ]
        assert model[key] is None


class TestParts:
    def test_the_model_alone(self, tmp_path: Path) -> None:
        import torch

        source = write(tmp_path / "a", Job(tp=2, dp=2, optimizer="distributed"))
        content = only(Content.of(opened(source.path)), Only.MODEL)
        layout = WRITER.layout(content, LayoutRequest(tp=1))
        assert list(layout.unplaced) == []
        materialise(layout, opened(source.path), tmp_path / "b")
        made = opened(tmp_path / "b")
        assert set(made.tensors) == set(content.tensors)
        assert sorted(p.name for p in (tmp_path / "b" / "mp_rank_00").iterdir()) == [
            "model_optim_rng.pt"
        ]
        state = torch.load(tmp_path / "b/mp_rank_00/model_optim_rng.pt", weights_only=False)
        assert list(state) == ["args", "checkpoint_version", "iteration", "model"]

    def test_without_moments(self, tmp_path: Path) -> None:
        for optimizer in ("masters", "distributed"):
            job = Job(tp=2, optimizer=optimizer)
            source = write(tmp_path / optimizer, job)
            content = drop(Content.of(opened(source.path)), ["exp_avg*"])
            layout = WRITER.layout(content, LayoutRequest(tp=1))
            assert list(layout.unplaced) == []
            materialise(layout, opened(source.path), tmp_path / optimizer / "b")
            truth = {k: v for k, v in source.truth.items() if not k.startswith("exp_avg")}
            truth = {k: v for k, v in truth.items() if "rng_state" not in k}
            require(Made(tmp_path / optimizer / "b", truth))

    def test_a_parameter_less(self, tmp_path: Path) -> None:
        source = write(tmp_path / "a", Job(tp=2, optimizer="masters"))
        name = "decoder.layers.1.mlp.linear_fc2.weight"
        content = drop(Content.of(opened(source.path)), [f"*{name}*"])
        layout = WRITER.layout(content, LayoutRequest())
        assert list(layout.unplaced) == []
        materialise(layout, opened(source.path), tmp_path / "b")
        require(Made(tmp_path / "b", {k: v for k, v in source.truth.items() if name not in k}))

    def test_the_optimizer_without_its_weights_has_no_place(self, tmp_path: Path) -> None:
        source = write(tmp_path / "a", Job(optimizer="masters"))
        content = only(Content.of(opened(source.path)), Only.OPTIMIZER)
        assert (
            "exp_avg:decoder.final_layernorm.weight"
            in WRITER.layout(content, LayoutRequest()).unplaced
        )

    def test_other_types(self, tmp_path: Path) -> None:
        source = write(tmp_path / "a", Job(tp=2, optimizer="none"))
        content = retype(Content.of(opened(source.path)), "fp32")
        materialise(
            WRITER.layout(content, LayoutRequest(tp=4)), opened(source.path), tmp_path / "b"
        )
        tensor = opened(tmp_path / "b").tensors["output_layer.weight"]
        assert (tensor.dtype.name, tensor.shape) == ("float32", (64, 12))

    def test_virtual_stages_need_stages(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="need several pipeline stages"):
            laid(write(tmp_path / "a", Job()).path, vp=2)


def test_a_rule_is_looked_up_no_more_often_for_more_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "source", Job(optimizer="masters")).path
    looked: list[str] = []
    find = Rules.find

    def counted(rules: Rules, name: str) -> Rule:
        looked.append(name)
        return find(rules, name)

    monkeypatch.setattr(Rules, "find", counted)
    laid(source, tp=2)
    once = list(looked)
    looked.clear()
    laid(source, tp=4)
    assert looked == once
