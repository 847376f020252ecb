"""The parameters of a DeepSpeed job's model, and what its files store of them at another stage.

A job that goes from stage 3 to a lower one gets weights: its masters in the compute type of the
placeholders, which is how DeepSpeed makes its weights from masters after every step. One that goes
to stage 3 has no place for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ftckpt.checkpoint import Kind, tensor_key
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.states import ModelState
from ftckpt.transfer.content import Content, TargetTensor

# What DeepSpeed's converter makes of buffers, of frozen and of shared parameters.
COPIES = "extra:universal"


class Models:
    """The parameters of the source's model, by name, and what becomes of them at another stage.

    Attributes:
        states: what the first file of each model-parallel rank says.
        shared: name that is not stored -> name of the same parameter that is.
        trained: names that the optimizer knows, and those that are shared with one of them.
        called: name -> what the optimizer calls the parameter, where a wrapper adds to it.
    """

    def __init__(self, checkpoint: DeepSpeedCheckpoint, states: Mapping[int, ModelState]) -> None:
        self._checkpoint = checkpoint
        self.states = states
        self.shared = {a: b for state in states.values() for a, b in state.shared.items()}
        self.called = {a: b for state in states.values() for a, b in state.called.items()}
        known = {n for rank in checkpoint.groups.values() for group in rank for n in group}
        self.trained = known | {name for name, owner in self.shared.items() if owner in known}

    def content(self, content: Content, before: int, after: int) -> Content:
        """Return the content that a job of another stage stores.

        Args:
            content: what is to be written.
            before: stage of the source.
            after: stage of the result.
        """
        content = content.with_tensors(self._whole(content))
        if after == 3:
            kept = [w for w in content.tensors.values() if not self._is_trained_weight(w)]
            return content.with_tensors(kept)
        if before != 3:
            return content
        made = {wanted.key: wanted for wanted in self._cast_masters(content)}
        tied = {n: owner for n, owner in self.shared.items() if {n, owner} <= made.keys()}
        return replace(
            content, tensors={**made, **content.tensors}, aliases={**content.aliases, **tied}
        )

    def _whole(self, content: Content) -> Iterable[TargetTensor]:
        """Yield the tensors of a job's own files, which a universal checkpoint has otherwise.

        There a vocabulary has lost its padding, which is zeros, and there are copies of weights.
        """
        for wanted in content.tensors.values():
            placed = self._checkpoint.placed.get(wanted.name)
            short = placed is not None and wanted.shape[1:] == placed.shape[1:] != ()
            if placed is not None and short and wanted.component == "optimizer":
                yield wanted._replace(shape=placed.shape)
            elif wanted.component != COPIES:
                yield wanted

    def _is_trained_weight(self, wanted: TargetTensor) -> bool:
        weight = wanted.component == "model" and wanted.kind is Kind.PARAM
        return weight and wanted.name in self.trained

    def _cast_masters(self, content: Content) -> Iterable[TargetTensor]:
        for state in self.states.values():
            for name, ref in state.weights.items():
                key = tensor_key("optimizer", Kind.MASTER, self.shared.get(name, name))
                master = content.tensors.get(key)
                if name in self.trained and name not in content.tensors and master is not None:
                    yield master._replace(
                        component="model", kind=Kind.PARAM, name=name, dtype=ref.dtype
                    )
