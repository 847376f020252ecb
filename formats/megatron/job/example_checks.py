"""Check that an example shows its optimizer and fits the source; refuse it otherwise.

What is wrong here would load without an error: a count of steps that begins anew, moments of
another type, a tensor of the example among the source's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.optimizer_states import KINDS
from ftckpt.errors import UnsupportedError
from ftckpt.formats.megatron.rank_files.contents import state_key
from ftckpt.formats.megatron.rank_files.tensor_names import LocalTensor
from ftckpt.formats.pickles.walk import leaves
from ftckpt.formats.torch_files.values import Composite, SubclassRef, TensorRef
from ftckpt.formats.torch_files.write_tree import CopiedTree

from .common_state import opened
from .groups import BufferForm, Optimizers
from .kept_state import KeptState

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
