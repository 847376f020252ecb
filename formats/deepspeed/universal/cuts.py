"""Read how a job is to cut a parameter over tensor slices from a universal checkpoint.

The rules are the source's own (`universal_checkpoint_info`, Megatron-DeepSpeed's names) and the
user's. Where there are none DeepSpeed cuts along the first axis, and so says its converter.

Source: `checkpoint/ds_to_universal.py` (`merge_tp_slices`), `checkpoint/universal_checkpoint.py`
(`load_hp_checkpoint_state`) of DeepSpeed 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.coverage import intersection
from ftckpt.errors import UnsupportedError
from ftckpt.formats.deepspeed.slices import CutOf, SliceCut, cuts_of
from ftckpt.formats.deepspeed.states import ModelState
from ftckpt.formats.deepspeed.zero.partition import Shape
from ftckpt.formats.families.vocabulary import is_vocabulary
from ftckpt.formats.pickles.write import Call, Global
from ftckpt.transfer.content import Copy, TargetTensor
from ftckpt.transfer.layout import LayoutRequest

_SUB_SHAPE = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")


class ParameterCuts:
    """How jobs cut the parameters of a source.

    Attributes:
        known: whether any rule says so.
        vocabulary: patterns of the names whose rows are a vocabulary's, as the source records them.
    """

    def __init__(self, state: ModelState | None, request: LayoutRequest) -> None:
        """Take the rules.

        Args:
            state: a model's file of a DeepSpeed source; None for other sources.
            request: may have a table of rules and the true size of the vocabulary.
        """
        self._cut_of: CutOf | None = None
        if state is not None:
            self._cut_of = cuts_of(state, request.rules, with_maps=False)
        self._rules = request.rules
        info = state.info if state is not None else None
        self._info = info if info is not None else {}
        self.known = request.rules is not None or info is not None
        patterns = self._info.get("vocabulary_parameter_patterns")
        texts = patterns if isinstance(patterns, (list, tuple)) else ()
        self.vocabulary = tuple(text for text in texts if isinstance(text, str))
        size = request.true_vocab_size or self._info.get("original_vocab_size")
        self._rows = size if type(size) is int else None

    def how(self, name: str, shape: Shape) -> dict[str, Any]:
        """Return what stands beside a parameter in each of its files."""
        cut = self._cut(name, shape)
        found: dict[str, Any] = {}
        if cut.axis is not None and len(cut.widths or cut.blocks) > 1:
            if cut.axis == 0 and cut.blocks == (1, 1):
                found = {"cat_dim": 0, "param_n_sub_params": 2}
            else:
                found = {"sub_param_shape": _sub_shape(name, cut, shape)}
        elif cut.axis is not None:
            found = {"cat_dim": cut.axis}
        return {**found, **({"vocab_tensor": True} if self._is_vocabulary(name) else {})}

    def _cut(self, name: str, shape: Shape) -> SliceCut:
        if self._cut_of is not None:
            try:  # of two slices: for one there is nothing to cut
                return self._cut_of(name, [shape, shape])
            except UnsupportedError:
                return SliceCut(0)
        rule = None if self._rules is None else self._rules.get(name)
        return SliceCut(0) if rule is None else SliceCut(rule.split.axis, blocks=rule.split.blocks)

    def _is_vocabulary(self, name: str) -> bool:
        return self._rows is not None and any(re.match(text, name) for text in self.vocabulary)

    def padded(self, wanted: TargetTensor, shape: Shape) -> TargetTensor | None:
        """Return a vocabulary's tensor with the padding of another shape; None where it is none.

        Args:
            wanted: with padding of its own, or none.
            shape: that it is to have.
        """
        rows, has = self._rows, wanted.shape
        known = self._is_vocabulary(wanted.name) or is_vocabulary(wanted.name)
        if rows is None or not known or has[1:] != shape[1:]:
            return None
        if not has or not shape or min(has[0], shape[0]) < rows:
            return None
        return (_cut_off(wanted, rows) if has[0] > rows else wanted)._replace(shape=shape)

    def without_padding(self, tensors: Iterable[TargetTensor]) -> Iterator[TargetTensor]:
        """Yield tensors, masters and moments of a vocabulary without the rows of its padding."""
        for wanted in tensors:
            rows = self._rows
            padded = (
                wanted.component == "optimizer"
                and self._is_vocabulary(wanted.name)
                and rows is not None
                and bool(wanted.shape)
                and wanted.shape[0] > rows
            )
            yield _cut_off(wanted, rows) if padded and rows is not None else wanted


def _cut_off(wanted: TargetTensor, rows: int) -> TargetTensor:
    shape = (rows, *wanted.shape[1:])
    kept = []
    for copy in wanted.copies:
        shared = intersection(Box.whole(shape), copy.box)
        if shared is not None and shared.volume:
            source = Box(copy.source.offsets, shared.sizes)  # rows are cut off at the end alone
            kept.append(Copy(shared, copy.key, source))
    return wanted._replace(shape=shape, copies=tuple(kept))


def _sub_shape(name: str, cut: SliceCut, shape: Shape) -> Call:
    """Return DeepSpeed's record of the sub-blocks that an axis packs."""
    axis = cut.axis or 0
    unit = shape[axis] // sum(cut.blocks) if cut.blocks else 0
    sizes = tuple(map(sum, cut.widths)) or tuple(unit * weight for weight in cut.blocks)
    record = (*shape[:axis], sizes, *shape[axis + 1 :])
    state = {"patterns": [re.escape(name)], "shape": record, "partition_dim": axis}
    return Call(_SUB_SHAPE, state=state, new=True)
