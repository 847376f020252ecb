"""Non-tensor state beside safetensors: `ftckpt.objects/`.

`records.bin` holds records one after the other, each on a multiple of 64: byte for byte that of the
source where it has one for the object alone, else the stream that torch.save would write of the
object. `index.json` says what they are:

    {"schema": 1, "format": "dcp", "step": 3,
     "objects": {"lr_scheduler.last_epoch": {"offset": 0, "length": 1261, "form": "torch",
                                             "rank": 0}}}

`form` is `torch` (a stream of torch.save, which `torch.load` reads), `json` or `bytes`;
`transforms` says what must be undone first. One file and not one for each object, because a run can
have tens of thousands of learning rates. Other files in the folder are objects of their own names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ftckpt.checkpoint import Extent, ObjectInfo
from ftckpt.errors import CorruptError, UnsafeError, UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.storage.decompress import supported
from ftckpt.storage.source import Source
from ftckpt.strict_json import JsonLimits, parse, shown

FOLDER = "ftckpt.objects/"
INDEX = f"{FOLDER}index.json"
RECORDS = f"{FOLDER}records.bin"
MAX_INDEX = 100_000_000  # bytes
SCHEMA = 1
TORCH, JSON, BYTES = FORMS = "torch", "json", "bytes"
_INDEX_LIMITS = JsonLimits(8, objects=1_000_000, keys=6_000_000, items=6_000_000, naturals=True)
_JSON_LIMITS = JsonLimits(32, objects=2_000_000, keys=20_000_000, items=20_000_000, naturals=False)


class ObjectRecord(NamedTuple):
    """How the bytes of one object are to be read.

    Attributes:
        form: `torch`, `json` or `bytes`.
        transforms: to be undone first.
    """

    form: str
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoredObjects:
    """The objects of a folder, found and not read.

    Attributes:
        infos: by name.
        step: as recorded; None where it is not.
        files: of the folder, those included that are missing.
        records: how the bytes of each are to be read.
    """

    infos: Mapping[str, ObjectInfo] = field(default_factory=dict)
    step: int | None = None
    files: tuple[str, ...] = ()
    records: Mapping[str, ObjectRecord] = field(default_factory=dict, repr=False)

    def load(self, source: Source, name: str) -> Any:
        """Return one object: parsed where its form is known, else its bytes.

        Raises:
            CorruptError, UnsafeError: its record is damaged or hostile.
        """
        extent, record = self.infos[name].extent, self.records[name]
        if record.form == TORCH:
            from ftckpt.formats.dcp.items import Item, ItemWindow, open_item

            window = open_item(source, Item(name, extent, record.transforms, None))
            assert isinstance(window, ItemWindow)
            return window.parse().tree
        raw = source.read(extent.file, extent.offset, extent.length)
        if record.form == BYTES:
            return raw
        return parse(
            raw,
            _JSON_LIMITS,
            file=extent.file,
            what="text",
            bad="bad-index",
            unsafe="unsafe-index",
        )

    def check(self, source: Source) -> Iterator[Finding]:
        """Yield the records that lie beyond their file, or whose file is missing."""
        held = [i.extent for i in self.infos.values() if i.extent.file == RECORDS]
        end = max((extent.end for extent in held), default=0)
        size = source.entries[RECORDS].size if RECORDS in source.entries else None
        if end and size is None:
            message = f"{RECORDS} is missing, which {INDEX} names"
            yield finding("missing-file", message, file=RECORDS)
        elif size is not None and end > size:
            yield finding(
                "truncated-file",
                f"{RECORDS} ends at byte {size} of {end}",
                file=RECORDS,
                offset=size,
                length=end - size,
            )


def read_objects(source: Source) -> StoredObjects:
    """Find the objects of `ftckpt.objects/`; nothing without such a folder.

    Raises:
        CorruptError: the index cannot be parsed (`bad-index`).
        UnsafeError: it is ambiguous or abusive (`unsafe-index`).
        UnsupportedError: it is of a later schema.
    """
    infos: dict[str, ObjectInfo] = {}
    records: dict[str, ObjectRecord] = {}
    step: int | None = None
    files = [n for n in source.entries if n.startswith(FOLDER)]
    if INDEX in source.entries:
        index = _read_index(source)
        step = index.get("step")
        for name, entry in index["objects"].items():
            infos[name], records[name] = _entry(name, entry)
        if infos and RECORDS not in files:
            files.append(RECORDS)
    for file in files:
        if file not in (INDEX, RECORDS):
            name = file.removeprefix(FOLDER)
            if name in infos:
                raise UnsafeError(
                    f"{INDEX} and {file} both hold the object {shown(name)}",
                    kind="unsafe-index",
                    file=INDEX,
                )
            infos[name] = ObjectInfo(name, Extent(file, 0, source.entries[file].size))
            records[name] = ObjectRecord(JSON if file.endswith(".json") else BYTES)
    return StoredObjects(infos, step, tuple(files), records)


def _read_index(source: Source) -> dict[str, Any]:
    if source.size(INDEX) > MAX_INDEX:
        raise UnsafeError(
            f"{INDEX} has {source.size(INDEX)} bytes, over the limit of {MAX_INDEX}",
            kind="unsafe-index",
            file=INDEX,
        )
    value = parse(
        source.read(INDEX),
        _INDEX_LIMITS,
        file=INDEX,
        what="text",
        bad="bad-index",
        unsafe="unsafe-index",
    )
    if not isinstance(value, dict) or not isinstance(value.get("objects"), dict):
        raise _bad("has no objects")
    if value.get("schema") != SCHEMA:
        raise UnsupportedError(
            f"{INDEX} is of schema {shown(value.get('schema'))}, which is not known", file=INDEX
        )
    if type(value.get("step", 0)) is not int:
        raise _bad("gives a step that is not a number")
    return value


def _entry(name: str, entry: Any) -> tuple[ObjectInfo, ObjectRecord]:
    said = entry if isinstance(entry, dict) else {}
    offset, length, rank = said.get("offset"), said.get("length"), said.get("rank")
    form, transforms = said.get("form"), said.get("transforms", [])
    if type(offset) is not int or type(length) is not int or type(rank) not in (int, type(None)):
        raise _bad(f"does not say where {shown(name)} lies")
    if form not in FORMS or not isinstance(transforms, list):
        raise _bad(f"does not say what {shown(name)} is")
    if not all(isinstance(t, str) for t in transforms) or not supported(transforms):
        raise _bad(f"names a transform of {shown(name)} that is not known")
    info = ObjectInfo(name, Extent(RECORDS, offset, length), rank)
    return info, ObjectRecord(form, tuple(transforms))


def _bad(what: str) -> CorruptError:
    return CorruptError(f"{INDEX} {what}", kind="bad-index", file=INDEX)
