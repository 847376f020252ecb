"""Read a model's family and heads from its checkpoint; refuse what no translation can keep.

A Hugging Face folder says it in `config.json`, a checkpoint of Megatron in its pickled arguments,
which other formats carry along as an object.

Hold a model to its `config.json`, with an output layer that is the embedding.

Where both are one, a trainer may save both. A loader takes the embedding, so they must be equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ftckpt.checkpoint import Checkpoint, Kind
from ftckpt.checkpoint.read_tensor import read_box, slabs
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.huggingface.config import CONFIG, parsed_json, read_config
from ftckpt.formats.megatron.rank_files.grid import Arguments
from ftckpt.formats.pickles.inert import Inert
from ftckpt.formats.state.stored_names import is_common
from ftckpt.transfer.content import Content, TargetTensor

from .shapes import require_same
from .tables import Family, TableEntry, built_by_arguments, family, family_names
from .views.joins import Heads, LinearHeads

_MAX_HEADS = 1 << 20
_LINEAR = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim",
)  # fmt: skip
_BIAS = "moe_router_enable_expert_bias"
# Arguments of Megatron that change what the numbers mean, so that other names would not be enough.
_CHANGES = {
    "layernorm_zero_centered_gamma": "its norms hold their weights less one",
    "apply_layernorm_1p": "its norms hold their weights less one",
    "rotary_interleaved": "its heads interleave the rotated halves",
    "attention_output_gate": "its attention has an output gate",
    "multi_latent_attention": "its attention is latent",
    "apply_residual_connection_post_layernorm": "its residual connection starts behind the norm",
    "window_size": "its attention sees a window",
    "moe_router_num_groups": "its router chooses groups of experts first",
    _BIAS: "its router has a bias that is not a weight",
}


_BY_CONFIG = f"--config FILE names the {CONFIG} of a model that a table knows"
# Models that Megatron-core does not have: names alone would not make one.
_BESIDE = "its attention and its MLP stand side by side, and Megatron-core has one after the other"
_BEHIND = (
    "no norm stands in front of its attention, and those of queries and keys run over all heads,"
    " while Megatron-core's run over one"
)
_WITHOUT = {
    "falcon": f"{_BESIDE}, without ALiBi",
    "phi": _BESIDE,
    "olmo2": _BEHIND,
    "olmo3": _BEHIND,
}


# What Meta's releases say of the model, and where `config.json` says it.
PARAMETERS = "params.json"
_PARAMETERS = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "vocab_size": "vocab_size", "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
}  # fmt: skip


class ModelFacts(NamedTuple):
    """What a checkpoint says of its model.

    Attributes:
        family: its table.
        heads: shape of its attention.
        config: its `config.json`; empty where it has none.
        arguments: of Megatron; empty where it has none.
    """

    family: Family
    heads: Heads
    config: Mapping[str, Any]
    arguments: Arguments


def model_of(
    checkpoint: Checkpoint, name: str = "", given: Mapping[str, Any] | None = None
) -> ModelFacts:
    """Return what a checkpoint says of its model.

    Args:
        checkpoint: a Hugging Face folder, or one with the arguments of Megatron.
        name: of the family, where the user gives it.
        given: a `config.json` that the user gives for it.

    Raises:
        UsageError: nothing says what the model is, or it is of another family than `name`.
        UnsupportedError: no table exists for it, or it does what no translation can keep.
        CorruptError, UnsafeError: the configuration is damaged or hostile.
    """
    if given is not None:
        model = configured_model(given, name, checkpoint)
        arguments = arguments_of(checkpoint)
        _require_form(arguments, model.family, checkpoint)
        _require_like(model.family, arguments, checkpoint)
        return model
    config = read_config(checkpoint)
    if config:
        found = family(name) if name else _family_of_config(config)
        if config.get("use_parallel_residual", found.name == "gpt_neox"):
            raise UnsupportedError(
                f"{checkpoint.source.url} has parallel residual connections, which Megatron-core "
                "does not have"
            )
        return ModelFacts(found, _heads_of_config(config, checkpoint), config, Arguments())
    arguments = arguments_of(checkpoint)
    if arguments.record is None:
        raise UsageError(
            f"nothing says what the model of {checkpoint.source.url} is: it has neither a "
            f"{CONFIG} nor the arguments of Megatron"
        )
    found = family(name) if name else _family_of_arguments(arguments, checkpoint)
    _require_form(arguments, found, checkpoint)
    if name:
        _require_like(found, arguments, checkpoint)
    return ModelFacts(found, _heads_of_arguments(arguments, checkpoint), {}, arguments)


def _require_form(arguments: Arguments, found: Family, checkpoint: Checkpoint) -> None:
    """Refuse a model that does what no translation can keep, unless its family does it, too."""
    for argument, meaning in _CHANGES.items():
        if arguments.get(argument) in (None, False) or argument in found.constants:
            continue
        if argument in found.written:
            continue
        if argument == _BIAS and any(_has_bias(entry) for entry in found.entries):
            continue  # some models of the family have it, and `config.json` says which
        raise UnsupportedError(
            f"the model of {checkpoint.source.url} has no Hugging Face form: {meaning}"
            f" ({argument})",
            hint=_BY_CONFIG,
        )


def _has_bias(entry: TableEntry) -> bool:
    return any(name.text.endswith(".router.expert_bias") for name in entry.megatron.values())


def _require_like(found: Family, arguments: Arguments, checkpoint: Checkpoint) -> None:
    """Refuse a family that Megatron's arguments contradict."""
    if arguments.record is None or not _differences(found, arguments):
        return
    key, wanted = _differences(found, arguments)[0]
    raise UsageError(
        f"the model of {checkpoint.source.url} is not a {found.name}: its arguments say {key} = "
        f"{arguments.get(key)!r}, not {wanted!r}"
    )


def configured_model(config: Mapping[str, Any], name: str, checkpoint: Checkpoint) -> ModelFacts:
    """Return what a `config.json` that need not lie beside a checkpoint says of its model.

    Args:
        config: not empty.
        name: of the family, where the user gives it.
        checkpoint: whose model it is.

    Raises:
        UsageError: it is of another family than `name`, or gives no attention.
        UnsupportedError: no table exists for it.
    """
    found = family(name) if name else _family_of_config(config)
    if config.get("model_type") not in (found.name, found.config.get("model_type")):
        raise UsageError(
            f"{CONFIG} says that the model is a {config.get('model_type')}, not a {found.name}"
        )
    require_parameters(config, checkpoint)
    return ModelFacts(found, _heads_of_config(config, checkpoint), config, Arguments())


def require_parameters(config: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Refuse a `config.json` that contradicts the `params.json` of one of Meta's releases.

    Raises:
        UsageError: the first field that differs.
        CorruptError, UnsafeError: `params.json` is damaged or hostile.
    """
    said = parsed_json(checkpoint.source, PARAMETERS)
    rotary = config.get("rope_parameters")
    known = {**config, **(rotary if isinstance(rotary, dict) else {})}
    for field, name in _PARAMETERS.items():
        ours, theirs = known.get(name), said.get(field)
        told = isinstance(ours, (int, float)) and isinstance(theirs, (int, float)) and theirs > 0
        if told and ours != theirs:
            raise UsageError(
                f"{PARAMETERS} of {checkpoint.source.url} says {field} = {theirs!r}, and {CONFIG}"
                f" says {name} = {ours!r}"
            )


def maxtext_family(config: Mapping[str, Any], name: str) -> Family:
    """Return the family of a MaxText model by its `config.json`, and by what the user says.

    Raises:
        UsageError: there is none, it is of another family, or the rotation is not known.
        UnsupportedError: no table exists for it.
    """
    if not config:
        raise UsageError(
            f"MaxText's checkpoints do not say what the model is: {CONFIG} is missing",
            hint=f"--config FILE: the {CONFIG} of the model",
        )
    found = family(name) if name else _family_of_config(config)
    if config.get("model_type") not in (found.name, found.config.get("model_type")):
        raise UsageError(
            f"{CONFIG} says that the model is a {config.get('model_type')}, not a {name}"
        )
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not name and found.name == "llama" and rotary.get("rope_type") == "llama3":
        raise UsageError(
            "MaxText rotates this Llama's heads in one of two ways, and nothing here says in which",
            hint="--family llama3.1 where model_name or rope_type of MaxText begins so, else"
            " --family llama",
        )
    return found


def arguments_of(checkpoint: Checkpoint) -> Arguments:
    """Return the arguments of Megatron that a checkpoint carries; empty where it has none.

    Raises:
        CorruptError, UnsafeError: the object that holds them is damaged or hostile.
    """
    for name in checkpoint.objects:
        if name == "args" or name.endswith(".args"):
            return Arguments(checkpoint.load_object(name))
        if is_common(name):
            tree = checkpoint.load_object(name)
            while isinstance(tree, list) and len(tree) == 1:
                tree = tree[0]
            held = tree.get("args") if isinstance(tree, dict) else None
            if isinstance(held, Inert):
                return Arguments(held)
    return Arguments()


def _family_of_config(config: Mapping[str, Any]) -> Family:
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in _WITHOUT:
        raise UnsupportedError(
            f"no table exists for models of the type {kind!r}: {_WITHOUT[kind]}",
            kind="unknown-rule",
        )
    if not isinstance(kind, str) or kind not in family_names():
        raise UnsupportedError(
            f"no table exists for models of the type {kind!r}",
            hint=f"known: {', '.join(family_names())}",
            kind="unknown-rule",
        )
    return family(kind)


def _family_of_arguments(arguments: Arguments, checkpoint: Checkpoint) -> Family:
    for name in built_by_arguments():
        found = family(name)
        if found.model and not _differences(found, arguments):
            return found
    for argument, meaning in _CHANGES.items():
        if arguments.get(argument) not in (None, False):
            raise UnsupportedError(
                f"the model of {checkpoint.source.url} has no Hugging Face form that its arguments"
                f" give: {meaning} ({argument})",
                hint=_BY_CONFIG,
            )
    raise UnsupportedError(
        f"no family has a model like that of {checkpoint.source.url}",
        hint=f"known: {', '.join(family_names())}",
        kind="unknown-rule",
    )


def _differences(found: Family, arguments: Arguments) -> list[tuple[str, Any]]:
    """Return what a family's arguments must be and are not; false stands for absent, too."""
    return [
        (key, wanted)
        for key, wanted in found.model.items()
        if (arguments.get(key) if isinstance(wanted, str) else bool(arguments.get(key))) != wanted
    ]


def _heads_of_config(config: Mapping[str, Any], checkpoint: Checkpoint) -> Heads:
    queries = config.get("num_attention_heads", config.get("n_head"))
    groups = config.get("num_key_value_heads") or queries
    hidden = config.get("hidden_size", config.get("n_embd"))
    found = _heads(queries, groups, config.get("head_dim"), hidden, f"{CONFIG} of", checkpoint)
    return found._replace(linear=_linear_heads(config, checkpoint))


def _linear_heads(config: Mapping[str, Any], checkpoint: Checkpoint) -> LinearHeads | None:
    """Return the shape of linear attention; None where a model has none."""
    said: list[Any] = [config.get(field) for field in _LINEAR]
    if said == [None] * len(_LINEAR):
        return None
    if not all(type(n) is int and 0 < n < _MAX_HEADS for n in said) or said[1] % said[0]:
        raise UsageError(
            f"{CONFIG} of {checkpoint.source.url} gives no linear attention: "
            + ", ".join(f"{field} = {n!r}" for field, n in zip(_LINEAR, said, strict=True))
        )
    return LinearHeads(*said)


def _heads_of_arguments(arguments: Arguments, checkpoint: Checkpoint) -> Heads:
    queries = arguments.get("num_attention_heads")
    grouped = arguments.flag("group_query_attention")
    groups = arguments.get("num_query_groups") if grouped else queries
    width, hidden = arguments.get("kv_channels"), arguments.get("hidden_size")
    return _heads(queries, groups, width, hidden, "the arguments of", checkpoint)


def _heads(
    queries: Any, groups: Any, width: Any, hidden: Any, origin: str, checkpoint: Checkpoint
) -> Heads:
    if width is None and type(queries) is int and queries and type(hidden) is int:
        width = hidden // queries
    sound = all(type(n) is int and 0 < n < _MAX_HEADS for n in (queries, groups, width))
    if not sound or queries % groups:
        raise UsageError(
            f"{origin} {checkpoint.source.url} give no attention: {queries!r} heads in {groups!r} "
            f"groups of width {width!r}"
        )
    return Heads(queries, groups, width)


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
