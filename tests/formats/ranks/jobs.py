"""Rank files to test with: kept ones of real jobs, and plain ones that torch writes here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ftckpt.errors import ExitCode
from ftckpt.formats.ranks import Ranks
from ftckpt.formats.ranks.checkpoint import RanksCheckpoint
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from tests.conformance.formats import Truth, findings_of

DATA = Path(__file__).parents[2] / "data" / "ranks"
SHARED = Path(__file__).parents[4] / "shared" / "checkpoints"
JOBS = ("fsdp1", "tp_fsdp2", "hsdp")


def opened(path: Path) -> RanksCheckpoint:
    return Ranks().open(Source.directory(open_store(str(path))))


def truth_of(value: Any) -> Truth:
    import torch

    data = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return Truth(str(value.dtype).removeprefix("torch."), tuple(value.shape), data)


def key_of(name: str) -> str:
    """Return the key of a tensor as the generators of the truth name it."""
    if not name.startswith("optim:"):
        return name
    parameter, _, leaf = name.removeprefix("optim:").rpartition(".")
    return f"optimizer:{parameter}.step" if leaf == "step" else f"{leaf}:{parameter}"


def truth_file(path: Path, prefix: str = "") -> dict[str, Truth]:
    from safetensors.torch import load_file

    return {key_of(prefix + name): truth_of(v) for name, v in load_file(path).items()}


def rng_truth(folder: Path) -> dict[str, Truth]:
    import torch

    return {
        f"extra:rank{r}:rng.cpu": truth_of(torch.load(file, weights_only=False)["rng"]["cpu"])
        for r in range(4)
        if (file := folder / f"extra_state_world_size_4_rank_{r}.pt")
    }


def job(root: Path, name: str) -> Path:
    """Copy one job's step, without its truth."""
    shutil.copytree(DATA / name / "actor", root / name / "actor")
    return root / name


def write_plain(folder: Path, parts: list[Any], record: Any = None, name: str = "") -> Path:
    """Write `shard_%05d.pt` of each part."""
    import torch

    folder.mkdir(parents=True)
    for rank, part in enumerate(parts):
        torch.save(part, folder / (name or "shard_{:05d}.pt").format(rank, len(parts)))
    if record is not None:
        (folder / "metadata.json").write_text(json.dumps(record))
    return folder


def kinds(path: Path) -> set[str]:
    return {f.kind for f in findings_of(Ranks(), path) if f.code is not ExitCode.OK}
