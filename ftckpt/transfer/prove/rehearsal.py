"""Read a result before it is written: would its own reader give back what is to be written?

The files of a layout are known byte by byte, so the target's reader can open them although nothing
has been written. What it would name otherwise, or not find, is refused here and costs nothing;
without this the proof would refuse it after all the work.

Sums over tensor bytes are not computed: nothing that a reader needs for opening depends on them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from zlib import crc32

from ftckpt.checkpoint.read_ahead import extents_of, reading_ahead
from ftckpt.discovery.recognise import Format
from ftckpt.errors import CorruptError, NotFoundError, UnsupportedError
from ftckpt.extents import Extent
from ftckpt.storage.readonly import ReadOnlyStore
from ftckpt.storage.source import Source
from ftckpt.storage.store import Entry, EntryKind, Reader, Traits
from ftckpt.transfer.content import Content
from ftckpt.transfer.forms import compare_forms, require_all_read
from ftckpt.transfer.layout import Checksums, Layout, Literal, OutputFile, Stored, Zeros
from ftckpt.transfer.read.elements import Gatherer

from .against_source import SameObjects, compare_objects

_MAX_SUMMED = 64 << 20  # bytes of a range whose CRC-32 is computed here
_COUNTER = 8  # bytes of a tensor that may be a step counter


def rehearse(
    content: Content, layout: Layout, target: Format, same_objects: SameObjects, *, single: bool
) -> None:
    """Require that the target's reader would find in the files what is to be written.

    Names, shapes, types and other state are compared; tensor elements are not.

    Args:
        content: what is to be written.
        layout: the files.
        target: reads them.
        same_objects: how objects are compared.
        single: whether the result is one file.

    Raises:
        UnsupportedError: it would find something else; the format cannot hold this as it is.
        FtckptError: the source cannot be read.
    """
    gatherer = Gatherer(content.checkpoint)
    try:
        store = LaidOutStore(layout, gatherer)
        if single:
            source = Source.file(store, store.stat(layout.files[0].path))
        else:
            source = Source.directory(store)
        held = layout.content or content
        # A reader decodes other state and step counters; from a server few requests bring them.
        checkpoint = content.checkpoint
        small = (key for key, info in checkpoint.tensors.items() if info.nbytes <= _COUNTER)
        asked = extents_of(checkpoint, {*content.objects, *small})
        try:
            with reading_ahead(checkpoint, asked, bases=False):
                result = target.open(source)
                require_all_read(result)
                compare_forms(held, result)
                compare_objects(held, result, same_objects)
        except CorruptError as error:
            if error.kind != "failed-proof":
                raise
            what = error.message.removeprefix("the proof failed: ")
            raise UnsupportedError(
                f"{target.name} cannot hold this as it is; read back, {what}",
                hint="--drop NAME leaves it out; --only model writes the weights alone; "
                "another --to may have a place for it",
                tensor=error.tensor,
            ) from error
    finally:
        gatherer.close()


class LaidOutStore(ReadOnlyStore):
    """The files of a layout as if they were written; nothing can be written to it.

    Args:
        layout: the files.
        gatherer: reads the elements of the source.
    """

    refusal = "a result that is only laid out cannot be written to"

    def __init__(self, layout: Layout, gatherer: Gatherer) -> None:
        self.url = gatherer.bytes.checkpoint.source.url
        self.traits = Traits(local=False, conditional_put=None, gap=0, parallel=1)
        self._files = {file.path: file for file in (*layout.files, *layout.commit)}
        self._gatherer = gatherer

    def stat(self, path: str) -> Entry:
        """Return the entry of one file."""
        if path not in self._files:
            raise NotFoundError(f"{path} is not a file of the result", file=path)
        return Entry(path, self._files[path].size, None, EntryKind.FILE)

    def walk(self, path: str = "") -> list[Entry]:
        """Return every file below `path`, sorted by path."""
        return sorted(
            self.stat(name) for name in self._files if not path or name.startswith(path + "/")
        )

    def open(self, path: str) -> Reader:
        """Open one file."""
        self.stat(path)
        return _LaidOutReader(self._files[path], self._gatherer)

    def read_many(self, extents: Sequence[Extent]) -> list[bytes]:
        """Return the bytes of each extent, in order."""
        return [self.open(e.file).read(e.offset, e.length) for e in extents]


class _LaidOutReader(Reader):
    def __init__(self, file: OutputFile, gatherer: Gatherer) -> None:
        self._file, self._gatherer = file, gatherer

    def close(self) -> None:
        """Nothing is open."""

    def readinto(self, offset: int, view: memoryview) -> None:
        """Fill `view` with bytes of the file."""
        file, stop = self._file, offset + view.nbytes
        if stop > file.size:
            raise CorruptError(f"{file.path} ends at byte {file.size}", file=file.path)
        offsets = file.offsets
        index = bisect_right(offsets, offset) - 1
        at = offset
        while at < stop:
            end = min(offsets[index + 1], stop)
            if at < end:
                self._fill(index, at - offsets[index], view[at - offset : end - offset])
                at = end
            index += 1

    def _fill(self, index: int, skip: int, view: memoryview) -> None:
        """Put bytes of one segment, from `skip` on, into `view`."""
        segment = self._file.segments[index]
        if isinstance(segment, Literal):
            view[:] = memoryview(segment.data)[skip : skip + len(view)]
        elif isinstance(segment, Zeros):
            view[:] = bytes(len(view))
        elif isinstance(segment, Stored):
            extent = segment.extent
            self._gatherer.copy(extent._replace(offset=extent.offset + skip), view)
        elif isinstance(segment, Checksums):
            sums = [self._crc32(start, stop) for start, stop in segment.ranges]
            view[:] = segment.build(sums)[skip : skip + len(view)]
        else:
            shard = segment.shard
            self._gatherer.fill_bytes(shard, segment.start * shard.dtype.bits // 8 + skip, view)

    def _crc32(self, start: int, stop: int) -> int:
        """Return the CRC-32 of bytes that are known; 0 where tensors are among them."""
        offsets, segments = self._file.offsets, self._file.segments
        if stop - start > _MAX_SUMMED:
            return 0
        index = bisect_right(offsets, start) - 1
        while index < len(segments) and offsets[index] < stop:
            if not isinstance(segments[index], Literal | Zeros):
                return 0
            index += 1
        return crc32(self.read(start, stop - start))
