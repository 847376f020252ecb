"""Hold a model to its `config.json`, with an output layer that is the embedding.

Where both are one, a trainer may save both. A loader takes the embedding, so they must be equal.
"""

from __future__ import annotations

from collections.abc import Mapping

from ftckpt.checkpoint import Checkpoint, Kind
from ftckpt.checkpoint.read_tensor import read_box, slabs
from ftckpt.errors import UsageError
from ftckpt.formats.huggingface.config import CONFIG
from ftckpt.transfer.content import Content, TargetTensor

from .facts import ModelFacts
from .shapes import require_same
from .tables import Family

_SLAB = 16 << 20  # bytes that are compared at once
_TIED = "tie_word_embeddings"


def weights_of(tensors: Mapping[str, TargetTensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's weights and buffers, by name."""
    kinds = (Kind.PARAM, Kind.BUFFER)
    return {w.name: w.shape for w in tensors.values() if w.component == "model" and w.kind in kinds}


def outputs_of(family: Family) -> dict[str, str]:
    """Return the output layers that may be tied, each with the embedding that it is then.

    Raises:
        UsageError: the table has an output layer and no embedding.
    """
    rules = family.shapes.rules.values() if family.shapes is not None else ()
    outputs = {entry.hf[0].text for entry in family.natives if entry.output}
    outputs |= {rule.name.text for rule in rules if rule.unless == _TIED and rule.axes}
    rows = [e.hf[0].text for e in family.natives if e.vocabulary and not e.output]
    rows += [e.hf[0].text for e in family.entries if e.vocabulary]
    rows += [r.name.text for r in rules if r.axes[:1] == ("vocab_size",)]
    embedding = next((name for name in rows if name not in outputs), None)
    if outputs and embedding is None:
        raise UsageError(
            f"the table of {family.name} has an output layer and no embedding",
            hint="its row has vocabulary = true",
        )
    return dict.fromkeys(sorted(outputs), embedding or "")


def require_tied(
    outputs: Mapping[str, str],
    made: Mapping[str, TargetTensor],
    shapes: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
) -> None:
    """Refuse an output layer of its own where the configuration ties it to the embedding.

    Args:
        outputs: as `outputs_of` returns them.
        made: the model, under Hugging Face's names.
        shapes: of the tensors that the configuration describes.
        checkpoint: what holds the values.

    Raises:
        UsageError: their values differ.
    """
    weights = {w.name: w for w in made.values() if w.component == "model"}
    for name, source in outputs.items():
        output, embedding = weights.get(name), weights.get(source)
        if name in shapes or output is None or embedding is None:
            continue
        if not equal(output, embedding, checkpoint):
            raise UsageError(
                f"{CONFIG} ties {name} to {embedding.name}, and their values differ",
                hint='"tie_word_embeddings": false says that the model has both',
                tensor=name,
            )


def require_model(model: ModelFacts, content: Content, rows: int | None) -> None:
    """Refuse weights of Hugging Face's that are not exactly those of a `config.json`.

    Args:
        model: with its configuration.
        content: under Hugging Face's names.
        rows: of the vocabulary, where they are not what the configuration says.

    Raises:
        UsageError: they are not, or the table does not give the shapes.
    """
    if model.family.shapes is None:
        raise UsageError(f"the table of {model.family.name} has no shapes to hold {CONFIG} to")
    config = {**model.config, "vocab_size": rows} if rows else model.config
    weights = weights_of(content.tensors)
    wanted = model.family.shapes.tensors(config)
    outputs = outputs_of(model.family)
    tied = {name: shape for name, shape in weights.items() if name in content.aliases}
    tied |= {name: wanted.get(one, ()) for name, one in outputs.items() if name in weights}
    require_same({**tied, **wanted} if weights else {}, weights, model.family.name)
    require_tied(outputs, content.tensors, wanted, content.checkpoint)


def equal(one: TargetTensor, other: TargetTensor, checkpoint: Checkpoint) -> bool:
    """Say whether two tensors, neither turned nor joined, have the same bits."""
    if one.copies == other.copies:
        return True
    if len(one.copies) != 1 or len(other.copies) != 1 or one.shape != other.shape:
        return False
    (first,), (second,) = one.copies, other.copies
    ours, theirs = (checkpoint.tensors.get(copy.key) for copy in (first, second))
    if ours is None or theirs is None or ours.dtype != theirs.dtype:
        return False
    if first.source != second.source or first.box != second.box:
        return False
    if ours.pieces == theirs.pieces:  # the same bytes
        return True
    return all(
        read_box(checkpoint, ours, box).tobytes() == read_box(checkpoint, theirs, box).tobytes()
        for box in slabs(first.source, _SLAB, ours.dtype.itemsize)
    )
