"""Keep the state of single ranks for a job of another layout, as far as it can be used.

Random states are by stage and tensor rank. Megatron asks for them where the arguments in a
checkpoint have the tensor ranks and stages of the run, and does not start where they are missing;
`no_save_rng` among the arguments keeps it from asking, and it seeds anew. With other sizes it never
asks. So they are left out where the sizes change, and the arguments say so.

Source: `load_checkpoint` in megatron/training/checkpointing.py (core 0.9 to 0.19).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ftckpt.findings import Finding, finding
from ftckpt.formats.megatron.job.layout import TargetLayout
from ftckpt.formats.megatron.job.optimizer_tree import RESHARDABLE, SHARDING
from ftckpt.formats.megatron.rank_files.grid import Arguments

from .plan import StorePlan

_RERUN, _RERUN_OBJECT = "rerun_state_machine", "rerun_state_machine_state/"
# Digests of the source's files, which Megatron checks with `--verify-integrity`.
_INTEGRITY = "integrity.json"


class RankState:
    """The decision for one job."""

    def __init__(self, plan: StorePlan, target: TargetLayout) -> None:
        self._plan = plan
        self._old, self._new = plan.job.layout.grid, target.grid
        self._same_stages = (self._old.tp, self._old.pp) == (self._new.tp, self._new.pp)
        self._same_ranks = self._same_stages and self._old.dp == self._new.dp
        self._args = plan.common.args if plan.common is not None else Arguments()
        each = self._args.flag("data_parallel_random_init")
        self._random = self._same_ranks if each else self._same_stages

    def has(self, name: str) -> bool:
        """Return whether an object is kept."""
        if name in self._plan.random:
            return self._random
        return self._same_ranks or not name.startswith(_RERUN_OBJECT)

    def finish(self, said: dict[str, Any]) -> None:
        """Make the common state say what the store holds.

        Args:
            said: further arguments.
        """
        common = self._plan.common
        if common is None:
            return
        if not self._same_ranks:
            common.remove((_RERUN,))
        known = {
            "ckpt_format": "torch_dist",
            "use_dist_ckpt": True,
            "dist_ckpt_optim_fully_reshardable": any(
                one.get(SHARDING) == RESHARDABLE for one in self._plan.optimizers.values()
            ),
        }
        said = said | {n: v for n, v in known.items() if self._args.get(n) is not None}
        if not self._same_stages:  # what Megatron compares with the run
            said["tensor_model_parallel_size"] = self._new.tp
            said["pipeline_model_parallel_size"] = self._new.pp
        if not (self._random and self._plan.random):
            said["no_save_rng"] = True
        tensors = self._plan.job.content.tensors.values()
        if not any(wanted.component == "optimizer" for wanted in tensors):
            said["no_save_optim"] = True
        common.change_arguments(said)

    def notes(self) -> Iterator[Finding]:
        """Yield what the user must know."""
        old, new, random = self._old, self._new, sorted(self._plan.random)
        if random and not self._random:
            yield finding(
                "note",
                f"RNG states: dropped, they are of tp {old.tp}, pp {old.pp}, dp {old.dp}; for tp"
                f" {new.tp}, pp {new.pp}, dp {new.dp} Megatron seeds anew from --seed",
                tensor=random[0],
            )
        elif random and not self._same_ranks:
            yield finding(
                "note",
                "RNG states: kept for each tensor rank and stage; all data-parallel ranks of one"
                " load the same, as Megatron does itself",
                tensor=random[0],
            )
        if not self._same_ranks and any(n.startswith(_RERUN_OBJECT) for n in self._plan.objects):
            yield finding("note", "the state of reruns: dropped, it is of the ranks that saved it")
        if not self._same_ranks and self._args.get("consumed_train_samples") is not None:
            yield finding(
                "note",
                "position in the data: kept as consumed_train_samples, from which Megatron's own"
                " data loader goes on; another loader must be told",
            )
        if _INTEGRITY in self._plan.job.content.checkpoint.source.entries:
            yield finding(
                "note",
                f"{_INTEGRITY}: dropped, it has digests of the source's files; load without"
                " --verify-integrity",
                file=_INTEGRITY,
            )
