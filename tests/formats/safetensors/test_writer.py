"""What is laid out as safetensors: bytes as the library's own, and nothing of the source lost."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.checkpoint import Checkpoint, CommitState, Kind
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import CorruptError, ExitCode, UnsafeError, UnsupportedError
from ftckpt.formats.safetensors import Safetensors
from ftckpt.formats.safetensors.layout import SafetensorsFileWriter
from ftckpt.formats.safetensors.writer import SafetensorsWriter
from ftckpt.formats.state.same_object import SameObject
from ftckpt.transfer.content import Content, Copy, TargetTensor
from ftckpt.transfer.layout import Layout, LayoutRequest, Writer
from ftckpt.transfer.prove.against_source import prove
from ftckpt.transfer.request.change_dtype import retype
from ftckpt.verification import verify
from tests.builders.archives import extract
from tests.builders.checkpoints import open_checkpoint
from tests.builders.materialise import materialise
from tests.campaign import examples

ARCHIVES = Path(__file__).parents[4] / "shared" / "checkpoints"
WRITER = SafetensorsWriter()


def lay_out(content: Content, **request: Any) -> Layout:
    return WRITER.layout(content, LayoutRequest(**request))


def converted(source: Path, folder: Path, **request: Any) -> tuple[Checkpoint, Checkpoint, Layout]:
    """Convert a checkpoint, and open both."""
    before = open_checkpoint(source)
    layout = lay_out(Content.of(before), **request)
    materialise(layout, before, folder)
    return before, open_checkpoint(folder), layout


def require_equal(before: Checkpoint, after: Checkpoint) -> None:
    """Require all that the one data model knows to be the same, tensors bit for bit."""
    assert set(after.tensors) == set(before.tensors)
    for key, info in before.tensors.items():
        found = after.tensors[key]
        assert found[:5] == info[:5], key
        assert read_tensor(after, key) == read_tensor(before, key), key
    assert dict(after.aliases) == dict(before.aliases)
    assert after.step == before.step


def save_training_state(path: Path) -> dict[str, Any]:
    """Let torch save weights, tied weights, buffers, moments, masters and an average."""
    import torch

    torch.manual_seed(3)
    embed = torch.randn(7, 4)
    model = {
        "embed.weight": embed,
        "layers.0.weight": torch.randn(4, 4).bfloat16(),
        "layers.0.mask": torch.ones(3, dtype=torch.bool),
        "norm.running_mean": torch.randn(4),
        "lm_head.weight": embed,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "naïve.名前": torch.randn(2),
    }
    trained = ["embed.weight", "layers.0.weight", "naïve.名前"]
    state: dict[str, Any] = {
        "model": model,
        "ema": {"embed.weight": torch.randn(7, 4), "counter": torch.tensor(5)},
        "optimizer": {
            "state": {
                n: {
                    "step": torch.tensor(9.0),
                    "exp_avg": torch.randn(v.shape),
                    "exp_avg_sq": torch.rand(v.shape),
                }
                for n, v in model.items()
                if n in trained
            },
            "param_groups": [{"lr": 0.1, "params": trained}],
        },
    }
    torch.save(state, path)
    return model


def test_a_training_state_comes_back_whole(tmp_path: Path) -> None:
    save_training_state(tmp_path / "state.pt")
    before, after, _ = converted(tmp_path / "state.pt", tmp_path / "out", max_shard_size=100)
    assert after.format == "safetensors"
    assert before.aliases == {"lm_head.weight": "embed.weight"}
    assert {t.kind for t in before.tensors.values()} >= {Kind.BUFFER, Kind.EXP_AVG, Kind.OTHER}
    require_equal(before, after)
    assert set(after.members()) == set(after.source.entries)
    assert after.commit.state is CommitState.COMMITTED
    report = verify(after)
    assert report.code is ExitCode.OK, report.findings


def test_weights_alone_lie_where_transformers_looks(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = save_training_state(tmp_path / "state.pt")
    converted(tmp_path / "state.pt", tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "model.safetensors", "optimizer", "ftckpt.components", "ftckpt.objects",
    }  # fmt: skip
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert set(loaded) == set(model) - {"lm_head.weight"}
    assert all(loaded[name].equal(model[name]) for name in loaded)
    moments = load_file(tmp_path / "out" / "optimizer" / "optimizer.safetensors")
    assert {n.partition(".")[0] for n in moments} == {"exp_avg", "exp_avg_sq", "other"}


def test_each_file_is_byte_for_byte_what_the_library_writes(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save

    generator = torch.Generator().manual_seed(1)
    names = (
        "complex64 bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float8_e5m2 "
        "float8_e4m3fn bfloat16 float16 float32 float64"
    )
    state = {}
    for number, name in enumerate(names.split()):
        raw = torch.randint(0, 2, (3 + number, 16), dtype=torch.uint8, generator=generator)
        dtype = getattr(torch, name)
        state[f"x.{name}"] = raw.to(dtype) if name == "bool" else raw.flatten().view(dtype)
    state['quote".\\ü\n\x7f'] = torch.ones(1)
    torch.save(state, tmp_path / "state.pt")
    _, _, layout = converted(tmp_path / "state.pt", tmp_path / "out")
    assert [f.path for f in (*layout.files, *layout.commit)] == ["model.safetensors"]
    made = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert made == save(state, metadata={"format": "pt"})


def test_shards_are_dealt_out_as_huggingface_does(tmp_path: Path) -> None:
    import torch

    sizes = {"a": 10, "b": 10, "big": 50, "c": 10, "d": 10, "e": 1}
    torch.save({n: torch.zeros(s, dtype=torch.uint8) for n, s in sizes.items()}, tmp_path / "x.pt")
    _, after, layout = converted(tmp_path / "x.pt", tmp_path / "out", max_shard_size=30)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 91}
    # A tensor beyond the limit has a file of its own, and does not close the one that is open.
    assert index["weight_map"] == {
        "big": "model-00001-of-00003.safetensors",
        "a": "model-00002-of-00003.safetensors",
        "b": "model-00002-of-00003.safetensors",
        "c": "model-00002-of-00003.safetensors",
        "d": "model-00003-of-00003.safetensors",
        "e": "model-00003-of-00003.safetensors",
    }
    assert [file.path for file in layout.commit] == ["model.safetensors.index.json"]
    assert verify(after).code is ExitCode.OK


def test_the_optimizer_alone_is_a_checkpoint(tmp_path: Path) -> None:
    save_training_state(tmp_path / "state.pt")
    before = open_checkpoint(tmp_path / "state.pt")
    content = Content.of(before)
    content = content.with_tensors(
        w for w in content.tensors.values() if w.component == "optimizer"
    )
    materialise(lay_out(content), before, tmp_path / "out")
    after = open_checkpoint(tmp_path / "out")
    assert set(after.tensors) == set(content.tensors)
    assert (after.step, after.optimizer_count) == (None, 9)
    assert after.commit.marker == "optimizer/optimizer.safetensors.index.json"


def test_a_lost_file_of_the_optimizer_is_missed(tmp_path: Path) -> None:
    save_training_state(tmp_path / "state.pt")
    converted(tmp_path / "state.pt", tmp_path / "out")
    for file in ("optimizer/optimizer.safetensors", "ftckpt.components/ema.safetensors"):
        held = (tmp_path / "out" / file).read_bytes()
        (tmp_path / "out" / file).unlink()
        found = verify(open_checkpoint(tmp_path / "out"))
        assert found.code is ExitCode.CORRUPT
        assert ("missing-file", file) in {(f.kind, f.file) for f in found.findings}
        (tmp_path / "out" / file).write_bytes(held)


def test_what_safetensors_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    import torch

    torch.save(
        {"fine": torch.ones(2), "waves": torch.ones(2, dtype=torch.complex128)}, tmp_path / "x.pt"
    )
    with pytest.raises(UnsupportedError, match="waves, which is complex128") as caught:
        lay_out(Content.of(open_checkpoint(tmp_path / "x.pt")))
    assert caught.value.tensor == "waves"
    torch.save({"fine": torch.ones(2), "__metadata__": torch.ones(2)}, tmp_path / "y.pt")
    with pytest.raises(UnsupportedError, match="__metadata__"):
        lay_out(Content.of(open_checkpoint(tmp_path / "y.pt")))


def test_elements_that_do_not_fill_bytes_are_refused(tmp_path: Path) -> None:
    import torch

    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    content = Content.of(open_checkpoint(tmp_path / "x.pt"))
    odd = content.tensors["w"]._replace(dtype=DTYPES["float4_e2m1"])
    with pytest.raises(UnsupportedError, match="3 elements of 4 bits"):
        lay_out(content.with_tensors([odd]))


def test_an_alias_of_another_component_is_stored_of_itself(tmp_path: Path) -> None:
    import torch

    weight = torch.randn(5)
    torch.save({"model": {"w": weight}, "ema": {"w": weight}}, tmp_path / "x.pt")
    before, after, _ = converted(tmp_path / "x.pt", tmp_path / "out")
    assert before.aliases == {"ema:w": "w"}
    assert after.aliases == {}
    assert read_tensor(after, "ema:w") == read_tensor(before, "w")


def test_aliases_of_aliases_and_of_themselves_end(tmp_path: Path) -> None:
    import torch

    torch.save({n: torch.ones(2) for n in "abcd"}, tmp_path / "x.pt")
    before = open_checkpoint(tmp_path / "x.pt")
    content = Content.of(before)
    circular = {"b": "a", "c": "b", "d": "d"}
    content = Content(checkpoint=before, tensors=content.tensors, objects={}, aliases=circular)
    materialise(lay_out(content), before, tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").aliases == {"b": "a", "c": "a"}


@pytest.mark.parametrize("writer", [WRITER, SafetensorsFileWriter()])
def test_a_tied_weight_that_the_source_only_names_is_an_alias(
    writer: Writer, tmp_path: Path
) -> None:
    """Megatron's last stage has a copy of the embedding, and its reader one tensor."""
    import torch

    torch.save({"embed.weight": torch.ones(2)}, tmp_path / "x.pt")
    before = open_checkpoint(tmp_path / "x.pt")
    content = replace(Content.of(before), aliases={"head.weight": "embed.weight"})
    layout = writer.layout(content, LayoutRequest())
    materialise(layout, before, tmp_path / "out")
    place = tmp_path / "out"
    after = open_checkpoint(place / layout.files[0].path if writer.single else place)
    assert after.aliases == content.aliases
    assert prove(content, after, SameObject).tensors == 1


@pytest.mark.parametrize(
    "name",
    [
        "dcp_fsdp2_nested",
        "dcp_fsdp2_titan",
        "accelerate_fsdp2",
        "hf_llama",
        "verl_fsdp",
        "lightning_ddp",
        "mcore_torch_tp2pp2",
        "mcore_torchdist_tp2dp2_fullyreshard_bf16",
        "ds_z2_w2_bf16",
    ],
)
def test_real_checkpoints_come_back_whole(name: str, tmp_path: Path) -> None:
    archive = ARCHIVES / f"{name}.tar.xz"
    if not archive.exists():
        pytest.skip(f"{archive} is not there")
    extract(archive, tmp_path)
    root = tmp_path / name / "ckpt"
    place = next((p for p in sorted(root.iterdir()) if p.is_dir()), root)
    if name == "lightning_ddp":
        place = root / "last.ckpt"
    before, after, layout = converted(place, tmp_path / "out", max_shard_size=100_000)
    assert layout.unplaced == ()
    require_equal(before, after)
    assert set(after.objects) == set(before.objects)
    same = SameObject(before, after)
    for key, info in before.objects.items():
        found = after.objects[key]
        if not info.field:
            assert after.source.read(*found.extent) == before.source.read(*info.extent), key
        assert same(key), key
        assert found.rank == info.rank
    report = verify(after)
    assert report.code is ExitCode.OK, report.findings


def test_configuration_and_tokenizer_are_carried_along(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    source = tmp_path / "hf"
    source.mkdir()
    save_file({"w": torch.ones(3)}, source / "model.safetensors", metadata={"format": "pt"})
    beside = {"config.json": "{}", "tokenizer.json": "[]", "merges.txt": "a b", "LICENSE": "mine"}
    other = {"model.safetensors.index.json.bak": "", "core.1": "", "trainer_state.json": "{}"}
    for name, text in (beside | other).items():
        (source / name).write_text(text)
    (source / "ftckpt.manifest.json").write_text("{}")
    before = Safetensors().open(open_checkpoint(source).source)
    materialise(lay_out(Content.of(before)), before, tmp_path / "out")
    made = {
        p.name: p.read_text() for p in (tmp_path / "out").iterdir() if p.suffix != ".safetensors"
    }
    assert made == beside


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_the_configuration_says_what_type_the_weights_are_cast_to(
    field: str, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import save_file

    source = tmp_path / "hf"
    source.mkdir()
    save_file({"w": torch.ones(3), "v": torch.ones(1).half()}, source / "model.safetensors")
    text = json.dumps({field: "float32", "hidden_size": 7})
    (source / "config.json").write_text(text)
    before = open_checkpoint(source)
    for dtype, expected in (("bf16", "bfloat16"), ("fp32", "float32")):
        content = retype(Content.of(before), dtype)
        materialise(lay_out(content), before, tmp_path / dtype)
        made = (tmp_path / dtype / "config.json").read_text()
        assert json.loads(made) == {field: expected, "hidden_size": 7}
    assert made == text  # nothing to say: byte for byte the source's
    (source / "config.json").write_text("{}")
    before = open_checkpoint(source)
    materialise(lay_out(retype(Content.of(before), "bf16")), before, tmp_path / "plain")
    assert (tmp_path / "plain" / "config.json").read_text() == "{}"


def test_the_same_content_is_laid_out_in_the_same_bytes(tmp_path: Path) -> None:
    save_training_state(tmp_path / "state.pt")
    for folder in ("one", "two"):
        converted(tmp_path / "state.pt", tmp_path / folder, max_shard_size=64)
    one, two = (
        {
            p.relative_to(tmp_path / f): p.read_bytes()
            for p in (tmp_path / f).rglob("*.*")
            if p.is_file()
        }
        for f in ("one", "two")
    )
    assert one == two


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
KINDS = st.sampled_from(list(Kind))


@settings(max_examples=examples(25, 240), deadline=None)
@given(
    wanted=st.dictionaries(
        st.tuples(st.sampled_from(["model", "optimizer", "ema", "extra:r/../x"]), NAMES, KINDS),
        st.tuples(st.sampled_from(["float32", "int64", "uint8", "bfloat16"]),
                  st.lists(st.integers(0, 3), max_size=3)),
        max_size=12,
    ),
    limit=st.integers(1, 200),
)  # fmt: skip
def test_any_names_kinds_and_components_come_back(
    wanted: Mapping[tuple[str, str, Kind], tuple[str, list[int]]],
    limit: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    import torch

    folder = tmp_path_factory.mktemp("any")
    torch.save({"x": torch.zeros(1)}, folder / "x.pt")
    before = open_checkpoint(folder / "x.pt")
    tensors: dict[str, TargetTensor] = {}
    for (component, name, kind), (dtype, shape) in wanted.items():
        tensor = TargetTensor(component, name, kind, tuple(shape), DTYPES[dtype], ())
        if name != "__metadata__":
            tensors.setdefault(tensor.key, tensor)
    stored = {}
    for tensor in tensors.values():
        told = tensor.component == "optimizer" or tensor.kind in ("master", "exp_avg", "exp_avg_sq")
        text = f"{tensor.kind}.{tensor.name}" if told else tensor.name
        if (tensor.component, text) in stored or (told and not tensor.name):
            return  # two tensors of one stored name, or a state of nothing
        stored[tensor.component, text] = tensor
    content = Content(checkpoint=before, tensors=tensors, objects={})
    if not tensors:
        with pytest.raises(UnsupportedError, match="there is none to write"):
            lay_out(content)
        return
    materialise(lay_out(content, max_shard_size=limit), before, folder / "out")
    after = open_checkpoint(folder / "out")
    assert {k: i[:5] for k, i in after.tensors.items()} == {k: w[:5] for k, w in tensors.items()}


def damage(text: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda index: index | json.loads(text)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ('{"objects": []}', CorruptError),
        ('{"schema": 2}', UnsupportedError),
        ('{"step": "x"}', CorruptError),
        ('{"objects": {"a": 1}}', CorruptError),
        ('{"objects": {"a": {"offset": 0, "length": 1, "form": "pickle"}}}', CorruptError),
        ('{"objects": {"a": {"offset": 0, "form": "bytes"}}}', CorruptError),
        ('{"objects": {"a": {"offset": 0, "length": 1, "form": "bytes", "transforms": ["rot"]}}}',
         CorruptError),
        ('{"objects": {"notes.txt": {"offset": 0, "length": 1, "form": "bytes"}}}', UnsafeError),
    ],
)  # fmt: skip
def test_an_index_of_objects_is_not_believed(
    change: str, error: type[Exception], tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import save_file

    (tmp_path / "ftckpt.objects").mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "ftckpt.objects" / "notes.txt").write_text("hello")
    (tmp_path / "ftckpt.objects" / "records.bin").write_bytes(b"1")
    good = {"schema": 1, "objects": {"n": {"offset": 0, "length": 1, "form": "json", "rank": 4}}}
    index = tmp_path / "ftckpt.objects" / "index.json"
    index.write_text(json.dumps(good))
    assert open_checkpoint(tmp_path).load_object("n") == 1
    index.write_text(json.dumps(damage(change)(good)))
    with pytest.raises(error):
        open_checkpoint(tmp_path)


def test_records_that_are_cut_short_are_damage(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    (tmp_path / "ftckpt.objects").mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    index = {"schema": 1, "objects": {"n": {"offset": 64, "length": 9, "form": "bytes"}}}
    (tmp_path / "ftckpt.objects" / "index.json").write_text(json.dumps(index))
    report = verify(open_checkpoint(tmp_path))
    assert "missing-file" in {f.kind for f in report.findings}
    (tmp_path / "ftckpt.objects" / "records.bin").write_bytes(bytes(70))
    report = verify(open_checkpoint(tmp_path))
    assert report.code is ExitCode.CORRUPT
    assert {f.kind for f in report.findings if f.code} == {"truncated-file"}


@pytest.mark.parametrize(
    "remarks",
    [
        "[]",
        '{"component": 1}',
        '{"kinds": {"w": "queen"}}',
        '{"kinds": []}',
        '{"aliases": {}}',
        '{"aliases": [["model", "param", "v", "absent"]]}',
        '{"aliases": [["model", "param", "v"]]}',
        '{"aliases": [["model", "queen", "v", "w"]]}',
        "{",
    ],
)
def test_remarks_in_a_header_are_not_believed(remarks: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"ftckpt": remarks})
    with pytest.raises(CorruptError):
        open_checkpoint(tmp_path / "model.safetensors")


@pytest.mark.parametrize("first", ["a", "z"])
def test_an_alias_that_is_stored_too_is_a_tensor_twice(first: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    remarks = json.dumps({"aliases": [["model", "param", "w", first]]})
    files = {"model-00001-of-00002.safetensors": "w", "model-00002-of-00002.safetensors": first}
    names = dict(sorted(files.items(), reverse=first == "z"))
    for file, name in files.items():
        extra = {"ftckpt": remarks} if name == first else {}
        save_file({name: torch.ones(1)}, tmp_path / file, metadata=extra)
    index = {"metadata": {}, "weight_map": {name: file for file, name in names.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    report = verify(open_checkpoint(tmp_path))
    assert report.code is ExitCode.CORRUPT
    assert "duplicate-tensor" in {f.kind for f in report.findings}


def test_objects_inside_a_larger_record_become_archives_of_their_own(tmp_path: Path) -> None:
    import torch

    state = {
        "model": {"w": torch.ones(2)},
        "scheduler": {"last_epoch": 4, "betas": (0.9, 0.95)},
        "seen": [1, {"a": None}],
        "hidden": (torch.arange(5),),
        "mixed": {"x": [torch.ones(3), "text"], "y": {1: 2}},
    }
    torch.save(state, tmp_path / "x.pt")
    before, after, layout = converted(tmp_path / "x.pt", tmp_path / "out")
    assert layout.unplaced == ()
    require_equal(before, after)
    assert set(after.objects) == set(before.objects)
    raw = (tmp_path / "out" / "ftckpt.objects" / "records.bin").read_bytes()

    def load(name: str) -> Any:
        extent = after.objects[name].extent
        assert extent.offset % 64 == 0
        return torch.load(io.BytesIO(raw[extent.offset : extent.end]), weights_only=True)

    assert load("scheduler") == state["scheduler"]
    assert load("seen") == state["seen"]
    # The tensor that the checkpoint lists lies with the tensors, and not here a second time.
    assert read_tensor(after, "extra:hidden:0") == read_tensor(before, "extra:hidden:0")
    assert read_tensor(after, "extra:mixed:x.0") == read_tensor(before, "extra:mixed:x.0")
    assert b"text" in raw
    same = SameObject(before, after)
    assert all(same(name) for name in before.objects)


def test_what_was_written_once_can_be_written_again(tmp_path: Path) -> None:
    import torch

    torch.save({"model": {"w": torch.ones(2)}, "rng": (torch.arange(9),)}, tmp_path / "x.pt")
    folder = tmp_path / "hf"
    converted(tmp_path / "x.pt", folder)
    (folder / "ftckpt.objects" / "notes.json").write_text('{"a": [1]}')
    (folder / "ftckpt.objects" / "raw").write_bytes(b"{}")
    before, after, layout = converted(folder, tmp_path / "again")
    assert layout.unplaced == ()
    require_equal(before, after)
    assert after.load_object("notes.json") == {"a": [1]}
    assert after.load_object("raw") == b"{}"
    third = converted(tmp_path / "again", tmp_path / "third")[1]
    assert third.load_object("notes.json") == {"a": [1]}
    assert third.load_object("raw") == b"{}"
    assert SameObject(before, third)("rng")


def test_padding_and_parts_of_tensors_are_kept(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from ftckpt.checkpoint import Box

    torch.save({"w": torch.arange(12.0).view(4, 3)}, tmp_path / "x.pt")
    before = open_checkpoint(tmp_path / "x.pt")
    copy = Copy(Box((1, 0), (2, 2)), "w", Box((2, 1), (2, 2)))
    wanted = TargetTensor("model", "v", Kind.PARAM, (4, 2), DTYPES["bfloat16"], (copy,))
    content = Content.of(before).with_tensors([wanted])
    materialise(lay_out(content), before, tmp_path / "out")
    loaded = load_file(tmp_path / "out" / "model.safetensors")["v"]
    assert loaded.equal(torch.tensor([[0, 0], [7, 8], [10, 11], [0, 0]]).bfloat16())
