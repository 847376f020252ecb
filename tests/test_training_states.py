"""Every kind of training state with a real sample: counted, verified, converted, damaged.

The truth of a sample was taken from the live memory of the job that wrote it. Mixed steps and the
loss of each single file have suites of their own (tests/verification/test_lost_files.py,
tests/formats/*/test_damage.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import ftckpt as api
from ftckpt.checkpoint import Checkpoint, Kind
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.comparison import Field
from ftckpt.comparison.state import compare_fields, state_tensors
from ftckpt.errors import ExitCode, FtckptError
from ftckpt.formats.state.fields import state_fields
from ftckpt.inspection.resume import Presence, resume_check
from ftckpt.transfer.content import Content
from tests.builders.archives import extract
from tests.builders.checkpoints import flip, open_checkpoint

DATA = Path(__file__).parent / "data"
# These files carry no checksum: a flipped bit in them is not seen before the folder is sealed.
NO_EVIDENCE = ".safetensors"
# The optimizer numbers its parameters, and two have one shape: nothing says which is which.
NUMBERED = frozenset({"trainer", "trainer_peft", "accelerate", "accelerate_two"})
# Frozen parameters, of which no optimizer keeps anything.
FROZEN = frozenset({"bf16", "lora_z2", "lora_z3", "wrap", "z1", "z2", "z3"})
NO_OPTIMIZER = frozenset({"hsdp", "ranklocal", "tp-dcp", "singleton"})


class Sample(NamedTuple):
    """A checkpoint, its file of truth, and how the truth spells keys."""

    place: str
    truth: str
    archive: str = ""


def _samples() -> dict[str, Sample]:
    found = {}
    for path in sorted((DATA / "dcp").glob("*/step-3")):
        name = "tp-dcp" if path.parent.name == "tp" else path.parent.name
        found[name] = Sample(str(path), f"{path}.safetensors")
    for path in sorted((DATA / "deepspeed").glob("*/global_step2")):
        found[path.parent.name] = Sample(str(path), str(path.parent / "truth.safetensors"))
    for path in sorted((DATA / "ranks").glob("*/actor")):
        found[f"{path.parent.name}-ranks"] = Sample(
            str(path), str(path.parent / "truth.safetensors")
        )
    for path in sorted(p for p in (DATA / "trainer_dirs").iterdir() if p.is_dir()):
        if path.with_suffix(".safetensors").exists():
            found[path.name] = Sample(str(path), f"{path}.safetensors")
    for path in sorted((DATA / "optimizers").glob("*adamw8bit.pt")):
        found[path.stem] = Sample(str(path), str(path.with_suffix(".safetensors")))
    for archive in (*(DATA / "megatron_dist").glob("*.xz"), *(DATA / "megatron_fsdp").glob("*.xz")):
        name = archive.name.removesuffix(".tar.xz")
        place = f"{name}/iter_0000002"
        found[name] = Sample(place, f"{name}/truth.safetensors", str(archive))
    return found


SAMPLES = _samples()
# One of each kind is converted; tests/transfer/test_every_target.py lays out all of them.
CONVERTED = (
    "actors", "fsdp2", "autotp", "lora_z3", "moe_z1", "pipe", "z3", "fsdp1-ranks", "trainer_zero2",
    "trainer_peft", "accelerate_two", "bitsandbytes_adamw8bit", "torchao_adamw8bit",
    "buckets_experts", "singleton", "shadows", "dense", "schedulefree", "muon",
)  # fmt: skip


def key_of(name: str) -> str:
    """Return the key of a tensor that the truth names by its path in the state."""
    if name.startswith("optim:"):
        parameter, _, leaf = name.removeprefix("optim:").rpartition(".")
    elif ".state." in name:
        owner, _, rest = name.partition(".state.")
        names = [w for w in owner.split(".") if w not in ("trainer", "optim", "optimizer")]
        if any(w in ("optim", "optimizer") for w in owner.split(".")):
            parameter, _, leaf = rest.rpartition(".")
            parameter = ".".join([*names, parameter])
        else:
            parameter, leaf = owner, rest
    else:
        words = name.split(".")
        return ".".join(w for w in words if w not in ("trainer", "model")) if (
            words[0] in ("trainer", "model") and words[1] != "layers" and words[1] != "embed_tokens"
            and words[1] != "norm"
        ) else name  # fmt: skip
    return f"{leaf}:{parameter}" if leaf.startswith("exp_avg") and "." not in leaf else (
        f"optimizer:{parameter}.{leaf}"
    )  # fmt: skip


@pytest.fixture(params=SAMPLES, scope="module")
def sample(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, torch.Tensor]]:
    name: str = request.param
    found = SAMPLES[name]
    root = tmp_path_factory.mktemp(name)
    if found.archive:
        extract(Path(found.archive), root)
        place, truth = root / found.place, root / found.truth
    else:
        place, truth = Path(found.place), Path(found.truth)
    return name, place, {key_of(key): value for key, value in load_file(truth).items()}


def raw(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return data


def require(checkpoint: Checkpoint, truth: Mapping[str, torch.Tensor]) -> None:
    keys = checkpoint.tensors.keys() | checkpoint.aliases.keys()
    assert truth.keys() <= keys
    for key, tensor in truth.items():
        stored = checkpoint.tensors[checkpoint.aliases.get(key, key)]
        assert stored.shape == tuple(tensor.shape), key
        assert read_tensor(checkpoint, stored.key) == raw(tensor), key


def test_what_inspect_says_is_the_truth(sample: tuple[str, Path, Any]) -> None:
    name, path, truth = sample
    checkpoint = open_checkpoint(path)
    require(checkpoint, truth)
    for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ):
        held = {
            t.key
            for t in checkpoint.tensors.values()
            if t.kind is kind and t.component == "optimizer"
        }
        # An alias is the moment of a tied weight, and stands for its owner.
        assert {checkpoint.aliases.get(k, k) for k in truth if k.startswith(f"{kind}:")} == held
    # A parameter by its name, or by its master where a stage saves no weights.
    names = {k.removeprefix("master:") for k in truth if ":" not in k or k.startswith("master:")}
    ours = {
        t.key.removeprefix("master:")
        for t in checkpoint.tensors.values()
        if t.kind is Kind.MASTER or t.component == "model"
    }
    assert ours - {alias.removeprefix("master:") for alias in checkpoint.aliases} <= names
    rows = {row.key: row for row in resume_check(checkpoint)}
    assert rows["weights"].presence is Presence.PRESENT
    wanted = Presence.PRESENT
    if name in NUMBERED | FROZEN:
        wanted = Presence.CANNOT_TELL
    if name in NO_OPTIMIZER:
        wanted = Presence.ABSENT
    assert rows["moments"].presence is wanted, rows["moments"].reason
    assert bool(rows["moments"].missing) == (name in FROZEN)  # and they are named
    report = api.verify(str(path), level="values")
    assert report.code is ExitCode.OK
    assert api.verify(str(path), level="content").code is (
        ExitCode.UNVERIFIED if any(path.glob(f"*{NO_EVIDENCE}")) else ExitCode.OK
    )


def fields(checkpoint: Checkpoint) -> list[Field]:
    found = list(state_fields(checkpoint))
    known = [field for field in found if isinstance(field, Field)]
    assert len(known) == len(found)
    return known


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_a_conversion_loses_nothing(sample: tuple[str, Path, Any], to: str, tmp_path: Path) -> None:
    name, path, truth = sample
    if name not in CONVERTED:
        pytest.skip("another sample of this kind is converted")
    source = open_checkpoint(path)
    api.convert(str(path), str(tmp_path / "out"), to)
    result = open_checkpoint(tmp_path / "out")
    require(result, truth)
    assert source.tensors.keys() <= result.tensors.keys() | result.aliases.keys()
    named = set(state_tensors(Content.of(source)).values())
    differing = [one.name for one in compare_fields(fields(source), fields(result))]
    # A safetensors folder names parameters where the source numbers them.
    renamed = [
        name
        for name in differing
        if to == "safetensors" and (name.endswith(".params") or name.startswith("optimizer.state."))
    ]
    assert set(differing) <= named | set(renamed)
    assert api.verify(str(tmp_path / "out"), level="values").code is ExitCode.OK


def code_at(path: Path) -> ExitCode:
    try:
        return api.verify(str(path), level="values").code
    except FtckptError as error:
        return error.exit_code


def test_a_damaged_twin_is_caught(sample: tuple[str, Path, Any], tmp_path: Path) -> None:
    _, path, _ = sample
    place = tmp_path / path.name
    checkpoint = open_checkpoint(path)
    largest: dict[str, tuple[int, int]] = {}
    for info in checkpoint.tensors.values():
        for piece in info.pieces:
            extent = checkpoint.payload(piece).extent
            if extent.length > largest.get(extent.file, (0, 0))[0]:
                largest[extent.file] = extent.length, extent.offset
    files = sorted(largest)
    for file in {files[0], files[-1]}:
        shutil.copytree(path, place) if path.is_dir() else shutil.copy(path, place)
        length, offset = largest[file]
        target = place / file if path.is_dir() else place
        flip(target, offset + length // 2)
        seen = code_at(place)
        assert seen is (ExitCode.OK if file.endswith(NO_EVIDENCE) else ExitCode.CORRUPT), file
        if path.is_dir():
            target.unlink()
            if len(files) > 1 and not file.endswith((".pkl", ".pth", "optimizer.bin", "rng.pt")):
                _require_loss_seen(place, file)
            shutil.rmtree(place)
        else:
            place.unlink()


def _require_loss_seen(place: Path, file: str) -> None:
    """Require a finding of a lost file: an error, or a warning where nothing records it."""
    report = api.verify(str(place), level="values")
    unknown = any(f.kind in ("state-unknown", "count-unknown") for f in report.findings)
    assert report.code in (ExitCode.CORRUPT, ExitCode.INCOMPLETE) or unknown, file
