"""DeepSpeed checkpoints to test with: kept tiny ones and larger ones beside the repository."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ftckpt.formats.deepspeed import DeepSpeed
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from tests.builders.archives import extract
from tests.conformance.formats import Made, Truth

DATA = Path(__file__).parents[2] / "data" / "deepspeed"
SHARED = Path(__file__).parents[4] / "shared" / "checkpoints"
# Client state that the generator hands to the engine; every model's file repeats it.
RNG = Truth("uint8", (6,), bytes(range(6)))


def opened(path: Path) -> DeepSpeedCheckpoint:
    return DeepSpeed().open(Source.directory(open_store(str(path))))


def tag(name: str) -> Path:
    """Return the folder of a kept set's only checkpoint."""
    (folder,) = (p for p in (DATA / name).iterdir() if p.is_dir())
    return folder


def copied(name: str, root: Path) -> Path:
    """Copy a kept set, so that a test may damage it."""
    return Path(shutil.copytree(tag(name), root / name / tag(name).name))


def tensors_of(path: Path) -> dict[str, Truth]:
    """Read a file of tensors with the library that wrote it."""
    import torch
    from safetensors.torch import load_file

    found = {}
    for name, value in load_file(path).items():
        data = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        found[name] = Truth(str(value.dtype)[6:], tuple(value.shape), data)
    return found


def truth_of(name: str) -> dict[str, Truth]:
    """Return what the job's memory held, and the client's random state, by key."""
    truth = tensors_of(DATA / name / "truth.safetensors")
    if name.startswith("autoep"):
        return truth
    files = len(list(tag(name).glob("*model_states.pt"))) - len(list(tag(name).glob("layer_*")))
    ranks = {"tp": (0, 1), "autotp": (0, 1), "pipe": (0, 1)}.get(name, range(files))
    truth |= {f"extra:rank{rank}:rng.cpu": RNG for rank in ranks}
    if "master:embed.weight" in truth and not name.startswith("moe"):  # the head is tied to it
        truth["master:head.weight"] = truth["master:embed.weight"]
    return truth


def made(name: str, root: Path) -> Made:
    return Made(copied(name, root), truth_of(name))


def unpacked(name: str, root: Path) -> Path:
    """Unpack a set that the framework wrote, or skip."""
    archive = SHARED / f"{name}.tar.xz"
    if not archive.exists():
        pytest.skip(f"{archive} is not here")
    extract(archive, root)
    return root / name
