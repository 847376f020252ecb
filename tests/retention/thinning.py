"""Roots whose milestones can be thinned: weights and moments in safetensors, made by hand."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from ftckpt.discovery import resolve as opening
from ftckpt.formats.catalog import FORMATS
from ftckpt.operations.thinning import WeightsAlone
from ftckpt.retention.apply.outcome import Thinned
from ftckpt.retention.apply.prepare import prepare
from ftckpt.retention.apply.run import apply
from ftckpt.retention.apply.thin import thin
from ftckpt.retention.policy import Policy
from ftckpt.retention.policy.plan import RetentionPlan
from ftckpt.storage import StoreOptions
from tests.retention.carrying import DAY, NOW

# Two to go on from, and every hundredth step; of those beyond the two newest the weights.
POLICY = Policy(keep_last=2, keep_every=100, thin_beyond=2)
KEEPS = ["--keep-last", "2", "--keep-every", "100", "--thin-after", "2"]


def safetensors(**tensors: bytes) -> bytes:
    """Return a file of one-dimensional tensors of float32."""
    head: dict[str, Any] = {}
    at = 0
    for name, data in tensors.items():
        head[name] = {
            "dtype": "F32", "shape": [len(data) // 4], "data_offsets": [at, at + len(data)],
        }  # fmt: skip
        at += len(data)
    header = json.dumps(head).encode()
    return len(header).to_bytes(8, "little") + header + b"".join(tensors.values())


def weights(step: int) -> bytes:
    return bytes([0, 0, step % 128, 62]) * 256


def save(root: Path, step: int, now: float = NOW) -> Path:
    """Save weights and moments; a day older for each hundred steps below a thousand."""
    path = root / f"step-{step}"
    (path / "optimizer").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(safetensors(w=weights(step)))
    moments = {"exp_avg.w": weights(step + 1), "exp_avg_sq.w": weights(step + 2)}
    (path / "optimizer/optimizer.safetensors").write_bytes(safetensors(**moments))
    date(path, now - (1000 - step) / 100 * DAY)
    return path


def date(path: Path, then: float) -> None:
    for each in (*path.rglob("*"), path):
        os.utime(each, (then, then))


def place_of(root: Path | str) -> opening.Place:
    return opening.locate(str(root), StoreOptions())


def plan_of(root: Path | str, policy: Policy = POLICY, now: float = NOW) -> RetentionPlan:
    return prepare(place_of(root), FORMATS, policy, now, weigh=WeightsAlone().weigh).plan


def gc(
    root: Path | str, policy: Policy = POLICY, now: float = NOW, **more: Any
) -> tuple[RetentionPlan, Thinned]:
    """Plan, drop and thin."""
    plan = plan_of(root, policy, now)
    apply(plan, place_of(root), FORMATS, actor="tester", now=lambda: now)
    return plan, thin_of(root, plan, now, **more)


def thin_of(root: Path | str, plan: RetentionPlan, now: float = NOW, **more: Any) -> Thinned:
    take = more.pop("take", WeightsAlone().take)
    more = {"differ": WeightsAlone().differ} | more
    return thin(plan, place_of(root), FORMATS, take, actor="tester", now=lambda: now, **more)


def shown(root: Path | str) -> dict[int | None, list[str]]:
    """Return what a reader finds of each step."""
    found: dict[int | None, list[str]] = defaultdict(list)
    for child in opening.open_root(place_of(root), FORMATS).children():
        found[child.candidate.step].append(child.candidate.path)
    return dict(found)
