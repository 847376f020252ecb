"""Choose the part of two checkpoints to compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ftckpt.checkpoint.rules import name_pattern
from ftckpt.errors import NotFoundError
from ftckpt.storage.suggestions import hint_for_name
from ftckpt.transfer.content import Content, TargetTensor

from .report import part_of

STATE = "state"


class Choice(NamedTuple):
    """What is asked for; empty means all.

    Attributes:
        components: names of components or of parts of the optimizer (`exp_avg`), or `state` for
            what is not a tensor.
        tensors: patterns of keys, `*` for any text. With patterns the other state is left out.
        layout: whether state that follows the grid of ranks counts as a difference.
    """

    components: Sequence[str] = ()
    tensors: Sequence[str] = ()
    layout: bool = False

    @property
    def state(self) -> bool:
        """Whether the non-tensor state is compared."""
        return not self.tensors and (not self.components or STATE in self.components)

    def keys(self, ours: Content, theirs: Content) -> frozenset[str]:
        """Return the keys of the tensors that are compared, on both sides.

        Raises:
            NotFoundError: a component or a pattern that neither checkpoint has anything of, or no
                tensor is of both.
        """
        both = {**ours.tensors, **theirs.tensors}
        both |= {key: both[o] for c in (ours, theirs) for key, o in c.aliases.items() if o in both}
        kept = set(both)
        if self.components:
            names = {key: _names(wanted) for key, wanted in both.items()}
            known = set().union(*names.values()) | {STATE}
            hint = f"they hold {', '.join(sorted(known))}"
            _require(self.components, known, hint, ours, theirs)
            kept = {key for key, own in names.items() if not own.isdisjoint(self.components)}
        if self.tensors:
            found: set[str] = set()
            for text in self.tensors:
                pattern = name_pattern(text)
                matched = {key for key in both if pattern.fullmatch(key)}
                if not matched:
                    hint = hint_for_name(text, both)
                    hint = hint or "`ftckpt inspect --tensors` lists the names"
                    _require([text], (), hint, ours, theirs)
                found |= matched
            if not kept & found:
                both_asked = f"{' or '.join(self.tensors)} in {' or '.join(self.components)}"
                _require([both_asked], (), "a tensor is of one component alone", ours, theirs)
            kept &= found
        return frozenset(kept)


def _names(wanted: TargetTensor) -> frozenset[str]:
    """Return what a tensor's component may be called."""
    component = wanted.component
    return frozenset((component, component.partition(":")[0], part_of(component, wanted.kind)))


def _require(
    asked: Sequence[str], known: Iterable[str], hint: str, ours: Content, theirs: Content
) -> None:
    for name in asked:
        if name not in known:
            urls = " nor ".join(content.checkpoint.source.url for content in (ours, theirs))
            raise NotFoundError(f"neither {urls} has anything of {name}", hint=hint)
