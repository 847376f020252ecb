"""The optimizer of a job that another format carried along, as torch_dist keeps it.

A store keeps an optimizer by parameter, and what all ranks share of it (groups with their settings,
the loss scale, one step) in the common state. Both forms that a job has are certain where the
source carried that state: flat buffers are not laid out here, so only whose groups they are counts.
Groups are matched by settings that no other trainer has, so without the job's own there is nothing
to write that Megatron would load.

Source: `DistributedOptimizer.sharded_state_dict` (`fully_sharded_model_space`) and
`Float16OptimizerWithFloat16Params.sharded_state_dict` in megatron/core/optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ftckpt.checkpoint import Kind
from ftckpt.formats.families.facts import arguments_of
from ftckpt.formats.megatron.job.common_state import job_state, not_carried
from ftckpt.formats.megatron.job.kept_state import KeptState
from ftckpt.formats.megatron.job.optimizer_tree import groups_in, is_muon, numbered
from ftckpt.formats.megatron.job.trained import is_distributed, moments_of, uncertain
from ftckpt.formats.megatron.job.whole_model import WholeModel
from ftckpt.formats.megatron.optimizer.per_rank import HALF
from ftckpt.formats.torch_files.write_tree import Tensor
from ftckpt.transfer.content import Content, TargetTensor

from .from_ranks import as_stored, require_one_step

_HINT = (
    "--to megatron --like EXAMPLE makes files of ranks, which then become megatron-dist; --only"
    " model writes the weights alone"
)


class TorchDistOptimizer(NamedTuple):
    """What is to be written of an optimizer."""

    root: Mapping[Any, Any]  # the state that all ranks share, its optimizers as a store has them
    optimizers: Mapping[Any, Mapping[Any, Any]]  # those, by number; one alone has the number None
    tensors: Sequence[TargetTensor]  # what they keep of parameters, under the model's own names
    placed: frozenset[str]  # keys of the source's tensors and names of its objects that this holds


def trained_of(content: Content, whole: WholeModel) -> TorchDistOptimizer | None:
    """Return the optimizer of a job; None where the source holds none.

    Args:
        content: what is written.
        whole: its model.

    Raises:
        UnsupportedError: the source does not carry the job's own groups, lacks a part of the state,
            or has made other numbers of steps for some parameters than for others.
    """
    if not whole.trained:
        return None
    if arguments_of(content.checkpoint).record is None:
        raise uncertain("the source does not carry the arguments of a job", hint=_HINT)
    state = job_state(content)
    optimizers = numbered(state.root.get("optimizer"))
    if not optimizers or not all(map(groups_in, optimizers.values())):
        raise uncertain("the source does not record the groups of its parameters", hint=_HINT)
    kept = KeptState(content, whole.trained, list(optimizers.values()))
    distributed = is_distributed(whole.layout.args, optimizers.values(), kept.steps, hint=_HINT)
    muons = next((n for n, one in enumerate(optimizers.values()) if is_muon(one)), None)
    for local in whole.locals():
        if local.kind is Kind.PARAM:
            masters = distributed or local.ref.dtype.name in HALF
            kept.of_parameter(local, None, masters=masters, moments=moments_of(local, muons))
    own = [key for key in content.tensors if key in kept.placed and _is_step(content, key)]
    require_one_step(content.checkpoint, own)
    common = Tensor.of(content.whole(own[0])) if own else None
    made = {}
    for (number, one), step in zip(optimizers.items(), kept.steps, strict=True):
        counted = (
            Tensor.of(content.whole(step.copies[0].key)) if isinstance(step, TargetTensor) else step
        )
        counted = common if counted is None else counted
        beside = None if distributed else {} if counted is None else {"common_step": counted}
        made[number] = as_stored(one, beside, distributed=distributed)
    tied = not whole.layout.args.flag("untie_embeddings_and_output_weights")
    repeated = not_carried(content, repeated=tied)
    tensors = [w for key, w in kept.tensors.items() if not key.endswith(".step")]
    return TorchDistOptimizer(
        state.root, made, tensors, frozenset({*kept.placed, *state.placed, *repeated})
    )


def _is_step(content: Content, key: str) -> bool:
    wanted = content.tensors[key]
    return wanted.component == "optimizer" and wanted.name.endswith(".step")
