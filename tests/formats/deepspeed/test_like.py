"""DeepSpeed checkpoints laid out as an example is, from sources of any format."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.checkpoint.sharding import parse_rules
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.states import OPTIMIZER
from ftckpt.formats.deepspeed.writer import DeepSpeedWriter
from ftckpt.formats.state.same_object import SameObject
from ftckpt.formats.writers import format_and_writer
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest
from ftckpt.transfer.prove.against_source import prove
from ftckpt.transfer.request.change_dtype import retype
from ftckpt.transfer.write.blocks import fingerprint
from tests.builders.checkpoints import open_checkpoint
from tests.builders.materialise import materialise
from tests.campaign import examples
from tests.conformance.writers import assert_repeatable, assert_same_tensors, assert_sound
from tests.formats.deepspeed.grids import (
    FRESH,
    TRAINED,
    GridJob,
    Shapes,
    State,
    jobs,
    models,
    save_grid,
)
from tests.formats.deepspeed.sets import copied, opened, tag
from tests.formats.deepspeed.trees import Job, at_home, save_job, trees

WRITER = DeepSpeedWriter()
SETS = ("z1", "z2", "z3", "bf16", "pipe", "tp", "wrap")


def layout(source: Checkpoint | Content, example: Checkpoint, **request: Any) -> Layout:
    content = source if isinstance(source, Content) else Content.of(source)
    return WRITER.layout(content, LayoutRequest(like=example, **request))


def written(
    source: Checkpoint | Content, example: Checkpoint, to: Path, **request: Any
) -> DeepSpeedCheckpoint:
    """Lay out, make the files plainly, prove them and open the result."""
    made = layout(source, example, **request)
    assert list(made.unplaced) == []
    assert_repeatable(layout(source, example, **request), made)
    materialise(made, source.checkpoint if isinstance(source, Content) else source, to)
    result = opened(to)
    assert made.content is not None
    prove(made.content, result, SameObject)
    assert [*result.check()] == []
    assert [note for note in result.notes if "buffers are split" not in note.message] == []
    return result


@pytest.mark.parametrize("name", SETS)
def test_its_own_example_gives_the_same_files(name: str, tmp_path: Path) -> None:
    source = opened(tag(name))
    result = written(source, source, tmp_path / "same")
    assert trees(result) == trees(source)
    assert_same_tensors(result, source)
    assert_sound(result)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("form", ["torchsave", "dcp", "safetensors", "deepspeed-universal"])
def test_there_and_back_through_another_format(name: str, form: str, tmp_path: Path) -> None:
    source = opened(tag(name))
    target = tmp_path / "one.pt" if form == "torchsave" else tmp_path / "other"
    _, writer = format_and_writer(form)
    made = writer.layout(Content.of(source), LayoutRequest())
    materialise(made, source, target.parent if writer.single else target)
    if writer.single:
        (tmp_path / made.files[0].path).rename(target)
    other = open_checkpoint(target)
    back = written(other, source, tmp_path / "back")
    if (name, form) == ("tp", "deepspeed-universal"):  # it has lost the vocabulary's padding
        assert read_tensor(back, "exp_avg:fc1") == read_tensor(source, "exp_avg:fc1")
        return
    assert trees(back) == trees(source)
    assert_same_tensors(back, source)


@st.composite
def two_jobs(draw: st.DrawFn) -> tuple[Shapes, GridJob, GridJob]:
    shapes = draw(models())
    return shapes, draw(jobs("a", shapes)), draw(jobs("b", shapes))


@settings(max_examples=examples(short=10, full=200), deadline=None)
@given(two_jobs())
def test_any_job_becomes_any_other_by_its_example(
    made: tuple[Shapes, GridJob, GridJob],
) -> None:
    """Groups, orders, slices, stages: the result is what the other job would have saved."""
    shapes, one, other = made
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        source = opened(save_grid(one, shapes, TRAINED, root / "source"))
        example = opened(save_grid(other, shapes, FRESH, root / "example"))
        truth = opened(save_grid(other, shapes, TRAINED, root / "truth"))
        result = written(source, example, root / "result")
        assert trees(result) == trees(truth)
        first = opened(save_grid(one, shapes, FRESH, root / "first"))
        assert trees(written(result, first, root / "back")) == trees(source)


# --- what does not fit ---------------------------------------------------------------------------


def narrowed(source: Checkpoint, *keys: str) -> Content:
    content = Content.of(source)
    return content.with_tensors(w for key, w in content.tensors.items() if key not in keys)


def renamed(source: Checkpoint, old: str, new: str) -> Content:
    content = Content.of(source)
    return content.with_tensors(
        w._replace(name=new + w.name.removeprefix(old)) if w.name.startswith(old) else w
        for w in content.tensors.values()
    )


def test_what_the_source_lacks_is_refused_by_name() -> None:
    source = opened(tag("z1"))
    for keys in (("rope",), ("frozen.weight",), ("exp_avg:gain",), ("optimizer:gain.step",)):
        with pytest.raises(UnsupportedError, match=f"the example has {keys[0]}, and the source"):
            layout(narrowed(source, *keys), source)
    with pytest.raises(UnsupportedError, match="the example has gain, master:gain, "):
        layout(narrowed(source, "gain", "master:gain"), source)


def test_other_names_are_refused_with_both_sides() -> None:
    source = opened(tag("z1"))
    says = "the example has gain, which the source lacks, and the source has amp, which the example"
    with pytest.raises(UnsupportedError, match=says) as caught:
        layout(renamed(source, "gain", "amp"), source)
    assert "--rename" in caught.value.hint


def test_what_the_example_lacks_must_be_dropped() -> None:
    content = Content.of(opened(tag("z1")))
    gain = content.tensors["gain"]
    more = [gain._replace(name="more"), content.tensors["exp_avg:gain"]._replace(name="more")]
    made = layout(content.with_tensors([*content.tensors.values(), *more]), content.checkpoint)
    assert list(made.unplaced) == ["exp_avg:more", "more"]


def test_an_example_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"the example has 1\.bias, 1\.weight, 3\.bias and 2"
    ):
        layout(opened(tag("z1")), opened(tag("pipe")))
    shapes: tuple[list[Shapes], ...] = ([{"w": (4, 2)}], [{"w": (2, 4)}])
    one, other = (opened(save_job(Job(s, 1, 1), tmp_path / str(s))) for s in shapes)
    with pytest.raises(UnsupportedError, match=r"of shape \[4, 2\], and \[2, 4\] in the example"):
        layout(one, other)
    with pytest.raises(UnsupportedError, match="ZeRO is off in the example"):
        layout(opened(tag("z1")), opened(tag("off")))


def test_a_vocabulary_gets_the_padding_of_the_example(tmp_path: Path) -> None:
    rows: tuple[Shapes, ...] = (
        {"word_embeddings.weight": (6, 2)},
        {"word_embeddings.weight": (8, 2)},
    )
    one, other = (opened(save_job(Job([r], 2, 1), tmp_path / str(n))) for n, r in enumerate(rows))
    with pytest.raises(UnsupportedError, match="different models"):
        layout(one, other)
    result = written(one, other, tmp_path / "result", true_vocab_size=5)
    key = "master:word_embeddings.weight"
    assert result.tensors[key].shape == (8, 2)
    assert read_tensor(result, key) == read_tensor(one, key)[: 5 * 8] + bytes(3 * 8)


# --- what is made ---------------------------------------------------------------------------------


def test_a_plain_trainers_state_becomes_a_jobs(tmp_path: Path) -> None:
    """Weights without masters, in single precision: widened, and cast for the module."""
    source = opened(tag("off"))
    example = opened(tag("z3"))
    result = written(source, example, tmp_path / "three")
    for key in ("exp_avg:gain", "exp_avg_sq:up.bias", "optimizer:gain.step", "rope"):
        assert read_tensor(result, key) == read_tensor(source, key), key
    assert read_tensor(result, "master:up.weight") == read_tensor(source, "up.weight")
    said = [note.message for note in layout(source, example).notes]
    assert any("has no master" in what for what in said)
    assert result.load_object("global_steps") == source.load_object("global_steps")


def test_settings_follow_their_parameters(tmp_path: Path) -> None:
    """The example has the groups in another order, and another learning rate."""
    groups: list[Shapes] = [{"a": (3,), "b": (2,)}, {"c": (4,)}]
    source = opened(save_job(Job(groups, 2, 1), tmp_path / "source"))
    example = opened(save_job(Job(groups[::-1], 3, 2), tmp_path / "example"))
    result = written(source, example, tmp_path / "result")
    made = result.load_object("optimizer.param_groups")
    assert [group["lr"] for group in made] == [1.5, 0.5]
    together: list[Shapes] = [{"a": (3,), "c": (4,)}, {"b": (2,)}]
    example = opened(save_job(Job(together, 2, 1), tmp_path / "together"))
    with pytest.raises(UnsupportedError, match="a and c have other settings") as caught:
        layout(source, example)
    assert "--drop" in caught.value.hint
    content = Content.of(source)
    objects = {n: o for n, o in content.objects.items() if not n.endswith("param_groups")}
    result = written(replace(content, objects=objects), example, tmp_path / "dropped")
    assert [group["lr"] for group in result.load_object("optimizer.param_groups")] == [0.5, 1.5]


def test_a_counter_is_a_number_where_the_example_has_numbers(tmp_path: Path) -> None:
    groups: list[Shapes] = [{"a": (3,)}, {"b": (2,)}]
    source = opened(save_job(Job(groups, 2, 1), tmp_path / "source"))
    example = opened(save_job(Job(groups, 2, 1, step=0, counted=True), tmp_path / "example"))
    result = written(source, example, tmp_path / "result")
    assert result.load_object("optimizer.state.1.step") == 5
    assert "optimizer:a.step" not in result.tensors
    again = written(result, example, tmp_path / "again")
    assert trees(again) == trees(result)
    back = written(result, source, tmp_path / "back")
    assert back.load_object("optimizer.state.0.step") == 5


def test_values_of_the_example_are_not_used(tmp_path: Path) -> None:
    """Every byte of its tensors is another, and nothing changes."""
    source = opened(tag("z2"))
    folder = copied("z2", tmp_path)
    example = opened(folder)
    for info in example.tensors.values():
        for piece in info.pieces:
            with (folder / piece.extent.file).open("r+b") as file:
                file.seek(piece.extent.offset)
                file.write(bytes([255]) * piece.extent.length)
    assert trees(written(source, example, tmp_path / "result")) == trees(source)


def sliced_buffer(job: GridJob, state: State, folder: Path, *values: float) -> DeepSpeedCheckpoint:
    """Save a job with a buffer, which nothing says how tensor slices divide."""
    save_grid(job, {"0.column": (2, 2)}, state, folder)
    rest = iter(values)

    def add(tree: dict[str, Any]) -> None:
        tree["module"]["rope"] = torch.full((3,), next(rest))
        tree["buffer_names"] = ["rope"]

    for tp in range(job.tp):
        edited(folder, f"mp_rank_{tp:02d}_model_states.pt", add)
    return opened(folder)


def test_a_buffer_is_the_same_on_every_slice_where_a_rule_says_so(tmp_path: Path) -> None:
    one, two = (GridJob(str(n), [[["0.column"]]], n, 1, 1) for n in (1, 2))
    source = sliced_buffer(two, TRAINED, tmp_path / "source", 4.0, 4.0)
    example = sliced_buffer(one, FRESH, tmp_path / "example", 0.5)
    with pytest.raises(UnsupportedError, match="the example has rope"):
        layout(source, example)
    rules = parse_rules('[[rule]]\nnames = ["rope"]\nsplit = "replicated"', "rules.toml")
    result = written(source, example, tmp_path / "result", rules=rules)
    assert read_tensor(result, "rope") == read_tensor(source, "extra:tp1:rope")
    back = sliced_buffer(two, FRESH, tmp_path / "back", 0.5, 0.25)
    result = written(result, back, tmp_path / "there", rules=rules)
    assert trees(result) == trees(source)
    odd = sliced_buffer(two, TRAINED, tmp_path / "odd", 4.0, 5.0)
    with pytest.raises(UnsupportedError, match="rope is not the same on every tensor slice"):
        layout(odd, example, rules=rules)
    assert trees(written(odd, back, tmp_path / "same")) == trees(odd)


def edited(folder: Path, pattern: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change what some files of a job hold."""
    with at_home():
        for file in folder.glob(pattern):
            tree = torch.load(file, weights_only=False)
            change(tree)
            torch.save(tree, file)
    return folder


def scheduled(job: Job, folder: Path, lrs: Sequence[float], decays: Sequence[float]) -> Path:
    """Save a job with a scheduler of torch's; its groups differ in their decay."""

    def schedule(tree: dict[str, Any]) -> None:
        inner = {"_last_lr": [*lrs], "milestones": [3, 9]}
        tree["lr_scheduler"] = {"base_lrs": [*lrs], "_schedulers": [inner], "last_epoch": 5}

    def decay(tree: dict[str, Any]) -> None:
        state = tree["optimizer_state_dict"]
        groups = state[OPTIMIZER if job.stage == 3 else "base_optimizer_state"]["param_groups"]
        for group, value in zip(groups, decays, strict=True):
            group["weight_decay"] = value

    save_job(job, folder)
    edited(folder, "*optim_states.pt", decay)
    return edited(folder, "*model_states.pt", schedule)


TWO: list[Shapes] = [{"a": (3,), "b": (2,)}, {"c": (4,)}]


@pytest.mark.parametrize("form", ["deepspeed", "torchsave", "dcp"])
def test_a_schedulers_lists_follow_the_groups(form: str, tmp_path: Path) -> None:
    """They are one value a group, by number, and no loader asks whose."""
    saved = opened(scheduled(Job(TWO, 2, 1), tmp_path / "source", [0.5, 1.5], [0.1, 0.0]))
    source: Checkpoint = saved
    if form != "deepspeed":
        _, writer = format_and_writer(form)
        made = writer.layout(Content.of(saved), LayoutRequest())
        materialise(made, saved, tmp_path / "other")
        source = open_checkpoint(tmp_path / "other" / (made.files[0].path if writer.single else ""))
    example = opened(scheduled(Job(TWO[::-1], 3, 2), tmp_path / "example", [7, 8], [0.0, 0.1]))
    scheduler = written(source, example, tmp_path / "result").load_object("lr_scheduler")
    assert scheduler["base_lrs"] == [1.5, 0.5]
    assert scheduler["_schedulers"] == [{"_last_lr": [1.5, 0.5], "milestones": [3, 9]}]
    again = written(source, saved, tmp_path / "again").load_object("lr_scheduler")
    assert again == saved.load_object("lr_scheduler")
    if form == "deepspeed":
        return
    # Groups are told by their decay alone.
    example = opened(scheduled(Job(TWO[::-1], 1, 2), tmp_path / "same", [7, 8], [0.0, 0.0]))
    assert any("param_groups" in name for name in layout(source, example).unplaced)
    example = opened(scheduled(Job(TWO[::-1], 1, 2), tmp_path / "odd", [7, 8], [0.3, 0.4]))
    with pytest.raises(UnsupportedError, match="other base_lrs for each parameter group"):
        layout(source, example)


def test_a_schedulers_lists_grow_and_shrink_with_the_groups(tmp_path: Path) -> None:
    one = opened(scheduled(Job([TWO[0] | TWO[1]], 2, 1), tmp_path / "one", [0.5], [0.1]))
    two = opened(scheduled(Job(TWO, 2, 1), tmp_path / "two", [7, 8], [0.0, 0.1]))
    scheduler = written(one, two, tmp_path / "result").load_object("lr_scheduler")
    assert scheduler["base_lrs"] == scheduler["_schedulers"][0]["_last_lr"] == [0.5, 0.5]
    assert scheduler["_schedulers"][0]["milestones"] == [3, 9]
    content = Content.of(two)
    objects = {n: o for n, o in content.objects.items() if not n.endswith("param_groups")}
    with pytest.raises(UnsupportedError, match="other base_lrs") as caught:
        layout(replace(content, objects=objects), one)
    assert "--drop lr_scheduler" in caught.value.hint


@pytest.mark.parametrize("moving", [True, False])
def test_a_loss_scale_of_another_kind_is_the_examples(moving: bool, tmp_path: Path) -> None:
    """That of a bf16 job is 1 and stays so: an fp16 job's gradients would vanish."""

    def move(tree: dict[str, Any]) -> None:
        state = {"loss_scaler": {"cur_scale": 512.0}, "dynamic_loss_scale": True}
        tree["optimizer_state_dict"] |= state

    moves = opened(edited(save_job(Job(TWO, 2, 1), tmp_path / "one"), "*optim*", move))
    stays = opened(save_job(Job(TWO, 2, 2), tmp_path / "two"))
    source, example = (moves, stays) if moving else (stays, moves)
    result = written(source, example, tmp_path / "result")
    assert result.load_object("optimizer.dynamic_loss_scale") is not moving
    assert ("optimizer.loss_scaler" in result.objects) is not moving  # None is no object
    assert any(
        "the loss scale is the example's" in n.message for n in layout(source, example).notes
    )
    back = written(moves, moves, tmp_path / "same")
    assert back.load_object("optimizer.loss_scaler") == {"cur_scale": 512.0}
    assert not any("loss scale" in note.message for note in layout(moves, moves).notes)


def test_another_example_is_another_transfer(tmp_path: Path) -> None:
    """The files have the same names and sizes: a run with the one must not go on with the other."""
    orders: tuple[Shapes, ...] = ({"a": (2,), "b": (2,)}, {"b": (2,), "a": (2,)})
    one, other, again = (
        opened(save_job(Job([order], 2, 1), tmp_path / str(n)))
        for n, order in enumerate((*orders, orders[0]))
    )
    made = [layout(one, example) for example in (one, other, again)]
    assert [f.size for f in made[0].files] == [f.size for f in made[1].files]
    keys = [fingerprint(one, layout) for layout in made]
    assert keys[0] == keys[2] != keys[1]


def tied(folder: Path) -> Path:
    """Let a second name stand for a parameter of a job."""

    def tie(tree: dict[str, Any]) -> None:
        tree["module"]["b2"] = tree["module"]["b"]
        tree["shared_params"] = {"b2": "b"}

    return edited(folder, "*model_states.pt", tie)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_the_job_ties_must_be_the_same(stage: int, tmp_path: Path) -> None:
    example = opened(tied(save_job(Job(TWO, stage, 1), tmp_path / "example")))
    for job, alike in (("one", True), ("other", False)):
        folder = save_job(Job([TWO[0], TWO[1] | {"b2": (2,)}], 2, 1), tmp_path / job)

        def equal(tree: dict[str, Any]) -> None:
            tree["module"]["b2"] = tree["module"]["b"].clone()

        source = opened(edited(folder, "*model_states.pt", equal) if alike else folder)
        state = [key for key in source.tensors if key.endswith(("b2", "b2.step", "master:b"))]
        content = narrowed(source, *(key for key in state if key != "b2"))
        if alike:
            result = written(content, example, tmp_path / "result")
            assert result.aliases["master:b2"] == "master:b"
            continue
        with pytest.raises(UnsupportedError, match=r"b2 is the same as .*b in the example"):
            layout(content, example)


def test_a_wish_for_another_type_contradicts_the_example(tmp_path: Path) -> None:
    source = opened(tag("z2"))
    content = Content.of(source)
    assert layout(retype(content, "bf16"), source).files
    with pytest.raises(UsageError, match=r"--dtype contradicts --like: .* bfloat16 in the example"):
        layout(retype(content, "fp16"), source)


def test_eight_bits_are_no_weight_without_their_scales(tmp_path: Path) -> None:
    example = opened(save_job(Job(TWO, 2, 1), tmp_path / "example"))
    state = {n: torch.ones(s).to(torch.float8_e4m3fn) for g in TWO for n, s in g.items()}
    torch.save({**state, "frozen": torch.ones(7), "seen": torch.tensor(3)}, tmp_path / "eight.pt")
    with pytest.raises(UnsupportedError, match="a is float8_e4m3fn, and bfloat16"):
        layout(open_checkpoint(tmp_path / "eight.pt"), example)


def counting_in_groups(folder: Path, step: int) -> Path:
    def change(tree: dict[str, Any]) -> None:
        base = tree["optimizer_state_dict"]["base_optimizer_state"]
        for state in base["state"].values():
            del state["step"]
        for group in base["param_groups"]:
            group["step"] = step

    return edited(folder, "*optim_states.pt", change)


@pytest.mark.parametrize("counted", [True, False])
def test_steps_counted_in_groups_are_the_sources(counted: bool, tmp_path: Path) -> None:
    """As apex' fused Adam counts them; the example's would begin its bias correction anew."""
    job = Job(TWO, 2, 1, counted=counted)
    source = opened(save_job(job, tmp_path / "source"))
    example = opened(counting_in_groups(save_job(job, tmp_path / "example"), 1))
    result = written(source, example, tmp_path / "result")
    assert [g["step"] for g in result.load_object("optimizer.param_groups")] == [5, 5]
    assert not [name for name in (*result.objects, *result.tensors) if name.endswith(".step")]
    back = written(result, opened(save_job(job._replace(step=1), tmp_path / "one")), tmp_path / "b")
    assert back.load_object("optimizer.state.1.step") == 5


def test_what_only_the_examples_client_has_is_noted(tmp_path: Path) -> None:
    folder = save_job(Job(TWO, 2, 1), tmp_path / "example")
    example = opened(edited(folder, "mp_rank*", lambda tree: tree.update(iteration=3)))
    said = [note.message for note in layout(opened(tag("z2")), opened(tag("z2"))).notes]
    assert not any("the source has no" in what for what in said)
    notes = layout(opened(save_job(Job(TWO, 2, 1), tmp_path / "source")), example).notes
    assert any("the source has no iteration, which" in note.message for note in notes)
