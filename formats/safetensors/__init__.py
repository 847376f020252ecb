"""safetensors: one file, a Hugging Face folder, or the shards of a DCP save.

A Hugging Face folder holds `<stem>.safetensors`, or shards `<stem>-00001-of-00003.safetensors` with
`<stem>.safetensors.index.json`, written last, so that shards without it are an unfinished save.
Several stems may lie together (a model and its adapter): the first of a short list is component
`model`, the others are `extra:<stem>`. ftckpt's own folders hold masters and moments beside the
weights in `optimizer/` (`safetensors_beside`), and other state in `ftckpt.objects/`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ftckpt.discovery.recognise import Listing, Recognition
from ftckpt.storage.source import Source

from .names import evidence

if TYPE_CHECKING:
    from ftckpt.checkpoint import Described

    from .reader import SafetensorsCheckpoint


class Safetensors:
    """The format `safetensors` (see the module's docstring)."""

    name = "safetensors"

    def __init__(
        self,
        described: Described | None = None,
        twice: Callable[[SafetensorsCheckpoint], None] | None = None,
    ) -> None:
        """Hold folders to their `config.json` by `described`; join second copies by `twice`."""
        self._described = described
        self._twice = twice

    def recognise(self, listing: Listing) -> Recognition | None:
        """Go by names; a single file with another suffix by its first nine bytes."""
        found = evidence(listing)
        return None if found is None else Recognition(self.name, *found)

    def open(self, source: Source) -> SafetensorsCheckpoint:
        """Read the index and all headers.

        Raises:
            NotFoundError: it holds no safetensors file.
            IncompleteError: shards without their index, or a consolidation that did not finish.
            CorruptError: the only file is damaged, or the index is.
            UnsafeError: a header or an index is hostile.
        """
        from .reader import open_safetensors

        checkpoint = open_safetensors(source)
        checkpoint.described = self._described
        if self._twice is not None:
            self._twice(checkpoint)
        return checkpoint
