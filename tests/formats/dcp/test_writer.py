from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load as load_with_torch

from ftckpt.checkpoint import Box, Checkpoint, Kind
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.checkpoint.sharding import even_rows
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.dcp.writer import DcpWriter
from ftckpt.formats.pickles.walk import at
from ftckpt.transfer.content import Content, Copy, TargetTensor
from ftckpt.transfer.layout import LayoutRequest
from tests.builders.checkpoints import open_checkpoint, save_dcp
from tests.builders.jobs import run_job
from tests.builders.real_sets import real_set
from tests.conformance.writers import as_bytes, assert_same_tensors, assert_sound, write
from tests.formats.dcp.fsdp2_loading import trained

SETS = [
    ("dcp_fsdp2_nested", "step-4"),
    ("dcp_fsdp2_titan", "step-3"),
    ("dcp_2d_tpfsdp", "step-3"),
    ("dcp_torch26_fsdp2_async", "step-3"),
    ("accelerate_fsdp2", "checkpoint_3"),
    ("accelerate_fsdp1", "checkpoint_3"),
    ("lightning_ddp", "step=4.ckpt"),
    ("verl_fsdp", "global_step_3"),
    ("hf_llama", ""),
    ("hf4_llama_bin", ""),
    ("mcore_torchdist_tp2pp2", "iter_0000003"),
    ("mcore_torch_tp2pp2", "iter_0000003"),
]
WRITER = DcpWriter()


def load(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Let torch load into `state`, in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process loads is what is meant
        load_with_torch(state, checkpoint_id=path, no_dist=True)
    return state


def saved(path: Path, state: Any) -> Checkpoint:
    torch.save(state, path)
    return open_checkpoint(path)


@pytest.mark.parametrize(("name", "inside"), SETS, ids=[name for name, _ in SETS])
def test_real_checkpoints_come_back(
    name: str, inside: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = open_checkpoint(real_set(name, inside, tmp_path_factory))
    result = write(WRITER, source, tmp_path, dp=3)
    assert_same_tensors(result, source)
    assert_sound(result)
    assert result.step == source.step
    if source.format == "dcp":
        assert set(result.objects) == set(source.objects)
        for key, info in source.objects.items():
            assert result.source.read(*result.objects[key].extent) == source.source.read(
                *info.extent
            )


@pytest.mark.parametrize("world", [1, 3, 5])
def test_each_rank_reads_its_own_rows_in_order(world: int, tmp_path: Path) -> None:
    source = open_checkpoint(save_dcp(tmp_path / "source"))
    result = write(WRITER, source, tmp_path / "out", dp=world)
    assert result.topology.world_size == world
    for info in source.tensors.values():
        rows = [p.box for p in result.tensors[info.key].pieces]
        wanted = [even_rows(64, world, rank) for rank in range(world)]
        assert rows == [Box((a, 0), (b - a, 33)) for a, b in wanted]
        for rank, piece in enumerate(result.tensors[info.key].pieces):
            assert piece.extent.file == f"__{rank}_0.distcp"
            payload = result.payload(piece)
            assert payload.strides is None
            assert (payload.extent.offset - piece.extent.offset) % 64 == 0


def test_torch_loads_what_it_had_saved(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "source")
    write(WRITER, open_checkpoint(source), tmp_path / "out", dp=4)
    empty = {"model": {f"layers.{i}.weight": torch.zeros(64, 33) for i in range(4)}}
    got, want = load(tmp_path / "out", empty), load(source, pickle.loads(pickle.dumps(empty)))
    for name, value in want["model"].items():
        assert torch.equal(got["model"][name], value)
    state = load(tmp_path / "out", {"step": 0, "notes": ""})
    assert state == {"step": 7, "notes": "x" * 1000}


@pytest.mark.parametrize(("name", "inside"), SETS[:3], ids=[name for name, _ in SETS[:3]])
def test_torchs_own_converter_sees_no_difference(
    name: str, inside: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = real_set(name, inside, tmp_path_factory)
    write(WRITER, open_checkpoint(place), tmp_path / "out", dp=3)
    trees = []
    for number, path in enumerate((place, tmp_path / "out")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_to_torch_save(path, tmp_path / f"{number}.pt")
        trees.append(torch.load(tmp_path / f"{number}.pt", weights_only=False))
    assert_equal_trees(*trees)


def assert_equal_trees(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert set(a) == set(b)
        for key in a:
            assert_equal_trees(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        for x, y in zip(a, b, strict=True):
            assert_equal_trees(x, y)
    elif not hasattr(a, "getvalue"):
        assert repr(a) == repr(b)


def state_of_one_process() -> dict[str, Any]:
    model, optimizer = trained()
    schedule = {"base_lrs": [0.01], "nested": {"a": [{"b": 1}], "c": ()}, "milestones": {30: 1}}
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": schedule,
        "rng": {"torch": torch.get_rng_state(), "deep": (torch.arange(3), "x")},
        "step": 3,
    }


def test_a_plain_file_becomes_what_torch_would_have_saved(tmp_path: Path) -> None:
    state = state_of_one_process()
    source = saved(tmp_path / "state.pt", state)
    result = write(WRITER, source, tmp_path / "out", dp=2)
    assert_same_tensors(result, source)
    assert_sound(result)
    names = set(result.objects)
    assert {
        "lr_scheduler.base_lrs",
        "lr_scheduler.nested.a.0.b",
        "lr_scheduler.milestones",
    } <= names
    assert result.load_object("lr_scheduler.milestones") == {30: 1}
    assert result.load_object("optimizer.param_groups.0.params") == [
        "gain", "embed.weight", "layers.0.weight", "layers.0.bias", "layers.1.weight",
        "layers.1.bias",
    ]  # fmt: skip
    # A tensor that no reader lists goes where it stood, byte for byte.
    loaded = load(tmp_path / "out", {"rng": {"torch": torch.zeros(5056, dtype=torch.uint8),
                                             "deep": ()}, "step": 0})  # fmt: skip
    assert torch.equal(loaded["rng"]["torch"], state["rng"]["torch"])
    assert torch.equal(loaded["rng"]["deep"][0], torch.arange(3))
    assert (loaded["rng"]["deep"][1], loaded["step"]) == ("x", 3)


def test_fsdp2_loads_it_at_another_world_size(tmp_path: Path) -> None:
    source = saved(tmp_path / "state.pt", state_of_one_process())
    first = write(WRITER, source, tmp_path / "first", dp=3)
    write(WRITER, first, tmp_path / "out", dp=5)  # as `reshard` does
    texts = run_job(2, Path(__file__).with_name("fsdp2_loading.py"), tmp_path / "out")
    assert "equal 7" in texts[0]


def test_masters_aliases_scalars_and_empty_tensors(tmp_path: Path) -> None:
    shared = torch.randn(5, 2)
    state = {
        "model": {
            "a.weight": shared, "b.weight": shared, "scalar": torch.tensor(2.5),
            "empty": torch.zeros(0, 3), "thin": torch.zeros(4, 0), "count": torch.tensor([1, 2]),
        },
        "optimizer": {
            "state": {"a.weight": {"master_param": torch.randn(5, 2), "step": torch.tensor(1.0),
                                   "square": torch.randn(5)}},
            "param_groups": [{"lr": 0.1, "params": ["a.weight"]}],
        },
        "ema": {"a.weight": torch.randn(5, 2)},
    }  # fmt: skip
    source = saved(tmp_path / "state.pt", state)
    assert {info.kind for info in source.tensors.values()} >= {Kind.MASTER, Kind.BUFFER}
    result = write(WRITER, source, tmp_path / "out", dp=3)
    assert_same_tensors(result, source)
    assert_sound(result)
    assert len(result.tensors["count"].pieces) == 1  # a buffer is not divided
    assert len(result.tensors["master:a.weight"].pieces) == 3


def test_types_are_cast_and_parts_cut_as_the_content_says(tmp_path: Path) -> None:
    values = torch.randn(6, 4)
    source = saved(tmp_path / "state.pt", {"model": {"w": values}})
    half = TargetTensor("model", "v", Kind.PARAM, (3, 4), DTYPES["bfloat16"],
                  (Copy(Box((0, 0), (3, 4)), "w", Box((2, 0), (3, 4))),))  # fmt: skip
    write(WRITER, Content.of(source).with_tensors([half]), tmp_path / "out", dp=2)
    loaded = load(tmp_path / "out", {"model": {"v": torch.zeros(3, 4, dtype=torch.bfloat16)}})
    assert torch.equal(loaded["model"]["v"], values[2:5].bfloat16())


def test_the_source_keeps_its_world_size_unless_another_is_wished(tmp_path: Path) -> None:
    source = open_checkpoint(save_dcp(tmp_path / "source"))
    write(WRITER, source, tmp_path / "four", dp=4)
    again = write(WRITER, open_checkpoint(tmp_path / "four"), tmp_path / "again")
    assert again.topology.world_size == 4
    for file in ("__0_0.distcp", "__3_0.distcp", ".metadata"):
        assert (tmp_path / "four" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


def test_compressed_objects_stay_compressed(tmp_path: Path) -> None:
    source = open_checkpoint(save_dcp(tmp_path / "source", compressed=True))
    result = write(WRITER, source, tmp_path / "out", dp=2)
    assert_same_tensors(result, source)
    assert result.load_object("notes") == "x" * 1000
    assert result.source.size("__0_0.distcp") > 0
    state = load(tmp_path / "out", {"step": 0, "notes": ""})
    assert state == {"step": 7, "notes": "x" * 1000}


def test_another_world_is_told_what_it_must_do(tmp_path: Path) -> None:
    streams = {f"rank_{rank}": {"torch": torch.get_rng_state()} for rank in range(2)}
    state = {"model": {"w": torch.ones(2)}, "rng": streams}
    source = saved(tmp_path / "state.pt", state)
    write(WRITER, source, tmp_path / "two", dp=2)
    two = open_checkpoint(tmp_path / "two")
    assert WRITER.layout(Content.of(two), LayoutRequest(dp=2)).notes == []
    (note,) = WRITER.layout(Content.of(two), LayoutRequest(dp=3)).notes
    assert "RNG of torch (CPU): kept as 2 ranks saved it, for 3" in note.message


def test_a_world_has_ranks(tmp_path: Path) -> None:
    content = Content.of(saved(tmp_path / "state.pt", {"w": torch.ones(2)}))
    with pytest.raises(UsageError, match="a world of -1 ranks"):
        WRITER.layout(content, LayoutRequest(dp=-1))


def test_names_that_would_not_come_back_are_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "state.pt", {"w": torch.ones(2)})
    wrapped = TargetTensor("model", "module.w", Kind.PARAM, (2,), DTYPES["float32"],
                     (Copy(Box((0,), (2,)), "w", Box((0,), (2,))),))  # fmt: skip
    with pytest.raises(UnsupportedError, match="read back as w"):
        WRITER.layout(Content.of(source).with_tensors([wrapped]), LayoutRequest())
    second = wrapped._replace(component="extra:model", name="w")
    layout = WRITER.layout(Content.of(source).with_tensors([second]), LayoutRequest())
    assert layout.unplaced == [second.key]


def test_an_object_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    odd = torch.ones(2, 2).to_sparse()  # two tensors in a call that nothing here writes
    source = saved(tmp_path / "state.pt", {"model": {"w": torch.ones(2)}, "odd": (odd,), "n": 1})
    layout = WRITER.layout(Content.of(source), LayoutRequest())
    assert layout.unplaced == ["odd"]


@given(
    shapes=st.lists(
        st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple), min_size=1, max_size=5
    ),
    first=st.integers(1, 5),
    second=st.integers(1, 5),
)
@settings(deadline=None, max_examples=25)
def test_any_shapes_over_any_worlds_and_back(
    shapes: list[tuple[int, ...]], first: int, second: int, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("worlds")
    state = {f"t{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    source = saved(folder / "s.pt", {"model": state})
    one = write(WRITER, source, folder / "one", dp=first)
    two = write(WRITER, one, folder / "two", dp=second)
    back = write(WRITER, two, folder / "back", dp=first)
    assert_same_tensors(two, source)
    assert_sound(two)
    for path in sorted((folder / "one").iterdir()):
        assert path.read_bytes() == (folder / "back" / path.name).read_bytes()
    assert set(back.tensors) == set(source.tensors)


def test_objects_hold_what_the_source_holds(tmp_path: Path) -> None:
    state = state_of_one_process()
    source = saved(tmp_path / "state.pt", state)
    result = write(WRITER, source, tmp_path / "out")
    tree = {"lr_scheduler": source.load_object("lr_scheduler")}
    for name in result.objects:
        if name.startswith("lr_scheduler"):
            path = result.meta.paths[name]  # type: ignore[attr-defined]
            assert as_bytes(result.load_object(name)) == as_bytes(at(tree, path))
