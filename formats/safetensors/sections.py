"""Read a whole training state in one flat mapping: `model.X`, `master.X`, `exp_avg.X`.

Trainers that save by hand put it into one safetensors file. Words alone decide nothing, because a
model may have a module `model`, as Hugging Face's have: the sections count only where each first
moment has its second moment and its weight, of one shape, under names that fit throughout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ftckpt.checkpoint import Kind
from ftckpt.formats.safetensors.header import HeaderTensor
from ftckpt.formats.state.stored_names import StoredName, weight_kind

_FIRST, _SECOND, _MASTER, _STEP, _MODEL = "exp_avg.", "exp_avg_sq.", "master.", "step.", "model."


def sections_of(tensors: Iterable[HeaderTensor]) -> Mapping[str, StoredName]:
    """Return what each tensor of a flat training state is, by stored name; nothing of any other.

    Args:
        tensors: all that were saved together.
    """
    held = {tensor.name: tensor for tensor in tensors}
    trained = [name.removeprefix(_FIRST) for name in held if name.startswith(_FIRST)]
    if not trained:
        return {}

    def has(prefix: str) -> bool:
        shapes = ((held.get(prefix + name), held[_FIRST + name]) for name in trained)
        return all(one is not None and one.shape == moment.shape for one, moment in shapes)

    section = _MODEL if has(_MODEL) else ""
    if not has(_SECOND) or not (has(section) or has(_MASTER)):
        return {}
    parameters = set(trained)
    found = {}
    for stored, tensor in held.items():
        word, _, name = stored.partition(".")
        prefix = f"{word}."
        if prefix in (_FIRST, _SECOND):
            kind = Kind.EXP_AVG if prefix == _FIRST else Kind.EXP_AVG_SQ
            found[stored] = StoredName("optimizer", kind, name)
        elif prefix == _MASTER and name in parameters:
            found[stored] = StoredName("optimizer", Kind.MASTER, name)
        elif prefix == _STEP and name in parameters:
            found[stored] = StoredName("optimizer", Kind.OTHER, f"{name}.step")
        elif prefix == section:
            found[stored] = StoredName("model", weight_kind(name, tensor.dtype), name)
    if len(set(found.values())) < len(found) or any(  # one name would stand for two tensors
        place.component == "model" and place.name in held and place.name not in found
        for place in found.values()
    ):
        return {}
    return found
