"""Read optimizer state of parameters one by one, for the files of the ranks.

A step is every parameter's own, or one for all: a number in the optimizer's object, a tensor in it,
or a tensor that the source lists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.dtypes import DTYPES, decode_scalar
from ftckpt.checkpoint.read_tensor import dense_strides, read_tensor
from ftckpt.errors import UnsupportedError
from ftckpt.formats.megatron.rank_files.contents import state_key
from ftckpt.formats.megatron.rank_files.tensor_names import LocalTensor
from ftckpt.formats.torch_files.values import TensorRef
from ftckpt.formats.torch_files.write_tree import CopiedTree, Storage, Tensor
from ftckpt.transfer.content import Content, Known, TargetTensor
from ftckpt.transfer.layout import Literal

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
