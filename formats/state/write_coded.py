"""Write tensor subclasses that are cut over ranks: a shard for any box that their blocks allow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.errors import UnsupportedError
from ftckpt.formats.pickles.walk import Path
from ftckpt.formats.pickles.write import Call
from ftckpt.formats.torch_files.write_tree import Storage, Tensor, subclass_call
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Literal

from .coded_shards import (
    SHAPE,
    CodedParts,
    CodedTensor,
    CutBy,
    HoldsCoded,
    is_run,
    part_box,
    run_of,
)


@dataclass(frozen=True)
class CodedContent:
    """A tensor subclass that is to be written.

    Attributes:
        name: of the object that is a record of it.
        tensor: what it is.
        keys: of the tensors inside, by what follows its name.
    """

    name: str
    tensor: CodedTensor
    keys: Mapping[str, str]
    content: Content

    def moved(self, content: Content, keys: Mapping[str, str]) -> CodedContent:
        """Return it as a part of other content; `keys` says what its tensors are called there."""
        own = {suffix: keys[key] for suffix, key in self.keys.items()}
        return replace(self, content=content, keys=own)

    def path(self, paths: Mapping[str, Path]) -> Path:
        """Return the tensor's path in a nested state, from the path of a tensor inside."""
        suffix, key = next(iter(self.keys.items()))
        *above, last = paths[key]
        return (*above, str(last).removesuffix(suffix))

    def shard(self, box: Box) -> Call | Tensor:
        """Return what a rank holds that has one box of the tensor.

        Raises:
            UnsupportedError: a block would be cut, or the shards are not joined and none of them
                is this box.
        """
        tensor = self.tensor
        if 0 in box.sizes:  # torchao has no codes where there are no elements
            empty = Storage((Literal(b""),))
            return Tensor(empty, tensor.dtype, box.sizes, dense_strides(box.sizes))
        if tensor.own:
            return self._own(box)
        if tensor.per and not is_run(box, tensor.shape):
            raise self._cut(f"columns of rows would be cut from {list(tensor.shape)}")
        start, length = run_of(box, tensor.shape)
        for part, per in tensor.per.items():
            if start % per or length % per:
                raise self._cut(
                    f"elements {start} to {start + length} of {prod(tensor.shape)} begin or end"
                    f" inside one of its blocks of {per} (its {part})"
                )
        return subclass_call(tensor.record, box.sizes, dict(self._parts(box)), SHAPE)

    def _parts(self, box: Box) -> Iterator[tuple[str, Tensor]]:
        for part, how in self.tensor.cuts.items():
            key = self.keys[f".{part}"]
            shape = self.content.tensors[key].shape
            inner = part_box(self.tensor, part, box, shape)
            whole = how is CutBy.EACH
            yield (
                part,
                Tensor.of(self.content.whole(key) if whole else self.content.part(key, inner)),
            )

    def _own(self, box: Box) -> Call | Tensor:
        for own in self.tensor.own:
            if own.box == box and not own.coded:
                return Tensor.of(self.content.whole(self.keys[own.suffix]))
            if own.box == box:
                parts = {
                    part: Tensor.of(self.content.whole(self.keys[f"{own.suffix}.{part}"]))
                    for part in self.tensor.cuts
                }
                return subclass_call(self.tensor.record, box.sizes, parts, SHAPE)
        raise self._cut(self.tensor.why)

    def _cut(self, why: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.name} cannot be divided so, or joined: {why}",
            hint="the same number of ranks keeps every shard as it is; --to safetensors carries the"
            " tensors inside, and --drop leaves the state out",
            tensor=self.name,
        )


def coded_contents(content: Content) -> list[CodedContent]:
    """Return the tensor subclasses that `content` has from its source.

    Raises:
        UnsupportedError: a tensor inside one is changed, renamed or left out alone.
    """
    checkpoint = content.checkpoint
    held: Mapping[str, CodedParts] = checkpoint.coded if isinstance(checkpoint, HoldsCoded) else {}
    if not held:
        return []
    owners = {key: name for name, parts in held.items() for key in parts.keys.values()}
    there: dict[str, int] = dict.fromkeys(held, 0)
    for key, wanted in content.tensors.items():
        sources = {copy.key for copy in wanted.copies} & owners.keys()
        for source in sources:
            info = checkpoint.tensors[source]
            same = (key, wanted.shape, wanted.dtype) == (source, info.shape, info.dtype)
            if not same or len(wanted.copies) != 1:
                raise _changed(source, owners[source])
            there[owners[source]] += 1
    for name, number in there.items():
        if number and number < len(held[name].keys):
            lost = next(key for key in held[name].keys.values() if key not in content.tensors)
            raise _changed(lost, name)
    return [CodedContent(name, *held[name], content) for name, number in there.items() if number]


def _changed(key: str, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{key} lies in {name}, a tensor subclass, and cannot be changed or left out alone",
        hint=f"leave {name} out with --drop as a whole",
        tensor=key,
    )
