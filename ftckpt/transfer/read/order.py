"""List what a transfer reads of its source, in roughly the order of reading."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ftckpt.checkpoint import Box, Checkpoint, Piece
from ftckpt.checkpoint.read_ahead import extents_in_order, extents_of
from ftckpt.extents import Extent
from ftckpt.transfer.content import Content
from ftckpt.transfer.forms import pairs
from ftckpt.transfer.layout import Elements, Layout, Stored

from .geometry import Boxes


def of_layout(layout: Layout, checkpoint: Checkpoint) -> Iterator[Extent]:
    """Yield the places of what fills a layout, file by file."""
    near = _Near(checkpoint)
    seen: set[int] = set()
    used: set[str] = set()
    for file in layout.files:
        for segment in file.segments:
            if isinstance(segment, Stored):
                yield segment.extent
            if not isinstance(segment, Elements) or id(segment.shard) in seen:
                continue
            seen.add(id(segment.shard))
            for fill in segment.shard.fills:
                used.add(fill.key)
                for piece in near.pieces(fill.key, fill.source):
                    yield piece.extent
    # A format may decode tensors from other bytes than those that its pieces name.
    yield from extents_of(checkpoint, used)


def of_content(content: Content, but: Collection[str] = ()) -> Iterator[Extent]:
    """Return the places of all tensors and objects of some content, in its order.

    `but` are the keys of tensors that are not read.
    """
    wanted = (one for key, one in content.tensors.items() if key not in but)
    keys = (copy.key for one in wanted for copy in one.copies)
    return extents_in_order(content.checkpoint, keys, content.objects)


def of_result(content: Content, result: Checkpoint, but: Collection[str] = ()) -> Iterator[Extent]:
    """Yield the places of all that a result holds, in the order of the content.

    `but` are the keys of the content's tensors that are not read.
    """
    for pair in pairs(content, result):
        for piece in pair.info.pieces if pair.key not in but else ():
            yield piece.extent
    if but:
        known = {pair.info.key for pair in pairs(content, result) if pair.key in but}
        yield from extents_of(result, (result.tensors.keys() | result.objects.keys()) - known)
    else:
        yield from extents_of(result)


class _Near:
    """Finds the pieces of tensors that a box may meet."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._known: dict[str, tuple[Sequence[Piece], Boxes | None]] = {}

    def pieces(self, key: str, box: Box) -> Sequence[Piece]:
        """Return the main pieces of a tensor that share elements with a box, or perhaps do."""
        known = self._known.get(key)
        if known is None:
            info = self._checkpoint.tensors[key]
            main = [one for one in info.pieces if not one.replica and one.box.volume]
            indexed = len(main) > 1 and bool(info.shape)
            known = main, Boxes.of([one.box for one in main]) if indexed else None
            self._known[key] = known
        pieces, boxes = known
        return pieces if boxes is None else [pieces[number] for number in boxes.near(box)]
