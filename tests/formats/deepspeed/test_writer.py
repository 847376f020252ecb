"""DeepSpeed checkpoints for other partitions and stages: as its engine would have saved them."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import ExitCode, FtckptError, UnsupportedError, UsageError
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.writer import DeepSpeedWriter
from ftckpt.formats.state.same_object import SameObject
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest
from ftckpt.transfer.prove.against_source import prove
from tests.builders.checkpoints import open_checkpoint
from tests.builders.materialise import materialise
from tests.campaign import examples
from tests.conformance.writers import assert_repeatable, assert_same_tensors, assert_sound
from tests.formats.deepspeed.sets import copied, opened, tag, unpacked
from tests.formats.deepspeed.test_damage import edit
from tests.formats.deepspeed.trees import Job, save_job, trees

WRITER = DeepSpeedWriter()
SETS = ("z1", "z2", "z3", "bf16", "pipe", "tp", "wrap")
SLICED = "autotp"
OF_EXPERTS = ("moe_z1", "moe_data", "moe_bf16", "autoep_z1", "autoep_z3")
REAL = {
    "ds_z1_w4_bf16": (3, {"dp": 3}),
    "ds_z2_w2_bf16": (3, {"dp": 4}),
    "ds_z3_w2_fp32": (3, {"dp": 5}),
    "ds_pp2dp2_z1_bf16": (2, {"dp": 1}),
}


def layout(source: DeepSpeedCheckpoint | Content, **request: Any) -> Layout:
    content = source if isinstance(source, Content) else Content.of(source)
    return WRITER.layout(content, LayoutRequest(**request))


def written(source: DeepSpeedCheckpoint, to: Path, **request: Any) -> DeepSpeedCheckpoint:
    """Lay out, make the files plainly, prove them and open the result."""
    made = layout(source, **request)
    assert list(made.unplaced) == []
    assert_repeatable(layout(source, **request), made)
    materialise(made, source, to)
    result = opened(to)
    assert made.content is not None
    prove(made.content, result, SameObject)
    assert [*result.check(), *result.notes] == []
    return result


def own_state(checkpoint: DeepSpeedCheckpoint) -> set[str]:
    return {key for key in checkpoint.tensors if key.startswith("extra:rank")}


@pytest.mark.parametrize("name", [*SETS, *OF_EXPERTS, SLICED])
def test_the_same_job_gets_the_same_files(name: str, tmp_path: Path) -> None:
    source = opened(tag(name))
    result = written(source, tmp_path / "same")
    assert trees(result) == trees(source)
    assert_same_tensors(result, source)
    assert_sound(result)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dp", [1, 2, 7])
def test_there_and_back(name: str, dp: int, tmp_path: Path) -> None:
    source = opened(tag(name))
    other = written(source, tmp_path / "there", dp=dp)
    assert other.topology.dp == dp
    back = written(other, tmp_path / "back", dp=source.grid.dp)
    assert trees(back) == trees(source)
    assert_same_tensors(back, source)


@pytest.mark.parametrize("name", OF_EXPERTS[:-1])
@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 6}, {"ep": 1}, {"dp": 2, "ep": 1}])
def test_experts_there_and_back(name: str, sizes: dict[str, int], tmp_path: Path) -> None:
    source = opened(tag(name))
    other = written(source, tmp_path / "there", **sizes)
    assert other.topology.ep == sizes.get("ep", 2)
    back = written(other, tmp_path / "back", dp=source.grid.dp, ep=2)
    assert trees(back) == trees(source)
    assert_same_tensors(back, source)


@pytest.mark.parametrize(
    ("name", "sizes", "why"),
    [
        ("moe_z1", {"dp": 3}, "cannot share"),
        ("moe_z1", {"ep": 4}, "cannot share the 2 experts"),
        ("moe_z1", {"zero_stage": 3}, "no experts with stage 3"),
        ("moe_z2", {"dp": 4}, "by different numbers of ranks"),
        ("moe_off", {"dp": 4}, "ZeRO is off"),
        ("autoep_z1", {"dp": 3}, "cannot share"),
        ("autoep_z3", {"ep": 8, "dp": 8}, "cannot share the 4 experts"),
        ("autoep_off", {"ep": 1}, "ZeRO is off"),
        ("autoep_frozen", {"zero_stage": 3}, "no frozen experts"),
        ("z1", {"ep": 2}, "no layers of experts"),
    ],
)
def test_experts_that_ranks_cannot_have(name: str, sizes: dict[str, int], why: str) -> None:
    with pytest.raises((UnsupportedError, UsageError), match=why):
        layout(opened(tag(name)), **sizes)


def test_sub_groups_of_stacked_experts_are_of_what_a_rank_has(tmp_path: Path) -> None:
    """DeepSpeed counts the elements that a rank holds, of experts those of fewer partitions."""
    source = in_sub_groups(copied("autoep_z3", tmp_path))
    assert [next(iter(group))[-2:] for group in source.groups[0]][2:] == ["w1", "w3", "w2"]
    assert_same_tensors(source, opened(tag("autoep_z3")))
    other = written(source, tmp_path / "other", dp=5, ep=1)
    written(opened(tag("autoep_z3")), tmp_path / "plain", dp=5, ep=1)
    assert of_plain_stage(other) == of_plain_stage(in_sub_groups(tmp_path / "plain"))
    assert of_plain_stage(written(other, tmp_path / "back", dp=4, ep=2)) == of_plain_stage(source)


def of_plain_stage(checkpoint: DeepSpeedCheckpoint) -> dict[str, Any]:
    """Return every file's data, with the stage as the number that `edit` makes of it."""
    made = trees(checkpoint)
    for path, tree in made.items():
        if path.endswith("optim_states.pt"):
            tree["optimizer_state_dict"]["zero_stage"] = 3
    return made


def in_sub_groups(path: Path, size: int = 14) -> DeepSpeedCheckpoint:
    """Divide the groups of a job of stage 3 as its engine does after `size` elements of a rank."""
    runs: list[list[list[int]]] = []  # group, sub-group, parameter -> elements of a rank

    def model(state: Any) -> None:
        listed, flats = state["param_shapes"], list[Any]()
        dp, ep = state["dp_world_size"], state["ds_autoep_layers"][0]["ep_size"]
        for group, ranks in zip(listed, (dp, dp // ep), strict=True):
            parts: list[list[str]] = [[]]
            held = {name: -(-prod(shape) // ranks) for name, shape in group.items()}
            for name in group:
                if sum(held[one] for one in parts[-1]) >= size:
                    parts.append([])
                parts[-1].append(name)
            flats += [type(group)((name, group[name]) for name in part) for part in parts]
            if len(runs) < 2:
                runs.append([[held[name] for name in part] for part in parts])
        state["param_shapes"] = flats
        state["ds_config"]["zero_optimization"]["sub_group_size"] = size

    def optimizer(state: Any) -> None:
        state["ds_config"]["zero_optimization"]["sub_group_size"] = size
        inner = state["optimizer_state_dict"]
        base, told = inner["optimizer_state_dict"], inner["ds_zero_partition_groups"]
        states, flats, ranks = dict[int, Any](), list[Any](), list[Any]()
        for number, parts in enumerate(runs):
            lengths = [sum(part) for part in parts]
            base["param_groups"][number]["params"] = [len(flats) + n for n in range(len(parts))]
            old = base["state"][number]
            cut = {key: old[key].split(lengths) for key in ("exp_avg", "exp_avg_sq")}
            for n, flat in enumerate(inner["fp32_flat_groups"][number].split(lengths)):
                ranks.append({**told[number], "sub_group": len(flats)})
                own = {key: value[n].clone() for key, value in cut.items()}
                states[len(flats)] = {"step": old["step"].clone(), **own}
                flats.append(flat.clone())
        base["state"], inner["fp32_flat_groups"] = states, flats
        inner["ds_zero_partition_groups"] = ranks

    for file in sorted(path.glob("*model_states.pt")):
        edit(file, model)
    for file in path.glob("*optim_states.pt"):
        edit(file, optimizer)
    return opened(path)


def test_groups_of_stacked_experts_that_other_ranks_would_join() -> None:
    """DeepSpeed begins a group after so many elements of a rank, and has fewer of four ranks."""
    experts = opened(tag("autoep_z1")).experts
    one, other, *_ = experts.stacked
    rows = 1 << 26
    before, after = ([{one: (n, rows)}, {other: (n, rows)}] for n in (2, 1))
    experts.require_the_same_groups(after, after)
    with pytest.raises(UnsupportedError, match="divide otherwise"):
        experts.require_the_same_groups(before, after)


def test_experts_that_a_group_has_in_part(tmp_path: Path) -> None:
    path = copied("moe_z1", tmp_path)

    def change(state: Any) -> None:
        group = state["param_shapes"][1]
        last = list(group)[-1]
        group[last[: last.rindex(".")] + ".x"] = group.pop(last)
        group.move_to_end(next(iter(group)))

    edit(path / "mp_rank_00_model_states.pt", change)
    for file in path.glob("*optim_states.pt"):
        edit(file, lambda s: s["optimizer_state_dict"].pop("param_slice_mappings"))
    with pytest.raises(UnsupportedError, match=r"part of the experts|divide otherwise"):
        layout(opened(path), ep=1)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("z1", 2),
        ("z1", 3),
        ("z2", 1),
        ("z3", 1),
        ("z3", 2),
        ("bf16", 2),
        ("tp", 2),
        ("tp", 3),
        ("wrap", 3),
        ("lora_z2", 3),
        ("lora_z3", 1),
        ("lora_left", 2),
        ("autoep_z1", 3),
        ("autoep_data", 2),
        ("autoep_frozen", 1),
    ],
)
def test_another_stage_and_back(name: str, stage: int, tmp_path: Path) -> None:
    source = opened(tag(name))
    other = written(source, tmp_path / "there", zero_stage=stage, dp=2)
    assert other.dialect == f"ZeRO stage {stage}"
    back = written(other, tmp_path / "back", zero_stage=source.stage, dp=source.grid.dp)
    same = own_state(source) ^ source.tensors.keys()
    assert own_state(back) ^ back.tensors.keys() == same
    for key in same:
        assert read_tensor(back, key) == read_tensor(source, key), key
    # What those optimizers keep is not what the others keep; fragments end in uninitialised memory.
    if name not in ("bf16", "z2", "lora_z3"):
        assert trees(back) == trees(source)


def test_weights_that_stage_3_does_not_store_are_cast_masters(tmp_path: Path) -> None:
    source = opened(tag("z1"))
    three = written(source, tmp_path / "three", zero_stage=3)
    assert "gain" not in three.tensors
    assert read_tensor(three, "frozen.weight") == read_tensor(source, "frozen.weight")
    back = written(three, tmp_path / "back", zero_stage=1)
    assert back.tensors["gain"].dtype.name == "bfloat16"
    assert back.aliases["head.weight"] == "embed.weight"
    for key in ("gain", "embed.weight", "head.weight"):
        assert read_tensor(back, key) == read_tensor(source, key)
    said = [note.message for note in layout(three, zero_stage=1).notes]
    assert any("cast to the type of the module" in what for what in said)


@pytest.mark.parametrize("name", REAL)
def test_a_real_job_on_other_ranks_and_back(name: str, tmp_path: Path) -> None:
    step, request = REAL[name]
    source = opened(unpacked(name, tmp_path) / "ckpt" / f"global_step{step}")
    other = written(source, tmp_path / "there", **request)
    back = written(other, tmp_path / "back", dp=source.grid.dp)
    assert trees(back) == trees(source)
    assert_same_tensors(back, source)


def test_the_pointer_is_not_written_and_said(tmp_path: Path) -> None:
    made = layout(opened(tag("z1")), dp=2)
    assert {file.path for file in made.files} == {
        "mp_rank_00_model_states.pt",
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    }
    assert any("latest" in note.message for note in made.notes)


# --- state of single ranks ----------------------------------------------------------------------


def with_own_state(root: Path) -> DeepSpeedCheckpoint:
    """Give each rank of a stage 3 job a client's state of its own."""
    import torch

    path = copied("z3", root)
    for rank in range(3):
        file = path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        state = torch.load(file, weights_only=False)
        state["seed"] = 10 + rank
        state["rng"] = {"cpu": torch.full((6,), rank, dtype=torch.uint8)}
        torch.save(state, file)
    return opened(path)


def test_state_of_a_rank_stays_with_it_and_new_ranks_have_none(tmp_path: Path) -> None:
    source = with_own_state(tmp_path)
    result = written(source, tmp_path / "more", dp=4)
    assert result.load_object("rank_2.seed") == 12
    assert "rank_3.seed" not in result.objects
    assert result.load_object("rank_3.note") == "tiny"
    assert read_tensor(result, "extra:rank2:rng.cpu") == bytes([2] * 6)
    assert "extra:rank3:rng.cpu" not in result.tensors
    said = [note.message for note in layout(source, dp=4).notes]
    assert "seed was of each rank alone: rank 3 has none" in said


def test_state_of_a_rank_that_is_no_more_must_be_dropped(tmp_path: Path) -> None:
    source = with_own_state(tmp_path)
    made = layout(source, dp=2)
    assert list(made.unplaced) == ["extra:rank2:rng.cpu", "rank_2.seed"]
    content = Content.of(source)
    kept = [w for key, w in content.tensors.items() if key not in made.unplaced]
    objects = {n: info for n, info in content.objects.items() if n not in made.unplaced}
    narrowed = replace(content.with_tensors(kept), objects=objects)
    assert list(layout(narrowed, dp=2).unplaced) == []


def test_what_was_dropped_is_not_written(tmp_path: Path) -> None:
    source = opened(tag("z1"))
    content = Content.of(source)
    kept = [w for key, w in content.tensors.items() if key != "extra:rank0:rng.cpu"]
    objects = {n: info for n, info in content.objects.items() if n != "note"}
    made = layout(replace(content.with_tensors(kept), objects=objects), dp=2)
    assert list(made.unplaced) == []
    materialise(made, source, tmp_path / "out")
    result = opened(tmp_path / "out")
    assert not {"note", "extra:rank0:rng.cpu"} & {*result.objects, *result.tensors}
    assert result.load_object("iteration") == 2


# --- what cannot be written ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "kind", "says"),
    [
        ("z1", {"true_vocab_size": 5}, UsageError, "keeps its padding"),
        ("z1", {"tp": 2}, UnsupportedError, "--tp 2"),
        ("pipe", {"pp": 1}, UnsupportedError, "--pp 1"),
        ("pipe", {"zero_stage": 2}, UnsupportedError, "pipelines"),
        ("z2", {"zero_stage": 3}, UnsupportedError, "param_groups"),
        ("off", {"dp": 2}, UnsupportedError, "ZeRO is off"),
    ],
)
def test_a_wish_that_cannot_be_granted(
    name: str, change: dict[str, int], kind: type[FtckptError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        layout(opened(tag(name)), **change)


def test_another_format_says_no_order(tmp_path: Path) -> None:
    import torch

    torch.save({"weight": torch.ones(3)}, tmp_path / "model.pt")
    content = Content.of(open_checkpoint(tmp_path / "model.pt"))
    with pytest.raises(UnsupportedError, match="order") as caught:
        layout(content)
    assert "deepspeed-universal" in caught.value.hint
    assert caught.value.exit_code is ExitCode.UNSUPPORTED


def test_a_parameter_without_its_master_is_refused() -> None:
    content = Content.of(opened(tag("z1")))
    kept = [w for key, w in content.tensors.items() if key != "master:gain"]
    with pytest.raises(UnsupportedError, match="master:gain"):
        layout(content.with_tensors(kept), dp=2)
    kept = [w for key, w in content.tensors.items() if key != "exp_avg:gain"]
    with pytest.raises(UnsupportedError, match=r"up\.bias and \['exp_avg_sq', 'step'\] of others"):
        layout(content.with_tensors(kept), dp=2)


# --- against a plain model of the engine --------------------------------------------------------

shapes_ = st.lists(st.integers(1, 5), max_size=2).map(tuple)


@st.composite
def two_jobs(draw: st.DrawFn) -> tuple[Job, Job]:
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    groups = [{f"g{g}.p{n}": draw(shapes_) for n in range(c)} for g, c in enumerate(counts)]
    size, deal, aligned = draw(st.integers(1, 40)), draw(st.booleans()), draw(st.booleans())
    return tuple(  # type: ignore[return-value]
        Job(groups, draw(st.integers(1, 5)), draw(st.integers(1, 3)), size, deal, aligned)
        for _ in range(2)
    )


@settings(max_examples=examples(short=15, full=200), deadline=None)
@given(two_jobs())
def test_any_job_becomes_any_other(jobs: tuple[Job, Job]) -> None:
    root = Path(tempfile.mkdtemp())
    try:
        one, other = (opened(save_job(job, root / str(n))) for n, job in enumerate(jobs))
        result = written(one, root / "made", dp=jobs[1].dp, zero_stage=jobs[1].stage)
        assert trees(result) == trees(other)
    finally:
        shutil.rmtree(root)


# --- what a job's trainer has added, or left out ------------------------------------------------


def test_names_that_a_wrapper_changed_are_the_state_dicts(tmp_path: Path) -> None:
    """And each file has them as the job's own loader looks for them."""
    source = opened(tag("wrap"))
    names = {info.name for info in source.tensors.values() if info.component == "model"}
    assert {"up.weight", "frozen.weight"} <= names
    assert not any("_checkpoint_wrapped_module" in key for key in source.tensors)
    tree = written(source, tmp_path / "three", zero_stage=3).tree(
        "zero_pp_rank_0_mp_rank_00_model_states.pt"
    )
    listed = {name for group in tree["param_shapes"] for name in group}
    assert "up._checkpoint_wrapped_module.weight" in listed
    assert tree["frozen_param_fragments"].keys() == {"frozen._checkpoint_wrapped_module.weight"}
    assert "up.weight" in tree["module"]


def test_stage_1_does_not_say_how_frozen_parameters_are_wrapped(tmp_path: Path) -> None:
    one = written(opened(tag("wrap")), tmp_path / "one", zero_stage=1)
    with pytest.raises(UnsupportedError, match="wrapper of activation checkpointing") as caught:
        layout(one, zero_stage=2)
    assert "--like" in (caught.value.hint or "")


@pytest.mark.parametrize(("name", "stage"), [("z2", 2), ("z3", 3), ("z2", 1), ("z3", 2)])
def test_frozen_parameters_that_were_left_out_are_not_listed(
    name: str, stage: int, tmp_path: Path
) -> None:
    """`exclude_frozen_parameters`: given a list, DeepSpeed asks it for all that the job has."""
    place = copied(name, tmp_path)
    for path in place.glob("*model_states.pt"):
        tree = torch.load(path, weights_only=False)
        tree["frozen_param_shapes"] = tree["frozen_param_fragments"] = None
        tree["module"].pop("frozen.weight")
        torch.save(tree, path)
    result = written(opened(place), tmp_path / "made", zero_stage=stage, dp=2)
    for file in result.files:
        if "model_states" in file:
            tree = result.tree(file)
            assert tree["frozen_param_shapes"] is tree["frozen_param_fragments"] is None
            assert "frozen.weight" not in tree["module"]
