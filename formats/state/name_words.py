"""Words in the names of files: what a part holds, and when or why something was saved."""

from __future__ import annotations

import re

OPTIMIZERS = frozenset({"optimizer", "optimizers", "optim", "optims", "opt"})
STATES = frozenset(
    {
        "scheduler", "schedulers", "sched", "schedule", "scaler", "rng", "random", "dataloader",
        "loader", "sampler", "reader", "train", "trainer", "training", "state", "states", "extra",
        "progress", "counter", "counters", "callbacks", "loop", "loops", "normalizer",
    }
)  # fmt: skip
VERSIONS = frozenset(
    {
        "best", "last", "latest", "final", "old", "new", "good", "bad", "broken", "backup", "bak",
        "copy", "tmp", "temp", "step", "epoch", "ep", "iter", "iteration", "initial", "init",
        "release", "checkpoint", "checkpoints", "ckpt", "ckpts", "emergency",
    }
)  # fmt: skip
# Numbers that say which piece of one save a file is: the rank, the shard, and how many there are.
OF_PIECE = re.compile(
    r"(?:(?<![a-z])(?:rank|tp|pp|dp|cp|ep|mp|sdp|exp|zero|shard|part|stage|worker|node)[-_=]?\d+"
    r"|[-_]?of[-_]?\d+|\d+[-_]of[-_]\d+)",
    re.IGNORECASE,
)
