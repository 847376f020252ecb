from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.checkpoint import Checkpoint, Kind
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.formats.torchsave.writer import FILE, TorchSaveWriter
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.layout import LayoutRequest
from tests.builders.checkpoints import open_checkpoint, save_dcp
from tests.builders.real_sets import real_set
from tests.campaign import examples
from tests.conformance.writers import assert_same_tensors, assert_sound, write
from tests.formats.dcp.fsdp2_loading import require_equal, trained

WRITER = TorchSaveWriter()
SETS = [
    ("dcp_fsdp2_nested", "step-4"),
    ("dcp_fsdp2_titan", "step-3"),
    ("dcp_2d_tpfsdp", "step-3"),
    ("dcp_torch26_fsdp2_async", "step-3"),
    ("accelerate_fsdp2", "checkpoint_3"),
    ("lightning_ddp", "step=4.ckpt"),
    ("verl_fsdp", "global_step_3"),
    ("hf_llama", ""),
    ("hf4_llama_bin", ""),
    ("mcore_torch_tp2pp2", "iter_0000003"),
]


def saved(path: Path, state: Any) -> Checkpoint:
    torch.save(state, path)
    return open_checkpoint(path)


def loaded(folder: Path) -> Any:
    return torch.load(folder / FILE, weights_only=False)


@pytest.mark.parametrize(("name", "inside"), SETS, ids=[name for name, _ in SETS])
def test_real_checkpoints_come_back(
    name: str, inside: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = open_checkpoint(real_set(name, inside, tmp_path_factory))
    result = write(WRITER, source, tmp_path)
    assert_same_tensors(result, source)
    assert_sound(result)
    assert result.step in (source.step, None)  # None: a scheduler's counter alone shows no step


def training_state() -> dict[str, Any]:
    model, optimizer = trained()
    return {
        "epoch": 2,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lists": [{"t": torch.arange(3)}, {"t": torch.arange(4)}],
        "lr_scheduler": {"milestones": {30: 1}, "order": OrderedDict(b=1, a=2)},
        "rng": {"torch": torch.get_rng_state(), "deep": (torch.arange(3), "x")},
    }


def test_a_file_keeps_its_own_nesting(tmp_path: Path) -> None:
    state = training_state()
    source = saved(tmp_path / "state.pt", state)
    result = write(WRITER, source, tmp_path / "out")
    assert_same_tensors(result, source)
    assert_sound(result)
    assert set(result.objects) == set(source.objects)
    back = loaded(tmp_path / "out")
    deep, want = back["rng"].pop("deep"), state["rng"].pop("deep")
    assert torch.equal(deep[0], want[0])
    assert deep[1] == "x"
    require_equal(back, state)
    assert type(back["lr_scheduler"]["order"]) is OrderedDict
    # What was saved can be loaded by what had saved it.
    _, optimizer = trained()
    optimizer.load_state_dict(back["optimizer"])
    assert torch.load(tmp_path / "out" / FILE, weights_only=True)["epoch"] == 2


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    shared = torch.randn(4, 3)
    source = saved(tmp_path / "s.pt", {"embed": shared, "head": shared, "other": shared.clone()})
    result = write(WRITER, source, tmp_path / "out")
    assert dict(result.aliases) == dict(source.aliases) == {"head": "embed"}
    back = loaded(tmp_path / "out")
    assert back["head"].data_ptr() == back["embed"].data_ptr() != back["other"].data_ptr()
    # Of another type, a tied weight is a tensor of its own.
    content = Content.of(source)
    half = content.tensors["head"]._replace(dtype=DTYPES["float16"])
    write(WRITER, content.with_tensors([content.tensors["embed"], half]), tmp_path / "half")
    back = loaded(tmp_path / "half")
    assert torch.equal(back["head"], shared.half())


def test_a_tied_weight_that_the_source_does_not_store(tmp_path: Path) -> None:
    source = saved(tmp_path / "s.pt", {"embed": torch.randn(4, 3)})
    content = replace(Content.of(source), aliases={"head": "embed"})
    result = write(WRITER, content, tmp_path / "out")
    assert dict(result.aliases) == {"head": "embed"}


def test_weights_alone_are_a_bare_state_dict(tmp_path: Path) -> None:
    weights = {"a.weight": torch.randn(2), "b": torch.tensor(1)}
    source = saved(tmp_path / "s.pt", {"model": weights, "step": 3})
    renamed = [w._replace(name=f"x.{w.name}") for w in Content.of(source).tensors.values()]
    content = replace(Content.of(source).with_tensors(renamed), objects={})
    write(WRITER, content, tmp_path / "out")
    back = loaded(tmp_path / "out")
    require_equal(back, {f"x.{name}": value for name, value in weights.items()})


def test_a_distributed_source_keeps_its_paths(tmp_path: Path) -> None:
    source = open_checkpoint(save_dcp(tmp_path / "source"))
    write(WRITER, source, tmp_path / "out")
    back = loaded(tmp_path / "out")
    assert set(back) == {"model", "step", "notes"}
    assert (back["step"], len(back["notes"])) == (7, 1000)
    assert list(back["model"]) == [f"layers.{i}.weight" for i in range(4)]


def test_a_flat_distributed_source_is_nested(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = open_checkpoint(real_set("dcp_fsdp2_titan", "step-3", tmp_path_factory))
    write(WRITER, source, tmp_path)
    back = loaded(tmp_path)
    assert {"model", "optimizer"} <= set(back)
    assert set(back["optimizer"]) == {"state", "param_groups"}
    assert set(back["optimizer"]["state"]["gain"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert back["optimizer"]["param_groups"]["gain.lr"] > 0


def test_an_optimizer_in_a_file_of_its_own_keeps_its_numbers(tmp_path: Path) -> None:
    model, optimizer = trained()
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    source = open_checkpoint(folder)
    result = write(WRITER, source, tmp_path / "out")
    assert_same_tensors(result, source)
    back = loaded(tmp_path / "out")
    require_equal(back["optimizer"], optimizer.state_dict())
    require_equal(back["model"], dict(model.state_dict()))
    assert back["trainer_state"] == {"global_step": 3}


def test_state_under_names_has_groups_or_readers_would_not_know_it(tmp_path: Path) -> None:
    optimizer = {"state": {"w": {"exp_avg": torch.ones(2)}}, "param_groups": []}
    source = saved(tmp_path / "s.pt", {"model": {"w": torch.ones(2)}, "optimizer": optimizer})
    content = replace(Content.of(source), objects={})
    result = write(WRITER, content, tmp_path / "out")
    assert_same_tensors(result, source)
    assert loaded(tmp_path / "out")["optimizer"]["param_groups"] == []


def test_two_things_for_one_place_are_named(tmp_path: Path) -> None:
    source = saved(tmp_path / "s.pt", {"model": {"w": torch.ones(2)}, "step": 1})
    content = Content.of(source)
    whole = content.tensors["w"]
    inside = TargetTensor("extra:step", "w", Kind.OTHER, whole.shape, whole.dtype, whole.copies)
    layout = WRITER.layout(content.with_tensors([whole, inside]), LayoutRequest())
    assert layout.unplaced == ["step"]


leaves = st.integers() | st.text(max_size=5) | st.none() | st.floats(allow_nan=False)
trees = st.recursive(
    leaves | st.lists(st.integers(0, 3), max_size=3).map(tuple).map(torch.Size),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.tuples(inner)
    ),
    max_leaves=8,
)


def with_tensors(tree: Any) -> Any:
    """Put a tensor wherever a `torch.Size` stands."""
    if isinstance(tree, torch.Size):
        return torch.arange(tree.numel()).reshape(tree)
    if isinstance(tree, dict):
        return {key: with_tensors(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(with_tensors(value) for value in tree)
    return tree


@given(tree=st.dictionaries(st.text(min_size=1, max_size=6), trees, max_size=4))
@settings(deadline=None, max_examples=examples(25, 240))
def test_any_tree_comes_back(tree: dict[str, Any], tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("trees")
    state = {"model": {"w": torch.ones(2)}, **with_tensors(tree)}
    source = saved(folder / "s.pt", state)
    result = write(WRITER, source, folder / "out")
    assert_same_tensors(result, source)
    assert_same(loaded(folder / "out"), state)


def assert_same(got: Any, want: Any) -> None:
    if isinstance(want, torch.Tensor):
        assert torch.equal(got, want)
    elif isinstance(want, Mapping):
        assert set(got) == set(want)
        for key in want:
            assert_same(got[key], want[key])
    elif isinstance(want, (list, tuple)):
        assert type(got) is type(want)
        for a, b in zip(got, want, strict=True):
            assert_same(a, b)
    else:
        assert got == want
