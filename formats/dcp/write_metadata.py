"""Write the `.metadata` pickle of torch.distributed.checkpoint.

Readable by torch from 2.3 on (the classes' modules moved before). `storage_meta` is omitted: torch
before 2.4 does not know its class, later ones do not need it, and its random id would make the same
content give other bytes. An older torch keeps unknown members as plain attributes.

Source: torch/distributed/checkpoint/{metadata,filesystem,default_planner}.py, 2.3 to 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from ftckpt.checkpoint.dtypes import DType
from ftckpt.formats.pickles.walk import Path
from ftckpt.formats.pickles.write import Call, Global, Pairs, dumps

VERSION = "1.0.0"


class ItemPlace(NamedTuple):
    """The place of an item.

    Attributes:
        file: relative to the checkpoint.
        transforms: to undo before it can be read.
    """

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


class WrittenChunk(NamedTuple):
    """A box of a tensor and the place of its item."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: ItemPlace


class TensorItems(NamedTuple):
    """A tensor: its type, its global shape and its chunks."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: Sequence[WrittenChunk]


def metadata(
    tensors: Mapping[str, TensorItems], objects: Mapping[str, ItemPlace], paths: Mapping[str, Path]
) -> bytes:
    """Return the bytes of a `.metadata` file.

    `tensors` and the `objects`' places are by stored name; `paths` are the keys in the nested state
    (`planner_data`).
    """
    writer = _Writer()
    state = {
        "state_dict_metadata": Pairs(writer.entries(tensors, objects)),
        "planner_data": Pairs(paths.items()),
        "storage_data": Pairs(writer.storage(tensors, objects)),
        "storage_meta": None,
        "version": VERSION,
    }
    return dumps(_made("Metadata", state))


class _Writer:
    """Creates each size and each type once, and everything else when it is written.

    A checkpoint has few sizes, and perhaps a million chunks.
    """

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, ...], Call] = {}
        self._properties: dict[str, Call] = {}

    def entries(
        self, tensors: Mapping[str, TensorItems], objects: Mapping[str, ItemPlace]
    ) -> Iterator[tuple[str, Call]]:
        """Yield `state_dict_metadata`."""
        for name, tensor in tensors.items():
            yield name, self.tensor(tensor)
        for name in objects:
            yield name, _made("BytesStorageMetadata", None)

    def storage(
        self, tensors: Mapping[str, TensorItems], objects: Mapping[str, ItemPlace]
    ) -> Iterator[tuple[Call, Call]]:
        """Yield `storage_data`."""
        for name, tensor in tensors.items():
            for number, chunk in enumerate(tensor.chunks):
                index = {"fqn": name, "index": number, "offset": self.size(chunk.offsets)}
                yield _made("MetadataIndex", index), _info(chunk.place)
        for name, place in objects.items():
            yield _made("MetadataIndex", {"fqn": name, "index": None}), _info(place)

    def size(self, values: tuple[int, ...]) -> Call:
        """Return a `torch.Size`."""
        made = self._sizes.get(values)
        if made is None:
            made = self._sizes[values] = Call(Global("torch", "Size"), ((*values,),))
        return made

    def tensor(self, tensor: TensorItems) -> Call:
        """Return a `TensorStorageMetadata`."""
        chunks = [
            _made(
                "ChunkStorageMetadata",
                {"offsets": self.size(chunk.offsets), "sizes": self.size(chunk.sizes)},
            )
            for chunk in tensor.chunks
        ]
        state = {
            "properties": self._of(tensor.dtype),
            "size": self.size(tensor.shape),
            "chunks": chunks,
        }
        return _made("TensorStorageMetadata", state)

    def _of(self, dtype: DType) -> Call:
        made = self._properties.get(dtype.name)
        if made is None:
            layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
            memory = Call(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))  # contiguous
            state = (Global("torch", dtype.name), layout, False, memory, False)
            made = self._properties[dtype.name] = Call(
                Global(_MODULE, "TensorProperties"), state=state, new=True
            )
        return made


def _made(name: str, state: Any) -> Call:
    return Call(_names(name), state=state, new=True, once=True)


@cache
def _names(name: str) -> Global:
    return Global(_MODULE, name)


def _info(place: ItemPlace) -> Call:
    state = {"relative_path": place.file, "offset": place.offset, "length": place.length}
    extra = {"transform_descriptors": list(place.transforms)} if place.transforms else {}
    return Call(_INFO, state=state | extra, new=True, once=True)


_MODULE = "torch.distributed.checkpoint.metadata"
_INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
