"""The step counters of a DCP checkpoint: small objects and one-element tensors, a few per file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from ftckpt.checkpoint import Scalar, StepRole
from ftckpt.checkpoint.dtypes import decode_scalar
from ftckpt.checkpoint.steps import READ_FIRST, is_counter, role_of
from ftckpt.errors import FtckptError
from ftckpt.formats.state.wrappers import NO_HOMES, Homes
from ftckpt.formats.torch_files.stream import TensorRef
from ftckpt.storage.source import Source

from .items import Item, ItemWindow, as_item, windows
from .metadata import DcpMetadata


def read_scalars(
    source: Source,
    meta: DcpMetadata,
    limit: int,
    known: Iterable[Scalar] = (),
    homes: Homes = NO_HOMES,
) -> Iterator[Scalar]:
    """Yield step counters, at most `limit` per file; the checks report unreadable ones.

    `known` counters, read before, come first and count towards the limit. A counter below wrappers
    (`homes`) has the meaning that it would have at the top.
    """
    left: dict[str, int] = defaultdict(lambda: limit)
    for scalar in known:
        if left[scalar.file] > 0:
            left[scalar.file] -= 1
            yield scalar
    chosen: dict[str, list[tuple[StepRole, Item]]] = defaultdict(list)
    wanted = dict(_candidates(meta, homes))
    for name, _, stored in meta.placed() if wanted else ():
        if name in wanted:
            chosen[stored.path].append((wanted[name], as_item(name, stored)))
    items: list[Item] = []
    roles: dict[Item, StepRole] = {}
    for file, found in chosen.items():
        if file not in source.entries:
            continue
        found.sort(key=lambda pair: (READ_FIRST[pair[0]], pair[1].extent.offset))
        for role, item in found[: left[file]]:
            items.append(item)
            roles[item] = role
    for window in windows(source, items):
        if isinstance(window, FtckptError):
            continue
        value = _value(window)
        if value is not None:
            item = window.item
            yield Scalar(item.extent.file, item.name, value, roles[item])


def _candidates(meta: DcpMetadata, homes: Homes) -> Iterator[tuple[str, StepRole]]:
    for name in meta.tensors:
        if not name.endswith(("step", "iteration", "steps")):
            continue
        role = _role(name, meta, homes)
        if role is not None and all(n == 1 for n in meta.tensors[name].size):
            yield name, role
    for name in meta.objects:
        if name.endswith(("step", "iteration", "steps", "last_epoch", "iter_num")):
            role = _role(name, meta, homes)
            if role is not None:
                yield name, role


def _role(name: str, meta: DcpMetadata, homes: Homes) -> StepRole | None:
    path = meta.paths.get(name, ())
    home = homes.found.get(homes.above(path)) if homes.found else None
    if home is not None:
        return role_of(name, optimizer=True) if home.component == "optimizer" else None
    if homes.wrappers and path:
        name = ".".join(map(str, homes.without_wrapper(path)))
    return role_of(name, optimizer=name.startswith(("optimizer", "optim")))


def _value(window: ItemWindow) -> float | None:
    try:
        stream = window.parse()
        value = stream.tree
        if isinstance(value, TensorRef):
            if value.numel != 1 or stream.storages[value.key].inline is not None:
                return None
            span = value.span(stream.storages)
            at = 0 if window.item.transforms else window.item.extent.offset
            value = decode_scalar(value.dtype, window.read(span.offset - at, span.length))
    except FtckptError:
        return None
    return float(value) if is_counter(value) else None
