"""The optimizer of a Megatron job as files of ranks keep it, where the source does not show it.

The form follows from the job's arguments: flat buffers (`use_distributed_optimizer`), or torch's
form with fp32 masters of 16-bit weights beside it. A flat buffer that is laid out otherwise than
the job lays it out would load without an error and be wrong, so whatever the layout depends on must
be recorded, or the state is refused.

Source: `get_megatron_optimizer`, `_get_param_groups` and `Float16OptimizerWithFloat16Params` in
megatron/core/optimizer; `get_parameter_state_dp_zero` in distrib_optimizer.py;
`wrap_model_chunks_with_ddp` in megatron/training/training.py (core 0.8 to 0.16).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.errors import UnsupportedError
from ftckpt.formats.families.facts import arguments_of
from ftckpt.formats.megatron.optimizer.per_rank import HALF, is_of_muon
from ftckpt.formats.megatron.optimizer.write_distrib_optim import LIKE, UNPADDED
from ftckpt.formats.megatron.rank_files.grid import Arguments
from ftckpt.formats.megatron.rank_files.tensor_names import LocalTensor

from .common_state import not_carried
from .groups import BufferForm, JobOptimizer, Optimizers, groups_like, regrouped
from .kept_state import ADAMS, MUONS, PLACE, KeptState, Step
from .layout import MegatronJob
from .optimizer_tree import ALL_MASTERS, MASTERS, SHARDING, groups_in, is_muon, numbered, torchs
from .registration import unordered

Groups = list[list[Mapping[Any, Any]]]
_DISTRIBUTED = "use_distributed_optimizer"
_IN_FP32 = "accumulate_allreduce_grads_in_fp32"
# Other optimizers than Adam's keep other state, and these arguments make other buffers of it.
_OTHERWISE = (
    "use_precision_aware_optimizer", "optimizer_cpu_offload", "use_megatron_fsdp",
    "use_custom_fsdp", "use_torch_fsdp2", "fp8_param_gather", "fp4_param_gather",
    "use_layer_wise_distributed_optimizer", "overlap_param_gather_with_optimizer_step",
)  # fmt: skip
_HINT = f"{LIKE}; --only model writes the weights alone"


@dataclass
class CarriedOptimizer:
    """The optimizer of a job, as a source has it that is not the job's own files."""

    trees: Mapping[Any, Mapping[Any, Any]]  # of each by number; one alone has the number None
    kept: KeptState  # what they keep of parameters
    distributed: bool  # whether the job keeps flat buffers


def carried_optimizer(job: MegatronJob, *, hint: str = _HINT) -> CarriedOptimizer | None:
    """Return the optimizer of a job whose state was read; None where the source holds none.

    Args:
        job: of which.
        hint: the way out.

    Raises:
        UnsupportedError: the source does not carry the job's own groups, or what it records does
            not agree on the form.
    """
    if not job.trained:
        return None
    if arguments_of(job.given.checkpoint).record is None:
        raise uncertain("the source does not carry the arguments of a job", hint=hint)
    trees = numbered(job.state.root.get("optimizer"))
    if not trees or not all(map(groups_in, trees.values())):
        raise uncertain("the source does not record the groups of its parameters", hint=hint)
    kept = KeptState(job.given, job.trained, list(trees.values()))
    distributed = is_distributed(job.args, trees.values(), kept.steps, hint=hint)
    return CarriedOptimizer(trees, kept, distributed)


def placed_with(job: MegatronJob, kept: KeptState) -> set[str]:
    """Return what of a source has its place when the state of all parameters was taken."""
    tied = not job.args.flag("untie_embeddings_and_output_weights")
    return {*job.state.placed, *kept.placed, *not_carried(job.given, repeated=tied)}


def optimizer_of(job: MegatronJob, carried: CarriedOptimizer, *, apart: bool) -> JobOptimizer:
    """Return the optimizer of a job by its arguments, and take its state.

    Args:
        job: of which.
        carried: its optimizer, as the source has it.
        apart: whether experts are to have an optimizer of their own.

    Raises:
        UnsupportedError: what the layout depends on is not recorded, or the state is neither
            Adam's nor Muon's.
    """
    return _Building(job, carried, apart=apart).made()


class _Building:
    """One optimizer on its way."""

    def __init__(self, job: MegatronJob, carried: CarriedOptimizer, *, apart: bool) -> None:
        self._args = job.args
        self._carried = carried
        self._parameters = {p.name: p for p in job.locals() if p.kind is Kind.PARAM}
        self._apart = job.layout.grid.experts_apart and len(carried.trees) > 1
        self._wanted_apart = apart
        self._experts = job.layout.experts > 0
        self._muons: int | None = None  # the number of Muon among chained optimizers
        self._regroups = apart != self._apart and self._experts

    def made(self) -> JobOptimizer:
        """Return all of it."""
        kept, distributed = self._carried.kept, self._carried.distributed
        optimizers = list(self._carried.trees.values())
        trees = [_tree(one, distributed=distributed) for one in optimizers]
        groups = [_groups(one, distributed=distributed) for one in optimizers]
        muons = muons_of(self._args, optimizers)
        if muons is not None and (self._apart or self._wanted_apart) and self._experts:
            raise uncertain("Muon's experts have an optimizer of their own")
        dense = len(trees) - self._apart
        if dense != (1 if muons is None else 2):
            raise uncertain(f"the source chains {len(trees)} optimizers")
        lost = unordered(self._parameters)
        if lost is not None:
            raise uncertain(f"where {lost} stands among the parameters is not known", lost)
        self._muons = muons
        grouped = self._regroups or not distributed  # flat buffers need no groups
        if grouped:
            _require_known_decay(self._args)
        places = {
            name: self._place(local, groups, certain=grouped)
            for name, local in self._parameters.items()
        }
        states: dict[str, Mapping[Any, Any]] = {
            name: kept.of_parameter(
                local,
                kept.steps[places[name][0]],
                masters=distributed or local.ref.dtype.name in HALF,
                moments=moments_of(local, muons),
            )
            for name, local in self._parameters.items()
        }
        found = Optimizers(
            trees=trees,
            groups=groups,
            places=places,
            states=states,
            wrapped="" if None in self._carried.trees else "list",
            dense=dense,
            plain=not distributed,
        )
        found = regrouped(found, apart=self._wanted_apart)
        form = self._form(listed=bool(found.wrapped)) if distributed else None
        return JobOptimizer(found, form, certain=True)

    def _form(self, *, listed: bool) -> BufferForm:
        args = self._args
        if not isinstance(args.get("overlap_grad_reduce"), bool):
            raise uncertain("the arguments do not record overlap_grad_reduce, and buckets need it")
        float32 = DTYPES["float32"]
        gradients: dict[DType, DType] = {}
        for dtype in {local.ref.dtype for local in self._parameters.values()} - {float32}:
            wide = args.get(_IN_FP32)
            if not isinstance(wide, bool):
                raise uncertain(f"the arguments do not record {_IN_FP32}, and buffers have a type")
            gradients[dtype] = float32 if wide else dtype
        leaves = dict.fromkeys(("param", "exp_avg", "exp_avg_sq"), PLACE)
        return BufferForm(listed, gradients | {float32: float32}, {**leaves, UNPADDED: 0}, {})

    def _place(self, local: LocalTensor, groups: Groups, *, certain: bool) -> tuple[int, int]:
        """Return the optimizer and the group of a parameter.

        Raises:
            UnsupportedError: it must be certain, and not one group alone is of its class.
        """
        apart = self._apart
        number = int(apart and local.expert)
        if self._muons is not None:
            number = self._muons if is_of_muon(local) else 1 - self._muons
        found = groups_like(local, groups[number], self._args, apart=apart)
        if certain and len(found) != 1:
            raise uncertain(f"in which group of parameters {local.name} is", local.name)
        return number, found[0] if found else 0


def is_distributed(
    args: Arguments, optimizers: Collection[Mapping[Any, Any]], steps: Sequence[Step], *, hint: str
) -> bool:
    """Return whether a job keeps flat buffers, if all that is recorded says the same.

    Args:
        args: of the job.
        optimizers: their trees.
        steps: what each counts for all of its parameters; flat buffers count in their groups.
        hint: the way out.

    Raises:
        UnsupportedError: it does not.
    """
    said = args.get(_DISTRIBUTED)
    shown: set[bool] = {
        *(True for one in optimizers if SHARDING in one),
        *(False for one in optimizers if _is_plain(one)),
        *(False for step in steps if step is not None),
        *((said,) if isinstance(said, bool) else ()),
    }
    if len(shown) != 1:
        what = "do not agree on" if shown else "do not record"
        why = f"the arguments and the optimizer's state {what} {_DISTRIBUTED}"
        raise uncertain(why, hint=hint)
    return shown.pop()


def _tree(one: Mapping[Any, Any], *, distributed: bool) -> Mapping[Any, Any]:
    """Return what a file holds of an optimizer, with places for what is parameters' own."""
    inner = torchs(one)
    empty: dict[Any, Any] = {} if distributed else {"state": {}}
    form = empty | {key: value for key, value in inner.items() if key != "state"}
    if inner is one:
        return form
    made = {key: form if value is inner else value for key, value in one.items()}
    for key in (SHARDING, *ALL_MASTERS):
        made.pop(key, None)
    return made if distributed else made | {MASTERS: []}


def _groups(one: Mapping[Any, Any], *, distributed: bool) -> list[Mapping[Any, Any]]:
    """Return the groups of an optimizer; torch's form lists their parameters, which come later."""
    groups = groups_in(one)
    if distributed:
        return groups
    return [{**group, "params": []} for group in groups]


def _is_plain(one: Mapping[Any, Any]) -> bool:
    """Return whether an optimizer's tree shows that it is not distributed."""
    inner = torchs(one)
    listed = any("params" in group for group in groups_in(one))
    return listed or bool(inner.get("state")) or MASTERS in one


def muons_of(args: Arguments, optimizers: Sequence[Mapping[Any, Any]]) -> int | None:
    """Return the number of Muon among chained optimizers; None where all are Adam.

    Raises:
        UnsupportedError: the state has a form of its own.
    """
    name = args.get("optimizer", "adam")
    for flag in _OTHERWISE:
        if args.get(flag) not in (None, False):
            raise uncertain(f"the job says {flag}, and keeps its state in another form")
    found = [number for number, one in enumerate(optimizers) if is_muon(one)]
    # Muon's own code sets the name to Adam's while it makes the rest.
    if found:
        if len(found) != 1 or len(optimizers) != 2 or name not in ("muon", "adam"):
            raise uncertain("Muon is not chained with one other optimizer")
        return found[0]
    if name != "adam":
        raise uncertain(f"the optimizer is {name}, whose state has a form of its own")
    return None


def moments_of(local: LocalTensor, muons: int | None) -> tuple[str, ...]:
    """Return the leaves that the optimizer of a parameter keeps; `muons` as `muons_of` gives it."""
    return MUONS if muons is not None and is_of_muon(local) else ADAMS


def _require_known_decay(args: Arguments) -> None:
    """Refuse jobs whose version of Megatron decides which parameters have no weight decay.

    Versions with `--no-weight-decay-cond-type` leave embeddings of an init of their own without it.
    """
    for name in ("no_weight_decay_cond_type", "embedding_init_method_std"):
        if args.get(name) is not None:
            raise uncertain(f"the job says {name}, which changes the groups of its parameters")


def uncertain(why: str, tensor: str | None = None, *, hint: str = _HINT) -> UnsupportedError:
    """Return the error about an optimizer that nothing here may lay out."""
    return UnsupportedError(
        f"in which form the job keeps its optimizer's state is not certain: {why}",
        hint=hint,
        tensor=tensor,
    )
