"""Read state inside DCP objects that hold a whole dict.

Since 2.4 torch flattens everything that it saves to single values. Before, a dict without a tensor
was one object; Megatron-Core still stores its common state (arguments, iteration, scheduler) as
one, in the store or, up to core 0.18, in a file `common.pt` beside it. These objects are small and
few: they are read whole for their names, step counters and topology.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from ftckpt.checkpoint import Scalar, StepRole, Topology
from ftckpt.checkpoint.dtypes import decode_scalar
from ftckpt.checkpoint.steps import is_counter, role_of
from ftckpt.errors import CorruptError, FtckptError, IncompleteError, NewerWriterError
from ftckpt.formats.pickles.inert import one_bit_from
from ftckpt.formats.pickles.unpickle import Inert
from ftckpt.formats.pickles.walk import field_names, leaves
from ftckpt.formats.state.stored_names import is_common, is_group_settings
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.formats.torch_files.values import TensorRef
from ftckpt.storage.source import Source
from ftckpt.strict_json import shown

from .items import Item, ItemWindow, windows
from .names import CONFIGURATION

# More or larger objects are data, not state with useful names.
MOST_OBJECTS, MOST_BYTES = 32, 4 << 20


class StoredObject(NamedTuple):
    """One object, read."""

    window: ItemWindow
    stream: TorchStream


class StateDicts:
    """The whole dicts of a checkpoint.

    Attributes:
        errors: why some could not be read; the checks report them too.
    """

    def __init__(self, source: Source, items: Iterable[Item]) -> None:
        """Read the small ones of `items`, the common state first."""
        small = [
            i for i in items if i.extent.length <= MOST_BYTES and i.extent.file in source.entries
        ]
        small.sort(key=lambda item: not is_common(item.name))
        self.errors: list[FtckptError] = []
        self._held: list[StoredObject] = []
        for window in windows(source, small[:MOST_OBJECTS]):
            if isinstance(window, FtckptError):
                self.errors.append(window)
                continue
            try:
                self._held.append(StoredObject(window, window.parse()))
            except FtckptError as error:
                self.errors.append(error)

    def names(self) -> Iterator[str]:
        """Yield dotted names of their content."""
        for window, stream in self._held:
            yield from (f"{window.item.name}.{inner}" for inner in field_names(stream.tree))

    def scalars(self) -> Iterator[Scalar]:
        """Yield step counters, the trainer's iteration first."""
        found: list[Scalar] = []
        for held in self._held:
            try:
                found += _counters(held)
            except FtckptError:
                continue  # the checks report unreadable ones
        yield from sorted(found, key=lambda s: s.role is not StepRole.ITERATION)

    def topology(self, world_size: int | None, evidence: str) -> Topology:
        """Return the topology in Megatron's arguments, else the world size known otherwise."""
        for window, stream in self._held:
            args = _arguments(stream.tree) if is_common(window.item.name) else None
            if args is None:
                continue
            known = Topology(world_size=world_size, evidence=evidence)
            found = topology_said(args, known, window.item.name)
            if found is not known:
                return found
        return Topology(world_size=world_size, evidence=evidence)


def topology_said(args: Inert, known: Topology, name: str) -> Topology:
    """Return what Megatron's arguments say of a job's layout; `known` if they say nothing.

    Args:
        args: the arguments.
        known: from elsewhere.
        name: of the object that holds them, for the evidence.
    """
    said: dict[str, int] = {
        field: size
        for field, argument in (
            ("world_size", "world_size"),
            ("tp", "tensor_model_parallel_size"),
            ("pp", "pipeline_model_parallel_size"),
            ("dp", "data_parallel_size"),
            ("ep", "expert_model_parallel_size"),
        )
        if type(size := args.get(argument)) is int and 0 < size < 1 << 32
    }
    if not said:
        return known
    evidence = ", ".join(filter(None, (f"arguments in {name}", known.evidence)))
    return replace(known, **said, evidence=evidence)


def unfinished() -> IncompleteError:
    """Return the error for a checkpoint that Megatron did not finish."""
    return IncompleteError(
        f"{CONFIGURATION} is absent: Megatron writes it last, so the save did not finish",
        hint="wait for the save, or use an earlier checkpoint",
        kind="uncommitted",
        file=CONFIGURATION,
    )


def unnamed(backend: object = None) -> FtckptError:
    """Return the error for Megatron's store where the file beside it does not name its backend."""
    known = backend == "zarr" or (
        isinstance(backend, str) and one_bit_from(backend, ("torch_dist",))
    )
    if isinstance(backend, str) and backend and not known:
        return NewerWriterError.of(
            f"the backend that {CONFIGURATION} names", expected="torch_dist",
            found=shown(backend), file=CONFIGURATION,
        )  # fmt: skip
    return CorruptError(
        f"{CONFIGURATION} does not name the backend torch_dist, and the store is Megatron's, which"
        " reads none without that name",
        kind="bad-index",
        file=CONFIGURATION,
    )


def _counters(held: StoredObject) -> Iterator[Scalar]:
    window, stream = held
    item = window.item
    for path, value in leaves(stream.tree):
        if not path:
            return  # a single value, which has the object's own name
        inner = ".".join(map(str, path))
        optimizer = any(part in ("optimizer", "optim") for part in path)
        optimizer = optimizer or is_group_settings(item.name)
        role = role_of(f"{item.name}.{inner}", optimizer=optimizer)
        if role is None:
            continue
        number = value
        if isinstance(value, TensorRef) and value.numel == 1 and value.key in stream.storages:
            if stream.storages[value.key].inline is not None:
                continue
            span = value.span(stream.storages)
            start = 0 if item.transforms else item.extent.offset
            number = decode_scalar(value.dtype, window.read(span.offset - start, span.length))
        if is_counter(number):
            yield Scalar(item.extent.file, f"{item.name}.{inner}", float(number), role)


def _arguments(tree: Any) -> Inert | None:
    """Return the Namespace that Megatron stores as `args`, in a dict or in a list of one."""
    if type(tree) is list and len(tree) == 1:
        tree = tree[0]
    args = tree.get("args") if isinstance(tree, dict) else None
    return args if isinstance(args, Inert) else None
