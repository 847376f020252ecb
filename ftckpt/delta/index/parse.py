"""Read the index of a delta and believe nothing in it.

What a number promises is checked before anything of that size is made. Two readers must never see
two different checkpoints in the same bytes: duplicate keys, unknown members, rows of no tensor and
bytes of no section are refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.delta.codec.choose_encoding import BLOCK
from ftckpt.delta.codec.fit_predictor import Fit
from ftckpt.delta.codec.predict import RULES, Predictor
from ftckpt.delta.index import (
    HEAD,
    MAGIC,
    MAX_BYTES,
    NAME,
    ROW,
    VERSION,
    BaseName,
    BaseTensor,
    DataFile,
    DeltaIndex,
    DeltaObject,
    DeltaTensor,
)
from ftckpt.errors import CorruptError, NewerWriterError, TruncatedError, UnsupportedError
from ftckpt.manifest.parse import parse_topology
from ftckpt.storage.source import safe_name
from ftckpt.strict_json import (
    JsonError,
    MembersError,
    count,
    counts,
    decode,
    hexadecimal,
    items,
    members,
    optional_count,
    text,
)
from ftckpt.workers.budget import demand

from .rows import check_rows

_DIGEST = 16
_MAX = 1 << 63
_MAX_AXES = 64  # and steps of a path
_MAX_PATH = 4096  # characters
GROWTH = 16  # bytes of parsed JSON for one of text, at most
_MEMBERS = "tool created source_format step topology base block files tensors objects aliases"
_TENSOR = frozenset(["component", "name", "kind", "dtype", "shape", "digest"])
_PATH = "path"
_STORED = "stored_name"
_PREDICTED = frozenset(["rule", "coefficients", "helpers"])
_KINDS = {kind.value: kind for kind in Kind}


def parse_index(data: bytes, file: str = NAME) -> DeltaIndex:
    """Return the index in `data`, every rule of its format checked.

    Args:
        data: the whole file.
        file: its name, for messages.

    Raises:
        CorruptError: damaged, or it contradicts itself (`bad-delta`).
        UnsupportedError: whole, but of a version, rule or form that this version does not know.
        UnsafeError: a name in it leads out of the checkpoint.
    """
    return IndexParser(file).index(data)


class IndexParser:
    """Reads one index.

    Args:
        file: its name, for messages.
    """

    def __init__(self, file: str) -> None:
        self.file = file

    def bad(self, why: str, tensor: str | None = None) -> NoReturn:
        """Raise the error for an index that is damaged or contradicts itself."""
        raise CorruptError(
            f"{self.file} is not a valid index of a delta: {why}",
            kind="bad-delta",
            file=self.file,
            tensor=tensor,
        )

    def unknown(self, what: str) -> NoReturn:
        """Raise the error for what only another version knows."""
        raise UnsupportedError(
            f"{self.file} uses {what}, which this version does not know",
            hint="use a newer ftckpt",
            file=self.file,
        )

    def index(self, data: bytes) -> DeltaIndex:
        """Return the index in `data`; see `parse_index`."""
        try:
            return self._index(data)
        except MembersError as error:  # its digest is right: so it was written
            raise NewerWriterError.of(
                self.file, expected="the members of an index of a delta", found=str(error),
                file=self.file,
            ) from None  # fmt: skip
        except JsonError as error:
            self.bad(str(error))

    def _index(self, data: bytes) -> DeltaIndex:
        header, rows = self._sections(data)
        body = members(self._json(header), _MEMBERS.split(), "the index")
        if body["block"] != BLOCK:
            self.unknown(f"blocks of {body['block']!r} elements"[:80])
        base = body["base"]
        files = [self._data_file(row) for row in items(body["files"], "files")]
        if len({file.name for file in files}) != len(files):
            self.bad("a data file stands twice")
        tensors = self._tensors(items(body["tensors"], "tensors"))
        if len({tensor.key for tensor in tensors}) != len(tensors):
            self.bad("a tensor stands twice")
        if base is None and any(tensor.base is not None for tensor in tensors):
            self.bad("a tensor is stored against a base that the delta does not have")
        check_rows(self, rows, files, tensors)
        return DeltaIndex(
            step=optional_count(body["step"], "step"),
            source_format=text(body["source_format"], "source_format"),
            topology=parse_topology(body["topology"]),
            base=None if base is None else self._base(base),
            files=files,
            tensors=tensors,
            objects=self._objects(items(body["objects"], "objects"), files),
            aliases=self._aliases(body["aliases"], tensors, rows),
            rows=rows,
            tool=text(body["tool"], "tool"),
            created=text(body["created"], "created"),
        )

    def _sections(self, data: bytes) -> tuple[bytes, bytes]:
        """Check the frame of the file and return the header and the rows."""
        if len(data) > MAX_BYTES:
            self.bad(f"it has {len(data)} bytes and {MAX_BYTES} is most")
        if len(data) < HEAD.size + _DIGEST:
            raise TruncatedError(f"{self.file} ends early", file=self.file)
        body = memoryview(data)[:-_DIGEST]
        magic, version, zero, size, count = HEAD.unpack_from(data)
        if magic != MAGIC:
            self.bad("it does not begin as one")
        self.require_whole(data)
        if version != VERSION or zero:
            self.unknown(f"version {version} of the format")
        if HEAD.size + size + count * ROW.size != len(body):
            self.bad("its sections do not fill it")
        return bytes(body[HEAD.size : HEAD.size + size]), bytes(body[HEAD.size + size :])

    def require_whole(self, data: bytes) -> None:
        """Raise CorruptError where the bytes do not match the digest at their end."""
        import xxhash

        if xxhash.xxh3_128_digest(memoryview(data)[:-_DIGEST]) != data[-_DIGEST:]:
            self.bad("its bytes do not match the digest at its end")

    def _json(self, header: bytes) -> object:
        demand(GROWTH * len(header), f"reading {self.file}")
        try:
            return decode(header)
        except JsonError as error:
            raise JsonError(f"its header {error}") from None

    def _tensors(self, rows: Sequence[object]) -> list[DeltaTensor]:
        tensors: list[DeltaTensor] = []
        first = 0
        for row in rows:
            tensor = self._tensor(row, first)
            first += tensor.blocks
            tensors.append(tensor)
        for tensor in tensors:
            if tensor.fit is not None:
                self._check_fit(tensor, tensor.fit.rule, tensors)
        return tensors

    def _tensor(self, row: object, first: int) -> DeltaTensor:
        if not isinstance(row, dict) or not row.keys() >= _TENSOR:
            self.bad("an entry of tensors lacks a member")
        rest = row.keys() - _TENSOR - {"base", _PATH, _STORED}
        if rest and rest < _PREDICTED:
            self.bad("an entry of tensors has only some of a prediction")
        if rest and rest != _PREDICTED:
            self.unknown(f"{', '.join(sorted(rest))} of a tensor"[:80])
        kind, name = row["kind"], text(row["name"], "a tensor's name")
        if not isinstance(kind, str) or kind not in _KINDS:
            self.unknown(f"the kind {kind!r} of a tensor"[:80])
        dtype = self._dtype(row["dtype"])
        return DeltaTensor(
            component=text(row["component"], "a tensor's component"),
            name=name,
            kind=_KINDS[kind],
            shape=self._shape(row["shape"], dtype),
            dtype=dtype,
            digest=_digest(row["digest"]).hex(),
            base=self._base_tensor(row["base"]) if "base" in row else None,
            fit=self._fit(row) if rest else None,
            helpers=tuple(counts(row["helpers"], "helpers")) if rest else (),
            first=first,
            path=self._path(row),
            stored_name=text(row[_STORED], "a stored name") if _STORED in row else "",
        )

    def _dtype(self, value: object) -> DType:
        dtype = DTYPES.get(value) if isinstance(value, str) else None
        if dtype is None or dtype.name != value:
            self.unknown(f"the element type {value!r}"[:80])
        return dtype

    def _shape(self, value: object, dtype: DType) -> tuple[int, ...]:
        shape = tuple(counts(value, "a shape"))
        # Each factor is checked on its way: the product of 64 large ones is not a number to make.
        product = dtype.bits
        for size in shape:
            product *= max(size, 1)
            if product >= _MAX:
                self.bad("a tensor is larger than any file")
        if len(shape) > _MAX_AXES:
            self.bad(f"a tensor has more than {_MAX_AXES} axes")
        return shape

    def _fit(self, row: dict[str, Any]) -> Fit:
        name = row["rule"]
        rule = RULES.get(name) if isinstance(name, str) else None
        if rule is None:
            self.unknown(f"the prediction {name!r}"[:80])
        numbers = [self._number(digits) for digits in items(row["coefficients"], "coefficients")]
        if len(numbers) != rule.coefficients:
            self.bad(f"{rule.name} takes {rule.coefficients} coefficients")
        return Fit(rule, tuple(numbers))

    def _check_fit(
        self, tensor: DeltaTensor, rule: Predictor, tensors: Sequence[DeltaTensor]
    ) -> None:
        """Check that a prediction has what it needs, and needs nothing that needs it."""
        if not rule.fits(tensor.dtype) or len(tensor.helpers) != len(rule.helpers):
            self.bad(f"{tensor.key} cannot be predicted by {rule.name}", tensor.key)
        if rule.of_base(None) and tensor.base is None:
            self.bad(f"{tensor.key} is predicted from a base that it does not have", tensor.key)
        for number, kind in zip(tensor.helpers, rule.helpers, strict=True):
            helper = tensors[number] if number < len(tensors) else None
            if (
                helper is None
                or helper.kind is not kind
                or helper.shape != tensor.shape
                or helper.dtype.name != "float32"
                or (rule.of_base(kind) and helper.base is None)
                or (helper.fit is not None and helper.fit.rule.level >= rule.level)
            ):
                self.bad(f"{tensor.key} is predicted from what cannot predict it", tensor.key)

    def _objects(self, rows: Sequence[object], files: Sequence[DataFile]) -> list[DeltaObject]:
        objects = [self._stored(row, files) for row in rows]
        if len({entry.name for entry in objects}) != len(objects):
            self.bad("an object stands twice")
        return objects

    def _stored(self, row: object, files: Sequence[DataFile]) -> DeltaObject:
        path = self._path(row) if isinstance(row, dict) else ()
        named = [n for n in DeltaObject._fields if path or n != _PATH]
        entry = members(row, named, "an entry of objects")
        number, offset, length = (count(entry[name], name) for name in ("file", "offset", "length"))
        if number >= len(files) or offset + length > files[number].size:
            self.bad("an object lies outside its data file")
        return DeltaObject(
            text(entry["name"], "an object's name"),
            text(entry["form"], "an object's form"),
            optional_count(entry["rank"], "rank"),
            number,
            offset,
            length,
            _digest(entry["digest"]),
            path,
        )

    def _path(self, row: dict[str, Any]) -> tuple[str | int, ...]:
        """Return the path that an entry gives; nothing where it gives none."""
        if _PATH not in row:
            return ()
        steps = items(row[_PATH], "a path")
        if not 0 < len(steps) <= _MAX_AXES:
            self.bad("a path leads nowhere, or too deep")
        return tuple(
            step if isinstance(step, str) else count(step, "a step of a path") for step in steps
        )

    def _aliases(
        self, value: object, tensors: Sequence[DeltaTensor], rows: bytes
    ) -> dict[str, str]:
        """Return the aliases; who reads an owner has read its copies, so that they must be some."""
        if not isinstance(value, dict):
            self.bad("aliases is not an object")
        held = {tensor.key: tensor for tensor in tensors} if value else {}
        for key, owner in value.items():
            if key not in held or not isinstance(owner, str) or owner not in held:
                self.bad("an alias is of no tensor")
            copy, own = held[key], held[owner]
            same = copy == replace(
                own,
                name=copy.name,
                first=copy.first,
                path=copy.path,
                stored_name=copy.stored_name,
            )
            if owner in value or not same or _rows_of(copy, rows) != _rows_of(own, rows):
                self.bad(f"{key} is not a copy of {owner}", key)
        return value

    def base(self, value: object) -> BaseName:
        """Return the base that a header's member `base` names."""
        try:
            return self._base(value)
        except JsonError as error:
            self.bad(str(error))

    def _base(self, value: object) -> BaseName:
        named = members(value, BaseName._fields, "base")
        path, manifest = text(named["path"], "the base's path"), named["manifest"]
        if len(path) > _MAX_PATH or not _may_name_a_file(path):
            self.bad("the base's path cannot be one")
        return BaseName(
            path,
            optional_count(named["step"], "the base's step"),
            _digest(named["content"]).hex(),
            "" if manifest == "" else _digest(manifest).hex(),
        )

    def _base_tensor(self, value: object) -> BaseTensor:
        pair = items(value, "a tensor's base")
        if len(pair) != 2:
            self.bad("a tensor's base is not a key with a digest")
        return BaseTensor(text(pair[0], "a base's key"), _digest(pair[1]).hex())

    def _data_file(self, value: object) -> DataFile:
        pair = items(value, "an entry of files")
        if len(pair) != 2:
            self.bad("an entry of files is not a name with a size")
        return DataFile(safe_name(pair[0], named_by=self.file), count(pair[1], "a size"))

    def _number(self, value: object) -> float:
        try:
            number = float.fromhex(text(value, "a coefficient")[:40])
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            self.bad("a coefficient is not a finite number")
        return number


def _digest(value: object) -> bytes:
    digest = hexadecimal(value, "a digest")
    if len(digest) != _DIGEST:
        raise JsonError(f"a digest is not of {_DIGEST} bytes")
    return digest


def _rows_of(tensor: DeltaTensor, rows: bytes) -> bytes:
    return rows[tensor.first * ROW.size :][: tensor.blocks * ROW.size]


def _may_name_a_file(path: str) -> bool:
    """Say whether a system can be asked for a path; bytes that are no UTF-8 are escaped in it."""
    try:
        return b"\0" not in path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
