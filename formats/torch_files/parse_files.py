"""Parse whole files as torch.save streams, several at once, and check what their zips repeat."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

from ftckpt.checkpoint import Extent
from ftckpt.errors import CorruptError, ExitCode
from ftckpt.findings import Finding, Severity, finding
from ftckpt.storage.source import Source

from .local_headers import check_local_headers, local_extents
from .stream import TorchStream, parse_stream
from .zip_directory import Archive, serialization_id

# Opaque names that are told one by one.
_SHOWN = 20

# Local headers of a remote file cost a request each where they lie far apart.
_REMOTE_RECORDS = 1024
_ID = ".data/serialization_id"
_DIGITS = re.compile(r"\d+", re.ASCII)
_PACKED = re.compile(r"\.(?:gz|zst|zstd|lz4)$")


def parse_files(source: Source, names: Sequence[str]) -> dict[str, TorchStream | CorruptError]:
    """Return each file's stream, or the damage that keeps it from being parsed, in order.

    Raises:
        UnsafeError, UnsupportedError: of a file that is hostile or of another format.
        IncompleteError: one is a Git LFS pointer.
    """

    def one(name: str) -> TorchStream | CorruptError:
        try:
            source.entry(name)
            size = source.size(name)
            source.require_fetched(name)
            with source.open(name) as reader:
                return parse_stream(reader.read, size, file=name, plain=True)
        except CorruptError as error:
            error.file = error.file or name
            return error

    if len(names) == 1:
        return {names[0]: one(names[0])}
    with ThreadPoolExecutor(min(len(names) or 1, source.store.traits.parallel)) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def check_streams(source: Source, streams: Mapping[str, TorchStream]) -> Iterator[Finding]:
    """Yield where a zip contradicts itself, and records that nothing uses."""
    for file, stream in streams.items():
        if stream.archive is None:
            continue
        yield from _check_local(source, file, stream.archive)
        yield from _check_id(source, file, stream.archive)
        unused = stream.unreferenced
        if unused:
            nbytes = sum(stream.archive.members[name].size for name in unused)
            yield finding(
                "extent-hole",
                f"{len(unused)} records in {file} ({nbytes} bytes) belong to no tensor, such as"
                f" {unused[0]}",
                file=file,
                offset=stream.archive.members[unused[0]].offset,
                length=stream.archive.members[unused[0]].size,
            )


def check_saved_names(
    streams: Mapping[str, TorchStream], of_ranks: Mapping[str, int]
) -> Iterator[Finding]:
    """Yield files that `torch.save` wrote under the name of another one that is there.

    It calls the folder in an archive as the file, so that a file which a script or a restore put in
    another's place still says whose it is. Files that were numbered anew together keep their order,
    and are where they belong.

    Args:
        streams: of one checkpoint, by path.
        of_ranks: rank of each file that is one rank's own: nothing else can stand there. Layers and
            experts may be copied on purpose, which is a warning.
    """
    named = {(_folder(file), _saved_as(file)): file for file in streams}
    series: dict[tuple[str, str], list[str]] = defaultdict(list)
    for file, stream in streams.items():
        if stream.archive is not None:
            series[_folder(file), _DIGITS.sub("#", _saved_as(file))].append(file)
    for (folder, form), files in series.items():
        inside = {file: _root(streams[file]) for file in files}
        if all(_DIGITS.sub("#", root) == form for root in inside.values()):
            order = sorted(files, key=lambda file: _numbers(_saved_as(file)))
            if all(_numbers(inside[a]) < _numbers(inside[b]) for a, b in pairwise(order)):
                continue
        for file, root in inside.items():
            other = named.get((folder, root), file)
            # A copy with another ending (rank_0.pt, rank_0.pth) has the same name inside.
            if root != _saved_as(file) and other != file:
                yield _put_elsewhere(file, other, of_ranks)


def _put_elsewhere(file: str, other: str, of_ranks: Mapping[str, int]) -> Finding:
    what = f"{file} was saved as {other.rpartition('/')[2]}, which is there too"
    if file in of_ranks and other in of_ranks and of_ranks[file] != of_ranks[other]:
        message = f"{what}: it is another rank's file"
        return finding("wrong-rank", message, file=file, rank=of_ranks[file])
    found = finding("renamed-file", what, file=file)
    if _DIGITS.sub("#", _saved_as(file)) == _DIGITS.sub("#", _saved_as(other)):
        return found
    return replace(found, severity=Severity.ERROR, code=ExitCode.CORRUPT)


def _folder(file: str) -> str:
    return file.rpartition("/")[0]


def _saved_as(file: str) -> str:
    """Return what torch calls the folder in the archive of a file of that name."""
    name = _PACKED.sub("", file.rpartition("/")[2])
    return name.rpartition(".")[0] or name


def _root(stream: TorchStream) -> str:
    return stream.archive.prefix.rstrip("/") if stream.archive is not None else ""


def _numbers(name: str) -> tuple[tuple[int, str], ...]:
    # In the order of the integers, without them: a name may have thousands of digits.
    found = (digits.lstrip("0") for digits in _DIGITS.findall(name))
    return tuple((len(digits), digits) for digits in found)


def _check_local(source: Source, file: str, archive: Archive) -> Iterator[Finding]:
    if not source.store.traits.local and len(archive.members) > _REMOTE_RECORDS:
        yield finding(
            "not-covered",
            f"the local headers of {file} were not compared with its directory: "
            f"{len(archive.members)} requests",
            file=file,
        )
        return
    places = list(local_extents(archive))
    read = dict(zip(places, source.read_many([Extent(file, *p) for p in places]), strict=True))
    yield from check_local_headers(archive, lambda o, n: read[(o, n)], file=file)


def _check_id(source: Source, file: str, archive: Archive) -> Iterator[Finding]:
    """Compare the running sum of all CRCs that torch writes: an edited one shows."""
    expected = serialization_id(archive)
    member = archive.members.get(_ID)
    if expected is None or member is None or member.size != 40:
        return
    written = source.read(file, member.offset, member.size)[20:].decode("latin1")
    if written != expected:
        yield finding(
            "note",
            f"the serialization id in {file} does not follow from its CRC-32s: one of them was"
            " edited, or another program than torch wrote the file",
            file=file,
            offset=member.offset,
            length=member.size,
        )


def opaque_notes(first: Mapping[str, str]) -> list[Finding]:
    """Return a note for each class outside the allow-list: its name and which file names it."""
    return [
        finding(
            "opaque-object",
            f"{path} names {name}, a class outside the allow-list; kept inert",
            file=path,
        )
        for name, path in list(first.items())[:_SHOWN]
    ]
