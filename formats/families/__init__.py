"""Names and shapes of Megatron-core, MaxText, torchtitan and Hugging Face, by a family's table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.huggingface.config import CONFIG, config_file, read_config, weights_dtype
from ftckpt.formats.huggingface.weights import is_of_adapter
from ftckpt.formats.lora.bridge import has_adapter
from ftckpt.formats.megatron.job.registration import EMBEDDING
from ftckpt.formats.ranks.meta_llama.parameters import meta_parameters
from ftckpt.transfer.content import Content

from .facts import PARAMETERS, ModelFacts, configured_model, maxtext_family, model_of, require_model
from .maxtext import adapter_to_hugging_face, from_maxtext, is_maxtext
from .mtp import config_of, from_hugging_face_mtp, layout_of_mtp, to_hugging_face_mtp
from .native import NativeTranslator, is_headless, is_hugging_face, is_native, may_turn
from .shapes import renamed, without_wrappers
from .tables import Family, family_names
from .tables import family as family_of
from .towers import from_hugging_face_parts, to_hugging_face_parts, tower_family
from .translator import DEFAULT_SPELLINGS, Translator

__all__ = ["family_names", "to_hugging_face", "to_megatron", "to_native"]

_TIED = "tie_word_embeddings"
_EMBEDDING = "tok_embeddings.weight"  # in Meta's code, and in all that began as that


def to_hugging_face(
    content: Content,
    *,
    family: str = "",
    true_vocab_size: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> Content:
    """Return the content as Hugging Face spells it, with a `config.json` where it has none.

    Args:
        content: under the names of Megatron-core, MaxText, torchtitan, Meta or Hugging Face.
        family: where the user says it; else what the arguments show.
        true_vocab_size: rows of the vocabulary that are no padding; None keeps as many as the
            `config.json` of a Megatron or MaxText model says, else all.
        config: the `config.json` of the model, where the checkpoint does not say what it is; None
            for the checkpoint's own.

    Raises:
        UsageError: nothing says what the model is, or a shape contradicts it.
        UnsupportedError: a model or a parameter that no table has, or that has no such form.
        CorruptError, UnsafeError: what says what the model is, is damaged or hostile.
    """
    bare = without_wrappers(content)
    if bare is not content:
        content = bare
        known = config or read_config(content.checkpoint)
        name = str(family or known.get("model_type"))
        described = name.endswith(".toml") or name in family_names()
        if config is None and (not described or is_hugging_face(content, family_of(name))):
            return content  # it had Hugging Face's names, and a wrapper around them
    if is_maxtext(content):
        known = config or read_config(content.checkpoint)
        if known and true_vocab_size:
            known = {**known, "vocab_size": true_vocab_size}
        return from_maxtext(content, maxtext_family(known, family), known)
    of_adapter = any(is_of_adapter(wanted.name) for wanted in content.tensors.values())
    if of_adapter and has_adapter(content.checkpoint):
        return adapter_to_hugging_face(content, model_of(content.checkpoint, family, config))
    known = config or read_config(content.checkpoint)
    if (table := tower_family(known, family)) is not None:

        def alone(language: Content, name: str, inner: Mapping[str, Any]) -> Content:
            return to_hugging_face(
                language, family=name, true_vocab_size=true_vocab_size, config=inner
            )

        return to_hugging_face_parts(content, table, known, true_vocab_size, alone)
    if (found := _mtp_of(content, family, known)) is not None:

        def longer(whole: Content, more: Mapping[str, Any]) -> Content:
            return to_hugging_face(
                whole, family=family, true_vocab_size=true_vocab_size, config=more
            )

        made = to_hugging_face_mtp(content, found.table, known, found.layout, longer)
        said = json.loads(made.beside[CONFIG])
        for field in ("first_mtp_layer", "num_hidden_layers", "layer_types"):
            said.pop(field, None)
            said |= {field: known[field]} if field in known else {}
        text = json.dumps(said, indent=2, sort_keys=True).encode() + b"\n"
        return replace(made, beside={**made.beside, CONFIG: text})
    if (headless := _headless(content, family, known)) is not None:
        made = to_hugging_face(
            renamed(content, headless.prefix.__add__), family=family,
            true_vocab_size=true_vocab_size, config={**known, _TIED: True},
        )  # fmt: skip
        said = {**json.loads(made.beside[CONFIG]), _TIED: known.get(_TIED)}
        if _TIED not in known:
            del said[_TIED]
        text = json.dumps(said, indent=2, sort_keys=True).encode() + b"\n"
        made = renamed(made, lambda name: name.removeprefix(headless.prefix))
        return replace(made, beside={**made.beside, CONFIG: text})
    if (native := _native_model(content, family, config)) is not None:
        return _from_native(content, native, true_vocab_size)
    model = model_of(content.checkpoint, family, config)
    rows = true_vocab_size or _true_rows(model, content)
    translator = Translator(model.family, model.heads, true_vocab_size=rows, config=model.config)
    made = translator.to_hugging_face(content)
    if config is not None:
        require_model(model, made, rows)
        return replace(made, beside={**made.beside, CONFIG: _typed(config, made, rows)})
    if model.config:
        if config_file(content.checkpoint) == CONFIG:
            return made  # it goes with the files beside the weights
        said = json.dumps(model.config, indent=2, sort_keys=True).encode() + b"\n"
        return replace(made, beside={**made.beside, CONFIG: said})
    return replace(made, beside={**made.beside, CONFIG: config_of(model, made)})


class _FurtherLayers(NamedTuple):
    """Layers that predict further tokens: the table that has them, and whose names they have."""

    table: Family
    layout: str


def _mtp_of(content: Content, family: str, config: Mapping[str, Any]) -> _FurtherLayers | None:
    """Return where a model's layers that predict further tokens are described; None for none."""
    name = str(family or config.get("model_type"))
    if not config or (not name.endswith(".toml") and name not in family_names()):
        return None
    table = family_of(name)
    layout = layout_of_mtp(content, table, config)
    return _FurtherLayers(table, layout) if layout else None


def _headless(content: Content, family: str, config: Mapping[str, Any]) -> Family | None:
    """Return the table of a model that was saved without its head; None for another."""
    name = str(family or config.get("model_type"))
    if not config or (not name.endswith(".toml") and name not in family_names()):
        return None
    table = family_of(name)
    return table if is_headless(content, table) else None


def _native_model(
    content: Content, family: str, config: Mapping[str, Any] | None
) -> ModelFacts | None:
    """Return the model, if its names are torchtitan's, Meta's or Hugging Face's; else None."""
    known = config or read_config(content.checkpoint)
    if not known:
        if any(wanted.name == _EMBEDDING for wanted in content.tensors.values()):
            raise UsageError(
                f"{content.checkpoint.source.url} does not say what its model is: {CONFIG} is"
                " missing",
                hint=f"--config FILE: the {CONFIG} of the model",
            )
        return None
    if config is not None:
        model = configured_model(known, family, content.checkpoint)
        own = is_native(content, model.family) or is_hugging_face(content, model.family)
        return model if own else None
    name = str(family or known.get("model_type"))
    if not name.endswith(".toml") and name not in family_names():
        return None  # Megatron's tables are asked, and say what is wrong
    if not is_native(content, family_of(name)):
        return None
    return configured_model(known, family, content.checkpoint)


def _from_native(content: Content, model: ModelFacts, true_vocab_size: int | None) -> Content:
    translator = NativeTranslator(
        model.family, model.heads, model.config, true_vocab_size=true_vocab_size
    )
    made = translator.to_hugging_face(content)
    text = _typed(model.config, made, true_vocab_size)
    return replace(made, beside={**made.beside, CONFIG: text})


def _typed(config: Mapping[str, Any], content: Content, rows: int | None) -> bytes:
    """Return a `config.json` that says the weights' type, and how many rows a vocabulary has."""
    said = {**config}
    if dtype := weights_dtype(content):
        said |= {"torch_dtype": dtype}
        said.pop("dtype", None)
    if rows:
        said["vocab_size"] = rows
    return json.dumps(said, indent=2, sort_keys=True).encode() + b"\n"


def to_native(
    content: Content,
    dialect: str,
    *,
    family: str = "",
    true_vocab_size: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> Content:
    """Return the content as other model code spells it.

    Args:
        content: under Hugging Face's names, experts packed or not, or those of other model code.
        dialect: `torchtitan` or `meta`.
        family: where the user says it; else what `config.json` shows.
        true_vocab_size: rows of the vocabulary; None for those of `config.json`.
        config: the `config.json` of the model; None for the checkpoint's own.

    Raises:
        UsageError: nothing says what the model is, or a shape contradicts it.
        UnsupportedError: a model or a parameter that no table has, or that has no such form.
        CorruptError, UnsafeError: what says what the model is, is damaged or hostile.
    """
    content = without_wrappers(content)
    known = config or read_config(content.checkpoint)
    if not known:
        raise UsageError(
            f"{content.checkpoint.source.url} does not say what its model is: {CONFIG} is missing",
            hint=f"--config FILE: the {CONFIG} of the model",
        )
    if (table := tower_family(known, family)) is not None:

        def alone(language: Content, name: str, inner: Mapping[str, Any]) -> Content:
            model = configured_model(inner, name, content.checkpoint)
            return _to_native(language, dialect, model, true_vocab_size)

        return from_hugging_face_parts(content, table, known, dialect, alone)
    model = configured_model(known, family, content.checkpoint)
    if is_headless(content, model.family):
        raise UnsupportedError(
            f"{content.checkpoint.source.url} is a {model.family.name} without its head, which has"
            f" no form of {dialect}"
        )
    found = _mtp_of(content, family, known)
    if found is not None and found.layout == "hf":

        def longer(whole: Content, more: Mapping[str, Any]) -> Content:
            return _to_native(whole, dialect, model._replace(config=more), true_vocab_size)

        return from_hugging_face_mtp(content, found.table, known, dialect, longer)
    made = _to_native(content, dialect, model, true_vocab_size)
    if dialect != "meta":
        return made
    rows = {"vocab_size": true_vocab_size} if true_vocab_size else {}
    said = meta_parameters({**model.config, **rows})
    text = json.dumps(said, indent=2, sort_keys=True).encode() + b"\n"
    return replace(made, beside={**made.beside, PARAMETERS: text})


def _to_native(
    content: Content, dialect: str, model: ModelFacts, true_vocab_size: int | None
) -> Content:
    translator = NativeTranslator(
        model.family, model.heads, model.config, true_vocab_size=true_vocab_size
    )
    if is_native(content, model.family) or may_turn(content, model.family):
        content = translator.to_hugging_face(content)
    if dialect == "packed" and not any(dialect in one.names for one in model.family.natives):
        return translator.to_hugging_face(content)  # without experts both have the same names
    return translator.from_hugging_face(content, dialect)


def _true_rows(model: ModelFacts, content: Content) -> int | None:
    """Return how many rows `config.json` says are no padding; None where it says nothing new."""
    rows = model.config.get("vocab_size")
    embedding = content.tensors.get(EMBEDDING)
    if type(rows) is not int or embedding is None or not 0 < rows < embedding.shape[0]:
        return None
    return rows


def to_megatron(
    content: Content,
    *,
    family: str = "",
    true_vocab_size: int | None = None,
    spellings: Sequence[str] = DEFAULT_SPELLINGS,
) -> Content:
    """Return the content as Megatron-core spells it.

    Args:
        content: under Hugging Face's names, experts packed or not, with its `config.json`.
        family: where the user says it; else what `config.json` shows.
        true_vocab_size: rows of the vocabulary that are no padding; None keeps all.
        spellings: where implementations of Megatron-core differ
            (`family_tables.SPELLINGS`): which names are wanted.

    Raises:
        UsageError: nothing says what the model is, or a shape contradicts it.
        UnsupportedError: a model or a parameter that no table has, or that has no such form.
        CorruptError, UnsafeError: what says what the model is, is damaged or hostile.
    """
    content = without_wrappers(content)
    known = read_config(content.checkpoint)
    if (table := tower_family(known, family)) is not None:

        def alone(language: Content, name: str, inner: Mapping[str, Any]) -> Content:
            model = configured_model(inner, name, content.checkpoint)
            return _to_megatron(language, model, true_vocab_size, spellings)

        return from_hugging_face_parts(content, table, known, "megatron", alone, spellings)
    model = model_of(content.checkpoint, family)
    found = _mtp_of(content, family, known)
    if found is not None and found.layout == "hf":

        def longer(whole: Content, more: Mapping[str, Any]) -> Content:
            return _to_megatron(whole, model._replace(config=more), true_vocab_size, spellings)

        return from_hugging_face_mtp(content, found.table, known, "megatron", longer)
    return _to_megatron(content, model, true_vocab_size, spellings)


def _to_megatron(
    content: Content, model: ModelFacts, true_vocab_size: int | None, spellings: Sequence[str]
) -> Content:
    if is_headless(content, model.family):
        content = renamed(content, model.family.prefix.__add__)
        model = model._replace(config={**model.config, _TIED: True})
    if is_native(content, model.family) or may_turn(content, model.family):  # experts in one tensor
        native = NativeTranslator(
            model.family, model.heads, model.config, true_vocab_size=true_vocab_size
        )
        content = native.to_hugging_face(content)
    translator = Translator(
        model.family, model.heads, true_vocab_size=true_vocab_size, spellings=spellings,
        config=model.config,
    )  # fmt: skip
    return translator.to_megatron(content)
