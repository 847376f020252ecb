"""The header of a safetensors file: an eight-byte length, then JSON, then the tensors' bytes.

The rules are those of the reference reader (`validate` and `read_metadata` in safetensors'
`tensor.rs`); whatever it rejects is rejected here. Beyond it, and after the text of the format:
equal keys are refused, the header begins with `{`, nesting is bounded, and there are at most a
million tensors. A dtype or members that neither knows are a newer writer's.

Damage and abuse are told apart. A file that is too short or has a hole can come from a broken copy
and is CORRUPT. Equal keys, two tensors on the same bytes, sizes beyond 64 bits, or a header of more
than 100 MB do not come from accidents and are UNSAFE.

Read the headers of many safetensors files together.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple, NoReturn

from ftckpt.checkpoint import Extent
from ftckpt.checkpoint.dtypes import BY_SAFETENSORS, DType
from ftckpt.errors import CorruptError, NewerWriterError, TruncatedError, UnsafeError
from ftckpt.findings import listed
from ftckpt.storage.source import Source
from ftckpt.strict_json import JsonLimits, parse, shown

PREFIX = 8  # bytes of the little-endian length
MAX_HEADER = 100_000_000  # bytes; `MAX_HEADER_SIZE` in tensor.rs
MAX_TENSORS = 1_000_000
_MAX_U64 = 2**64 - 1
_MOST_DIMS = 64  # of torch and of numpy
_MEMBERS = frozenset(("dtype", "shape", "data_offsets"))
_INT = {int}  # bool is not among them
_MAX_DIM = 2**63 - 1  # what torch and numpy can count

# A tensor has a name and three members; the rest of the keys are those of `__metadata__`.
_LIMITS = JsonLimits(
    depth=4, objects=MAX_TENSORS + 2, keys=4_200_000, items=16_000_000, naturals=True, more=200_000
)


class HeaderTensor(NamedTuple):
    """One tensor in a file.

    Attributes:
        name: as stored; any text, never a path.
        dtype: element type.
        shape: as stored (F4 counts elements, not torch's pairs).
        begin: first byte, from the start of the file.
        end: byte after the last, from the start of the file.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """All that a header says.

    Attributes:
        tensors: in the order of the header.
        metadata: `__metadata__`; empty where absent or null.
        length: bytes of the header with its prefix: where the tensors' bytes begin.
    """

    tensors: list[HeaderTensor]
    metadata: Mapping[str, str]
    length: int


def header_length(prefix: bytes, size: int, file: str) -> int:
    """Return how many bytes of `file` prefix and header take together.

    Args:
        prefix: the first eight bytes, or all that there are.
        size: bytes of the whole file.
        file: its name, for errors.

    Raises:
        TruncatedError: the file ends before its header does.
        CorruptError: the length is 0 or 1, in which no header fits.
        UnsafeError: the length is over 100 MB.
    """
    if size < PREFIX:
        raise TruncatedError(
            f"{file} has {size} bytes, fewer than a safetensors file can have", file=file
        )
    length = int.from_bytes(prefix[:PREFIX], "little")
    if length > MAX_HEADER:
        raise UnsafeError(
            f"{file} declares a header of {length} bytes, over the limit of {MAX_HEADER}",
            kind="unsafe-header",
            file=file,
            offset=0,
            length=PREFIX,
        )
    if length < 2:
        raise CorruptError(
            f"{file} declares a header of {length} bytes, in which none fits",
            kind="bad-header",
            file=file,
            offset=0,
            length=PREFIX,
        )
    if length > size - PREFIX:
        raise TruncatedError(
            f"{file} has {size} bytes and ends inside its header of {length}",
            file=file,
            offset=size,
            length=length + PREFIX - size,
        )
    return PREFIX + length


def parse_header(head: bytes, size: int, file: str) -> Header:
    """Return the header of `file`, checked by every rule of the format.

    Args:
        head: the first `header_length` bytes of the file.
        size: bytes of the whole file.
        file: its name, for errors.

    Raises:
        TruncatedError: the file ends before its tensors do.
        CorruptError: damage (`bad-header`, `trailing-bytes`).
        NewerWriterError: a dtype, or members of an entry, that are not known.
        UnsafeError: abuse or ambiguity (`unsafe-header`).
    """
    text = head[PREFIX:]
    if text[:1] != b"{":
        _bad(file, "does not begin with {")
    value = parse(text, _LIMITS, file=file, what="header", bad="bad-header", unsafe="unsafe-header")
    metadata = _metadata(value.pop("__metadata__", None), file)
    if len(value) > MAX_TENSORS:
        _refuse(file, f"names more than {MAX_TENSORS} tensors")
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # there are few, and many tensors
    tensors = [_tensor(name, entry, len(head), file, shapes) for name, entry in value.items()]
    _check_ranges(tensors, len(head), size, file)
    return Header(tensors, metadata, len(head))


def _metadata(value: Any, file: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        _bad(file, "has a __metadata__ that does not map text to text")
    return value


def _tensor(
    name: str,
    entry: Any,
    start: int,
    file: str,
    shapes: dict[tuple[int, ...], tuple[int, ...]],
) -> HeaderTensor:
    """Check one entry by itself; `start` is where the tensors' bytes begin."""
    try:
        code, dims, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, IndexError):
        _refuse_members(file, name, entry)
    dtype = BY_SAFETENSORS.get(code) if type(code) is str else None
    if dtype is None:
        _refuse_dtype(file, name, entry)
    if type(dims) is not list or not set(map(type, dims)) <= _INT:
        _bad(file, f"gives {shown(name)} a shape that is not a list of integers", name)
    if type(offsets) is not list or len(offsets) != 2 or set(map(type, offsets)) != _INT:
        _bad(file, f"gives {shown(name)} data_offsets that are no pair of integers", name)
    if len(dims) > _MOST_DIMS:  # each costs time again for every other
        _refuse(file, f"gives {shown(name)} {len(dims)} dimensions", name)
    begin, end = offsets
    if begin > end:
        _bad(file, f"ends {shown(name)} before its beginning", name)
    if end > _MAX_U64 - start:
        _refuse(file, f"places {shown(name)} beyond 64 bits", name)
    elements = prod(dims)
    if not 0 < elements <= _MAX_DIM:
        _check_volume(name, dims, file)
    bits = elements * dtype.bits
    if bits > _MAX_U64:
        _refuse(file, f"gives {shown(name)} a size beyond 64 bits", name)
    if bits != 8 * (end - begin):
        _bad(
            file,
            f"gives {shown(name)} {end - begin} bytes where shape and dtype need "
            f"{bits // 8 if bits % 8 == 0 else bits / 8}",
            name,
        )
    shape = tuple(dims)
    return HeaderTensor(name, dtype, shapes.setdefault(shape, shape), start + begin, start + end)


def _refuse_members(file: str, name: str, entry: Any) -> NoReturn:
    """Refuse an entry that lacks a member: as damage, or as a newer writer's if it has others."""
    other = sorted(entry.keys() - _MEMBERS) if isinstance(entry, dict) else []
    if not other or any(_near(one, _MEMBERS - entry.keys()) for one in other):
        _bad(file, f"has an entry without dtype, shape and data_offsets: {shown(name)}", name)
    raise NewerWriterError.of(
        f"the members of {shown(name)} in the header of {file}",
        expected="dtype, shape, data_offsets", found=shown(listed(sorted(entry))), file=file,
        tensor=name,
    )  # fmt: skip


def _refuse_dtype(file: str, name: str, entry: Mapping[str, Any]) -> NoReturn:
    """Refuse a dtype that is not known; one bit from one whose size fits is damage."""
    code = entry["dtype"]
    if type(code) is not str or not re.fullmatch(r"[A-Z]\w{0,31}", code, re.ASCII):
        _bad(file, f"gives {shown(name)} the unknown dtype {shown(code)}", name)
    near = BY_SAFETENSORS.get(_near(code, BY_SAFETENSORS))
    with suppress(TypeError, ValueError):  # a shape or a range that is none
        begin, end = entry["data_offsets"]
        if near is not None and prod(entry["shape"]) * near.bits == 8 * (end - begin):
            _bad(file, f"gives {shown(name)} the unknown dtype {shown(code)}", name)
    raise NewerWriterError.of(
        f"the dtype of {shown(name)} in the header of {file}", expected=", ".join(BY_SAFETENSORS),
        found=code, file=file, tensor=name,
    )  # fmt: skip


def _near(name: str, known: Container[str]) -> str:
    from ftckpt.formats.pickles.inert import one_bit_from  # only after a failure

    return one_bit_from(name, known)


def _check_volume(name: str, dims: list[int], file: str) -> None:
    """Multiply in the header's order and stop at the first overflow, as the reference does.

    A zero at the end must not hide what a reader with 64 bits computes before it gets there.
    """
    elements = 1
    for dim in dims:
        elements *= dim
        if elements > _MAX_U64 or dim > _MAX_DIM:
            _refuse(file, f"gives {shown(name)} a shape whose volume is beyond 64 bits", name)


def _check_ranges(tensors: list[HeaderTensor], start: int, size: int, file: str) -> None:
    """Check that the tensors' bytes follow each other from the header to the end of the file."""
    cursor = start
    for tensor in sorted(tensors, key=lambda t: (t.begin, t.end)):
        if tensor.begin < cursor:
            _refuse(file, f"places {shown(tensor.name)} on bytes of another tensor", tensor.name)
        if tensor.begin > cursor:
            _bad(
                file,
                f"leaves {tensor.begin - cursor} bytes before {shown(tensor.name)} to no tensor",
                tensor.name,
                cursor,
                tensor.begin - cursor,
            )
        cursor = tensor.end
        if cursor > size:
            raise TruncatedError(
                f"{file} has {size} bytes and ends inside or before {shown(tensor.name)}, which "
                f"reaches to byte {cursor}",
                file=file,
                tensor=tensor.name,
                offset=size,
                length=cursor - size,
            )
    if cursor < size:
        raise CorruptError(
            f"{file} holds {size - cursor} bytes after its last tensor",
            kind="trailing-bytes",
            file=file,
            offset=cursor,
            length=size - cursor,
        )


def _bad(
    file: str,
    reason: str,
    tensor: str | None = None,
    offset: int | None = None,
    length: int | None = None,
) -> NoReturn:
    raise CorruptError(
        f"the header of {file} {reason}",
        kind="bad-header",
        file=file,
        tensor=tensor,
        offset=offset,
        length=length,
    )


def _refuse(file: str, reason: str, tensor: str | None = None) -> NoReturn:
    raise UnsafeError(
        f"the header of {file} {reason}", kind="unsafe-header", file=file, tensor=tensor
    )


_GUESS = 64 << 10  # holds the header of about 500 tensors
_ROUND = 64 << 20  # bytes of headers in memory at once


def read_headers(source: Source, files: Iterable[str]) -> dict[str, Header | CorruptError]:
    """Return the header of each file, or the damage that was found in it.

    At most two ranged reads a file, all files of a round together; headers take no more memory
    at once than the larger of 64 MiB and one header.

    Raises:
        UnsafeError: any of them is hostile.
    """
    result: dict[str, Header | CorruptError] = {}
    longer: list[tuple[Extent, bytes]] = []
    wanted = list(files)
    sizes: dict[str, int] = {}
    for file in wanted:
        try:
            source.entry(file)
            sizes[file] = source.size(file)
        except CorruptError as error:  # a link to nothing
            result[file] = error
    guesses = [Extent(file, 0, min(size, _GUESS)) for file, size in sizes.items()]
    for batch in _rounds(guesses):
        for extent, head in zip(batch, source.read_many(batch), strict=True):
            file, size = extent.file, sizes[extent.file]
            try:
                need = header_length(head, size, file)
                if need <= len(head):
                    result[file] = parse_header(head[:need], size, file)
                else:
                    longer.append((Extent(file, len(head), need - len(head)), head))
            except CorruptError as error:
                result[file] = error
    heads = {extent.file: head for extent, head in longer}
    for batch in _rounds([extent for extent, _ in longer]):
        for extent, rest in zip(batch, source.read_many(batch), strict=True):
            file = extent.file
            try:
                result[file] = parse_header(heads.pop(file) + rest, sizes[file], file)
            except CorruptError as error:
                result[file] = error
    return {file: result[file] for file in wanted}


def _rounds(extents: Sequence[Extent]) -> Iterator[list[Extent]]:
    """Split `extents` so that each round reads at most `_ROUND` bytes, or one extent."""
    batch: list[Extent] = []
    total = 0
    for extent in extents:
        if batch and total + extent.length > _ROUND:
            yield batch
            batch, total = [], 0
        batch.append(extent)
        total += extent.length
    if batch:
        yield batch
