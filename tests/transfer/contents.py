"""Contents without a file behind them: what the derivations of contents are tried on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ftckpt.checkpoint import Checkpoint, Extent, Kind, ObjectInfo, Piece, TensorInfo
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.extents import Box
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from ftckpt.transfer.content import Content

Described = Mapping[str, tuple[str, str, tuple[int, ...], str]]


class Imagined(Checkpoint):
    """A checkpoint of which only the descriptions exist."""

    format = "imagined"

    def members(self) -> Iterable[str]:
        return ()

    def load_object(self, name: str) -> Any:
        raise KeyError(name)


def content_of(
    tensors: Described, objects: Iterable[str] = (), aliases: Mapping[str, str] | None = None
) -> Content:
    """Return a content of tensors by name: component, kind, shape, dtype."""
    infos = {}
    for name, (component, kind, shape, dtype) in tensors.items():
        piece = Piece(Box.whole(shape), Extent("x", 0, 0))
        info = TensorInfo(component, name, Kind(kind), shape, DTYPES[dtype], (piece,))
        infos[info.key] = info
    return Content.of(
        Imagined(
            source=Source(open_store("memory://imagined"), "", {}),
            tensors=infos,
            objects={name: ObjectInfo(name, Extent("x", 0, 0)) for name in objects},
            aliases=aliases or {},
        )
    )
