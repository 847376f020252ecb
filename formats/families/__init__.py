"""Megatron-core's, MaxText's and Hugging Face's names and shapes, by a family's table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ftckpt.errors import UsageError
from ftckpt.formats.huggingface.config import CONFIG, config_file, read_config
from ftckpt.formats.megatron.job.registration import EMBEDDING
from ftckpt.transfer.content import Content

from .config import config_of
from .facts import ModelFacts, maxtext_family, model_of
from .maxtext import from_maxtext, is_maxtext
from .tables import family_names
from .translator import DEFAULT_SPELLINGS, Translator

__all__ = ["family_names", "to_hugging_face", "to_megatron"]


def to_hugging_face(
    content: Content,
    *,
    family: str = "",
    true_vocab_size: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> Content:
    """Return the content as Hugging Face spells it, with a `config.json` where it has none.

    Args:
        content: under Megatron-core's names, or MaxText's.
        family: where the user says it; else what the arguments show.
        true_vocab_size: rows of the vocabulary that are no padding; None keeps as many as the
            `config.json` says that the model came with, else all.
        config: the `config.json` of a MaxText model; None for the checkpoint's own.

    Raises:
        UsageError: nothing says what the model is, or a shape contradicts it.
        UnsupportedError: a model or a parameter that no table has, or that has no such form.
        CorruptError, UnsafeError: what says what the model is, is damaged or hostile.
    """
    if is_maxtext(content):
        known = config or read_config(content.checkpoint)
        return from_maxtext(content, maxtext_family(known, family), known)
    if config is not None:
        raise UsageError(
            "--config is for MaxText's checkpoints, which do not say what the model is",
            hint="leave it out",
        )
    model = model_of(content.checkpoint, family)
    rows = true_vocab_size or _true_rows(model, content)
    made = Translator(model.family, model.heads, true_vocab_size=rows).to_hugging_face(content)
    if model.config:
        if config_file(content.checkpoint) == CONFIG:
            return made  # it goes with the files beside the weights
        said = json.dumps(model.config, indent=2, sort_keys=True).encode() + b"\n"
        return replace(made, beside={**made.beside, CONFIG: said})
    return replace(made, beside={**made.beside, CONFIG: config_of(model, made)})


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
        content: under Hugging Face's names, with its `config.json`.
        family: where the user says it; else what `config.json` shows.
        true_vocab_size: rows of the vocabulary that are no padding; None keeps all.
        spellings: where implementations of Megatron-core differ
            (`family_tables.SPELLINGS`): which names are wanted.

    Raises:
        UsageError: nothing says what the model is, or a shape contradicts it.
        UnsupportedError: a model or a parameter that no table has, or that has no such form.
        CorruptError, UnsafeError: what says what the model is, is damaged or hostile.
    """
    model = model_of(content.checkpoint, family)
    translator = Translator(
        model.family, model.heads, true_vocab_size=true_vocab_size, spellings=spellings
    )
    return translator.to_megatron(content)
