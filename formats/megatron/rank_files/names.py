"""The files of one legacy rank, and how Megatron is to be started where they do not hold all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ftckpt.findings import Finding, finding
from ftckpt.formats.megatron.job.whole_model import namespace
from ftckpt.formats.megatron.optimizer.write_distributed import DistributedWriter
from ftckpt.formats.torch_files.write_tree import Tensor, save
from ftckpt.transfer.layout import OutputFile

from .contents import RankModel
from .grid import OPTIMIZER, WEIGHTS

# Weights by chunk and name, as a distributed optimizer's buffers hold them.
Weights = Mapping[tuple[int, str], Tensor]


def files_of(
    folder: str,
    mine: RankModel,
    distributed: DistributedWriter | None,
    tree: Callable[[Weights], Any],
) -> list[OutputFile]:
    """Return the files of one rank, which torch.save is to write of trees.

    Args:
        folder: of the rank.
        mine: what it holds.
        distributed: lays out the distributed optimizer; None where there is none.
        tree: returns what the file of weights holds, given those that lie in buffers.
    """
    weights: Weights = {}
    files = []
    if distributed is not None:
        buffers = distributed.buffers(mine)
        weights = distributed.weights(buffers)
        files.append(_file(folder, OPTIMIZER, distributed.tree(buffers)))
    return [_file(folder, WEIGHTS, tree(weights)), *files]


def arguments_at(arguments: Mapping[str, Any], rank: int | None) -> Any:
    """Return the arguments of a job as one rank pickles them; it says which it is, where known."""
    known = "rank" in arguments and rank is not None
    return namespace({**arguments, "rank": rank} if known else arguments)


def _file(folder: str, name: str, tree: Any) -> OutputFile:
    return OutputFile(f"{folder}/{name}", save(tree, folder=name.removesuffix(".pt")))


def weights_alone() -> Finding:
    """Return the note of files without an optimizer's state."""
    what = (
        "these are the weights alone: start Megatron with --finetune, or with --no-load-optim and"
        " --no-load-rng"
    )
    return finding("note", what)


def seeded_anew() -> Finding:
    """Return the note of files without random streams."""
    what = (
        "random streams were not written, as no rank can go on with them: start Megatron with"
        " --no-load-rng, and each is seeded anew"
    )
    return finding("note", what)
