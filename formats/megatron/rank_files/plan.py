"""How the files of a job's ranks are written."""

from __future__ import annotations

from dataclasses import dataclass

from ftckpt.checkpoint.rules import Rules
from ftckpt.findings import finding
from ftckpt.formats.megatron.job.description import MegatronJob
from ftckpt.formats.megatron.job.groups import JobOptimizer
from ftckpt.formats.megatron.job.layout import TargetLayout
from ftckpt.formats.megatron.job.module_order import Order

from .grid import Arguments
from .states import OwnState, SharedState

# Notes of files without an optimizer's state, and of those without random streams.
WEIGHTS_ALONE = finding(
    "note",
    "these are the weights alone: start Megatron with --finetune, or with --no-load-optim and"
    " --no-load-rng",
)
SEEDED_ANEW = finding(
    "note",
    "random streams were not written, as no rank can go on with them: start Megatron with"
    " --no-load-rng, and each is seeded anew",
)


@dataclass(kw_only=True)
class RankFilesPlan:
    """How a job's files are written."""

    # its content is that of the target: with its padding, and with the optimizer's state
    job: MegatronJob
    target: TargetLayout  # the layout that is written
    order: Order  # of the modules on every stage of the job's layout
    rules: Rules  # how tensors are cut
    args: Arguments  # of the job that is to load the files
    # whether a last stage without an output layer of its own has a copy of the embedding
    tied: bool
    optimizer: JobOptimizer | None  # None where none is laid out
    states: SharedState | OwnState  # of its ranks
