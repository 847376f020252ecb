"""Megatron-FSDP: a store of the library's own DTensors, read under the names of torch_dist.

`dense` and `experts` are as far as the library runs without a GPU, `standalone` was trained on one:
tests/data/megatron_fsdp says how.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.checkpoint.replicas import copies_of
from ftckpt.formats.megatron.fsdp import MegatronFsdp
from tests.builders.checkpoints import flip, open_checkpoint
from tests.commands.golden import ftckpt
from tests.conformance.formats import FormatTests, Made
from tests.formats.dcp.writing import save, truth_of
from tests.formats.megatron.torch_dist.test_reader import unpacked
from tests.json_run import ftckpt_json

DATA = Path(__file__).parents[2] / "data" / "megatron_fsdp"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
EXPERTS = "decoder.mlp.experts"
WRAPPED = "module.module.module."


def of_data(name: str, to: Path) -> Made:
    place = unpacked(DATA / f"{name}.tar.xz", to)
    truth = {key: truth_of(t) for key, t in load_file(place / "truth.safetensors").items()}
    return Made(place / "iter_0000002", truth)


class TestMegatronFsdp(FormatTests):
    """The promises of every format."""

    format = MegatronFsdp()

    def make(self, root: Path) -> list[Made]:
        return [of_data(name, root) for name in ("dense", "experts")]


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_its_verbs(name: str, tmp_path: Path) -> None:
    path, truth = of_data(name, tmp_path)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.format, checkpoint.step) == ("megatron-fsdp", 2)
    sizes = checkpoint.topology
    assert (sizes.tp, sizes.dp, sizes.ep) == (2, 2, 2 if name == "experts" else 1)
    assert ftckpt_json("verify", str(path), "--level", "values")["result"]["code"] == 0
    for form in ("safetensors", "dcp"):
        made = ftckpt_json("convert", str(path), str(tmp_path / form), "--to", form)
        assert made["result"]["code"] == 0
        assert ftckpt_json("diff", str(path), str(tmp_path / form))["result"]["code"] == 0
        assert open_checkpoint(tmp_path / form).tensors.keys() >= truth.keys() - {
            key for key in truth if key.startswith("extra:")
        }


def test_to_hugging_face_by_its_arguments(tmp_path: Path) -> None:
    path, _ = of_data("dense", tmp_path)
    whole = load_file(path.parent / "truth.safetensors")
    out = tmp_path / "hf"
    args = ("--to", "safetensors", "--names", "hf", "--only", "model")
    assert ftckpt_json("convert", str(path), str(out), *args)["result"]["code"] == 0
    made = load_file(out / "model.safetensors")
    gate, up = whole[FC1].chunk(2)
    assert torch.equal(made["model.layers.0.mlp.gate_proj.weight"], gate)
    assert torch.equal(made["model.layers.0.mlp.up_proj.weight"], up)
    assert (out / "config.json").is_file()


@pytest.mark.parametrize(("name", "sizes"), [("dense", [2]), ("experts", [2, 1])])
def test_to_torch_dist_with_the_optimizer(name: str, sizes: list[int], tmp_path: Path) -> None:
    path, truth = of_data(name, tmp_path)
    out = tmp_path / "dist"
    made = ftckpt_json("convert", str(path), str(out), "--to", "megatron-dist")
    assert made["result"]["code"] == 0
    checkpoint = open_checkpoint(out)
    state = {key for key in truth if not key.startswith("extra:")}
    masters = {f"master:{key}" for key in state if ":" not in key}
    assert checkpoint.tensors.keys() == state | masters  # the weights are fp32, and masters too
    for key in state | masters:
        raw = read_tensor(checkpoint, key)
        assert raw == truth[key.removeprefix("master:")].data, key
    optimizer = checkpoint.load_object("common.pt")["optimizer"]
    each = optimizer.values() if len(sizes) > 1 else [optimizer]
    groups = [one["optimizer"]["param_groups"] for one in each]
    assert [len(own) for own in groups] == sizes  # with and without decay; the experts' apart
    assert {group["step"] for own in groups for group in own} == {2}


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_there_and_back_through_torch_dist(name: str, tmp_path: Path) -> None:
    path, truth = of_data(name, tmp_path)
    steps = (("dist", "megatron-dist"), ("fsdp", "megatron-fsdp"))
    for source, (out, form) in zip((path, tmp_path / "dist"), steps, strict=True):
        made = ftckpt_json("convert", str(source), str(tmp_path / out), "--to", form)
        assert made["result"]["code"] == 0
    back = open_checkpoint(tmp_path / "fsdp")
    assert back.format == "megatron-fsdp"
    assert back.tensors.keys() == {key for key in truth if not key.startswith("extra:")}
    for key in back.tensors:
        assert read_tensor(back, key) == truth[key].data, key
    first = open_checkpoint(path)
    stored = {i.stored_name for i in first.tensors.values() if not i.key.startswith("extra:")}
    assert {info.stored_name for info in back.tensors.values()} == stored
    kept = {n for n in first.objects if n.startswith("optimizer.param_to_group_meta.")}
    assert kept == {n for n in back.objects if n.startswith("optimizer.param_to_group_meta.")}
    for one in kept:
        assert back.load_object(one) == first.load_object(one)
    assert ftckpt_json("verify", str(tmp_path / "fsdp"), "--level", "values")["result"]["code"] == 0


def of_torchs_adam(path: Path, to: Path, *counts: float) -> Path:
    """Write a checkpoint as torch's Adam has it, which counts beside the moments."""
    dcp_to_torch_save(path, to / "torch.pt")
    state = torch.load(to / "torch.pt", weights_only=False)
    for number, own in enumerate(state["optimizer"]["state"].values()):
        own["step"] = torch.tensor(counts[number % len(counts)])
    for group in state["optimizer"]["param_to_group_meta"].values():
        del group["step"], group["bias_correction"]
        group |= {"amsgrad": False, "foreach": None, "maximize": False}
    return save(state, to / "iter_0000002")


def test_what_torchs_adam_counts_goes_along(tmp_path: Path) -> None:
    path = of_torchs_adam(of_data("dense", tmp_path)[0], tmp_path, 2.0)
    first = open_checkpoint(path)
    wanted = {i.stored_name for i in first.tensors.values() if not i.key.startswith("extra:")}
    dist, back, resharded = (tmp_path / name for name in ("dist", "back", "resharded"))
    for words in (
        ("convert", path, dist, "--to", "megatron-dist"),
        ("convert", dist, back, "--to", "megatron-fsdp"),
        ("reshard", path, resharded, "--dp", "3"),
    ):
        assert ftckpt_json(*map(str, words))["result"]["code"] == 0
    groups = open_checkpoint(dist).load_object("common.pt")["optimizer"]["optimizer"]
    assert [group["step"] for group in groups["param_groups"]] == [2, 2]
    for made in map(open_checkpoint, (back, resharded)):
        assert {info.stored_name for info in made.tensors.values()} == wanted
        for key in made.tensors:
            assert read_tensor(made, key) == read_tensor(first, key), key
        said = {name for name in first.objects if name.startswith("optimizer.")}
        assert said == {name for name in made.objects if name.startswith("optimizer.")}
    assert ftckpt_json("verify", str(resharded), "--level", "values")["result"]["code"] == 0
    dcp_to_torch_save(resharded, tmp_path / "again.pt")
    state = torch.load(tmp_path / "again.pt", weights_only=False)
    for own in state["optimizer"]["state"].values():
        assert own["step"].dtype == torch.float32
        assert own["step"].item() == 2


@pytest.mark.parametrize("target", ["megatron-dist", "megatron-fsdp"])
def test_counts_that_differ_are_refused(target: str, tmp_path: Path) -> None:
    path = of_torchs_adam(of_data("dense", tmp_path)[0], tmp_path, 2.0, 3.0)
    verb = ("reshard", "--dp", "2") if target == "megatron-fsdp" else ("convert", "--to", target)
    answer = ftckpt_json(verb[0], str(path), str(tmp_path / "out"), *verb[1:])
    assert answer["result"]["code"] == 13
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dp", [1, 3, 8])
def test_resharded_over_other_ranks(dp: int, tmp_path: Path) -> None:
    path, truth = of_data("experts", tmp_path)
    made = ftckpt_json("reshard", str(path), str(tmp_path / "out"), "--dp", str(dp))
    assert made["result"]["code"] == 0
    back = open_checkpoint(tmp_path / "out")
    for key in back.tensors:
        assert read_tensor(back, key) == truth[key].data, key
    assert len(list((tmp_path / "out").glob("*.distcp"))) == dp


def test_a_flipped_bit_is_named_by_its_tensor(tmp_path: Path) -> None:
    path, _ = of_data("dense", tmp_path)
    checkpoint = open_checkpoint(path)
    piece = checkpoint.tensors[FC1].pieces[-1]  # of the ups, which have another stored name
    flip(path / piece.extent.file, checkpoint.payload(piece).extent.offset)
    answer = ftckpt_json("verify", str(path))
    assert [f["tensor"] for f in answer["findings"] if f["kind"] == "bad-crc"] == [FC1]
    assert answer["result"]["code"] == 4


def a_state(tensors: dict[str, torch.Tensor], **optimizer: dict[str, torch.Tensor]) -> dict:  # type: ignore[type-arg]
    """Return a state of the library's form."""
    first = {"module.embedding.word_embeddings.weight": torch.ones(4, 2)}
    return {
        "checkpoint_version": 3.0,
        "iteration": 2,
        "model": first | {f"module.{name}": value for name, value in tensors.items()},
        "optimizer": {"state": {WRAPPED + name: own for name, own in optimizer.items()}},
    }


@pytest.mark.parametrize("half", "wv")
def test_a_lost_half_is_missed(half: str, tmp_path: Path) -> None:
    path = save(a_state({f"{FC1}_{half}": torch.ones(2, 2)}), tmp_path / "ckpt")
    answer = ftckpt_json("verify", str(path), "--level", "structure")
    lost = [f["tensor"] for f in answer["findings"] if f["kind"] == "missing-tensor"]
    assert lost == [f"{FC1}_{half}"]
    assert answer["result"]["code"] == 4


@pytest.mark.parametrize("second", [2.0, 3.0])
def test_the_counter_of_both_halves_is_one(second: float, tmp_path: Path) -> None:
    steps = {f"{FC1}_w": {"step": torch.tensor(2.0)}, f"{FC1}_v": {"step": torch.tensor(second)}}
    path = save(a_state({}, **steps), tmp_path / "ckpt")
    checkpoint = open_checkpoint(path)
    (copies,) = copies_of(checkpoint.tensors[f"optimizer:{FC1}.step"])
    assert len(copies.pieces) == 2
    answer = ftckpt_json("verify", str(path), "--level", "values")
    differs = any(f["kind"] == "replica-differs" for f in answer["findings"])
    assert differs == (second != 2.0)


def test_flat_names_of_the_converter(tmp_path: Path) -> None:
    # checkpoint_inspector.py saves one flat dict, and masters as the leaf `param`.
    state = {
        f"model.module.{FC1}_w": torch.zeros(2, 2),
        f"model.module.{FC1}_v": torch.ones(2, 2),
        f"optimizer.state.{WRAPPED}{FC1}_w.param": torch.zeros(2, 2),
        f"optimizer.state.{WRAPPED}{FC1}_v.param": torch.ones(2, 2),
        "model.module.mlp.experts.linear_fc2.weight3": torch.ones(2, 2),
        "checkpoint_version": 3.0,
    }
    checkpoint = open_checkpoint(save(state, tmp_path / "ckpt"))
    assert set(checkpoint.tensors) == {
        FC1, f"master:{FC1}", "mlp.experts.local_experts.3.linear_fc2.weight"
    }  # fmt: skip
    assert checkpoint.tensors[FC1].shape == (4, 2)


@pytest.mark.parametrize("names", [
    (FC1, f"{FC1}_w", f"{FC1}_v"),  # the whole and its halves
    (f"{EXPERTS}.linear_fc1.weight1", f"{EXPERTS}.local_experts.1.linear_fc1.weight"),
    (f"{EXPERTS}.linear_fc1.weight{10**9}", FC1),  # no number of an expert
    (f"{FC1}_w", f"{FC1}_v_w", f"{FC1}_v_v"),
])  # fmt: skip
def test_no_tensor_is_lost_by_its_name(names: tuple[str, ...], tmp_path: Path) -> None:
    state = a_state({name: torch.full((2, 2), float(n)) for n, name in enumerate(names)})
    checkpoint = open_checkpoint(save(state, tmp_path / "ckpt"))
    pieces = [piece for info in checkpoint.tensors.values() for piece in info.pieces]
    assert len({piece.extent for piece in pieces}) == len(names) + 1


def test_halves_that_do_not_fit_stay_apart(tmp_path: Path) -> None:
    state = a_state({f"{FC1}_w": torch.ones(2, 2), f"{FC1}_v": torch.ones(3, 2)})
    path = save(state, tmp_path / "ckpt")
    assert FC1 not in open_checkpoint(path).tensors
    assert ftckpt_json("verify", str(path), "--level", "structure")["result"]["code"] == 4


def test_trained_without_megatron(tmp_path: Path) -> None:
    """What the package saves by itself is a DCP store whose optimizer numbers its states."""
    path = unpacked(DATA / "alone" / "standalone.tar.xz", tmp_path) / "step-2"
    dcp_to_torch_save(path, tmp_path / "torch.pt")
    told = torch.load(tmp_path / "torch.pt", weights_only=False)
    checkpoint = open_checkpoint(path)
    weights = {name.removeprefix("module."): held for name, held in told["model"].items()}
    for name, held in weights.items():
        assert read_tensor(checkpoint, name) == held.numpy().tobytes()
    moments = told["optimizer"]["state"]
    assert len(moments) == len(weights) == 10
    for number, state in moments.items():
        for kind in ("exp_avg", "exp_avg_sq"):
            assert read_tensor(checkpoint, f"{kind}:{number}") == state[kind].numpy().tobytes()
    document = ftckpt_json("inspect", str(path))
    presence = {item["key"]: item["presence"] for item in document["resume"]}
    assert (presence["weights"], presence["moments"]) == ("present", "cannot tell")
    said = ftckpt("inspect", path).stdout
    assert "cannot tell  optimizer moments" in said
    # Megatron-FSDP takes a step of its own to make the states: an optimizer's count is no step.
    assert (document["step"], document["step_by"], document["optimizer_count"]) == (2, "name", 3)
    verified = ftckpt_json("verify", str(path), "--level", "values")
    assert not any(found["severity"] == "warning" for found in verified["findings"])
    assert ftckpt_json("convert", str(path), str(tmp_path / "out"), "--to", "safetensors")
    assert ftckpt_json("diff", str(path), str(tmp_path / "out"))["result"]["code"] == 0
