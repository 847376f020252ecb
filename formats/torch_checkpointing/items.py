"""Read the files of items, however they are written, as the trees that torch.save would hold.

What is neither the model, nor an optimizer, nor sharded stands under its item's name, as in the
mapping that the job saved: `train_state` and `step` of all items would be one otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftckpt.checkpoint import Extent
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.errors import CorruptError, NewerWriterError
from ftckpt.formats.ranks.names import FileSpelling, RankFile, Role
from ftckpt.formats.ranks.parse_files import read_stream, read_streams
from ftckpt.formats.safetensors.header import Header
from ftckpt.formats.safetensors.parse_headers import read_headers
from ftckpt.formats.state.vocabulary import AVERAGES, MODELS, OPTIMIZERS
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.formats.torch_files.values import StoredStorage, TensorRef
from ftckpt.storage.source import Source
from ftckpt.strict_json import JsonLimits, parse

from .metadata import Metadata
from .names import METADATA, REST, ItemFile, item_file

TORCH, JSON, RAW, SAFETENSORS = (
    f"{name}Serialization" for name in ("Torch", "Json", "Raw", "Safetensors")
)
_BY_SUFFIX = {"pt": TORCH, "json": JSON, "safetensors": SAFETENSORS}
_MOST_JSON = 64 << 20
_MOST_RAW = 64 << 20
_LIMITS = JsonLimits(depth=64, objects=1_000_000, keys=4_000_000, items=8_000_000, naturals=False)


@dataclass(frozen=True)
class ItemFiles:
    """The files of a save.

    Attributes:
        source: where they lie.
        files: by path.
        roles: item -> what it is.
    """

    source: Source
    files: Mapping[str, ItemFile]
    roles: Mapping[str, Role]

    @classmethod
    def of(cls, source: Source, metadata: Metadata) -> ItemFiles:
        """Collect what the metadata name, and files of other items by their default names.

        The metadata list sharded items alone. A name that they have not says an item by its form.
        """
        files = {
            file.path: file for item in metadata.items.values() for file in item.files.values()
        }
        for name in sorted(source.entries):
            found = None if name == METADATA or name in files else item_file(name)
            known = metadata.items.get(found.item) if found is not None else None
            if found is not None and (known is None or found.rank not in known.files):
                kind = _BY_SUFFIX.get(name.rpartition(".")[2], RAW)
                files[name] = found._replace(kind=kind)
        items = dict.fromkeys(file.item for file in files.values())
        return cls(source, files, {item: _role(item, metadata) for item in items})

    def rank_files(self, world: int) -> list[RankFile]:
        """Return the files that are there, as files of ranks of a world."""
        found = []
        for file in self.files.values():
            if file.path in self.source.entries:
                before = file.path.removesuffix(f"{file.rank}.pt")
                spelling = FileSpelling(before, 1, "", 0, ".pt")
                role = self.roles[file.item]
                found.append(RankFile(file.path, role, file.rank, world, spelling, word=file.item))
        return found

    def streams(
        self, files: Sequence[RankFile]
    ) -> Iterator[tuple[RankFile, TorchStream | CorruptError]]:
        """Yield what each file holds, or the damage that keeps it from being parsed.

        Raises:
            UnsafeError, UnsupportedError: of the first file that is hostile or of another format.
        """
        torch = [f for f in files if self.files[f.path].kind == TORCH]
        for file, stream in read_streams(self.source, torch):
            if not isinstance(stream, CorruptError):
                stream = stream._replace(tree=self._under(file.path, stream.tree))
            yield file, stream
        tensors = [f for f in files if self.files[f.path].kind == SAFETENSORS]
        headers = read_headers(self.source, [f.path for f in tensors])
        for file in tensors:
            header = headers[file.path]
            if isinstance(header, CorruptError):
                yield file, header
                continue
            tree = _tensors(header)
            storages = {
                one.name: StoredStorage(
                    Extent(file.path, one.begin, one.end - one.begin), one.dtype,
                    tree[one.name].numel,
                )
                for one in header.tensors
            }  # fmt: skip
            yield file, TorchStream(self._under(file.path, tree), storages, (), None, file.path)
        for file in files:
            if self.files[file.path].kind in (JSON, RAW):
                try:
                    yield file, TorchStream(self.tree(file.path), {}, (), None, file.path)
                except CorruptError as error:
                    error.file = error.file or file.path
                    yield file, error

    def tree(self, path: str) -> Any:
        """Return what a file holds, under the name of its item where it stands under that.

        Raises:
            CorruptError: it cannot be parsed.
            UnsafeError: it is hostile.
            NewerWriterError: it is written in a way that is not known.
        """
        kind = self.files[path].kind
        if kind == TORCH:
            return self._under(path, read_stream(self.source, path).tree)
        if kind == SAFETENSORS:
            header = read_headers(self.source, [path])[path]
            if isinstance(header, CorruptError):
                raise header
            return self._under(path, _tensors(header))
        if kind == JSON:
            self._require(path, _MOST_JSON)
            raw = self.source.read(path)
            said = parse(raw, _LIMITS, file=path, what="item", bad="bad-index", unsafe="unsafe")
            return self._under(path, said)
        if kind == RAW:
            self._require(path, _MOST_RAW)
            return self._under(path, self.source.read(path))
        raise NewerWriterError.of(
            f"how {path} is written",
            expected="torch, JSON, raw or safetensors",
            found=kind,
            file=path,
        )

    def _require(self, path: str, most: int) -> None:
        if self.source.size(path) > most:
            raise CorruptError(f"{path} is too long for what it is", kind="bad-index", file=path)

    def _under(self, path: str, tree: Any) -> Any:
        item = self.files[path].item
        return {item: tree} if self.is_wrapped(item) else tree

    def is_wrapped(self, item: str) -> bool:
        """Whether what an item's files hold stands under its name."""
        return self.roles[item] is Role.EXTRA and item != REST


def _tensors(header: Header) -> dict[str, TensorRef]:
    return {
        one.name: TensorRef(one.name, 0, one.shape, dense_strides(one.shape), one.dtype)
        for one in header.tensors
    }


def _role(item: str, metadata: Metadata) -> Role:
    """Return what an item is: by its name, and a sharded one by that it is sharded."""
    if item in MODELS:
        return Role.MODEL
    if item in OPTIMIZERS:
        return Role.OPTIMIZER
    sharded = bool(metadata.items.get(item))
    return Role.WHOLE if item in AVERAGES or sharded else Role.EXTRA
