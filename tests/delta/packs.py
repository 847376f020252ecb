"""Deltas in files: checkpoints of raw bytes or of real formats, packed as the verb packs them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ftckpt.checkpoint import Checkpoint
from ftckpt.delta.pack.assemble import PackOptions
from ftckpt.delta.pack.report import PackReport
from ftckpt.discovery.resolve import open_target
from ftckpt.formats.catalog import FORMATS
from ftckpt.formats.delta.pack import pack_checkpoint
from ftckpt.storage import StoreOptions
from ftckpt.transfer.content import Content
from ftckpt.transfer.read.elements import Gatherer
from ftckpt.verification import VerifyOptions, verify
from ftckpt.workers import Work

STORES = StoreOptions(retry_seconds=5)


def opened(place: Path | str) -> Checkpoint:
    """Open the one checkpoint at a place."""
    return open_target(str(place), FORMATS, STORES).open()


def pack_places(
    base: Path | str | None,
    target: Path | str,
    out: Path | str,
    *,
    check: bool = False,
    jobs: int = 2,
    **more: Any,
) -> PackReport:
    """Pack what lies at a place against what lies at another."""
    return pack_checkpoint(
        opened(target),
        None if base is None else opened(base),
        str(out),
        options=PackOptions(work=Work(threads=jobs), **more),
        store_options=STORES,
        check=(lambda one, seen: verify(one, VerifyOptions(seen=seen))) if check else None,
    )


def tensors_of(checkpoint: Checkpoint) -> Mapping[str, bytes]:
    """Return the bytes of every tensor."""
    content, gatherer = Content.of(checkpoint), Gatherer(checkpoint)
    found = {}
    for key in checkpoint.tensors:
        shard = content.whole(key)
        view = bytearray(shard.nbytes)
        gatherer.fill(shard, 0, shard.numel, memoryview(view))
        found[key] = bytes(view)
    gatherer.close()
    return found


def save_steps(folder: Path, count: int, *, rows: int = 40, optimizer: bool = True) -> list[Path]:
    """Save some steps of a small AdamW training, each a safetensors folder."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(5)
    f = np.float32
    w: dict[str, Any] = {
        f"layers.{i}.weight": rng.standard_normal((rows, 30)).astype(f) for i in range(3)
    }
    m = {name: np.zeros_like(value) for name, value in w.items()}
    v = {name: np.zeros_like(value) for name, value in w.items()}
    places = []
    for step in range(1, count + 1):
        for name in w:
            g = rng.standard_normal(w[name].shape).astype(f)
            m[name] = m[name] + (g - m[name]) * f(0.1)
            v[name] = v[name] * f(0.95) + f(0.05) * (g * g)
            root = np.sqrt(v[name]) / f((1 - 0.95**step) ** 0.5) + f(1e-8)
            w[name] = w[name] * f(0.9999) + (m[name] * f(-1e-3 / (1 - 0.9**step))) / root
        place = folder / f"step-{step}"
        place.mkdir(parents=True)
        frozen = {"frozen": np.arange(100, dtype=np.float64), "count": np.array(step)}
        save_file({**w, **frozen}, place / "model.safetensors")
        if optimizer:
            (place / "optimizer").mkdir()
            state = {f"exp_avg.{n}": m[n] for n in w} | {f"exp_avg_sq.{n}": v[n] for n in w}
            save_file(state, place / "optimizer" / "optimizer.safetensors")
        places.append(place)
    return places


def forget(place: Path) -> None:
    """Remove a checkpoint."""
    shutil.rmtree(place)
