"""No checkpoint that lost a file passes unseen: each file of each layout is taken away in turn.

What a checkpoint records of its own files is found by the reader, or a warning calls the loss
unknown. The files that nothing records stand here by name, and in docs/verify.md.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest

from ftckpt.errors import ExitCode, FtckptError
from ftckpt.findings import Finding, Severity, from_error
from ftckpt.verification import Level, VerifyOptions, verify
from tests.builders.archives import extract
from tests.builders.checkpoints import open_checkpoint
from tests.builders.megatron_files import write
from tests.builders.megatron_model import Job
from tests.builders.real_sets import real_set
from tests.delta.packs import pack_places, save_steps
from tests.formats.safetensors.test_reader import save_sharded, split_by_rank, tensors
from tests.json_run import ftckpt_json

DATA = Path(__file__).parents[1] / "data"
# Kinds of warnings that say what is not recorded.
UNKNOWN = frozenset({"count-unknown", "state-unknown"})

Make = Callable[[Path], Path]


class Layout(NamedTuple):
    """A checkpoint, and which of its files nothing records.

    Attributes:
        make: puts it below a folder and returns its place.
        unrecorded: patterns of files that can be lost without a word.
        unknown: patterns of files that can be lost with no more than a warning.
    """

    make: Make
    unrecorded: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def data(place: str) -> Make:
    def make(root: Path) -> Path:
        return Path(shutil.copytree(DATA / place, root / "checkpoint"))

    return make


def archive(name: str) -> Make:
    def make(root: Path) -> Path:
        extract(DATA / "megatron_dist" / f"{name}.tar.xz", root)
        return root / name / "iter_0000002"

    return make


def converted(place: str, to: str) -> Make:
    def make(root: Path) -> Path:
        out = root / "checkpoint"
        done = ftckpt_json("convert", str(DATA / place), str(out), "--to", to)
        assert done["result"]["code"] == 0
        return out

    return make


def sharded(root: Path) -> Path:
    save_sharded(root / "checkpoint", tensors(), 3)
    return root / "checkpoint"


def pickled_shards(root: Path) -> Path:
    """Write shards as transformers did with `safe_serialization=False`."""
    import json

    import torch

    place = root / "checkpoint"
    place.mkdir()
    index = {}
    for number in range(1, 4):
        file = f"pytorch_model-{number:05d}-of-00003.bin"
        torch.save({f"layers.{number}.weight": torch.ones(3, 4)}, place / file)
        index[f"layers.{number}.weight"] = file
    whole = {"metadata": {"total_size": 144}, "weight_map": index}
    (place / "pytorch_model.bin.index.json").write_text(json.dumps(whole))
    return place


def of_ranks(root: Path) -> Path:
    split_by_rank(root / "checkpoint", tensors(), 3)
    return root / "checkpoint"


def pickled_as(module: str, name: str, **state: Any) -> Any:
    """Return a record of a class of another library, which need not be installed."""
    made = type(name, (), {"__module__": module})()
    made.__dict__.update(state)
    return made


def random_states(world: int) -> Make:
    """Make a Trainer's folder of four processes; `world` is what its arguments record."""

    def make(root: Path) -> Path:
        import torch

        place = data("trainer_dirs/trainer")(root)
        for rank in range(4):
            shutil.copy(place / "rng_state.pth", place / f"rng_state_{rank}.pth")
        (place / "rng_state.pth").unlink()
        state = pickled_as("accelerate.state", "PartialState", num_processes=world)
        arguments = pickled_as(
            "transformers.training_args", "TrainingArguments", distributed_state=state
        )
        modules: dict[str, Any] = {n: SimpleNamespace() for n in ("accelerate", "transformers")}
        for one in (state, arguments):
            named = {type(one).__name__: type(one)}
            modules[type(one).__module__] = SimpleNamespace(**named)
        with mock.patch.dict(sys.modules, modules):
            torch.save(arguments, place / "training_args.bin")
        return place

    return make


def legacy(job: Job) -> Make:
    return lambda root: write(root, job).path


def delta(*, upon: bool) -> Make:
    def make(root: Path) -> Path:
        first, second = save_steps(root / "saves", 2)
        out = root / "delta"
        pack_places(first if upon else None, second, out)
        return out

    return make


_TRAINER = ("training_args.bin", "*config.json"), ("optimizer.pt", "scheduler.pt", "rng_state.pth")
_VERL = ("fsdp_config.json",)
_SEAL = ("ftckpt.manifest.json",)  # what it covered is still checked by its own digests
LAYOUTS: dict[str, Layout] = {
    "dcp of fsdp2": Layout(data("dcp/fsdp2/step-3")),
    "dcp of hsdp": Layout(data("dcp/hsdp/step-3")),
    "dcp of tp": Layout(data("dcp/tp/step-3")),
    "dcp with objects of ranks": Layout(data("dcp/ranklocal/step-3")),
    "safetensors": Layout(sharded),
    "safetensors of ranks": Layout(of_ranks, (), ("shard-00003-*",)),
    "safetensors with optimizer": Layout(
        converted("dcp/fsdp2/step-3", "safetensors"), _SEAL
    ),
    "bin shards": Layout(pickled_shards),
    "megatron, tp and pp": Layout(legacy(Job(tp=2, pp=2, vp=2, optimizer="masters"))),
    "megatron, distributed": Layout(legacy(Job(tp=2, dp=2, optimizer="distributed"))),
    "megatron, one directory": Layout(legacy(Job(dp=2, optimizer="distributed"))),
    "megatron, experts": Layout(legacy(Job(ep=2, dp=2, experts=4, layers=2))),
    **{
        f"torch_dist, {name}": Layout(archive(name))
        for name in (
            "buckets_tp2pp2_tied", "buckets_pp2vp2", "buckets_experts", "model_space_tp2",
            "singleton",
        )
    },
    **{
        f"deepspeed, {name}": Layout(data(f"deepspeed/{name}/global_step2"))
        for name in ("z1", "z2", "z3", "bf16", "pipe", "tp", "wrap")
    },
    **{
        f"deepspeed, universal_{name}": Layout(
            data(f"deepspeed/universal_{name}/global_step2_universal")
        )
        for name in ("z1", "z3", "tp", "wrap")
    },
    **{
        f"verl, {name}": Layout(data(f"ranks/{name}/actor"), _VERL)
        for name in ("fsdp1", "hsdp", "tp_fsdp2")
    },
    **{
        f"by hand, {name}": Layout(data(f"by_hand/{name}"))
        for name in ("entries", "offsets", "ruled", "specs", "stages")
    },
    "by hand, recorded": Layout(data("by_hand/recorded"), ("metadata.json",)),
    "trainer": Layout(data("trainer_dirs/trainer"), *_TRAINER),
    "trainer with peft": Layout(data("trainer_dirs/trainer_peft"), *_TRAINER),
    "trainer of four processes": Layout(
        random_states(4), _TRAINER[0], ("optimizer.pt", "scheduler.pt")
    ),
    "accelerate": Layout(
        data("trainer_dirs/accelerate"),
        ("scheduler.bin", "custom_checkpoint_0.pkl"),
        ("optimizer.bin", "random_states_0.pkl"),
    ),
    "delta": Layout(delta(upon=False), _SEAL),
    "delta upon a base": Layout(delta(upon=True), _SEAL),
}  # fmt: skip

REAL: dict[str, tuple[str, ...]] = {
    "accelerate_fsdp1/checkpoint_3": (),
    "accelerate_fsdp2/checkpoint_3": (),
    "dcp_2d_tpfsdp/step-3": (),
    "dcp_fsdp2_nested/step-3": (),
    "dcp_fsdp2_titan/step-3": (),
    "dcp_hf/index": (),
    "dcp_hf/consolidated_float": (),
    "dcp_torch26_fsdp2_async/step-3": (),
    "ds_pp2dp2_z1_bf16/global_step2": (),
    "ds_z1_w4_bf16/global_step3": (),
    "ds_z2_w2_bf16/global_step3": (),
    "ds_z3_w2_fp32/global_step3": (),
    "hf4_llama_bin/": ("*config.json",),
    "hf_llama/": ("*config.json",),
    "hf_mixtral/": ("*config.json",),
    "mcore0161_tp2dp2_dpreshard/iter_0000003": (),
    "mcore_torch_tp2dp2_distopt_bf16/iter_0000003": (),
    "mcore_torch_tp2pp2/iter_0000003": (),
    "mcore_torchdist_tp2dp2_fullyreshard_bf16/iter_0000003": (),
    "mcore_torchdist_tp2pp2/iter_0000003": (),
    "verl_fsdp/global_step_3": ("actor/fsdp_config.json",),
}


def findings(place: Path) -> tuple[ExitCode, list[Finding]]:
    """Return what `verify` answers where no level is named."""
    try:
        report = verify(open_checkpoint(place), VerifyOptions(level=Level.AUTO))
    except FtckptError as error:
        found = from_error(error)
        return found.code, [found]
    return report.code, list(report.findings)


def lose_each(place: Path, aside: Path) -> tuple[set[str], set[str]]:
    """Take each file away in turn; return whose loss passes unseen, and with a warning."""
    code, found = findings(place)
    assert code is ExitCode.OK, found
    files = sorted(p for p in place.rglob("*") if p.is_file())
    assert len(files) > 1
    unseen: set[str] = set()
    unknown: set[str] = set()
    for file in files:
        file.rename(aside)
        code, found = findings(place)
        aside.rename(file)
        if code is ExitCode.OK:
            warned = any(f.kind in UNKNOWN and f.severity is Severity.WARNING for f in found)
            (unknown if warned else unseen).add(file.relative_to(place).as_posix())
    return unseen, unknown


def require(place: Path, layout: Layout, aside: Path) -> None:
    unseen, unknown = lose_each(place, aside)
    names = [p.relative_to(place).as_posix() for p in place.rglob("*") if p.is_file()]

    def matching(patterns: tuple[str, ...]) -> set[str]:
        return {name for name in names if any(fnmatch(name, p) for p in patterns)}

    assert unseen == matching(layout.unrecorded)
    assert unknown == matching(layout.unknown)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_lost_file_is_seen(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    require(layout.make(tmp_path), layout, tmp_path / "aside")


@pytest.mark.parametrize("name", REAL)
def test_a_lost_file_of_a_real_set_is_seen(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    archived, _, inside = name.partition("/")
    source = real_set(archived, inside, tmp_path_factory)
    place = Path(shutil.copytree(source, tmp_path / "checkpoint"))
    require(place, Layout(data(""), REAL[name]), tmp_path / "aside")


@pytest.mark.parametrize("make", [sharded, pickled_shards])
def test_shards_without_their_index_never_pass(make: Make, tmp_path: Path) -> None:
    """Their names count them, and the index is written last."""
    place = make(tmp_path)
    next(place.glob("*.index.json")).unlink()
    for file in [None, *sorted(place.iterdir())]:
        if file is not None:
            file.unlink()
        if any(place.iterdir()):
            assert findings(place)[0] in (ExitCode.INCOMPLETE, ExitCode.CORRUPT)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"\0" * 60, "nothing but zeros"),
        (b'{"a": 1', "is not JSON"),
        (b'{"a": ' + b"9" * 5000, "is not JSON from character 5006 on"),
    ],
)
def test_a_configuration_that_a_crash_left(content: bytes, why: str, tmp_path: Path) -> None:
    """No reader of ftckpt needs a Trainer's `config.json`; transformers does."""
    place = data("trainer_dirs/trainer")(tmp_path)
    (place / "config.json").write_bytes(content)
    report = verify(open_checkpoint(place), VerifyOptions(level=Level.STRUCTURE))
    assert report.code is ExitCode.CORRUPT
    (found,) = (f for f in report.findings if f.code)
    assert (found.kind, found.file) == ("bad-index", "config.json")
    assert why in found.message


def test_a_number_that_python_does_not_make_is_json(tmp_path: Path) -> None:
    place = data("trainer_dirs/trainer")(tmp_path)
    (place / "config.json").write_bytes(b'{"a": ' + b"9" * 5000 + b"}")
    report = verify(open_checkpoint(place), VerifyOptions(level=Level.STRUCTURE))
    assert report.code is ExitCode.OK


@pytest.mark.parametrize(
    ("place", "one", "two", "code"),
    [
        ("trainer_zero2", "rng_state_0.pth", "rng_state_1.pth", ExitCode.OK),
        ("accelerate_two", "optimizer.bin", "optimizer_1.bin", ExitCode.CORRUPT),
    ],
)
def test_state_files_in_each_others_place(
    place: str, one: str, two: str, code: ExitCode, tmp_path: Path
) -> None:
    """Random states are copied for further processes, which is a warning; optimizers are not."""
    copied = data(f"trainer_dirs/{place}")(tmp_path)
    (copied / one).rename(copied / "aside")
    (copied / two).rename(copied / one)
    (copied / "aside").rename(copied / two)
    report = verify(open_checkpoint(copied), VerifyOptions(level=Level.STRUCTURE))
    found = {f.file: f.code for f in report.findings if f.kind == "renamed-file"}
    assert found == {one: code, two: code}
    assert report.code is code
