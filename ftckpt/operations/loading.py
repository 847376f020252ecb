"""Load a checkpoint, or what one rank of another job would be given of it, into a dict: `load`."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, cast

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.names import as_stored
from ftckpt.errors import NotFoundError, UnsupportedError, UsageError
from ftckpt.progress import NULL, Counter
from ftckpt.storage import StoreOptions
from ftckpt.workers import Work

from .definition import lenient
from .loadable import (
    LOAD_LEVELS,
    RequestFlags,
    is_computed,
    requested,
    require_structure,
    threads_alone,
    verify_used,
)
from .opening import STORES
from .tables import read_rules

if TYPE_CHECKING:
    from ftckpt.checkpoint.dtypes import DType
    from ftckpt.formats.pickles.walk import Path
    from ftckpt.loading.targets import LoadTarget, Wanted
    from ftckpt.transfer.content import Content, Shard
    from ftckpt.transfer.layout import OutputFile

Rank = tuple[int, int]
TRAINER = "trainer"

# The files of Megatron's ranks: tensor, pipeline and expert rank.
_MEGATRON = re.compile(r"(?:.*/)?mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?/.*")
_SLICE = re.compile(r"(?:.*/)?mp_rank_(\d+)_model_states\.pt")  # DeepSpeed's


class LoadFlags(RequestFlags, total=False):
    """What is loaded, for which rank, and to where.

    Attributes:
        names: as of `RequestFlags`, or `trainer`: as the trainer's model spells them, with the
            wrappers around it (`_orig_mod.`, `module.`), so that its `load_state_dict` takes them.
        tp, pp, dp, ep: which rank of how many, of each group: `(0, 4)`; None for all of it.
        device: `cpu` or `cuda[:N]` for tensors of torch; None for arrays of numpy.
        level: `content`: the checkpoint is held to its format's rules, and what is read to what is
            recorded of it; `structure`: the first alone; `bytes`: the second; `none`: neither.
        jobs: threads; 0 for one a processor.
    """

    tp: Rank | None
    pp: Rank | None
    dp: Rank | None
    ep: Rank | None
    device: str | None
    level: str
    jobs: int


@lenient
def load(
    place: Checkpoint | str | os.PathLike[str],
    *,
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
    **flags: Unpack[LoadFlags],
) -> dict[str, Any]:
    """Return the tensors of a checkpoint as a dict, or one rank's of a job of another size.

    No file is written, and neither torch.distributed nor, for arrays of numpy, torch is needed.

    Args:
        place: opened, or a path as `open_checkpoint` takes it.
        stores: how to reach object stores.
        counter: is told of the work.
        flags: see `LoadFlags`. By default `only="model"`: the weights by name. With `only=""` the
            state is nested as torch's `get_state_dict` nests it, and other values are inert data.
            With a rank of Megatron's or DeepSpeed's grid it is what `reshard` would have written
            for that rank: its tensors by the names of that rank's file.

    Raises:
        UsageError: a grid that the format or a shape does not grant.
        CorruptError: what was read is damaged.
        FtckptError: as `open_checkpoint` and `convert` do.
    """
    ranks = {name: cast("Rank | None", flags.get(name)) for name in ("tp", "pp", "dp", "ep")}
    asked = {name: rank for name, rank in ranks.items() if rank is not None}
    for name, rank in asked.items():
        if len(rank) != 2 or not 0 <= rank[0] < rank[1]:
            raise UsageError(f"{name}={rank} is not a rank of a size", hint=f"{name}=(0, 4)")
    only = flags.get("only", "model") or ""
    own = {k: v for k, v in flags.items() if k in RequestFlags.__annotations__ and k != "only"}
    spelled = flags.get("names") == TRAINER
    if spelled:
        if only != "model" or asked:
            raise UsageError(
                "names='trainer' is for the whole model",
                hint="without a rank, and with only='model'",
            )
        own["names"] = ""
    wishes = cast("RequestFlags", {**own, **({"only": only} if only else {})})
    source = place if isinstance(place, Checkpoint) else os.fspath(place)
    content = requested(source, stores, **wishes)
    level = flags.get("level", "content")
    if level not in LOAD_LEVELS:
        hint = ", ".join(LOAD_LEVELS)
        raise UsageError(f"level={level!r} is not a level of a load", hint=hint)
    if level in ("content", "structure"):
        require_structure(content)
    work = threads_alone(Work.of(flags.get("jobs", 0), counter=counter), content.checkpoint)
    loader = _Loader(content, flags.get("device", "cpu"), work, check=level in ("content", "bytes"))
    grid = {name: rank for name, rank in asked.items() if rank[1] > 1}
    if grid.keys() - {"dp"}:
        rules = flags.get("rules", "")
        if rules and grid.keys() == {"tp"}:
            return loader.cut_by_rules(rules, grid["tp"])
        name = "megatron" if flags.get("names") == "megatron" else content.checkpoint.source_format
        return loader.of_rank(name, asked, model=only == "model")
    if "dp" in grid:
        return loader.rows(grid["dp"], nested=only != "model")
    whole = loader.whole(nested=only != "model")
    return _as_the_trainer_spells(whole, content.checkpoint) if spelled else whole


def _as_the_trainer_spells(found: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the weights by the names of the trainer's own model, wrappers included."""
    stored = {i.name: i.stored_name for i in checkpoint.tensors.values() if i.component == "model"}
    # Where nothing else is in the file, its names are those of the model itself; else the first
    # part of each is the trainer's key for the model, whatever the word is.
    alone = not checkpoint.objects and len(stored) == len(checkpoint.tensors)
    spelled = {}
    for name, value in found.items():
        there = stored.get(name) or name
        below = there if alone or there == name else there.partition(".")[2]
        spelled[as_stored(name, below)] = value
    return spelled


def state_dict(checkpoint: Checkpoint, **flags: Unpack[LoadFlags]) -> dict[str, Any]:
    """Return an opened checkpoint as a dict; see `load`."""
    return load(checkpoint, **flags)


class _Place(NamedTuple):
    """Where a loaded tensor goes: below these keys, or in this list; and what fills it."""

    path: Path
    shard: Shard


class _Loader:
    """Loads shards of one content into fresh memory."""

    def __init__(self, content: Content, device: str | None, work: Work, *, check: bool) -> None:
        self._content = content
        self._device = device
        self._work = work
        self._check = check

    def whole(self, *, nested: bool) -> dict[str, Any]:
        """Return every tensor whole."""
        return self._loaded(
            (_Place(path, self._content.whole(key)) for key, path in self._paths(nested)),
            nested=nested,
        )

    def rows(self, rank: Rank, *, nested: bool) -> dict[str, Any]:
        """Return the rows of each tensor that FSDP2 gives a rank; what it does not divide whole."""
        from ftckpt.checkpoint.sharding import even_rows
        from ftckpt.extents import Box
        from ftckpt.formats.state.paths import is_divided

        places = []
        for key, path in self._paths(nested):
            wanted = self._content.tensors[key]
            box = Box.whole(wanted.shape)
            if is_divided(wanted):
                start, stop = even_rows(wanted.shape[0], rank[1], rank[0])
                more = len(wanted.shape) - 1
                box = Box((start, *(0,) * more), (stop - start, *wanted.shape[1:]))
            places.append(_Place(path, self._content.part(key, box)))
        return self._loaded(places, nested=nested)

    def cut_by_rules(self, rules: str, rank: Rank) -> dict[str, Any]:
        """Return what a table of rules gives a tensor-parallel rank.

        Raises:
            UnsupportedError: no rule matches a name.
            UsageError: an axis cannot be divided.
        """
        from ftckpt.checkpoint.sharding import slabs
        from ftckpt.transfer.content import ShardBox

        table = read_rules(rules)
        assert table is not None
        places = []
        for key, path in self._paths(nested=False):
            wanted = self._content.tensors[key]
            parts = slabs(wanted.shape, table.find(wanted.name).split, rank[1], rank[0])
            sizes = [max(p.local.offsets[d] + p.local.sizes[d] for p in parts)
                     for d in range(len(wanted.shape))]  # fmt: skip
            boxes = [ShardBox(part.local, key, part.box) for part in parts]
            places.append(_Place(path, self._content.shard(sizes, wanted.dtype, boxes)))
        return self._loaded(places, nested=False)

    def of_rank(self, name: str, asked: Mapping[str, Rank], *, model: bool) -> dict[str, Any]:
        """Return what `reshard` would write for one rank, by the names of its file.

        Raises:
            UsageError: the format has no file for a rank.
        """
        from ftckpt.formats.writers import format_and_writer
        from ftckpt.transfer.layout import LayoutRequest

        _, writer = format_and_writer(name)
        sizes: dict[str, int] = {axis: rank[1] for axis, rank in asked.items()}
        unknown = sorted(axis for axis in sizes if axis not in writer.supported_options)
        if unknown:
            raise UsageError(
                f"a checkpoint of the format {name} is not divided over {', '.join(unknown)}",
                hint='rules=FILE says how tp divides it; names="megatron" makes a model of'
                " Megatron's of it",
            )
        layout = writer.layout(self._content, LayoutRequest(**sizes))  # type: ignore[arg-type]
        at = {axis: rank[0] for axis, rank in asked.items()}
        file = _file_of(layout.files, at)
        if layout.content is not None:
            self._content = layout.content
        return self._tree(file, model=model)

    def _tree(self, file: OutputFile, *, model: bool) -> dict[str, Any]:
        """Load the tensors of one file that is laid out and not written."""
        from ftckpt.formats.torch_files.stream import parse_stream
        from ftckpt.formats.torch_files.values import TensorRef
        from ftckpt.transfer.layout import Elements, Layout
        from ftckpt.transfer.prove.rehearsal import LaidOutStore
        from ftckpt.transfer.read.elements import Gatherer

        gatherer = Gatherer(self._content.checkpoint)
        wanted: list[Wanted] = []
        made: list[Any] = []
        try:
            reader = LaidOutStore(Layout(files=[file]), gatherer).open(file.path)
            stream = parse_stream(reader.read, file.size, file=file.path)

            def tensor(ref: TensorRef, name: str) -> Any:
                place = ref.span(stream.storages)
                number = bisect_right(file.offsets, place.offset) - 1
                segment = file.segments[number] if number < len(file.segments) else None
                array, target = self._fresh(ref.shape, ref.dtype)
                made.append(target)
                inside = isinstance(segment, Elements) and file.offsets[number] == place.offset
                if inside and ref.dense and segment.shard.numel == ref.numel:  # type: ignore[union-attr]
                    wanted.append(_wanted(name, segment.shard, target))  # type: ignore[union-attr]
                elif ref.numel:
                    data = bytearray(place.length)
                    reader.readinto(place.offset, memoryview(data))
                    _put(target, ref, memoryview(data))
                return array

            tree = _mapped(stream.tree, tensor, ())
        finally:
            gatherer.close()
        self._fill(wanted)
        if not model or not isinstance(tree, dict):
            return cast("dict[str, Any]", tree)
        models = {key: part for key, part in tree.items() if re.fullmatch(r"model\d*|module", key)}
        found = next(iter(models.values())) if len(models) == 1 else models
        return cast("dict[str, Any]", found)

    def _paths(self, nested: bool) -> Iterator[tuple[str, Path]]:
        from ftckpt.formats.state.paths import torch_paths, with_aliases

        from .loadable import with_ties

        self._content = with_aliases(with_ties(self._content))
        paths = torch_paths(self._content)
        for key, wanted in self._content.tensors.items():
            yield key, paths[key] if nested else (wanted.name,)

    def _loaded(self, places: Iterable[_Place], *, nested: bool) -> dict[str, Any]:
        found: dict[Any, Any] = {}
        wanted = []
        for path, shard in places:
            array, target = self._fresh(shard.shape, shard.dtype)
            wanted.append(_wanted(".".join(map(str, path)), shard, target))
            below = found
            for key in path[:-1]:
                below = below.setdefault(key, {})
            below[path[-1]] = array
        self._fill(wanted)
        if nested:
            self._add_values(found)
        return found

    def _add_values(self, found: dict[Any, Any]) -> None:
        """Put values that are no tensors in place, as inert data."""
        from ftckpt.formats.state.objects import StateObjects, of_all_ranks
        from ftckpt.formats.state.paths import recorded_paths

        content = of_all_ranks(self._content)
        trees = StateObjects(content, recorded_paths(content.checkpoint).objects)
        for name in content.objects:
            for leaf in trees.flattened(name):
                below: Any = found
                for key in leaf.path[:-1]:
                    below = below.setdefault(key, {}) if isinstance(below, dict) else {}
                if isinstance(below, dict):
                    below.setdefault(leaf.path[-1], leaf.value.value)
        for key, value in found.items():
            found[key] = _with_lists(value)

    def _fill(self, wanted: list[Wanted]) -> None:
        from ftckpt.loading.fill import fill
        from ftckpt.loading.shares import divide
        from ftckpt.manifest.locate import find

        checkpoint = self._content.checkpoint
        computed = is_computed(checkpoint)
        if computed and self._check:
            keys = {copy for one in wanted for copy in _keys(self._content, one.shard)}
            verify_used(self._content, keys, self._work)
        shards = [one.shard for one in wanted]
        manifest = None if computed else find(checkpoint.as_stored.source)
        share = divide(checkpoint, [shards], manifest, check=self._check and not computed)[0]
        fill(checkpoint, wanted, share.evidence, work=self._work)
        if self._staging is not None:
            self._staging.finish()

    _staging: Any = None

    def _fresh(self, shape: Sequence[int], dtype: DType) -> tuple[Any, LoadTarget]:
        """Return memory for a tensor, and what fills it.

        Raises:
            UnsupportedError: numpy, or torch, has no such type.
            MissingPackageError: torch is not installed.
        """
        from ftckpt.loading.targets import ArrayTarget

        if self._device is None:
            import numpy as np

            if not dtype.numpy:
                raise UnsupportedError(
                    f"numpy has no type {dtype.name}",
                    hint='device="cpu" loads tensors of torch; dtype="fp32" casts them',
                )
            array: Any = np.empty(tuple(shape), dtype.numpy)
            flat: Any = array.reshape(-1).view(np.uint8)
            return array, ArrayTarget(memoryview(flat), dtype)
        from ftckpt.packages import needing
        from ftckpt.transfer.device import torch_device

        with needing("a tensor of torch", "device=None loads arrays of numpy"):
            import torch

            from ftckpt.loading.tensors import StagingBuffers, TensorTarget
        kind = getattr(torch, dtype.name, None)
        if kind is None or dtype.family == "opaque":
            raise UnsupportedError(f"torch has no plain type {dtype.name}")
        if self._staging is None:
            self._staging = StagingBuffers(torch_device(self._device))
        tensor = torch.empty(tuple(shape), dtype=kind, device=self._staging.device)
        return tensor, TensorTarget(tensor, self._staging, "the result")


def _wanted(name: str, shard: Shard, target: LoadTarget) -> Wanted:
    from ftckpt.loading.targets import Wanted

    return Wanted(name, shard, target)


def _keys(content: Content, shard: Shard) -> Iterator[str]:
    """Yield the keys of the content that a shard's source tensors fill."""
    sources = {fill.key for fill in shard.fills}
    for key, wanted in content.tensors.items():
        if any(copy.key in sources for copy in wanted.copies):
            yield key


def _file_of(files: Sequence[OutputFile], at: Mapping[str, int]) -> OutputFile:
    """Return the file of one rank that holds its weights.

    Raises:
        UsageError: the layout has no file for a rank.
        NotFoundError: it has none for this one.
    """
    known = False
    for file in files:
        match = _MEGATRON.fullmatch(file.path)
        if match is not None and file.path.endswith("model_optim_rng.pt"):
            known = True
            numbers = [int(one) for one in match.groups() if one is not None]
            axes = ["tp", *(["pp"] if "pp" in at and at["pp"] is not None else []), "ep"]
            if len(numbers) == 2 and "pp" not in at and "ep" not in at:
                axes = ["tp", "pp"]
            mine = [at.get(axis, 0) for axis in axes[: len(numbers)]]
            if numbers == mine:
                return file
        match = _SLICE.fullmatch(file.path)
        if match is not None:
            known = True
            if int(match[1]) == at.get("tp", 0):
                return file
    if known:
        raise NotFoundError("the layout has no file for this rank")
    raise UsageError(
        "this format keeps no file of a rank's weights",
        hint="dp=(rank, size) takes rows as FSDP2 does; rules= and tp= cut by a table",
    )


def _mapped(tree: Any, tensor: Any, path: tuple[str, ...]) -> Any:
    """Return a tree with what `tensor` makes in place of each reference."""
    from ftckpt.formats.torch_files.values import TensorRef

    if type(tree) is TensorRef:
        return tensor(tree, ".".join(path))
    if isinstance(tree, dict):
        return {key: _mapped(value, tensor, (*path, str(key))) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        made = [_mapped(one, tensor, (*path, str(n))) for n, one in enumerate(tree)]
        return made if type(tree) is list else tuple(made)
    return tree


def _with_lists(tree: Any) -> Any:
    """Return a tree with lists in place of dicts whose keys are the places in a list."""
    if not isinstance(tree, dict):
        return tree
    made = {key: _with_lists(value) for key, value in tree.items()}
    if made and all(type(key) is int for key in made) and sorted(made) == [*range(len(made))]:
        return [made[number] for number in range(len(made))]
    return made


def _put(target: Any, ref: Any, data: memoryview) -> None:
    """Put the elements of a small tensor in place, whatever its strides are."""
    from ftckpt.checkpoint.read_tensor import dense_strides
    from ftckpt.extents import Box
    from ftckpt.transfer.read.copies_plan import ElementMove, StoredBox

    size = ref.dtype.itemsize
    strides = tuple(stride * size for stride in ref.strides)
    held = StoredBox(Box.whole(ref.shape), "", 0, strides, None)
    move = ElementMove(
        held, 0, len(data), 0, ref.numel, tuple(ref.shape), strides, dense_strides(ref.shape),
        ref.dtype,
    )  # fmt: skip
    target.put(data, 0, [move])
