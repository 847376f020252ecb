"""Deltas on disk: states of a training packed against each other, as small real directories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.delta import NAME, BaseName, DeltaIndex, content_digest
from ftckpt.delta.index.head import recorded_path
from ftckpt.delta.index.parse import parse_index
from ftckpt.digests.tensors import digest_tensor
from ftckpt.formats.delta.chain import manifest_digest
from ftckpt.manifest.locate import find
from ftckpt.storage.store import Store
from tests.builders.checkpoints import open_checkpoint
from tests.delta.packing import Packed, State, pack


def training(steps: int) -> list[dict[str, torch.Tensor]]:
    """Return the weights of a model after each step: each changes a little of the one before."""
    torch.manual_seed(5)
    state = {
        "embed.weight": torch.randn(300, 16),
        "layers.0.weight": torch.randn(64, 64).to(torch.bfloat16),
        "norm.weight": torch.randn(7),
        "empty": torch.zeros(0, 4),
        "count": torch.tensor(41),
    }
    saves = []
    for step in range(steps):
        change = {name: torch.zeros_like(t, dtype=torch.float32) for name, t in state.items()}
        change["embed.weight"][step % 300] = 1e-3
        change["layers.0.weight"] += torch.randn(64, 64) * 1e-3
        change["count"] += 1
        state = {name: (t + change[name]).to(t.dtype) for name, t in state.items()}
        saves.append(state)
    return saves


def save_full(path: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Let safetensors write a full checkpoint."""
    path.mkdir(parents=True)
    save_file(weights, path / "model.safetensors")
    return path


def state_at(checkpoint: Checkpoint) -> State:
    """Read the tensors of a checkpoint into memory."""
    state = State()
    for key, info in checkpoint.tensors.items():
        state.infos[key] = info
        state.data[key] = read_tensor(checkpoint, key)
    return state


def pack_delta(
    path: Path,
    target: State,
    base: Path | None = None,
    *,
    step: int | None = None,
    objects: Mapping[str, bytes] | None = None,
    forms: Sequence[str] = (),
    place: str | None = None,
) -> Path:
    """Write a delta directory.

    Args:
        path: of the delta.
        target: what it holds.
        base: the checkpoint that it depends on.
        step: of the target.
        objects, forms: non-tensor state, and what its bytes are.
        place: how the base's place is recorded; as `pack` does it, where None.
    """
    below = None if base is None else open_checkpoint(base)
    packed = pack(target, None if below is None else state_at(below), objects=objects)
    name = None
    if below is not None:
        assert base is not None
        manifest = find(below.source)
        name = BaseName(
            recorded_path(str(base), str(path)) if place is None else place,
            below.step,
            content_digest({k: digest_tensor(below, i) for k, i in below.tensors.items()}),
            "" if manifest is None else manifest_digest(manifest),
        )
    kept = [
        entry._replace(form=form)
        for entry, form in zip(packed.index.objects, forms or ["bytes"] * 99, strict=False)
    ]
    index = replace(packed.index, base=name, step=step, objects=kept)
    write(path, replace(packed, index=index))
    return path


def write(path: Path, packed: Packed) -> None:
    """Write the files of a delta."""
    path.mkdir(parents=True)
    for file, data in packed.files.items():
        (path / file).write_bytes(data)
    (path / NAME).write_bytes(packed.index.dump())


def put(store: Store, folder: Path, under: str = "") -> None:
    """Copy a directory's files into a store."""
    for file in folder.iterdir():
        store.put(f"{under}/{file.name}" if under else file.name, file.read_bytes())


def index_of(path: Path) -> DeltaIndex:
    """Read the index of a delta on disk."""
    return parse_index((path / NAME).read_bytes())


def run_of(root: Path, steps: int) -> list[State]:
    """Write a full checkpoint and deltas based on each other; return the states by step, from 0."""
    states = []
    for step, weights in enumerate(training(steps)):
        whole = save_full(root / "whole" / f"step-{step}", weights)
        states.append(state_at(open_checkpoint(whole)))
        if step == 0:
            save_full(root / "step-0", weights)
        else:
            pack_delta(root / f"step-{step}", states[step], root / f"step-{step - 1}", step=step)
    return states
