"""List the files of a replica, in the order in which they are copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import CorruptError
from ftckpt.extents import Extent
from ftckpt.manifest import FileDigest, Manifest
from ftckpt.own_files import is_leftover, is_own
from ftckpt.transfer.layout import Layout, OutputFile, Stored


class CopiedFile(NamedTuple):
    """One file.

    Attributes:
        path: in the replica.
        name: in the source; another one only where the checkpoint is one file that is renamed.
        size: bytes.
    """

    path: str
    name: str
    size: int

    @property
    def output(self) -> OutputFile:
        """The file as a staging place and a journal know it."""
        return OutputFile(self.path, [Stored(Extent(self.name, 0, self.size))])


@dataclass(frozen=True)
class ReplicaContents:
    """The files of a replica.

    Attributes:
        files: those that belong to the checkpoint, by path; the commit marker last.
        beside: other files that are carried too.
        left: names in the source's directory that are not carried.
        marker: path of the file by which the format's own readers see a checkpoint; "" for none.
    """

    files: Sequence[CopiedFile]
    beside: Sequence[CopiedFile]
    left: Sequence[str]
    marker: str = ""

    @property
    def stages(self) -> Iterator[Sequence[CopiedFile]]:
        """What is carried first, and what only when that is whole: data, then the marker."""
        everything = [*self.beside, *self.files]
        yield [file for file in everything if file.path != self.marker]
        yield [file for file in everything if file.path == self.marker]

    @property
    def layout(self) -> Layout:
        """The same as a layout, for what names and fingerprints one."""
        return Layout(files=[file.output for stage in self.stages for file in stage])

    @property
    def nbytes(self) -> int:
        """Bytes of all files that are carried."""
        return sum(file.size for file in (*self.files, *self.beside))


def contents_of(
    checkpoint: Checkpoint, manifest: Manifest | None, *, beside: bool = False, called: str = ""
) -> ReplicaContents:
    """Return the files of a checkpoint as a replica has them.

    What belongs to a checkpoint is what its format names and, where it is sealed, what its manifest
    lists. The manifest itself and other files of ftckpt's own do not count: they are written anew.

    Args:
        checkpoint: opened.
        manifest: its own, where it is sealed.
        beside: whether the other files of its directory are carried too.
        called: what the replica of a checkpoint that is one file is called; "" for the same.

    Raises:
        CorruptError: a file is missing, of another size than when it was sealed, or came after.
        UnsafeError: a file is a fifo, socket or device.
    """
    source = checkpoint.source
    members = {member for member in checkpoint.members() if not is_own(member)}
    if manifest is not None:
        for member in sorted(members - manifest.by_path.keys()):
            raise CorruptError(
                f"{member} belongs to the checkpoint and is not in the manifest",
                kind="added-file",
                file=member,
            )
        for sealed in manifest.files:
            _require_size(source.size(sealed.path), sealed)
        members |= manifest.by_path.keys()
    others = [
        n for n in source.entries if n not in members and not is_own(n) and not is_leftover(n)
    ]

    def file(member: str) -> CopiedFile:
        return CopiedFile(called or member, member, source.size(member))

    marker = checkpoint.commit.marker
    return ReplicaContents(
        files=[file(member) for member in sorted(members, key=lambda m: (m == marker, m))],
        beside=[file(other) for other in sorted(others)] if beside else [],
        left=[] if beside else sorted(others),
        marker=marker if marker in members and not source.single else "",
    )


def _require_size(size: int, sealed: FileDigest) -> None:
    if size != sealed.size:
        short = size < sealed.size
        low, high = sorted((size, sealed.size))
        raise CorruptError(
            f"{sealed.path} has {size} bytes and had {sealed.size} when it was sealed",
            kind="truncated-file" if short else "trailing-bytes",
            file=sealed.path,
            offset=low,
            length=high - low,
        )
