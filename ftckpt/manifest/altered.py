"""Tell damage from hostile content: a file that is not what was sealed is damage.

A flipped bit can make a file look hostile: an archive with two directories, a pickle that calls
something. If the manifest lists the file and its digest differs now, the file changed after it was
sealed, so that an older checkpoint or a replica helps, as for any other damage. A file that is as
it was sealed stays hostile. Neither is executed or loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ftckpt.digests.blocks import Block, BlockDigest, block_count, block_length, hash_or_fail
from ftckpt.errors import CorruptError, FtckptError, UnsafeError
from ftckpt.extents import BLOCK
from ftckpt.storage.store import EntryKind

from .locate import find

if TYPE_CHECKING:
    from ftckpt.storage.source import Source

    from . import FileDigest, Manifest


class Altered(NamedTuple):
    """A range of a file that is not what was sealed."""

    file: str
    offset: int
    length: int

    def said(self, why: str) -> str:
        """Return a sentence on it, with the reason why a parser refuses the file."""
        return (
            f"{self.file} differs from the manifest in bytes {self.offset} to"
            f" {self.offset + self.length}, and as it is now: {why}"
        )


def altered(source: Source, manifest: Manifest, name: str, near: int = 0) -> Altered | None:
    """Return where a file differs from its manifest; None if it does not, or if nothing proves it.

    Reads the file up to the first block that differs.

    Args:
        source: the files, listed.
        manifest: of the sealed files.
        name: the file in question, as a checkpoint or a part of it names the file.
        near: the byte of it that a parser refused: its block is read first.
    """
    file = manifest.by_path.get(source.stored(name))
    if file is None:  # a part of the checkpoint, in a folder of its own
        below = [f for f in manifest.files if f.path.endswith(f"/{name}")]
        file = below[0] if len(below) == 1 else None
    entry = source.entries.get(file.path) if file is not None else None
    if file is None or entry is None or entry.kind is EntryKind.SPECIAL:
        return None
    if entry.size != file.size:
        start, end = sorted((entry.size, file.size))
        return Altered(file.path, start, end - start)
    numbers = range(block_count(file.size))
    for number in sorted(numbers, key=lambda n: (n != near // BLOCK, n != len(numbers) - 1, n)):
        length = block_length(file.size, number)
        block = Block(source.store, source.path(file.path), file.path, number, length)
        # Damage at rest is read the same twice; a bit that flipped on the way is not.
        if _differs(block, file) and _differs(block, file):
            return Altered(file.path, number * BLOCK, length)
    return None


def _differs(block: Block, file: FileDigest) -> bool:
    found = hash_or_fail(block)
    return isinstance(found, BlockDigest) and found.digest != file.block(block.number)


def as_damage(error: FtckptError, source: Source) -> FtckptError:
    """Return a `CorruptError` for an `UnsafeError` about a file that is not what was sealed.

    Any other error is returned as it is, also where no manifest beside the data can be read.
    """
    name = error.file or (next(iter(source.entries), "") if source.single else "")
    if not isinstance(error, UnsafeError) or not name:
        return error
    try:
        manifest = find(source)
        changed = altered(source, manifest, name, error.offset or 0) if manifest else None
    except FtckptError:  # it proves nothing
        return error
    if changed is None:
        return error
    return CorruptError(
        changed.said(error.message),
        hint="`ftckpt repair` restores it from a replica",
        kind="bad-digest",
        file=changed.file,
        offset=changed.offset,
        length=changed.length,
    )
