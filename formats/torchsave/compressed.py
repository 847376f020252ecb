"""A torch.save file that was compressed as a whole: `ckpt_100.pt.zst`, `.pt.lz4`, `.pt.gz`.

It is read as what is in it; its seal, copies and digests are of the file as it lies on the store.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import UnsupportedError
from ftckpt.formats.ranks.nested_shards import ranks_inside
from ftckpt.formats.torch_files.compression import UnpackedSource, inside_of, packed_by
from ftckpt.storage.source import Source

from .reader import TorchSaveCheckpoint, open_files, open_torchsave


@dataclass(kw_only=True, repr=False)
class CompressedTorchSave(TorchSaveCheckpoint):
    """A compressed file, opened.

    Attributes:
        packed: its name.
    """

    packed: str

    def members(self) -> Iterable[str]:
        """Return the compressed file."""
        return [self.packed]


def open_compressed(source: Source) -> Checkpoint:
    """Unpack a compressed file and parse what is in it; a plain one with such a name as it is.

    Raises:
        CorruptError: the compressed stream, or what is in it, is damaged.
        UnsafeError: it unfolds to more than is plausible, or what is in it is hostile.
        NoResourceError: not enough room to unpack it.
        UnsupportedError: what undoes it is not installed; and see `TorchSave.open`.
    """
    packed = next(iter(source.entries))
    codec = packed_by(source, packed)
    if codec is None:
        return open_torchsave(source)
    unpacked = UnpackedSource.over(source, {packed: codec})
    opened = open_files(unpacked, [inside_of(packed)])
    if any(ranks_inside(stream.tree) is not None for stream in opened.streams.values()):
        raise UnsupportedError(
            f"{source.url} holds the shards of several ranks, which are read uncompressed only",
            hint="decompress it, and name the file that was in it",
            file=packed,
        )
    told = {one.name: getattr(opened, one.name) for one in fields(opened) if one.init}
    checkpoint = CompressedTorchSave(packed=packed, **told)
    checkpoint.dialect = ", ".join(filter(None, (f"compressed with {codec.name}", opened.dialect)))
    checkpoint.notes = [
        replace(note, file=packed) if note.kind == "link-followed" else note
        for note in opened.notes
    ]
    checkpoint.step = opened.step
    return checkpoint
