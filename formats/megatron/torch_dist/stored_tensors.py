"""Give the tensors of a job the names that they have on disk, and the objects of its modules.

A step that the optimizer keeps for each parameter becomes one for all, as torch_dist has it, if all
are equal. What modules keep beside their weights (`_extra_state`) becomes objects by layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from ftckpt.checkpoint import Kind
from ftckpt.formats.megatron.rank_files.grid import Arguments
from ftckpt.transfer.content import Content, TargetTensor

from .legacy_names import JobNames
from .names import StoredForm, state_name, stored_place
from .owners import experts_of, layers_of
from .packed import PackedTensors
from .plan import Blob

_STACKS = ("decoder.layers.", "encoder.layers.")


class StoredTensors:
    """The tensors under their names on disk."""

    def __init__(self, content: Content, args: Arguments, placed: Collection[str] = ()) -> None:
        """Take those of the model and of its optimizer.

        Args:
            content: under the names of the job's own modules.
            args: of the job.
            placed: keys of other tensors that have a place.
        """
        weights = {w.name for w in content.tensors.values() if w.component == "model"}
        self._spelling = JobNames(weights, args)
        self._packed = PackedTensors(args)
        self._homogeneous = _is_homogeneous(args)
        self.named: dict[str, TargetTensor] = {}  # by key
        self.steps: list[str] = []  # keys of the source's counters of steps
        self.unplaced: list[str] = []  # keys of what torch_dist has no place for
        for key, wanted in content.tensors.items():
            if wanted.component in ("model", "optimizer"):
                self._place(key, wanted, weights, content)
            elif key not in placed:
                self.unplaced.append(key)
        named = self.named.values()
        self.weights = dict.fromkeys(w.name for w in named if w.component == "model")

    def _place(self, key: str, wanted: TargetTensor, weights: set[str], content: Content) -> None:
        name = wanted.name
        if wanted.component == "optimizer" and wanted.kind is Kind.OTHER:
            weight, _, leaf = name.rpartition(".")
            if leaf == "step":
                self.steps.append(key)
                return
            of = content.tensors.get(weight)
            if of is None or of.shape != wanted.shape:
                self.unplaced.append(key)
                return
            stored = self._spelling.stored(weight)
            parts = [
                (state_name(stored + e, leaf), p) for e, p in self._packed.parts(stored, wanted)
            ]
        else:
            stored = self._spelling.stored(name)
            parts = [(stored + end, part) for end, part in self._packed.parts(stored, wanted)]
        for spelled, part in parts:
            named = part._replace(name=spelled)
            self.named[named.key] = named

    def form_of(self, weight: str) -> StoredForm:
        """Return how a weight is stored: stacked, where all layers of the model are alike."""
        return StoredForm(layers=self._homogeneous and weight.startswith(_STACKS))

    def extra_states(self, held: Iterable[tuple[str, Any]]) -> dict[str, Blob]:
        """Return what modules keep beside their weights, mostly nothing, by name of the object.

        Megatron up to core 0.18 does not load a store without them.

        Args:
            held: the name of each in the whole model, and its value; the first of a name counts.
        """
        sizes = (layers_of(self.weights), experts_of(self.weights))
        found: dict[str, Blob] = {}
        for own, value in held:
            whole = self._spelling.stored(own)
            found.setdefault(_object_of(whole, self.form_of(whole), sizes), Blob([value]))
        return found


def _is_homogeneous(args: Arguments) -> bool:
    """Return whether Megatron stacks the layers of such a job (`TransformerBlock`)."""
    for name in ("moe_layer_freq", "linear_attention_freq"):
        every = args.get(name, 1)
        if type(every) is not int or every > 1:
            return False
    numbered = (
        "heterogeneous_layers_config_path", "hybrid_layer_pattern", "hybrid_override_pattern",
        "is_hybrid_model", "hetereogenous_dist_checkpoint",
    )  # fmt: skip
    return all(args.get(name) in (None, False) for name in numbered)


def _object_of(name: str, form: StoredForm, sizes: tuple[int, int]) -> str:
    """Return the name of the object of one layer, or of one expert of it."""
    stored, place = stored_place(name, form)
    lead = (*sizes[:1] * form.layers, *sizes[1:])[: len(place)]
    numbers = ".".join(map(str, place or (0,)))
    return f"{stored}/shard_{numbers}_{'.'.join(map(str, lead or (1,)))}"
