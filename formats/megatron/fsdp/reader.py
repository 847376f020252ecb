"""An opened checkpoint of Megatron-FSDP, and how to open one (see `fsdp`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from ftckpt.checkpoint import Extent, Kind, TensorInfo, tensor_key
from ftckpt.errors import FtckptError
from ftckpt.findings import Finding, finding
from ftckpt.formats.dcp.reader import DcpCheckpoint, open_dcp
from ftckpt.formats.dcp.state import topology_said
from ftckpt.formats.megatron.torch_dist.names import BUFFERS, joined_halves
from ftckpt.formats.pickles.unpickle import Inert
from ftckpt.progress import NULL, Counter
from ftckpt.storage.source import Source
from ftckpt.workers.memory import no_gc

if TYPE_CHECKING:
    from ftckpt.formats.state.paths import RecordedPaths

_WRAPPERS = re.compile(r"(?:model\.)?(?:module\.)+")
_GROUPED = re.compile(r"(.*\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d{1,7})(.*)")
_HALF = re.compile(r"(.*\.linear_fc1\.(?:weight|bias))_([wv])((?:\..+)?)")


@dataclass(kw_only=True, repr=False)
class MegatronFsdpCheckpoint(DcpCheckpoint):
    """An opened checkpoint of Megatron-FSDP.

    Attributes:
        alone: keys of halves of gated MLPs whose other half is not there.
        owners: stored name -> key of the tensor that it is, or is a part of.
        unscaled: see `Checkpoint`; weights are fp32 here also where the job computed in float16.
    """

    format: ClassVar[str] = "megatron-fsdp"
    alone: list[str] = field(default_factory=list)
    owners: Mapping[str, str] = field(default_factory=dict)
    unscaled: bool = False

    def recorded_paths(self) -> RecordedPaths:
        """Return those of objects alone: the logical names of tensors are not the store's."""
        from ftckpt.formats.state.paths import RecordedPaths

        return RecordedPaths({}, super().recorded_paths().objects)

    def interpret(self) -> None:
        """Replace the stored tensors by the logical ones, and read the job's layout."""
        self.dialect = ", ".join(filter(None, ("fsdp_dtensor", self.dialect)))
        named: dict[str, TensorInfo] = {}
        for key, info in self.tensors.items():
            made = _named(info)
            # Where our reading maps two stored names to one tensor, one stays as it is stored.
            taken = made.key != key and (made.key in named or made.key in self.tensors)
            named[key if taken else made.key] = info if taken else made
        self.tensors = _counters_joined(joined_halves(named))
        self.owners = {i.stored_name: _owner(key, self.tensors) for key, i in named.items()}
        self.alone = [key for key, i in self.tensors.items() if i.shape and _HALF.fullmatch(i.name)]
        if "args" in self.objects:
            try:
                args = self.load_object("args")
            except FtckptError:
                return  # the checks report it
            if isinstance(args, Inert):
                self.topology = topology_said(args, self.topology, "args")
                self.unscaled = args.get("fp16", True) is False and not args.get("loss_scale")

    def owner(self, stored: str, place: Extent | None) -> str:
        """Return the logical tensor that a stored one is, or is half of."""
        return self.owners.get(stored, stored)

    def check(self, counter: Counter = NULL) -> Iterator[Finding]:
        """Yield the store's defects, and halves of a gated MLP without the other half."""
        yield from super().check(counter)
        for key in self.alone:
            other = key[:-1] + ("v" if key[-1] == "w" else "w")
            message = f"{key} is half of a gated MLP, and {other} is not there"
            yield finding("missing-tensor", message, file=self.markers[0], tensor=key)


def open_fsdp(source: Source) -> MegatronFsdpCheckpoint:
    """Parse the metadata and give its tensors their logical names (see `MegatronFsdp.open`)."""
    checkpoint = open_dcp(source, MegatronFsdpCheckpoint)
    with no_gc():
        checkpoint.interpret()
    return checkpoint


def _named(info: TensorInfo) -> TensorInfo:
    """Give a stored tensor the name that torch_dist's reader gives it, halves apart."""
    name = info.name
    if info.component in ("model", "optimizer"):
        name = parameter_name(name)
    kind = info.kind
    if info.component == "model" and name.endswith(BUFFERS):
        kind = Kind.BUFFER
    return info if (name, kind) == (info.name, info.kind) else info._replace(name=name, kind=kind)


def parameter_name(stored: str) -> str:
    """Return the name that torch_dist's reader gives what stands behind the model's wrappers."""
    match = _WRAPPERS.match(stored)
    return logical_name(stored[match.end() :] if match else stored)


def logical_name(name: str) -> str:
    """Return the name that torch_dist's reader gives a parameter of the model; halves stay."""
    match = _GROUPED.fullmatch(name)
    return f"{match[1]}local_experts.{match[3]}.{match[2]}{match[4]}" if match else name


def _counters_joined(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Make one of the counters of both halves: the library writes the same one twice."""
    joined: dict[str, TensorInfo] = {}
    for key, info in tensors.items():
        match = _HALF.fullmatch(info.name)
        if match is None or not match[3] or info.numel != 1:
            joined[key] = info
            continue
        name = match[1] + match[3]
        whole = tensor_key(info.component, info.kind, name)
        first, second = (
            tensors.get(tensor_key(info.component, info.kind, f"{match[1]}_{half}{match[3]}"))
            for half in "wv"
        )
        same = first is not None and second is not None and whole not in tensors
        if first is None or second is None or not same or first.dtype != second.dtype:
            joined[key] = info
        elif info is first:
            pieces = [*first.pieces, *(p._replace(replica=p.replica + 1) for p in second.pieces)]
            joined[whole] = first._replace(name=name, pieces=pieces)
    return joined


def _owner(key: str, tensors: Mapping[str, TensorInfo]) -> str:
    """Return the key of the tensor that a stored one became a part of."""
    match = None if key in tensors else _HALF.fullmatch(key)
    return f"{match[1]}{match[3]}" if match else key
