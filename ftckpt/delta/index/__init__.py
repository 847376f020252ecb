"""The index of a delta: every tensor with its blocks, every object, and what the base must be.

A delta is a directory: `ftckpt.delta`, the index, which is written last, and data files, which the
index names. Without a base it is a full checkpoint, compressed. `docs/delta-format.md` has the
format byte by byte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ftckpt.checkpoint import Kind, Topology, tensor_key
from ftckpt.checkpoint.dtypes import DType
from ftckpt.delta.codec.choose_encoding import BLOCK, Form, Reference
from ftckpt.delta.codec.fit_predictor import Fit
from ftckpt.delta.codec.words import word_count, words_of
from ftckpt.errors import UnsupportedError
from ftckpt.manifest import TOPOLOGY
from ftckpt.own_files import DELTA

NAME = DELTA
MAGIC = b"FTCKDLTA"
VERSION = 1
# 44 bytes for each block of 2^20 elements: this is the index of a checkpoint of 40 TB.
MAX_BYTES = 512 << 20
HEAD = struct.Struct("<8sIIQQ")  # magic, version, zero, bytes of the header, number of blocks
# file, reference, form, zero, offset, length, XXH3-64 of the payload, XXH3-128 of the elements
ROW = struct.Struct("<IBBHQI8s16s")
# By number: to look an enum's member up by its value takes longer.
_REFERENCES, _FORMS = tuple(Reference), tuple(Form)


class StoredBlock(NamedTuple):
    """Where one block of a tensor lies.

    Attributes:
        file: number of the data file.
        offset, length: of its payload there.
        reference: what it is stored against.
        form: how it is stored.
        stored: XXH3-64 of the payload, 8 bytes, big-endian.
        digest: XXH3-128 of the block's elements, 16 bytes, big-endian.
    """

    file: int
    offset: int
    length: int
    reference: Reference
    form: Form
    stored: bytes
    digest: bytes


class BaseTensor(NamedTuple):
    """The tensor of the base that one of the target is stored against.

    Attributes:
        key: in the base.
        digest: its tensor digest (`ftckpt.digests.tensors`).
    """

    key: str
    digest: str


@dataclass(frozen=True, slots=True)
class DeltaTensor:
    """One logical tensor of the target.

    Attributes:
        component, name, kind, shape, dtype: as `ftckpt.checkpoint.TensorInfo` has them.
        digest: its tensor digest (`ftckpt.digests.tensors`).
        base: what it is stored against in the base, of the same shape and type; or None.
        fit: the rule that predicts it; or None.
        helpers: for each of the rule's helpers, its place among the index's tensors.
        first: row of its first block.
        path: keys that lead to it in the source's nested state, where the source recorded them.
        stored_name: the name that the source used, where it differs from `name`.
    """

    component: str
    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: DType
    digest: str
    base: BaseTensor | None = None
    fit: Fit | None = None
    helpers: tuple[int, ...] = ()
    first: int = 0
    path: tuple[str | int, ...] = ()
    stored_name: str = ""

    @property
    def key(self) -> str:
        """Its key in `ftckpt.checkpoint.Checkpoint.tensors`."""
        return tensor_key(self.component, self.kind, self.name)

    @property
    def numel(self) -> int:
        """Number of elements."""
        numel = 1
        for size in self.shape:
            numel *= size
        return numel

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.dtype.nbytes(self.numel)

    @property
    def words(self) -> int:
        """How many words its elements make (`ftckpt.delta.codec.words`)."""
        return word_count(self.dtype, self.numel)

    @property
    def block_words(self) -> int:
        """Words of a block: those of `BLOCK` elements, or of as many packed bytes."""
        return BLOCK * words_of(self.dtype).each

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.words // self.block_words)


class DeltaObject(NamedTuple):
    """A piece of non-tensor state, byte for byte.

    Attributes:
        name: as `ftckpt.checkpoint.ObjectInfo` has it.
        form: what the bytes are, in words of the format that reads deltas.
        rank: whose it is, where known.
        file: number of the data file.
        offset, length: of its bytes there.
        digest: XXH3-128 of them, 16 bytes, big-endian.
        path: keys that lead to it in the source's nested state, where the source recorded them.
    """

    name: str
    form: str
    rank: int | None
    file: int
    offset: int
    length: int
    digest: bytes
    path: tuple[str | int, ...] = ()


class BaseName(NamedTuple):
    """Which checkpoint a delta depends on.

    Attributes:
        path: where it was: a URL, or a path relative to the delta.
        step: its step, where known.
        content: the digest of its content (`content_digest`); this is what counts.
        manifest: the digest of its manifest, in hexadecimal; "" where it had none.
    """

    path: str
    step: int | None
    content: str
    manifest: str = ""


class DataFile(NamedTuple):
    """A file that holds payloads: its name beside the index, and its bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class DeltaIndex:
    """All that a delta says of itself.

    Attributes:
        step: of the target, where its content shows it.
        source_format: the format that the target was stored in.
        topology: of the job that wrote it.
        base: what it depends on; None for a full one.
        files: the data files.
        tensors: in the target's own order.
        objects: non-tensor state.
        aliases: key -> key of the tensor that owns the same elements (tied weights).
        rows: `ROW` after `ROW`, one a block, tensor by tensor.
        tool: the program that wrote it, with its version.
        created: UTC, `2026-01-31T12:00:00Z`.
    """

    step: int | None
    source_format: str
    topology: Topology
    base: BaseName | None
    files: Sequence[DataFile]
    tensors: Sequence[DeltaTensor]
    objects: Sequence[DeltaObject]
    aliases: Mapping[str, str]
    rows: bytes = field(repr=False)
    tool: str = ""
    created: str = ""

    def block(self, tensor: DeltaTensor, number: int) -> StoredBlock:
        """Return where block `number` of a tensor lies, counted from 0."""
        file, reference, form, _, offset, length, stored, digest = ROW.unpack_from(
            self.rows, (tensor.first + number) * ROW.size
        )
        return StoredBlock(
            file, offset, length, _REFERENCES[reference], _FORMS[form], stored, digest
        )

    def blocks_of(self, tensor: DeltaTensor) -> Iterator[StoredBlock]:
        """Yield where the blocks of a tensor lie, in order."""
        return (self.block(tensor, number) for number in range(tensor.blocks))

    def content(self) -> str:
        """Return the digest of the target's content: what a delta based on it names as its base."""
        aliases = self.aliases
        return content_digest({t.key: t.digest for t in self.tensors if t.key not in aliases})

    def dump(self) -> bytes:
        """Return the index's bytes; equal indexes give equal bytes.

        Raises:
            UnsupportedError: it would be larger than a reader accepts.
        """
        import json

        import xxhash

        header = json.dumps(_document(self), ensure_ascii=True, separators=(",", ":")).encode()
        head = HEAD.pack(MAGIC, VERSION, 0, len(header), len(self.rows) // ROW.size)
        data = head + header + self.rows
        data += xxhash.xxh3_128_digest(data)
        if len(data) > MAX_BYTES:
            raise UnsupportedError(
                f"the index of the delta would have {len(data)} bytes; {MAX_BYTES} is most"
            )
        return data


def pack_row(block: StoredBlock) -> bytes:
    """Return the row of one block."""
    return ROW.pack(
        block.file,
        block.reference,
        block.form,
        0,
        block.offset,
        block.length,
        block.stored,
        block.digest,
    )


def content_digest(digests: Mapping[str, str]) -> str:
    """Return the digest of a checkpoint's tensors, whatever its format, files and sharding.

    XXH3-128, 32 hexadecimal digits, over one line `<digest> <key>` for each tensor, sorted by key
    (as UTF-8), each ended by a line feed. Aliases and non-tensor state do not count.

    Args:
        digests: the tensor digest of each tensor, by key.
    """
    import xxhash

    lines = sorted(
        (key.encode("utf-8", "surrogatepass"), digest) for key, digest in digests.items()
    )
    state = xxhash.xxh3_128()
    for key, digest in lines:
        state.update(digest.encode() + b" " + key + b"\n")
    result: str = state.hexdigest()
    return result


def _document(index: DeltaIndex) -> dict[str, Any]:
    base = index.base
    return {
        "tool": index.tool,
        "created": index.created,
        "source_format": index.source_format,
        "step": index.step,
        "topology": {name: getattr(index.topology, name) for name in TOPOLOGY},
        "base": None if base is None else base._asdict(),
        "block": BLOCK,
        "files": [list(file) for file in index.files],
        "tensors": [_tensor(tensor) for tensor in index.tensors],
        "objects": [_object(entry) for entry in index.objects],
        "aliases": dict(sorted(index.aliases.items())),
    }


def _object(entry: DeltaObject) -> dict[str, Any]:
    row = {**entry._asdict(), "digest": entry.digest.hex()}
    if not entry.path:
        del row["path"]
    return row


def _tensor(tensor: DeltaTensor) -> dict[str, Any]:
    row: dict[str, Any] = {
        "component": tensor.component,
        "name": tensor.name,
        "kind": tensor.kind.value,
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "digest": tensor.digest,
    }
    if tensor.base is not None:
        row["base"] = list(tensor.base)
    if tensor.fit is not None:
        row["rule"] = tensor.fit.rule.name
        row["coefficients"] = [float(number).hex() for number in tensor.fit.coefficients]
        row["helpers"] = list(tensor.helpers)
    if tensor.path:
        row["path"] = list(tensor.path)
    if tensor.stored_name:
        row["stored_name"] = tensor.stored_name
    return row
