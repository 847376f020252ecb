"""Universal checkpoints: as DeepSpeed's converter makes them, and of other formats too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.checkpoint.sharding import parse_rules
from ftckpt.errors import UnsafeError, UnsupportedError, UsageError
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.universal.writer import DeepSpeedUniversalWriter
from ftckpt.formats.deepspeed.writer import DeepSpeedWriter
from ftckpt.formats.state.same_object import SameObject
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest, Writer
from ftckpt.transfer.prove.against_source import prove
from tests.builders.checkpoints import open_checkpoint, save_dcp
from tests.builders.materialise import materialise
from tests.conformance.writers import assert_repeatable, assert_same_tensors, assert_sound
from tests.formats.deepspeed.sets import tag
from tests.formats.deepspeed.trees import trees

WRITER = DeepSpeedUniversalWriter()


def layout(source: Checkpoint | Content, writer: Writer = WRITER, **request: Any) -> Layout:
    content = source if isinstance(source, Content) else Content.of(source)
    return writer.layout(content, LayoutRequest(**request))


def written(
    source: Checkpoint, to: Path, writer: Writer = WRITER, **request: Any
) -> DeepSpeedCheckpoint:
    """Lay out, make the files plainly, prove them and open the result."""
    made = layout(source, writer, **request)
    assert list(made.unplaced) == []
    assert_repeatable(layout(source, writer, **request), made)
    materialise(made, source, to)
    result = open_checkpoint(to)
    assert isinstance(result, DeepSpeedCheckpoint)
    assert result.format == writer.name
    assert made.content is not None
    prove(made.content, result, SameObject)
    assert [*result.check(), *result.notes] == []
    return result


def opened(name: str) -> DeepSpeedCheckpoint:
    checkpoint = open_checkpoint(tag(name))
    assert isinstance(checkpoint, DeepSpeedCheckpoint)
    return checkpoint


@pytest.mark.parametrize("name", ["z1", "tp"])
def test_it_is_what_the_converter_makes(name: str, tmp_path: Path) -> None:
    """But for copies that nothing reads, and the other stages' form of the optimizer's state."""
    result = written(opened(name), tmp_path / "universal")
    assert_sound(result)
    ours, theirs = trees(result), trees(opened(f"universal_{name}"))
    state = "zero/optimizer_state.pt"
    mine, its = ours.pop(state), theirs.pop(state)
    assert {key: its[key] for key in mine.keys() & its.keys()} == {
        key: mine[key] for key in mine.keys() & its.keys()
    }
    assert mine.keys() - its.keys() == {"optimizer_state_dict"}
    assert its.keys() - mine.keys() <= {
        "zero_stage", "group_paddings", "param_alignment_paddings", "partition_count",
    }  # fmt: skip
    copies = {f"zero/{n}/fp32.pt" for n in ("frozen.weight", "head.weight", "rope", "seen")}
    assert theirs.keys() - ours.keys() == (copies if name == "z1" else set())
    assert ours == {path: theirs[path] for path in ours}


def test_a_flat_source_of_stage_3_gets_its_shapes_and_steps(tmp_path: Path) -> None:
    source = opened("z3")
    result = written(source, tmp_path / "universal")
    assert_same_tensors(result, source)
    tree = result.tree("zero/up.weight/fp32.pt")
    assert tree["param"].shape == (3, 5)
    state = result.tree("zero/optimizer_state.pt")
    assert list(state["optimizer_state_dict"]["state"]) == [0]
    assert state["optimizer_state_dict"]["param_groups"] == state["param_groups"]
    assert state["ds_version"] == "0.19.8"


def test_folders_are_called_as_the_loader_looks_for_them(tmp_path: Path) -> None:
    """By the names of the optimizer, into which a wrapper has put its own."""
    result = written(opened("wrap"), tmp_path / "universal")
    assert "zero/up._checkpoint_wrapped_module.weight/exp_avg.pt" in result.files
    assert not any(path.startswith("zero/up.weight") for path in result.files)
    assert_same_tensors(result, opened("wrap"))


@pytest.mark.parametrize(("name", "said"), [("z1", True), ("z2", False)])
def test_it_says_that_stage_3_gives_all_groups_the_settings_of_the_first(
    name: str, said: bool
) -> None:
    notes = WRITER.layout(Content.of(opened(name)), LayoutRequest()).notes
    assert any("the first parameter group" in note.message for note in notes) is said


def test_the_elastic_form_has_no_settings_and_keeps_its_groups(tmp_path: Path) -> None:
    result = written(opened("z2"), tmp_path / "universal")
    state = result.tree("zero/optimizer_state.pt")
    assert state["param_groups"] == [{"params": [0]}, {"params": [1]}]


def test_a_pipeline_keeps_the_files_of_its_layers(tmp_path: Path) -> None:
    source = opened("pipe")
    result = written(source, tmp_path / "universal")
    assert_same_tensors(result, source)
    assert "layer_00-model_states.pt" in result.files


def test_experts_that_autoep_stacks_are_what_the_converter_makes(tmp_path: Path) -> None:
    """But for copies of the record, which it shortens, and a pattern that it writes otherwise."""
    ours = trees(written(opened("autoep_z1"), tmp_path / "universal"))
    theirs = trees(opened("universal_autoep_z1"))
    assert ours.keys() == theirs.keys()
    apart = {"zero/optimizer_state.pt", "mp_rank_00_model_states.pt"}
    assert {p: ours[p] for p in ours if p not in apart} == {
        p: theirs[p] for p in theirs if p not in apart
    }
    mine, its = (made["mp_rank_00_model_states.pt"] for made in (ours, theirs))
    layers = mine.pop("universal_checkpoint_info")["ds_autoep_layers"]
    short = its.pop("universal_checkpoint_info")["ds_autoep_layers"]
    assert [{key: one[key] for key in two} for one, two in zip(layers, short, strict=True)] == short
    assert mine == its


def test_frozen_experts_have_no_place_in_it() -> None:
    with pytest.raises(UnsupportedError, match="no frozen experts"):
        layout(opened("autoep_frozen"))


def test_weights_of_stacked_experts_are_made_of_masters_again(tmp_path: Path) -> None:
    source = opened("autoep_z1")
    back = written(opened("universal_autoep_z1"), tmp_path / "back", DeepSpeedWriter(), ep=1)
    assert_same_tensors(back, source)


@pytest.mark.parametrize("name", ["z1", "z3", "pipe", "autoep_data", "autoep_z3"])
def test_partitions_are_made_of_it_again(name: str, tmp_path: Path) -> None:
    source = opened(name)
    universal = written(source, tmp_path / "universal")
    back = written(universal, tmp_path / "back", DeepSpeedWriter())
    assert trees(back) == trees(source)


@pytest.mark.parametrize("name", ["universal_z1", "universal_z3", "universal_tp", "universal_wrap"])
def test_partitions_are_made_of_the_converters(name: str, tmp_path: Path) -> None:
    universal = opened(name)
    result = written(universal, tmp_path / "zero", DeepSpeedWriter(), dp=2)
    source = opened(name.removeprefix("universal_"))
    for key, info in source.tensors.items():
        if not key.startswith("extra:"):
            same = read_tensor(result, key) == read_tensor(source, key)
            assert same or info.name == "embed", key  # its padding has become zeros
    padded = read_tensor(result, "exp_avg:embed") if name.endswith("tp") else b""
    assert padded[11 * 16 :] == bytes(len(padded) // 12)


# --- other formats ------------------------------------------------------------------------------


def trained(path: Path) -> tuple[Checkpoint, torch.nn.Module, torch.optim.Optimizer]:
    """Save what a plain trainer saves after two steps."""
    torch.manual_seed(0)
    head = torch.nn.Linear(5, 7, bias=False).requires_grad_(False)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5, bias=False), torch.nn.BatchNorm1d(5), head)
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=0.01)
    for _ in range(2):
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    state |= {"lr_scheduler": {"last_epoch": 2}, "rng": {"torch": torch.get_rng_state()}}
    torch.save(state, path)
    return open_checkpoint(path), model, optimizer


def test_a_plain_trainers_file(tmp_path: Path) -> None:
    source, model, optimizer = trained(tmp_path / "step2.pt")
    result = written(source, tmp_path / "universal")
    out = tmp_path / "universal"
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert not (out / "zero" / name).exists()
            continue
        for leaf, value in (("fp32", parameter.data), *optimizer.state[parameter].items()):
            found = torch.load(out / "zero" / name / f"{leaf}.pt")
            assert torch.equal(found if leaf == "step" else found["param"], value)
    state = torch.load(out / "zero" / "optimizer_state.pt")
    assert state["param_groups"][:1] == optimizer.state_dict()["param_groups"]
    # The loader leaves the state of groups out that the file does not have.
    assert state["param_groups"][1:] == [{"params": []}] * 2
    engine = torch.load(out / "mp_rank_00_model_states.pt", weights_only=False)
    assert engine["lr_scheduler"] == {"last_epoch": 2}
    assert engine["global_steps"] == engine["step"] == 2
    assert torch.equal(engine["rng"]["torch"], torch.get_rng_state())
    assert engine["buffer_names"] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert list(engine["frozen_param_shapes"]) == ["2.weight"]
    assert all(torch.equal(engine["module"][n], v) for n, v in model.state_dict().items())
    assert result.step == 2
    assert_sound(result)
    said = [note.message for note in layout(source).notes]
    assert any("widened, are the masters" in what for what in said)
    assert any("no wish" in what or "--rules" in what for what in said)


def test_a_tied_weight_is_one_parameter(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(2, 3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(2, 3)
    optimizer.step()
    state = {"model": {"embed": weight.data, "head": weight.data}, "step": 1}
    torch.save(state | {"optimizer": optimizer.state_dict()}, tmp_path / "tied.pt")
    result = written(open_checkpoint(tmp_path / "tied.pt"), tmp_path / "universal")
    assert result.aliases == {"head": "embed", "master:head": "master:embed"}
    assert not (tmp_path / "universal" / "zero" / "head").exists()


def test_rules_say_how_jobs_cut_a_parameter(tmp_path: Path) -> None:
    source, *_ = trained(tmp_path / "step2.pt")
    rules = parse_rules('[[rule]]\nnames = ["0.weight"]\nsplit = 1\n', "rules.toml")
    result = written(source, tmp_path / "universal", rules=rules)
    assert result.tree("zero/0.weight/fp32.pt")["cat_dim"] == 1
    assert result.tree("zero/1.weight/fp32.pt")["cat_dim"] == 0


def test_weights_alone_are_no_start(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no parameter has an optimizer's state"):
        layout(open_checkpoint(save_dcp(tmp_path / "dcp")))


def test_other_components_are_the_clients_state(tmp_path: Path) -> None:
    source, *_ = trained(tmp_path / "step2.pt")
    content = Content.of(source)
    average = content.tensors["0.weight"]._replace(component="ema")
    content = replace(content, tensors={**content.tensors, average.key: average})
    made = layout(content)
    assert list(made.unplaced) == []
    materialise(made, source, tmp_path / "universal")
    engine = torch.load(tmp_path / "universal" / "mp_rank_00_model_states.pt", weights_only=False)
    assert torch.equal(engine["ema"]["0.weight"], engine["module"]["0.weight"])


def test_state_under_a_name_of_the_engine_has_no_place(tmp_path: Path) -> None:
    file = tmp_path / "step2.pt"
    trained(file)
    torch.save(torch.load(file) | {"param_shapes": 3}, file)
    assert list(layout(open_checkpoint(file)).unplaced) == ["param_shapes"]


def test_a_name_that_climbs_is_refused(tmp_path: Path) -> None:
    source, *_ = trained(tmp_path / "step2.pt")
    content = Content.of(source)
    names = {"0.weight": "../../0.weight"}
    tensors = [
        w._replace(name=names[n] + w.name.removeprefix(n)) if w.name.startswith(n) else w
        for w in content.tensors.values()
        for n in names
    ]
    with pytest.raises(UnsafeError):
        layout(content.with_tensors(tensors))


def test_a_vocabulary_that_nothing_names_has_no_true_size() -> None:
    with pytest.raises(UsageError, match="--true-vocab-size has no meaning here"):
        layout(opened("z1"), true_vocab_size=5)


def test_the_pointer_is_not_written_and_said() -> None:
    made = layout(opened("z1"))
    assert not any("latest" in file.path for file in made.files)
    assert any("latest_universal" in note.message for note in made.notes)
