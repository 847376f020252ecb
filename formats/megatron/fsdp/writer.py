"""Lay out a Megatron-FSDP checkpoint (`fsdp_dtensor`) of a GPT model that Megatron can build.

What Megatron-FSDP keeps is one copy of each weight, in the optimizer's type: the fp32 master, if
the source has one. Rows are divided over a world of ranks; Megatron-FSDP cuts them anew while it
loads.

Source: see `fsdp`; the prefixes are those of `convert_torch_dist_to_fsdp_dtensor` in Megatron-LM's
tools/checkpoint/checkpoint_inspector.py.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ftckpt.checkpoint import Box, Kind
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.checkpoint.sharding import even_rows
from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.formats.dcp.names import MARKER
from ftckpt.formats.dcp.writer import ItemPlace, RankFiles, TensorItems, WrittenChunk, metadata
from ftckpt.formats.megatron.job.common_state import not_carried
from ftckpt.formats.megatron.job.groups import groups_like
from ftckpt.formats.megatron.job.optimizer_tree import groups_in, numbered
from ftckpt.formats.megatron.job.trained import uncertain
from ftckpt.formats.megatron.job.whole_model import VERSION, namespace, whole_model
from ftckpt.formats.pickles.walk import Path, dotted
from ftckpt.formats.state.world_size import world_of
from ftckpt.formats.torch_files.write_tree import Storage, Tensor, save, save_shard
from ftckpt.transfer.content import Content, Known, TargetTensor
from ftckpt.transfer.layout import Layout, LayoutRequest, Literal, OutputFile

from .reader import logical_name

_GATED = re.compile(
    r".*\.mlp\.(?:|shared_experts\.|experts\.(?:local_experts\.\d+\.)?)linear_fc1\.(?:weight|bias)\d*"
)
# Linear attention, whose packed projections lie apart there, and state-space layers.
_PACKED = re.compile(r".*\.(?:in_proj|conv1d)[._].*")
_LEAVES = {Kind.EXP_AVG: "exp_avg", Kind.EXP_AVG_SQ: "exp_avg_sq"}
# Of the shared state: what other formats need, and what is written here in its own way.
_APART = ("args", "optimizer", "checkpoint_version", "iteration", "content_metadata")
_HINT = "--only model writes the weights alone"
# `strict_fsdp_dtensor_load`, the default, asks for each name.
_SEEDED = (
    "random streams were not written: start Megatron with --no-load-rng, and it seeds them anew"
    " from --seed"
)
_STEP = "step"
_TORCHS = "foreach"  # a setting that torch's Adam has, and no fused one
_FLOAT = DTYPES["float32"]


class MegatronFsdpWriter:
    """The writer of the format `megatron-fsdp` (fits `ftckpt.transfer.layout.Writer`)."""

    name = "megatron-fsdp"
    single = False
    supported_options = ("dp",)

    def layout(self, content: Content, request: LayoutRequest) -> Layout:
        """Lay out `content` for `request.dp` ranks; None: the source's world size.

        Raises:
            UsageError: a world of no ranks.
            UnsupportedError: nothing describes the model to Megatron, or its optimizer keeps state
                that Megatron-FSDP does not.
        """
        writing = _Writing(content, world_of(content, request))
        writing.add_tensors()
        writing.add_objects()
        marker = metadata(writing.tensors, writing.objects, writing.paths)
        return Layout(
            files=list(writing.files.outputs()),
            commit=[OutputFile(MARKER, [Literal(marker)])],
            unplaced=writing.unplaced,
            notes=writing.notes,
            content=writing.content,
        )


class _Writing:
    """Files and metadata while they grow."""

    def __init__(self, content: Content, world: int) -> None:
        job = self._job = whole_model(content, state=True)
        self._args = job.args
        wrappers = 3 if self._args.flag("bf16") or self._args.flag("fp16") else 2
        self._wrapped = "module." * wrappers
        self._world = world
        self.files = RankFiles(world)
        self.tensors: dict[str, TensorItems] = {}
        self.objects: dict[str, ItemPlace] = {}
        self.paths: dict[str, Path] = {}
        self.notes: list[Finding] = [*job.notes, *job.state.notes]
        trained = job.trained
        self._kept = {(w.kind, w.name): w for w in trained.values()}
        packed = next(filter(_PACKED.fullmatch, self._job.content.tensors), None)
        if packed is not None:
            raise UnsupportedError(
                f"how Megatron-FSDP stores {packed}, which has several parts, is not known",
                tensor=packed,
                hint="--to megatron-dist",
            )
        self._settings = dict(self._groups()) if trained else {}
        # Torch's Adam counts for each parameter, and the fused ones in the group.
        torchs = {name for name, one in self._settings.items() if _TORCHS in one}
        self._steps = {name: _count(self._settings[name], name) for name in torchs}
        others = [
            w for w in trained.values()
            if w.kind not in (*_LEAVES, Kind.MASTER)
            and w.name.removesuffix(f".{_STEP}") not in self._steps
        ]  # fmt: skip
        if others:
            raise UnsupportedError(
                f"Megatron-FSDP's store of Adam has no place for {others[0].key}",
                tensor=others[0].key,
                hint=_HINT,
            )
        placed = {*trained, *job.state.placed, *not_carried(content, repeated=True)}
        self.unplaced = [name for name in job.names if name not in placed]
        self._logical: dict[str, TargetTensor] = {}
        self.notes.append(finding("note", _SEEDED))
        narrow = {w.dtype.name for w in self._job.content.tensors.values()} - {"float32"}
        if narrow and any(kind is Kind.MASTER for kind, _ in self._kept):
            what = f"the fp32 masters are the weights; their {' and '.join(sorted(narrow))} copies"
            self.notes.append(finding("note", f"{what} are not stored, as Megatron-FSDP does"))
        # What is read back: under the reader's names, for the cutting and for the proof.
        weights = [self._weight(w) for w in self._job.content.tensors.values()]
        moments = [w for w in trained.values() if w.kind in _LEAVES]
        self._own = {w.key: w for w in (*weights, *moments)}
        named = [w._replace(name=logical_name(w.name)) for w in self._own.values()]
        known = {
            f"optimizer:{logical_name(name)}.{_STEP}": Known((), _FLOAT, data)
            for name, data in self._steps.items()
        }
        self.content = replace(content.with_tensors(named), objects={}, aliases={}, known=known)

    def _weight(self, wanted: TargetTensor) -> TargetTensor:
        """Return the master of a weight in its place; itself if it has none."""
        master = self._kept.get((Kind.MASTER, wanted.name))
        return wanted if master is None else wanted._replace(dtype=master.dtype,
                                                             copies=master.copies)  # fmt: skip

    def add_tensors(self) -> None:
        """Place weights and moments, gates and ups apart."""
        for own, key in zip(self._own.values(), self.content.tensors, strict=True):
            for half, box in self._halves(own):
                if own.component == "model":
                    path: Path = ("model", f"module.{own.name}{half}")
                else:
                    name = f"{self._wrapped}{own.name}{half}"
                    path = ("optimizer", "state", name, _LEAVES[own.kind])
                chunks = list(self._chunks(key, own, box))
                stored = dotted(path)
                self.tensors[stored] = TensorItems(own.dtype, box.sizes, chunks)
                self.paths[stored] = path

        for own in self._own.values():
            if own.component == "model" and own.name in self._steps:
                for half, _ in self._halves(own):
                    self._add_step(own.name, half)

    def _add_step(self, name: str, half: str) -> None:
        rank = self.files.lightest()
        count = Tensor(Storage((Literal(self._steps[name]),)), _FLOAT, (), ())
        place = self.files.add(rank, save(count, base=self.files.sizes[rank]))
        path: Path = ("optimizer", "state", f"{self._wrapped}{name}{half}", _STEP)
        self.tensors[dotted(path)] = TensorItems(_FLOAT, (), [WrittenChunk((), (), place)])
        self.paths[dotted(path)] = path

    def _halves(self, own: TargetTensor) -> list[tuple[str, Box]]:
        """Return what is stored of a tensor: how its name ends, and which box of it that is."""
        whole = Box.whole(own.shape)
        if not self._args.flag("swiglu") or not _GATED.fullmatch(own.name) or not own.shape:
            return [("", whole)]
        rows, *rest = own.shape
        if rows % 2:
            what = f"{own.key} has {rows} rows, and a gated MLP as many gates as ups"
            raise UnsupportedError(what, tensor=own.key)
        zeros = (0,) * len(rest)
        sizes = (rows // 2, *rest)
        return [("_w", Box((0, *zeros), sizes)), ("_v", Box((rows // 2, *zeros), sizes))]

    def _chunks(self, key: str, own: TargetTensor, box: Box) -> Iterator[WrittenChunk]:
        if not own.shape:
            yield self._chunk(key, self.files.lightest(), box, ())
            return
        (first, *others), (rows, *rest) = box
        for rank in range(self._world):
            start, stop = even_rows(rows, self._world, rank)
            if start < stop:
                part = Box((first + start, *others), (stop - start, *rest))
                yield self._chunk(key, rank, part, (start, *others))

    def _chunk(self, key: str, rank: int, box: Box, offsets: tuple[int, ...]) -> WrittenChunk:
        shard = self.content.part(key, box)
        place = self.files.add(rank, save_shard(shard, base=self.files.sizes[rank]))
        return WrittenChunk(offsets, box.sizes, place)

    def add_objects(self) -> None:
        """Place the shared state, each value by itself, on the first rank."""
        arguments = {**self._job.arguments, "ckpt_format": "fsdp_dtensor"}
        self._add(("args",), namespace({**arguments, "use_megatron_fsdp": True}))
        self._add(("checkpoint_version",), VERSION)
        self._add(("iteration",), self._job.iteration)
        for key, value in self._job.state.root.items():
            if key not in _APART:
                self._flattened((key,), value)
        for name, group in self._settings.items():
            beside = ("params", _STEP) if name in self._steps else ("params",)
            settings = {key: value for key, value in group.items() if key not in beside}
            self._flattened(("optimizer", "param_to_group_meta", self._wrapped + name), settings)

    def _flattened(self, path: Path, value: Any) -> None:
        if isinstance(value, dict) and value and all(type(key) is str for key in value):
            for key, member in value.items():
                self._flattened((*path, key), member)
        else:
            self._add(path, value)

    def _add(self, path: Path, value: Any) -> None:
        name = dotted(path)
        self.paths[name] = path
        self.objects[name] = self.files.add(0, save(value, base=self.files.sizes[0]))

    def _groups(self) -> Iterator[tuple[str, Mapping[Any, Any]]]:
        """Yield each parameter's own name and the settings of its group.

        Raises:
            UnsupportedError: the source has no groups, or it cannot be told which is whose.
        """
        optimizers = list(numbered(self._job.state.root.get("optimizer")).values())
        groups = [groups_in(one) for one in optimizers]
        if not groups or not all(groups) or len(groups) > 2:
            raise uncertain("the source does not record the groups of its parameters", hint=_HINT)
        apart = len(groups) == 2
        for local in self._job.locals():
            if local.kind is not Kind.PARAM:
                continue
            own = groups[int(apart and local.expert)]
            found = groups_like(local, own, self._args, apart=apart)
            if len(found) != 1:
                what = f"in which group of parameters {local.name} is"
                raise uncertain(what, local.name, hint=_HINT)
            yield local.name, own[found[0]]


def _count(group: Mapping[Any, Any], name: str) -> bytes:
    """Return what torch's Adam has as its step.

    Raises:
        UnsupportedError: the source does not say it.
    """
    step = group.get(_STEP)
    if type(step) not in (int, float):
        raise uncertain(f"how many steps the optimizer has made of {name}", name, hint=_HINT)
    return struct.pack("<f", step)
