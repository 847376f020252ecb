"""Say in a few words what adapter a checkpoint holds: for `inspect`, from names and small files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import FtckptError
from ftckpt.findings import listed
from ftckpt.formats.huggingface.weights import is_of_adapter

from .bridge import has_adapter, is_alone, read_adapter
from .config import read_config


class AdapterDescription(NamedTuple):
    """What is told of an adapter.

    Attributes:
        kind: `LoRA`, `DoRA` or `canonical LoRA`.
        rank, alpha: of modules that no pattern names; None where nothing says it.
        targets: the trained modules, as the configuration names them.
        alone: whether the checkpoint holds no other weight.
    """

    kind: str
    rank: int | None
    alpha: float | None
    targets: Sequence[str]
    alone: bool

    def __str__(self) -> str:
        known = "rank and alpha are not recorded"
        if self.rank is not None:
            known = f"rank {self.rank}, alpha {self.alpha:g}"
        on = f", on {listed(list(self.targets), 8)}" if self.targets else ""
        alone = "; the adapter alone, without its base" if self.alone else ""
        return f"{self.kind}: {known}{on}{alone}"


def describe(checkpoint: Checkpoint) -> AdapterDescription | None:
    """Return what adapter a checkpoint holds; None if it holds none.

    A configuration that cannot be read says nothing here: the merge names what is wrong.
    """
    if has_adapter(checkpoint):
        alone = is_alone(checkpoint)
        try:
            found = read_adapter(checkpoint)
        except FtckptError:
            found = None
        if found is None:
            return AdapterDescription("LoRA", None, None, (), alone)
        return AdapterDescription(found.kind, found.rank, found.alpha, found.targets, alone)
    if not any(is_of_adapter(info.name) for info in checkpoint.tensors.values()):
        return None
    try:
        config = read_config(checkpoint)
    except FtckptError:
        return AdapterDescription("LoRA", None, None, (), True)
    said = (config.targets,) if isinstance(config.targets, str) else config.targets
    targets = (*(one for one in said if one), *config.parameters)
    kind = "DoRA" if config.dora else "LoRA"
    return AdapterDescription(kind, config.rank, config.alpha, targets, True)
