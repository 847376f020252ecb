"""Parse the files of many ranks with two concurrent reads each: the head and the tail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ftckpt.checkpoint import Extent
from ftckpt.errors import CorruptError, TruncatedError
from ftckpt.formats.torch_files.stream import TorchStream, parse_stream
from ftckpt.formats.torch_files.zip_directory import TAIL
from ftckpt.storage.source import Source
from ftckpt.strict_json import JsonLimits, parse

from .names import CONFIG, METADATA
from .recorded_job import Evidence
from .specs import spec_of
from .tensors import RankSplit

# The pickle stands at the head of a torch.save file and the directory at its end.
HEAD = 256 << 10
# Files whose ends are held at once: 20 MB.
BATCH = 64
_JSON = JsonLimits(depth=16, objects=2_000_000, keys=8_000_000, items=8_000_000, naturals=False)
_MAX_JSON = 64 << 20


class NamedFile(Protocol):
    """A file as its name describes it."""

    @property
    def path(self) -> str:
        """The name, relative to the checkpoint."""


F = TypeVar("F", bound=NamedFile)


def read_streams(
    source: Source, files: Sequence[F]
) -> Iterator[tuple[F, TorchStream | CorruptError]]:
    """Yield each file's stream, or the damage that keeps it from being parsed.

    Raises:
        UnsafeError, UnsupportedError: of the first file that is hostile or of another format.
    """
    for start in range(0, len(files), BATCH):
        batch = files[start : start + BATCH]
        sizes = [source.size(file.path) for file in batch]
        wanted = [
            extent
            for file, size in zip(batch, sizes, strict=True)
            for extent in _ends(file.path, size)
        ]
        fetched = iter(source.read_many(wanted))
        for file, size in zip(batch, sizes, strict=True):
            parts = [(e.offset, next(fetched)) for e in _ends(file.path, size)]
            yield file, _parsed(source, file.path, size, parts)


def read_stream(source: Source, path: str) -> TorchStream:
    """Parse one file.

    Raises:
        CorruptError, UnsafeError, UnsupportedError: see `parse_stream`.
    """
    size = source.size(path)
    with source.open(path) as reader:
        return parse_stream(reader.read, size, file=path, plain=True)


def _ends(path: str, size: int) -> list[Extent]:
    if size <= HEAD + TAIL:
        return [Extent(path, 0, size)]
    return [Extent(path, 0, HEAD), Extent(path, size - TAIL, TAIL)]


def _parsed(
    source: Source, path: str, size: int, parts: Sequence[tuple[int, bytes]]
) -> TorchStream | CorruptError:
    def read(offset: int, length: int) -> bytes:
        for start, data in parts:
            if start <= offset and offset + length <= start + len(data):
                return data[offset - start : offset - start + length]
        if offset < 0 or offset + length > size:
            raise TruncatedError(f"{path} ends before a record that it must hold", file=path)
        return source.read(path, offset, length)

    try:
        return parse_stream(read, size, file=path, plain=True)
    except CorruptError as error:
        error.file = error.file or path
        return error


class RecordedConfig:
    """What a configuration file beside the ranks' files records.

    Attributes:
        path: the file; "" where there is none.
        world_size: number of ranks; None where not recorded.
        step: the trainer's step; None where not recorded.
        splits: tensor name -> how it is cut, where recorded.
        torn: its numbers that contradict each other.
    """

    def __init__(self, path: str = "", content: Any = None) -> None:
        record = content if isinstance(content, dict) else {}
        self.path = path
        told = Evidence(path, 0)
        told.read(content)
        self.world_size = told.shards or told.world or _only(told.groups)
        self.torn = told.torn
        self.step = told.step if told.step is None or told.step >= 0 else None
        tensors = next((record[key] for key in _TENSORS if key in record), None)
        self.splits: Mapping[str, RankSplit] = _splits(tensors, path)


def read_recorded(source: Source, folder: str) -> RecordedConfig:
    """Read `fsdp_config.json` or `metadata.json` of a folder, whichever is there.

    Raises:
        CorruptError: it is not JSON, or records a tensor that cannot be (`bad-index`).
        UnsafeError: it is ambiguous or abusive JSON (`unsafe`).
    """
    prefix = f"{folder}/" if folder else ""
    for name in (CONFIG, METADATA):
        path = prefix + name
        if path not in source.entries:
            continue
        if source.size(path) > _MAX_JSON:
            raise CorruptError(f"{path} is too long for what it is", kind="bad-index", file=path)
        raw = source.read(path)
        return RecordedConfig(
            path, parse(raw, _JSON, file=path, what="record", bad="bad-index", unsafe="unsafe")
        )
    return RecordedConfig()


# Under which of these a record has what it says of each tensor.
_TENSORS = ("tensors", "placements", "params", "parameters", "shards", "sharding_specs")


def _only(groups: Mapping[str, int]) -> int | None:
    """Return the ranks of the one group that is recorded; of several the files decide."""
    return next(iter(groups.values())) if len(groups) == 1 else None


def _splits(tensors: Any, path: str) -> dict[str, RankSplit]:
    found: dict[str, RankSplit] = {}
    for name, record in tensors.items() if isinstance(tensors, dict) else ():
        if not isinstance(record, dict):
            continue
        if "shape" in record and "dim" in record:
            _require_sound(record["shape"], record["dim"], name, path)
        try:
            spec = spec_of(record, None, name)
        except CorruptError as error:
            raise CorruptError(
                f"{path}: {error.message}", kind="bad-index", file=path, tensor=name
            ) from error
        if spec.shape is not None and spec.placements is not None and len(spec.placements) < 2:
            found[name] = RankSplit(spec.shape, spec.dim)
    return found


def _require_sound(shape: Any, dim: Any, name: str, path: str) -> None:
    sound = (
        isinstance(shape, list)
        and all(type(n) is int and n >= 0 for n in shape)
        and (dim is None or (type(dim) is int and 0 <= dim < len(shape)))
    )
    if not sound:
        raise CorruptError(
            f"{path} records a split of {name!r} that cannot be",
            kind="bad-index",
            file=path,
            tensor=name,
        )
