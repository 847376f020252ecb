from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as load_with_torch

from ftckpt.checkpoint import Checkpoint, Kind
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.megatron.rank_files.grid import Arguments
from ftckpt.formats.megatron.torch_dist.legacy_names import JobNames, PackedTensors
from ftckpt.formats.megatron.torch_dist.writer import MegatronDistWriter
from ftckpt.formats.pickles.inert import Inert
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.layout import Layout, LayoutRequest
from ftckpt.transfer.request.narrowing import Only, drop, only
from tests.builders.checkpoints import open_checkpoint, save_dcp
from tests.builders.materialise import materialise
from tests.builders.megatron_files import write as write_ranks
from tests.builders.megatron_model import Job
from tests.builders.real_sets import real_set
from tests.campaign import examples
from tests.conformance.formats import Truth
from tests.conformance.writers import assert_same_tensors, assert_sound, write
from tests.formats.megatron.torch_dist.test_reader import RUNS, SETS, by_layer, of_data, torch_dist

WRITER = MegatronDistWriter()
RANKS = ("mcore_torch_tp2pp2", "mcore_torch_tp2dp2_distopt_bf16")
NORMS = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
OTHER = {"tp": 4, "pp": 1, "dp": 1}


def made(source: Checkpoint | Content, to: Path, **request: Any) -> tuple[Checkpoint, Layout]:
    """Write the files, and open what they are."""
    content = source if isinstance(source, Content) else Content.of(source)
    layout = WRITER.layout(content, LayoutRequest(**request))
    materialise(layout, content.checkpoint, to)
    return open_checkpoint(to), layout


def assert_truth(result: Checkpoint, truth: dict[str, Truth]) -> None:
    assert set(result.tensors) == set(truth)
    for key, (dtype, shape, data) in truth.items():
        info = result.tensors[key]
        assert (info.dtype.name, info.shape) == (dtype, shape), key
        assert read_tensor(result, key) == data, key


def common_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the common state with plain arguments."""
    name = "common.pt" if "common.pt" in checkpoint.objects else "common_state/shard_0_1"
    value = checkpoint.load_object(name)
    root: dict[str, Any] = dict(value if isinstance(value, dict) else value[0])
    if isinstance(root.get("args"), Inert):
        root["args"] = root["args"].state
    return root


def random_of(checkpoint: Checkpoint) -> set[str]:
    return {name for name in checkpoint.objects if name.startswith("rng_state/")}


# --- what Megatron wrote ------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{}, OTHER, {"tp": 1, "pp": 4, "dp": 2}])
@pytest.mark.parametrize("name", [*RUNS, *RANKS])
def test_real_checkpoints_hold_the_truth(
    name: str, sizes: dict[str, int], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = real_set(name, "iter_0000003", tmp_path_factory)
    result = write(WRITER, open_checkpoint(place), tmp_path, **sizes)
    truth = by_layer(load_file(place.parents[1] / "truth" / "state.safetensors"))
    truth |= by_layer(load_file(place.parents[1] / "truth" / "optim.safetensors"))
    assert_truth(result, truth)
    assert_sound(result)
    assert result.step == 3
    if sizes:
        known = (sizes["tp"], sizes["pp"], sizes["tp"] * sizes["pp"] * sizes["dp"])
        assert (result.topology.tp, result.topology.pp, result.topology.world_size) == known


@pytest.mark.parametrize("name", SETS)
def test_every_layout_of_state_becomes_one_that_any_job_loads(name: str, tmp_path: Path) -> None:
    source = open_checkpoint(of_data(name, tmp_path / "source").path)
    sizes = {"same": {}, "more": {"tp": 2, "pp": 2}, "less": {"tp": 1, "pp": 1, "dp": 4}}
    for folder, request in sizes.items():
        result = write(WRITER, source, tmp_path / folder, **request)
        assert_same_tensors(result, source)
        assert_sound(result)
        assert "buckets" not in result.dialect
        assert not any("dp_group_idx" in object_ for object_ in result.objects)


def test_stored_names_are_megatrons(tmp_path: Path) -> None:
    source = open_checkpoint(of_data("buckets_experts", tmp_path / "s").path)
    result, _ = made(source, tmp_path / "o", tp=2)
    stored = {info.stored_name: info for info in result.tensors.values()}
    expert = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    assert {expert, *(f"optimizer.state.{k}.{expert}" for k in ("param", "exp_avg"))} <= set(stored)
    singles = open_checkpoint(of_data("singleton", tmp_path / "t").path)
    again, _ = made(singles, tmp_path / "p", tp=2)
    names = {info.stored_name for info in again.tensors.values()}
    assert names == {info.stored_name for info in singles.tensors.values()}


def test_torch_loads_the_whole_tensors(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = real_set(RANKS[0], "iter_0000003", tmp_path_factory)
    made(open_checkpoint(place), tmp_path, **OTHER)
    for file in ("state", "optim"):
        truth = load_file(place.parents[1] / "truth" / f"{file}.safetensors")
        state = {name: torch.zeros_like(tensor) for name, tensor in truth.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process loads is what is meant
            load_with_torch(state, checkpoint_id=tmp_path, no_dist=True)
        for name, tensor in truth.items():
            assert torch.equal(state[name], tensor), name


def test_each_rank_has_what_it_would_write(tmp_path: Path) -> None:
    source = open_checkpoint(of_data("buckets_pp2vp2", tmp_path / "s").path)
    result, _ = made(source, tmp_path / "o", tp=2, pp=2, dp=1)
    ranks = {
        key: [piece.rank for piece in info.pieces]
        for key, info in result.tensors.items()
        if info.component == "model"
    }
    assert ranks["embedding.word_embeddings.weight"] == [0, 1]
    assert ranks["decoder.layers.3.self_attention.linear_proj.weight"] == [2, 3]
    # A gated matrix is [gate | up]: each tensor rank has a part of both.
    assert ranks["decoder.layers.0.mlp.linear_fc1.weight"] == [0, 0, 1, 1]
    assert ranks["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"] == [0]
    assert ranks["output_layer.weight"] == [2, 3]
    expert = open_checkpoint(of_data("buckets_experts", tmp_path / "e").path)
    result, _ = made(expert, tmp_path / "p", ep=2, dp=2)
    weight = "decoder.layers.0.mlp.experts.local_experts.%d.linear_fc2.weight"
    assert [result.tensors[weight % n].pieces[0].rank for n in range(4)] == [0, 0, 1, 1]


# --- any model, any layout ----------------------------------------------------------------------


def on_disk(truth: Mapping[str, Truth]) -> dict[str, Truth]:
    """Return what torch_dist holds of what a legacy checkpoint of a local model holds."""
    found = {}
    for key, value in truth.items():
        if key.startswith("extra:") or key.endswith(".step"):
            continue
        for norm, fused in NORMS.items():
            key = key.replace(norm, fused)
        head, grouped, rest = key.partition(".experts.linear_fc")
        if grouped:
            word, _, number = rest.partition(".weight")
            key = f"{head}.experts.local_experts.{number}.linear_fc{word}.weight"
        found[key] = value
    return found


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    experts = draw(st.sampled_from([0, 4]))
    pp = draw(st.sampled_from([1, 2]))
    return Job(
        tp=draw(st.sampled_from([1, 2])),
        pp=pp,
        vp=draw(st.sampled_from([1, 2])) if pp > 1 else 1,
        ep=draw(st.sampled_from([1, 2])) if experts else 1,
        dp=4,
        gated=draw(st.booleans()),
        tied=draw(st.booleans()),
        bias=draw(st.booleans()) and not experts,
        experts=experts,
        style=draw(st.sampled_from(["sequential", "grouped"])),
        optimizer=draw(st.sampled_from(["none", "fp32", "masters", "distributed"])),
        recorded=(("transformer_impl", "local"),),
    )


@given(
    job=jobs(),
    sizes=st.lists(
        st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 4])),
        min_size=2,
        max_size=2,
    ),
)
@settings(deadline=None, max_examples=examples(short=8, full=200))
def test_any_job_as_any_other_and_back(
    job: Job, sizes: list[tuple[int, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("jobs")
    source = write_ranks(folder, job)
    truth = on_disk(source.truth)
    checkpoint = open_checkpoint(source.path)
    for number, (tp, pp, dp) in enumerate(sizes):
        to = folder / str(number)
        request = {"tp": tp, "pp": pp, "dp": dp * job.ep, "vp": 1}
        checkpoint, layout = made(checkpoint, to, **request)
        assert list(layout.unplaced) == []
        assert_truth(checkpoint, truth)
        assert list(checkpoint.check()) == []
        assert checkpoint.step == job.iteration


# --- the state that all ranks share -------------------------------------------------------------


def test_the_arguments_say_the_new_sizes_and_what_is_not_there(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = open_checkpoint(real_set(RUNS[0], "iter_0000003", tmp_path_factory))
    result, layout = made(source, tmp_path, **OTHER)
    before, after = common_of(source)["args"], common_of(result)["args"]
    changed = {name for name in after if repr(after[name]) != repr(before.get(name))}
    assert changed == {
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "no_save_rng",
        "transformer_pipeline_model_parallel_size", "tensor_parallel_num_weight_shards",
        "expert_tensor_parallel_size", "expert_tensor_parallel_num_weight_shards",
    }  # fmt: skip
    assert (after["tensor_model_parallel_size"], after["no_save_rng"]) == (4, True)
    assert random_of(result) == set()
    said = [note.message for note in layout.notes]
    assert "RNG states: dropped" in said[0]
    assert "--seed" in said[0]
    assert "consumed_train_samples" in said[1]
    assert all(note.kind == "note" for note in layout.notes)


def test_nothing_changes_where_no_size_does(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = open_checkpoint(real_set(RUNS[0], "iter_0000003", tmp_path_factory))
    result, layout = made(source, tmp_path)
    assert set(result.objects) == set(source.objects)
    for name, info in source.objects.items():
        assert result.source.read(*result.objects[name].extent) == source.source.read(*info.extent)
    assert layout.notes == []
    assert (tmp_path / "metadata.json").read_bytes() == source.source.read("metadata.json")


def test_more_data_ranks_keep_the_random_states(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = open_checkpoint(real_set(RUNS[0], "iter_0000003", tmp_path_factory))
    result, layout = made(source, tmp_path, dp=2)
    assert random_of(result) == random_of(source)
    assert "kept for each tensor rank and stage" in layout.notes[0].message
    args = common_of(result)["args"]
    assert (args["world_size"], args["data_parallel_size"], args["no_save_rng"]) == (8, 2, None)


def test_buckets_become_an_optimizer_that_any_layout_loads(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = open_checkpoint(real_set(RUNS[2], "iter_0000003", tmp_path_factory))
    result, _ = made(source, tmp_path, tp=1)
    assert "common.pt" in result.objects
    common = common_of(result)
    assert common["optimizer"]["param_state_sharding_type"] == "fully_reshardable"
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    groups = source.load_object("optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1")
    assert common["optimizer"]["optimizer"] == groups[0]


def test_several_optimizers_keep_their_numbers(tmp_path: Path) -> None:
    source = open_checkpoint(of_data("buckets_experts", tmp_path / "s").path)
    result, _ = made(source, tmp_path / "o")
    common = common_of(result)
    assert set(common["optimizer"]) == {0, 1}
    for number, one in common["optimizer"].items():
        name = f"chained_{number}.optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"
        assert one["optimizer"] == source.load_object(name)[0]
    assert common["content_metadata"] == {
        "distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True,
    }  # fmt: skip


def test_ranks_that_recorded_different_optimizers_are_refused(tmp_path: Path) -> None:
    name = "optimizer.distributed.dp_group_idx_%d.optimizer/shard_0_1"
    state: dict[str, Any] = {name % n: [{"param_groups": [{"lr": n}]}] for n in range(2)}
    common = {"optimizer": {"param_state_sharding_type": "dp_reshardable"}, "iteration": 1}
    state |= {"w": torch.ones(2), "common_state/shard_0_1": [common]}
    source = open_checkpoint(torch_dist(tmp_path / "c", state))
    with pytest.raises(UnsupportedError, match="different optimizer states"):
        WRITER.layout(Content.of(source), LayoutRequest())


def test_a_legacy_optimizer_is_taken_apart(tmp_path: Path) -> None:
    job = Job(tp=2, optimizer="masters", recorded=(("transformer_impl", "local"),))
    result, _ = made(open_checkpoint(write_ranks(tmp_path / "s", job).path), tmp_path / "o")
    optimizer = common_of(result)["optimizer"]
    assert set(optimizer["optimizer"]["state"]) == {"common_step"}
    assert not any("params" in group for group in optimizer["optimizer"]["param_groups"])
    assert "fp32_from_fp16_params" not in optimizer
    stored = {info.stored_name for info in result.tensors.values()}
    assert "optimizer.state.fp32_param.output_layer.weight" in stored
    assert random_of(result) == {"rng_state/shard_0.0_1.2", "rng_state/shard_0.1_1.2"}
    ((state,),) = result.load_object("rng_state/shard_0.1_1.2")
    assert state["random_rng_state"] == (3, (1,), None)
    assert json.loads((tmp_path / "o" / "metadata.json").read_text())["common_backend"] == "torch"


def test_steps_that_differ_are_refused(tmp_path: Path) -> None:
    job = Job(optimizer="masters", recorded=(("transformer_impl", "local"),))
    path = write_ranks(tmp_path / "s", job).path
    file = path / "mp_rank_00" / "model_optim_rng.pt"
    tree = torch.load(file, weights_only=False)
    tree["optimizer"]["optimizer"]["state"][2]["step"] += 1
    torch.save(tree, file)
    content = Content.of(open_checkpoint(path))
    with pytest.raises(UnsupportedError, match="number of steps"):
        WRITER.layout(content, LayoutRequest())
    result, _ = made(drop(content, ["*.step"]), tmp_path / "o")
    assert common_of(result)["optimizer"]["optimizer"]["state"] == {}


@pytest.mark.parametrize("name", [RUNS[0], RANKS[0]])
def test_weights_alone_say_that_they_are_alone(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = Content.of(open_checkpoint(real_set(name, "iter_0000003", tmp_path_factory)))
    result, layout = made(only(content, Only.MODEL), tmp_path, **OTHER)
    assert list(layout.unplaced) == []
    common = common_of(result)
    assert set(common) == {"args", "checkpoint_version", "iteration", "content_metadata"}
    assert (common["args"]["no_save_optim"], common["args"]["no_save_rng"]) == (True, True)
    assert {info.component for info in result.tensors.values()} == {"model"}


def test_a_vocabulary_is_padded_anew_where_its_size_is_known(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = open_checkpoint(real_set(RUNS[0], "iter_0000003", tmp_path_factory))
    result, _ = made(source, tmp_path, tp=8, true_vocab_size=1000)
    assert result.tensors["output_layer.weight"].shape == (1024, 64)
    again, _ = made(source, tmp_path / "b", tp=2, true_vocab_size=1000)
    assert again.tensors["output_layer.weight"].shape == (1024, 64)
    args = common_of(again)["args"]
    assert args["padded_vocab_size"] == 1024


def test_what_stands_beside_the_store_is_carried(tmp_path: Path) -> None:
    path = of_data("singleton", tmp_path / "s").path
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "words.model").write_bytes(b"words")
    (path / "integrity.json").write_text("{}")
    _, layout = made(open_checkpoint(path), tmp_path / "o")
    assert (tmp_path / "o" / "tokenizer" / "words.model").read_bytes() == b"words"
    assert not (tmp_path / "o" / "integrity.json").exists()
    assert "--verify-integrity" in layout.notes[-1].message


# --- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ({"tp": 3}, "8 attention heads"),
        ({"pp": 3}, "4 layers"),
        ({"ep": 2}, "without experts"),
    ],
)
def test_sizes_that_do_not_divide(
    sizes: dict[str, Any], what: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = open_checkpoint(real_set(RUNS[0], "iter_0000003", tmp_path_factory))
    with pytest.raises(UsageError, match=what):
        WRITER.layout(Content.of(source), LayoutRequest(**sizes))


def test_a_source_without_a_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="is not a parameter of a GPT model"):
        WRITER.layout(Content.of(open_checkpoint(save_dcp(tmp_path / "c"))), LayoutRequest())


def test_state_that_no_parameter_owns_is_named_with_the_reason(tmp_path: Path) -> None:
    bucket = (
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
        ".bucket_idx_0.exp_avg"
    )
    gathered = "optimizer.distributed.dp_group_idx_0.param_state/shard_0_1"
    state = {"embedding.word_embeddings.weight": torch.ones(4, 2), bucket: torch.ones(9),
             gathered: [{0: "state"}], "rng_state/shard_0.0_1.1": [0]}  # fmt: skip
    source = open_checkpoint(torch_dist(tmp_path / "c", state))
    content = Content.of(source)
    with pytest.raises(UnsupportedError, match="dp_zero_gather_scatter") as caught:
        WRITER.layout(content, LayoutRequest())
    assert gathered in str(caught.value)
    assert "--dist-ckpt-optim-fully-reshardable" in caught.value.hint
    content = drop(content, [gathered])
    with pytest.raises(UnsupportedError, match=r"bucket_idx_0\.exp_avg: the optimizer's"):
        WRITER.layout(content, LayoutRequest())
    assert WRITER.layout(drop(content, ["*bucket_idx_0*"]), LayoutRequest()).files
    assert WRITER.layout(only(content, Only.MODEL), LayoutRequest()).files


def test_a_stack_that_lost_a_layer_has_numbers_in_its_names(tmp_path: Path) -> None:
    source = open_checkpoint(of_data("buckets_pp2vp2", tmp_path / "s").path)
    gone = "exp_avg:decoder.layers.2.self_attention.linear_qkv.weight"
    result, _ = made(drop(Content.of(source), [gone]), tmp_path / "o")
    assert set(result.tensors) == set(source.tensors) - {gone}
    key = gone.replace("layers.2", "layers.3")
    assert result.tensors[key].stored_name.endswith(
        "decoder.layers.3.self_attention.linear_qkv.weight"
    )


# --- names ---------------------------------------------------------------------------------------

LOCAL = ["decoder.layers.0.input_layernorm.weight", "decoder.layers.0.pre_mlp_layernorm.bias",
         "decoder.layers.0.self_attention.linear_qkv.weight"]  # fmt: skip


def test_local_norms_are_called_as_transformer_engine_has_them() -> None:
    for said in ({"transformer_impl": "local"}, {}):
        spelling = JobNames(LOCAL, Arguments(said))
        assert [spelling.stored(name) for name in LOCAL[:2]] == [
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.0.mlp.linear_fc1.layer_norm_bias",
        ]


def test_norms_of_their_own_keep_their_names() -> None:
    latent = ["decoder.layers.0.self_attention.linear_kv_down_proj.weight", *LOCAL[:2]]
    fused = ["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", LOCAL[1]]
    for names, said in ((latent, {"transformer_impl": "local"}), (fused, {}),
                        (fused, {"transformer_impl": "transformer_engine"})):  # fmt: skip
        spelling = JobNames(names, Arguments(said))
        assert spelling.stored(LOCAL[1]) == LOCAL[1]


def test_an_implementation_that_nothing_shows_is_asked_for() -> None:
    with pytest.raises(UnsupportedError, match="transformer_impl"):
        JobNames([LOCAL[1]], Arguments({}))


@pytest.mark.parametrize(
    "name",
    ["decoder.layers.0.mlp.experts.weight1",
     "language_model.encoder.layers.0.mlp.dense_h_to_4h.weight"],
)  # fmt: skip
def test_what_is_stored_in_another_shape_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        JobNames([name], Arguments({})).stored(name)
    assert caught.value.tensor == name


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("decoder.layers.0.mixer.in_proj.weight", {}, "do not record their sizes"),
        ("decoder.layers.0.self_attention.in_proj.weight", {}, "do not record their sizes"),
        (
            "decoder.layers.0.mixer.conv1d.weight",
            {"mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_num_groups": 2,
             "mamba_state_dim": 6},
            r"is not made of parts of \[32, 12, 12\] rows",
        ),
    ],
)  # fmt: skip
def test_packed_rows_of_unknown_parts_are_refused(name: str, args: Any, says: str) -> None:
    wanted = TargetTensor("model", name, Kind.PARAM, (57, 8), DTYPES["bfloat16"], ())
    with pytest.raises((UnsupportedError, UsageError), match=says) as caught:
        list(PackedTensors(Arguments(args)).parts(name, wanted))
    assert caught.value.tensor == name
