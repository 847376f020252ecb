"""Megatron-Core's torch_dist: layers, experts and optimizer state under their own names."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from ftckpt.checkpoint import Checkpoint, Commit, CommitState, Kind
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.discovery.recognise import recognise
from ftckpt.errors import (
    CorruptError,
    ExitCode,
    FtckptError,
    IncompleteError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.findings import Severity
from ftckpt.formats.catalog import FORMATS
from ftckpt.formats.dcp import Dcp
from ftckpt.formats.megatron.torch_dist import MegatronDist
from ftckpt.verification import Level, VerifyOptions, verify
from tests.builders.archives import extract
from tests.conformance.formats import FormatTests, Made, Truth, listing_of_path, open_path
from tests.formats.dcp.writing import truth_of

ARCHIVES = Path(__file__).parents[5] / "shared" / "checkpoints"
DATA = Path(__file__).parents[3] / "data" / "megatron_dist"
RUNS = (
    "mcore_torchdist_tp2pp2",
    "mcore_torchdist_tp2dp2_fullyreshard_bf16",
    "mcore0161_tp2dp2_dpreshard",
)
SETS = (
    "buckets_tp2pp2_tied",
    "buckets_pp2vp2",
    "buckets_experts",
    "model_space_tp2",
    "singleton",
    "shadows",
    "tensor_ranks",
)
_KINDS = {"param": "master:", "exp_avg": "exp_avg:", "exp_avg_sq": "exp_avg_sq:"}


def unpacked(archive: Path, to: Path) -> Path:
    extract(archive, to)
    return to / archive.name.partition(".")[0]


def of_data(name: str, to: Path) -> Made:
    place = unpacked(DATA / f"{name}.tar.xz", to)
    truth = {key: truth_of(t) for key, t in load_file(place / "truth.safetensors").items()}
    return Made(place / "iter_0000002", truth)


def by_layer(stacked: dict[str, torch.Tensor]) -> dict[str, Truth]:
    """Return the truth by key, a tensor a layer, of tensors that are stacked over layers."""
    truth: dict[str, Truth] = {}
    for name, tensor in stacked.items():
        prefix = ""
        if name.startswith("optimizer.state."):
            state, _, name = name.removeprefix("optimizer.state.").partition(".")
            prefix = _KINDS[state]
        head, found, rest = name.partition(".layers.")
        if not found:
            truth[prefix + name] = truth_of(tensor)
            continue
        for layer, part in enumerate(tensor):
            truth[f"{prefix}{head}.layers.{layer}.{rest}"] = truth_of(part)
    return truth


class TestMegatronDist(FormatTests):
    """The promises of every format, on small checkpoints of every layout."""

    format = MegatronDist()

    def make(self, root: Path) -> list[Made]:
        return [of_data(name, root) for name in SETS]


class TestTrainingRuns(FormatTests):
    """The same, on what Megatron's training loop and a released megatron-core wrote."""

    format = MegatronDist()

    def make(self, root: Path) -> list[Made]:
        if not ARCHIVES.exists():
            pytest.skip(f"no real checkpoints at {ARCHIVES}")
        made = []
        for name in RUNS:
            place = unpacked(ARCHIVES / f"{name}.tar.xz", root)
            truth = by_layer(load_file(place / "truth" / "state.safetensors"))
            truth |= by_layer(load_file(place / "truth" / "optim.safetensors"))
            made.append(Made(place / "ckpt" / "iter_0000003", truth))
        return made


@pytest.mark.parametrize("name", SETS)
def test_a_lost_common_state_is_missed(name: str, tmp_path: Path) -> None:
    # No item names the file: metadata.json says that it is beside the store.
    path, _ = of_data(name, tmp_path)
    (path / "common.pt").unlink()
    report = verify(open_path(MegatronDist(), path), VerifyOptions(level=Level.STRUCTURE))
    assert report.code is ExitCode.CORRUPT
    assert [f.file for f in report.findings if f.kind == "missing-file"] == ["common.pt"]


def warned(path: Path) -> list[str]:
    report = verify(open_path(MegatronDist(), path), VerifyOptions(level=Level.STRUCTURE))
    return [f.message for f in report.findings if f.kind == "state-unknown"]


def test_the_common_state_of_a_job_of_other_ranks(tmp_path: Path) -> None:
    """No item names the file, so that it may be another save's: the states of the ranks show it."""
    path, _ = of_data("buckets_tp2pp2_tied", tmp_path)
    assert warned(path) == []
    other, _ = of_data("model_space_tp2", tmp_path)
    (path / "common.pt").write_bytes((other / "common.pt").read_bytes())
    (message,) = warned(path)
    assert "are of 2 pipeline stages and 2 tensor ranks, the arguments record 1 and 2" in message


@pytest.mark.parametrize(
    ("places", "told"),
    [
        (("0.0_1.2", "0.1_1.2"), 0),
        (("0.0_1.2",), 1),
        (("0.0.0_1.1.2", "0.0.1_1.1.2"), 0),  # with data ranks, where experts are divided
        (("0.0.1_1.1.2",), 1),
    ],
)
def test_rng_states_of_some_ranks_alone(places: tuple[str, ...], told: int, tmp_path: Path) -> None:
    states = {f"rng_state/shard_{place}": [place] for place in places}
    path = store(tmp_path / "a", {"w": torch.ones(2), **states})
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert len(warned(path)) == told


def store(path: Path, state: dict[str, Any], **writer: Any) -> Path:
    """Let torch write a store of flat names, as Megatron does: a list is one object."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it works without process groups
        save(
            state,
            storage_writer=FileSystemWriter(path, **writer),
            planner=DefaultSavePlanner(flatten_state_dict=False),
            no_dist=True,
        )
    return path


def torch_dist(path: Path, state: dict[str, Any], **writer: Any) -> Path:
    """Write a store, and finish it as Megatron does."""
    store(path, state, **writer)
    (path / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    return path


def tensor(checkpoint: Checkpoint, key: str) -> torch.Tensor:
    info = checkpoint.tensors[key]
    data = bytearray(read_tensor(checkpoint, key))
    dtype: torch.dtype = getattr(torch, info.dtype.name)
    return torch.frombuffer(data, dtype=dtype).reshape(info.shape)


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


# --- stacks ---------------------------------------------------------------------------------------

EXPERTS = "mlp.experts.experts.linear_fc1.weight"


@pytest.mark.parametrize("compressed", [False, True])
def test_one_record_may_hold_many_layers_and_experts(tmp_path: Path, compressed: bool) -> None:
    weight, state = numbered(3, 2, 4, 5), numbered(3, 2, 4, 5) + 1000
    path = torch_dist(
        tmp_path / "c",
        {
            f"decoder.layers.{EXPERTS}": weight,
            f"optimizer.state.exp_avg.decoder.layers.{EXPERTS}": state,
        },
        _extensions=[ZStandard()] if compressed else [],
    )
    checkpoint = open_path(MegatronDist(), path)
    assert len(checkpoint.tensors) == 12
    for layer in range(3):
        for expert in range(2):
            name = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight"
            assert torch.equal(tensor(checkpoint, name), weight[layer, expert])
            assert torch.equal(tensor(checkpoint, f"exp_avg:{name}"), state[layer, expert])
    assert verify(checkpoint, VerifyOptions(level=Level.VALUES)).code is ExitCode.OK


def test_a_record_that_is_no_array_in_c_order_is_read_by_its_strides(tmp_path: Path) -> None:
    weight = numbered(5, 4, 3).permute(2, 1, 0)
    checkpoint = open_path(MegatronDist(), torch_dist(tmp_path / "c", {"decoder.layers.w": weight}))
    assert checkpoint.payload(checkpoint.tensors["decoder.layers.1.w"].pieces[0]).strides
    for layer in range(3):
        assert torch.equal(tensor(checkpoint, f"decoder.layers.{layer}.w"), weight[layer])


def test_a_stack_without_its_axis_stays_as_it_is_stored(tmp_path: Path) -> None:
    path = torch_dist(tmp_path / "c", {"decoder.layers.step": torch.tensor(3.0)})
    assert set(open_path(MegatronDist(), path).tensors) == {"decoder.layers.step"}


def test_two_stored_tensors_of_one_meaning_are_both_kept(tmp_path: Path) -> None:
    path = torch_dist(
        tmp_path / "c", {"decoder.layers.w": numbered(2, 3), "decoder.layers.1.w": numbered(3) + 9}
    )
    checkpoint = open_path(MegatronDist(), path)
    assert len(checkpoint.tensors) == 3
    values = sorted(tensor(checkpoint, key).tolist() for key in checkpoint.tensors)
    assert values == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [9.0, 10.0, 11.0]]


def test_one_half_of_a_gated_matrix_is_not_taken_for_both(tmp_path: Path) -> None:
    half = "decoder.layers.0.mlp.linear_fc1.weight_v"
    checkpoint = open_path(MegatronDist(), torch_dist(tmp_path / "c", {half: numbered(2, 3)}))
    assert set(checkpoint.tensors) == {half}


def test_a_buffer_of_the_router_is_no_parameter(tmp_path: Path) -> None:
    path = torch_dist(tmp_path / "c", {"decoder.layers.mlp.router.expert_bias": numbered(2, 4)})
    kinds = {i.kind for i in open_path(MegatronDist(), path).tensors.values()}
    assert kinds == {Kind.BUFFER}


# --- damage, and who is named ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("buckets_experts", "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"),
        (
            "buckets_experts",
            "exp_avg:decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight",
        ),
        ("buckets_pp2vp2", "master:decoder.layers.2.self_attention.linear_qkv.weight"),
        ("model_space_tp2", "exp_avg_sq:decoder.layers.1.mlp.linear_fc1.weight"),
    ],
)
def test_a_flip_names_the_logical_tensor(name: str, key: str, tmp_path: Path) -> None:
    path = of_data(name, tmp_path).path
    checkpoint = open_path(MegatronDist(), path)
    place = checkpoint.payload(checkpoint.tensors[key].pieces[0]).extent
    data = bytearray((path / place.file).read_bytes())
    data[place.offset + place.length // 2] ^= 1
    (path / place.file).write_bytes(data)
    report = verify(open_path(MegatronDist(), path), VerifyOptions(level=Level.CONTENT))
    found = {(f.kind, f.tensor) for f in report.findings if f.severity is Severity.ERROR}
    assert found == {("bad-crc", key)}


def test_masters_of_buckets_cast_to_their_weights(tmp_path: Path) -> None:
    checkpoint = open_path(MegatronDist(), of_data("buckets_experts", tmp_path).path)
    report = verify(checkpoint, VerifyOptions(level=Level.VALUES))
    assert [f for f in report.findings if f.kind == "master-differs"] == []
    masters = [i for i in checkpoint.tensors.values() if i.kind is Kind.MASTER]
    assert {i.name for i in masters} == {
        i.name for i in checkpoint.tensors.values() if i.kind is Kind.PARAM
    }


def test_a_shard_of_an_earlier_save_is_named(tmp_path: Path) -> None:
    path = of_data("singleton", tmp_path).path
    (path / "__7_0.distcp").write_bytes(b"left")
    found = [f for f in open_path(MegatronDist(), path).check() if f.kind == "stale-shard"]
    assert [f.file for f in found] == ["__7_0.distcp"]


def test_what_lies_beside_the_store_belongs_to_it(tmp_path: Path) -> None:
    path = of_data("singleton", tmp_path).path
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "tokenizer.model").write_bytes(b"words")
    (path / "integrity.json").write_text("{}")
    members = set(open_path(MegatronDist(), path).members())
    assert {"tokenizer/tokenizer.model", "integrity.json", "common.pt"} <= members


# --- what the checkpoint says of itself -----------------------------------------------------------


def test_topology_step_and_marker_are_told(tmp_path: Path) -> None:
    checkpoint = open_path(MegatronDist(), of_data("buckets_tp2pp2_tied", tmp_path).path)
    known = checkpoint.topology
    assert (known.world_size, known.tp, known.pp) == (4, 2, 2)
    assert checkpoint.step == 2
    assert checkpoint.commit == Commit(CommitState.COMMITTED, "metadata.json")
    assert checkpoint.dialect.startswith("Megatron-Core torch_dist, optimizer in buckets")
    assert checkpoint.notes == []


def test_the_grid_of_rng_states_gives_tensor_ranks_and_stages(tmp_path: Path) -> None:
    states = {f"rng_state/shard_{p}.{t}_3.2": [{"seed": p}] for p in range(3) for t in range(2)}
    path = torch_dist(tmp_path / "c", {"w": numbered(2), **states})
    known = open_path(MegatronDist(), path).topology
    assert (known.tp, known.pp, known.dp) == (2, 3, None)
    assert "RNG" in known.evidence


def test_gathered_optimizer_state_is_named(tmp_path: Path) -> None:
    name = "optimizer.distributed.dp_group_idx_0.param_state/shard_0_1"
    checkpoint = open_path(
        MegatronDist(), torch_dist(tmp_path / "c", {"w": numbered(2), name: [{0: "state"}]})
    )
    assert any("dp_zero_gather_scatter" in f.message for f in checkpoint.notes)
    assert name in checkpoint.objects


def test_buckets_that_fit_no_order_are_kept_as_stored(tmp_path: Path) -> None:
    bucket = (
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
        ".bucket_idx_0.exp_avg"
    )
    path = torch_dist(
        tmp_path / "c",
        {
            "embedding.word_embeddings.weight": numbered(4, 2),
            bucket: numbered(9),
            "rng_state/shard_0.0_1.1": [0],
        },
    )
    checkpoint = open_path(MegatronDist(), path)
    assert any("kept as stored" in f.message for f in checkpoint.notes)
    (kept,) = [i for i in checkpoint.tensors.values() if i.stored_name == bucket]
    assert (kept.component, kept.kind) == ("optimizer", Kind.OTHER)
    assert torch.equal(tensor(checkpoint, kept.key), numbered(9))
    assert verify(checkpoint, VerifyOptions(level=Level.VALUES)).code is ExitCode.OK


# --- what is not a finished torch_dist ------------------------------------------------------------


def test_without_its_configuration_a_save_did_not_finish(tmp_path: Path) -> None:
    path = of_data("singleton", tmp_path).path
    (path / "metadata.json").unlink()
    found = recognise(FORMATS, listing_of_path(path))
    assert found is not None
    assert (found[1].format, found[1].commit) == ("megatron-dist", CommitState.UNCOMMITTED)
    with pytest.raises(IncompleteError, match=r"metadata\.json"):
        open_path(MegatronDist(), path)


def test_a_save_that_ends_at_its_start_is_no_checkpoint(tmp_path: Path) -> None:
    """It leaves `common.pt` alone, which by itself is a file of torch.save without tensors."""
    step = tmp_path / "iter_0000001"
    step.mkdir()
    torch.save({"iteration": 1}, step / "common.pt")
    found = recognise(FORMATS, listing_of_path(step))
    assert found is not None
    assert (found[1].format, found[1].commit) == ("megatron-dist", CommitState.UNCOMMITTED)
    with pytest.raises(IncompleteError, match="did not finish"):
        open_path(MegatronDist(), step)


def test_the_common_state_in_the_store_tells_the_same(tmp_path: Path) -> None:
    state = {"w": numbered(2), "common_state/shard_0_1": [{"iteration": 3}]}
    path = store(tmp_path / "c", state)
    with pytest.raises(IncompleteError, match=r"metadata\.json"):
        open_path(Dcp(), path)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert open_path(MegatronDist(), path).step == 3


def test_a_configuration_without_a_store_is_damage(tmp_path: Path) -> None:
    path = of_data("singleton", tmp_path).path
    (path / ".metadata").unlink()
    with pytest.raises(CorruptError) as caught:
        open_path(MegatronDist(), path)
    assert (caught.value.kind, caught.value.file) == ("missing-file", ".metadata")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"sharded_backend": "zarr", "sharded_backend_version": 1}', CorruptError),
        ('{"sharded_backend": "torch_dist", "sharded_backend_version": 2}', UnsupportedError),
        ('{"sharded_backend": "torch_dist_v2"}', UnsupportedError),
        ('{"sharded_backend": "torch_disp"}', CorruptError),  # one bit
        ('{"sharded_backend": "torch_dist", "x": {"sharded_backend": "torch_dist"', CorruptError),
        ('{"sharded_backend": "torch_dist", "sharded_backend": "torch_dist"}', UnsafeError),
        (" " * (1 << 20) + '{"sharded_backend": "torch_dist"}', UnsupportedError),
    ],
)
def test_another_configuration_is_refused(
    text: str, error: type[FtckptError], tmp_path: Path
) -> None:
    path = of_data("singleton", tmp_path).path
    (path / "metadata.json").write_text(text)
    with pytest.raises(error) as caught:
        open_path(MegatronDist(), path)
    assert caught.value.file == "metadata.json"


@pytest.mark.parametrize("text", ["", "\0" * 60, '{"sharded_backend": "torch_d', "{}"])
@pytest.mark.parametrize("beside", [True, False])
def test_a_configuration_that_a_crash_left_empty_is_damage(
    text: str, beside: bool, tmp_path: Path
) -> None:
    """Megatron reads nothing without it, and by its other files it is a plain store's."""
    if beside:
        path = of_data("singleton", tmp_path).path
    else:
        path = store(tmp_path / "c", {"w": numbered(2), "common_state/shard_0_1": [{"i": 3}]})
    (path / "metadata.json").write_text(text)
    found = recognise(FORMATS, listing_of_path(path))
    assert found is not None
    with pytest.raises(CorruptError) as caught:
        open_path(found[0], path)
    assert (caught.value.kind, caught.value.file) == ("bad-index", "metadata.json")


def test_another_file_of_that_name_is_no_mark_of_megatron(tmp_path: Path) -> None:
    path = store(tmp_path / "c", {"w": numbered(2)})
    (path / "metadata.json").write_text('{"run": 7}')
    assert MegatronDist().recognise(listing_of_path(path)) is None
    assert list(open_path(Dcp(), path).tensors) == ["w"]
