"""Carry the files besides the weights from one Hugging Face folder to another."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import replace

from ftckpt.errors import NoResourceError, NotFoundError
from ftckpt.extents import Extent
from ftckpt.storage.source import Source
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Literal, OutputFile, Stored

from .config import (
    ADAPTER_CONFIG,
    CONFIG,
    DTYPE_FIELDS,
    ReplacesFiles,
    parsed_json,
    retyped_config,
    weights_dtype,
)
from .index import is_beside
from .weights import is_of_adapter

_MAX_BESIDE = 64 << 20  # bytes
# What is of these files and no others: manifests, indexes, the markers of Megatron's torch_dist.
_NOT_CARRIED = (
    r"ftckpt\.manifest.*|.*\.index(\.[^/]+)?\.json|trainer_state\.json|(metadata|integrity)\.json"
)


def taken_from(content: Content, folder: Source) -> Content:
    """Return a content with the small files of another folder: configuration, a tokenizer.

    Of an adapter that is `adapter_config.json` alone. A `config.json` gets the type of the weights.

    Args:
        content: weights or an adapter.
        folder: where the files lie.

    Raises:
        NotFoundError: it holds none of them.
        NoResourceError: one is larger than any such file is.
        CorruptError, UnsafeError: its `config.json` is damaged or hostile.
    """
    adapter = any(is_of_adapter(wanted.name) for wanted in content.tensors.values())
    found = {}
    for name, entry in sorted(folder.entries.items()):
        fits = name == ADAPTER_CONFIG if adapter else is_beside(name) and name != ADAPTER_CONFIG
        if not fits or re.fullmatch(_NOT_CARRIED, name):
            continue
        if entry.size > _MAX_BESIDE:
            raise NoResourceError(f"{name} of {folder.url} has {entry.size} bytes", file=name)
        found[name] = folder.read(name)
    checkpoint = content.checkpoint
    made = dict(checkpoint.replaced) if isinstance(checkpoint, ReplacesFiles) else {}
    made |= content.beside  # these hold of the tensors, whatever the other folder says
    if (ADAPTER_CONFIG if adapter else CONFIG) not in found | made:
        raise NotFoundError(
            f"{folder.url} has no {ADAPTER_CONFIG if adapter else CONFIG}",
            hint="--beside names the folder whose configuration goes with the weights",
        )
    if not adapter and CONFIG not in made:
        config, dtype = parsed_json(folder, CONFIG), weights_dtype(content)
        named = [field for field in DTYPE_FIELDS if config.get(field) not in (None, dtype)]
        if named and dtype:
            config |= dict.fromkeys(named, dtype)
            found[CONFIG] = json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"
    return replace(content, beside=found | made)


def lacking(files: Collection[str]) -> list[str]:
    """Return which files a folder of weights, or of an adapter, lacks to be loaded.

    Args:
        files: all that it has.
    """
    if any(name.startswith("adapter_model") for name in files):
        return [] if ADAPTER_CONFIG in files else [ADAPTER_CONFIG]
    tokenizer = any(name.startswith(("tokenizer", "vocab", "spiece")) for name in files)
    return [*([] if CONFIG in files else [CONFIG]), *([] if tokenizer else ["a tokenizer"])]


def beside_weights(content: Content) -> Iterator[OutputFile]:
    """Yield what else lies in a Hugging Face folder: its `config.json` shows that it is one.

    Raises:
        CorruptError, UnsafeError: its `config.json` is damaged or hostile.
    """
    checkpoint, source = content.checkpoint, content.checkpoint.source
    beside = dict(checkpoint.replaced) if isinstance(checkpoint, ReplacesFiles) else {}
    beside |= content.beside
    if CONFIG not in beside and (config := retyped_config(content)) is not None:
        beside[CONFIG] = config
    for name, data in sorted(beside.items()):
        yield OutputFile(name, [Literal(data)])
    if source.single:
        return
    if CONFIG not in source.entries:
        adapter = source.entries.get(ADAPTER_CONFIG)
        if adapter is not None and ADAPTER_CONFIG not in beside:
            yield OutputFile(ADAPTER_CONFIG, [Stored(Extent(ADAPTER_CONFIG, 0, adapter.size))])
        return
    state = {info.extent.file for info in content.checkpoint.objects.values()}
    for name, entry in sorted(source.entries.items()):
        taken = name in state or name in beside or re.fullmatch(_NOT_CARRIED, name)
        if is_beside(name) and not taken:
            yield OutputFile(name, [Stored(Extent(name, 0, entry.size))])
