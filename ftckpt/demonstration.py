"""Small real checkpoints to try things on: a tiny model, trained, saved by torch's own DCP.

The only part of the core that imports torch, and only inside its functions.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from typing import Any

from ftckpt.storage.local.oserror import translate

from .errors import ExistsError
from .own_files import TEMPORARY
from .packages import needing

# When the model is saved.
_STEPS = (10, 20, 30)
# Bytes of a save: the model and two moments of it.
_SIZE = 1 << 20


def train_and_save(directory: str) -> list[str]:
    """Train a model of 50,000 parameters and save it three times.

    Each checkpoint `step-N` holds model, AdamW moments, scheduler, step counter and the RNG states
    of Python, NumPy and torch, as torch.distributed.checkpoint writes them.

    Args:
        directory: is made; must not exist, or be empty.

    Returns:
        The paths of the checkpoints, in the order of their steps.

    Raises:
        ExistsError: the directory has content, or is none.
        MissingPackageError: torch is not installed.
        DeniedError, NoResourceError, UnavailableError: it cannot be made or written.
    """
    with needing("the demo, which trains a model and saves it,"):
        import numpy  # noqa: F401
        import torch
    _make_empty(directory)

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(128, 64),
        torch.nn.Linear(64, 256),
        torch.nn.GELU(),
        torch.nn.LayerNorm(256),
        torch.nn.Linear(256, 128),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=_STEPS[-1] * 2)
    paths = []
    for step in range(1, _STEPS[-1] + 1):
        tokens = torch.randint(0, 128, (16, 33))
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), (tokens[:, 1:] * 7 % 128).flatten()
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        if step in _STEPS:
            path = os.path.join(directory, f"step-{step}")
            _save(path, model, optimizer, scheduler, step)
            paths.append(path)
    return paths


def _make_empty(directory: str) -> None:
    try:
        os.makedirs(directory, exist_ok=True)
        held = os.listdir(directory)
    except OSError as error:
        raise translate(error, directory, "make") from error
    if held:
        raise ExistsError(
            f"{directory} exists and is not empty",
            hint="name another directory, or remove it yourself",
        )


def _save(path: str, model: Any, optimizer: Any, scheduler: Any, step: int) -> None:
    import random

    import numpy as np
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {
        "model": model_state,
        "optimizer": optimizer_state,
        "lr_scheduler": scheduler.state_dict(),
        "train_state": {"step": step, "tokens": step * 16 * 32},
        "rng": {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        },
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch remarks that there is one process
        writer = FileSystemWriter(path, thread_count=2)
        try:
            save(state, storage_writer=writer, no_dist=True)
        except BaseException:  # torch raises one that is not an Exception
            _require_room(os.path.dirname(path))
            raise


def _require_room(directory: str) -> None:
    """Write as much as a save has: torch says of a full disk that a position is unexpected.

    Raises:
        DeniedError, NoResourceError, UnavailableError: it cannot be written.
    """
    probe = os.path.join(directory, TEMPORARY + "probe")
    try:
        with open(probe, "wb") as file:
            file.write(bytes(_SIZE))
            os.fsync(file.fileno())
    except OSError as error:
        raise translate(error, directory, "write") from error
    finally:
        with suppress(OSError):
            os.unlink(probe)


def flip_bit(path: str, offset: int) -> None:
    """Flip the lowest bit of a byte in place, as a failing disk or cable does."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
