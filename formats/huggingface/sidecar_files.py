"""Carry the files besides the weights from one Hugging Face folder to another."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ftckpt.extents import Extent
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Literal, OutputFile, Stored

from .config import CONFIG, ReplacesFiles, retyped_config
from .names import is_beside

# What is of these files and no others: manifests, indexes, the markers of Megatron's torch_dist.
_NOT_CARRIED = re.compile(
    r"ftckpt\.manifest.*|.*\.index(\.[^/]+)?\.json|trainer_state\.json|(metadata|integrity)\.json"
)


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
    if source.single or CONFIG not in source.entries:
        return
    state = {info.extent.file for info in content.checkpoint.objects.values()}
    for name, entry in sorted(source.entries.items()):
        taken = name in state or name in beside or _NOT_CARRIED.fullmatch(name)
        if is_beside(name) and not taken:
            yield OutputFile(name, [Stored(Extent(name, 0, entry.size))])
