"""Read optimizer state of parameters one by one, for the files of the ranks.

A step is every parameter's own, or one for all: a number in the optimizer's object, a tensor in it,
or a tensor that the source lists.

Check that an example shows its optimizer and fits the source; refuse it otherwise.

What is wrong here would load without an error: a count of steps that begins anew, moments of
another type, a tensor of the example among the source's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.dtypes import DTYPES, decode_scalar
from ftckpt.checkpoint.optimizer_states import KINDS
from ftckpt.checkpoint.read_tensor import dense_strides, read_tensor
from ftckpt.errors import UnsupportedError
from ftckpt.formats.megatron.rank_files.parts import state_key
from ftckpt.formats.megatron.rank_files.tensor_names import LocalTensor
from ftckpt.formats.pickles.walk import leaves
from ftckpt.formats.torch_files.values import Composite, SubclassRef, TensorRef
from ftckpt.formats.torch_files.write_tree import CopiedTree, Storage, Tensor
from ftckpt.transfer.content import Content, Known, TargetTensor
from ftckpt.transfer.layout import Literal

from .common_state import opened
from .groups import BufferForm, Optimizers
from .optimizer_tree import torchs

# A step that is the same for all parameters: a tensor, or whatever it was in the object.
Step = TargetTensor | CopiedTree | int | float | None
_COMMON = "common_step"
_LISTED = re.compile(r"(?:^|\.)optimizer\.(?:(\d{1,4})\.)?(?:optimizer\.)?state\.common_step$")
ADAMS = ("exp_avg", "exp_avg_sq")
MUONS = ("momentum_buffer",)
# What stands for a tensor that is found by its name.
PLACE = TensorRef("", 0, (), (), DTYPES["float32"])


class KeptState:
    """The state of parameters."""

    def __init__(
        self,
        content: Content,
        trained: Mapping[str, TargetTensor],
        optimizers: Sequence[Mapping[Any, Any]],
    ) -> None:
        """Take what there is.

        Args:
            content: what is written.
            trained: what the source keeps of parameters, by its keys, under the model's own names.
            optimizers: their trees, as `opened` gives them.
        """
        # what was taken, by key, under the names of the model that is written
        self.tensors: dict[str, TargetTensor] = {}
        self.known: dict[str, Known] = {}  # steps that the source keeps in an object, by key
        self.placed: set[str] = set()  # keys of the source's tensors that were taken
        self._content = content
        self._kept = {w.key: (key, w) for key, w in trained.items()}
        # what each of the source's optimizers counts for all of its parameters
        self.steps = self._shared_steps(optimizers)

    def has(self, key: str) -> bool:
        """Return whether the source has a tensor of this key."""
        return key in self._kept

    def count(self) -> float | None:
        """Return how many steps all parameters have made; None where that is not one number."""
        values: set[float | None] = set()
        checkpoint = self._content.checkpoint
        for key, (source, wanted) in self._kept.items():
            if wanted.kind is Kind.OTHER and key.endswith(".step") and prod(wanted.shape) == 1:
                values.add(decode_scalar(wanted.dtype, read_tensor(checkpoint, source)))
        for step in self.steps:
            if isinstance(step, TargetTensor):
                data = read_tensor(checkpoint, step.copies[0].key)
                values.add(decode_scalar(step.dtype, data))
            elif type(step) is CopiedTree and isinstance(step.value, TensorRef):
                known = self._read(step.value, step)
                values.add(decode_scalar(known.dtype, known.data))
            elif isinstance(step, (int, float)):
                values.add(float(step))
        return values.pop() if len(values) == 1 else None

    def of_parameter(
        self,
        local: LocalTensor,
        step: Step,
        *,
        masters: bool,
        counts: bool = True,
        moments: Sequence[str] = ADAMS,
    ) -> dict[str, Any]:
        """Return what is kept of a parameter by leaf; tensors are found by name elsewhere.

        Args:
            local: the parameter.
            step: counted for all; its own goes before.
            masters: whether there is an fp32 copy of it.
            counts: whether its step stands beside the moments.
            moments: leaves that the optimizer keeps of it.

        Raises:
            UnsupportedError: the source lacks a part of it.
        """
        made: dict[str, Any] = {}
        key = state_key(local.name, "step")
        if not counts:
            self.placed.update(self._kept[key][:1] if self.has(key) else ())
        elif self.has(key):
            made["step"] = self.take(key)
        elif isinstance(step, TargetTensor):
            self.tensors[key] = step._replace(
                component="optimizer", kind=Kind.OTHER, name=f"{local.name}.step"
            )
            made["step"] = PLACE
        elif step is not None:
            made["step"] = step
            if type(step) is CopiedTree and isinstance(step.value, TensorRef):
                known = self.known[key] = self._read(step.value, step)
                # Of its own for each parameter: torch's optimizers count in place, and a tensor
                # that all share would count once for each of them.
                storage = Storage((Literal(known.data),))
                made["step"] = Tensor(storage, known.dtype, known.shape, dense_strides(known.shape))
        if masters:
            self.take(state_key(local.name, "param"))
        for leaf in moments:
            made[leaf] = self.take(state_key(local.name, leaf))
        return made

    def take(self, key: str) -> TensorRef:
        """Take one tensor.

        Raises:
            UnsupportedError: the source lacks it.
        """
        if key not in self._kept:
            raise UnsupportedError(
                f"the source has no {key}, and Megatron keeps one of every parameter",
                tensor=key,
                hint="--only model writes the weights alone",
            )
        source, wanted = self._kept[key]
        self.tensors[key] = wanted
        self.placed.add(source)
        return PLACE

    def _shared_steps(self, optimizers: Sequence[Mapping[Any, Any]]) -> list[Step]:
        listed: dict[int, TargetTensor] = {}
        for key, wanted in self._content.tensors.items():
            match = _LISTED.search(wanted.name)
            shown = wanted.component.startswith("extra:") and prod(wanted.shape) == 1
            if match is not None and shown:
                listed[int(match[1] or 0)] = wanted
                self.placed.add(key)
        found: list[Step] = []
        for number, one in enumerate(optimizers):
            state = torchs(one).get("state")
            held = state.get(_COMMON) if isinstance(state, dict) else None
            found.append(held if held is not None else listed.get(number))
        return found

    def _read(self, ref: TensorRef, held: CopiedTree) -> Known:
        if ref.numel != 1:
            what = f"the step of the optimizer has the shape {list(ref.shape)} and is not a number"
            raise UnsupportedError(what, hint="--only model writes the weights alone")
        storage = held.storages[ref.key]
        size = ref.dtype.nbytes(1)
        start = size * ref.storage_offset
        if storage.inline is not None:
            data = storage.inline[start : start + size]
        else:
            data = self._content.checkpoint.source.read(*ref.span(held.storages))
        return Known(ref.shape, ref.dtype, bytes(data))


TENSORS = (TensorRef, SubclassRef, Composite)
_SCHEDULES = ("opt_param_scheduler", "lr_scheduler")  # the latter in old versions
LATER = "let the job save one with its optimizer, after a step"


def require_leaves(form: BufferForm) -> None:
    """Refuse buffers of another form than Adam's, and tensors inside what else they hold.

    Raises:
        UnsupportedError: they lack a tensor that every Adam keeps, or hold more than tensors.
    """
    kinds = {KINDS.get(str(k)) for k, v in form.leaves.items() if isinstance(v, TENSORS)}
    for kind in (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ):
        if kind not in kinds:
            raise UnsupportedError(f"the buffers of the example hold no {kind.value}", hint=LATER)
    plain = {k: v for k, v in form.leaves.items() if not isinstance(v, TENSORS)}
    require_plain(opened(plain, form.storages), "distrib_optim")


def require_steps(found: Optimizers) -> None:
    """Refuse an example that does not show where its optimizer counts steps.

    A fused Adam counts in its groups, and begins to with its first step: without the count it takes
    the moments of a long run for those of its first step, and says nothing. torch's counts beside
    the moments, and misses it.

    Raises:
        UnsupportedError: no group of an optimizer counts them, and neither do the parameters.
    """
    if any("step" in state for state in found.states.values()):
        return
    torchs_own = found.plain and not any(found.states.values())
    for number, groups in enumerate(found.groups):
        if any("step" in group for group in groups):  # one without parameters has none
            continue
        if not torchs_own or any("bias_correction" in group for group in groups):
            raise UnsupportedError(
                f"optimizer {number} of the example does not show where it counts steps",
                hint=LATER,
            )


def require_schedule(shown: Mapping[Any, Any], root: Mapping[Any, Any]) -> None:
    """Refuse a source without a schedule: Megatron loads no optimizer without it.

    Args:
        shown: what a file of the example holds, by key.
        root: what the source carries of that.

    Raises:
        UnsupportedError: the example has one, and the source has none.
    """
    if any(key in shown for key in _SCHEDULES) and not any(key in root for key in _SCHEDULES):
        raise lacking(_SCHEDULES[0])


def require_same_types(local: LocalTensor, shown: Mapping[Any, Any], kept: KeptState) -> None:
    """Refuse state of other types than the example's: the job would load neither, or round it.

    Raises:
        UnsupportedError: a tensor that is kept of a parameter is of another type.
    """
    for leaf, value in shown.items():
        key = state_key(local.name, str(leaf))
        wanted = kept.tensors.get(key)
        if leaf == "step" or wanted is None or not isinstance(value, TensorRef):
            continue
        if wanted.dtype != value.dtype:
            raise UnsupportedError(
                f"{key} is {wanted.dtype.name} in the source and {value.dtype.name} in the example",
                hint="--only model writes the weights alone",
                tensor=key,
            )


def require_plain(value: Any, where: str) -> None:
    """Refuse tensors of the example: what they hold is never used.

    Raises:
        UnsupportedError: there is one, and the source has nothing in its place.
    """
    for path, held in leaves(value):
        if type(held) is CopiedTree:
            raise lacking(".".join(map(str, (where, *path))))


def lacking(what: str, tensor: str | None = None) -> UnsupportedError:
    """Return how to say that the example has what the source has nothing in place of."""
    return UnsupportedError(
        f"the source has no {what}, which the example has",
        hint="--only model writes the weights alone",
        tensor=tensor,
    )
