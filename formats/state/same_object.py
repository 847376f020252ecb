"""Compare an object between two checkpoints of any formats.

Both are taken apart into their leaves, and those are pickled again in one canonical way, with the
bytes of the tensors that lie inside them. Leaves that the first checkpoint lists as tensors are
left out, because those are compared as tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from operator import itemgetter
from typing import Any

from ftckpt.checkpoint import Checkpoint
from ftckpt.formats.pickles.walk import Path, dotted, leaves
from ftckpt.formats.torch_files.write_tree import CopiedTree, pickled
from ftckpt.storage.ranges import chunks
from ftckpt.transfer.layout import Literal, Stored

from .objects import Storages, listed_places

_RANK = r"^rank_\d+\."


class SameObject:
    """Compares objects of two checkpoints by name.

    Args:
        source: the checkpoint whose tensors are compared elsewhere.
        result: the other.
    """

    def __init__(self, source: Checkpoint, result: Checkpoint) -> None:
        self._source, self._result = source, result
        self._listed, _ = listed_places(source)

    def __call__(self, name: str) -> bool:
        """Say whether an object that both have is the same.

        What all ranks of the source hold alike may have one name in the result, and is compared
        with the first rank's.

        Raises:
            CorruptError, UnsafeError: its record is damaged or hostile.
            UnsupportedError: it holds what cannot be pickled again.
        """
        own = name
        if name not in self._source.objects:
            own = next(n for n in self._source.objects if re.sub(_RANK, "", n) == name)
        info = self._source.objects[own]
        left_out = {
            dotted(path)
            for path, _ in leaves(self._source.load_object(own))
            if (info.extent.file, dotted((*info.field, *path))) in self._listed
        }
        return _digest(self._source, own, left_out) == _digest(self._result, name, left_out)


def _digest(checkpoint: Checkpoint, name: str, left_out: Collection[str]) -> bytes:
    storages = Storages(checkpoint, checkpoint.objects[name])
    found = _kept(checkpoint.load_object(name), left_out)
    # Two keys of a mapping can be spelt alike (1 and "1"): both count, told apart by their types.
    spelt = ((dotted(path), [type(s).__name__ for s in path], value) for path, value in found)
    kept = sorted(spelt, key=itemgetter(0, 1))
    return state_digest(checkpoint, [[at, CopiedTree(value, storages)] for at, _, value in kept])


def _kept(tree: Any, left_out: Collection[str]) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves that are not left out.

    What was around those may be left empty, or be a plain list now: neither is a leaf of its own.
    """
    around = {at[:end] for at in left_out for end in range(len(at)) if at[end] == "."}
    if left_out:
        around.add("")
    for path, value in leaves(tree):
        at = dotted(path)
        if at in left_out:
            continue
        if at not in around:
            yield path, value
        elif type(value) is list:
            yield from (((*path, index), member) for index, member in enumerate(value))
        elif value != {}:
            yield path, value


def state_digest(checkpoint: Checkpoint, tree: Any) -> bytes:
    """Return the XXH3-128 of a tree's canonical pickle and of the tensors inside it.

    Args:
        checkpoint: that holds those tensors.
        tree: inert data and `CopiedTree` parts of it.

    Raises:
        UnsupportedError: it holds what cannot be pickled again.
    """
    import xxhash

    pickle, records = pickled(tree)
    state = xxhash.xxh3_128(pickle)
    for record in records:
        for segment in record.segments:
            if isinstance(segment, Stored):
                file, offset, length = segment.extent
                with checkpoint.source.open(file) as reader:
                    for chunk in chunks(reader, offset, length):
                        state.update(chunk)
            else:
                assert isinstance(segment, Literal)
                state.update(segment.data)
    digest: bytes = state.digest()
    return digest
