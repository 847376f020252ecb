"""Read which experts AutoEP has given to each rank, and name the rows that a rank holds.

AutoEP keeps the experts of a layer as three stacked parameters, `<layer>.experts.w1` to `w3`, of
one row an expert. A rank has the rows of its own experts, under the same names. `ds_autoep_layers`
in the model's files lists the layers:

    {"moe_layer_id": 0, "num_experts": 4, "num_local_experts": 2, "ep_size": 2,
     "expert_key_prefix": "model.layers.0.mlp.experts", "checkpoint_format": "per_expert_files",
     "expert_placement": {"version": 1, "num_experts": 4, "ep_size": 2,
                          "ranks": [{"rank": 0, "experts": [0, 1]}, …]}, "ep_rank": 0, …}

The weights lie in files of one expert each, as `<layer>.experts.w1.<expert>`. ZeRO partitions the
stacked rows of a rank. Stage 3 partitions the weights too, and there are no files of experts.

Source: `deepspeed/runtime/engine.py` (`_save_moe_checkpoint`), `checkpoint/autoep_affine.py`,
`checkpoint/autoep_universal.py`, `checkpoint/autoep_zero3_metadata.py` of DeepSpeed 0.19.8.

Take the names of experts' parameters apart, as ranks and as the whole model have them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.checkpoint.sharding import Slab
from ftckpt.errors import CorruptError, NewerWriterError, UnsupportedError
from ftckpt.findings import listed
from ftckpt.formats.deepspeed.zero.partition import Shape

from .affine_maps import read_map

AUTOEP = "ds_autoep_layers"
AUTOEP_KEYS = (AUTOEP, "autoep_layers")
# The stacked parameters of a layer; AutoEP makes them of whatever the model had.
_STACKED = ("w1", "w2", "w3")
# Experts of one layer, and of all, that are believed: what is kept grows with them.
_MOST, _MOST_OF_ALL = 1 << 14, 1 << 20
_PER_EXPERT, _PARTITIONED = "per_expert_files", "zero3_partitioned"


class StackedLayer(NamedTuple):
    """One layer of experts, as it is recorded.

    Attributes:
        number: of the layer, as the names of its files have it.
        prefix: what the names of its parameters begin with.
        experts: number of them in the whole model.
        local: number of them on one rank.
        partitioned: whether the weights are partitioned (stage 3) and have no files of their own.
        ep_rank: the expert-parallel rank that wrote the record, where it says so.
    """

    number: int
    prefix: str
    experts: int
    local: int
    partitioned: bool
    ep_rank: int | None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its stacked parameters."""
        return tuple(f"{self.prefix}.{leaf}" for leaf in _STACKED)


class StackedRows(NamedTuple):
    """Rows of a stacked parameter: those of one expert, or of all experts of a rank."""

    name: str
    first: int
    rows: int

    @property
    def key(self) -> str:
        """A name of the rows alone, which no parameter has."""
        return f"{self.name}[{self.first}:{self.first + self.rows}]"


def read_layers(path: str, tree: Mapping[Any, Any]) -> tuple[StackedLayer, ...]:
    """Read the layers that a model's file records; () without AutoEP.

    Raises:
        CorruptError: the record is none, or contradicts itself (`bad-metadata`).
        UnsupportedError: experts that are not shared evenly, or over tensor slices too.
    """
    key = _key(tree)
    records = tree.get(key)
    if not records:
        return ()
    if tree.get("folding") is not None:
        raise UnsupportedError(
            f"{path} is of AutoEP together with AutoTP: each tensor slice keeps experts of its own,"
            " and DeepSpeed itself loads them at the same sizes alone",
            file=path,
        )
    if not isinstance(records, list):
        what = f"{key} in {path}"
        raise NewerWriterError.of(what, expected="a list of layers", found=records, file=path)
    found = tuple(_layer(path, key, record) for record in records)
    if sum(layer.experts for layer in found) > _MOST_OF_ALL:
        raise _odd(path, key, f"has more than {_MOST_OF_ALL} experts")
    if len({layer.experts // layer.local for layer in found}) > 1:
        raise _odd(path, key, "shares layers over different numbers of ranks")
    for part in ("number", "prefix"):
        if len({getattr(layer, part) for layer in found}) != len(found):
            raise _odd(path, key, f"has two layers of one {part}")
    return found


def _key(tree: Mapping[Any, Any]) -> str:
    """Return the key under which a model's file has its layers."""
    return next((key for key in AUTOEP_KEYS if tree.get(key) is not None), AUTOEP)


def _layer(path: str, key: str, record: Any) -> StackedLayer:
    record = record if isinstance(record, dict) else {}
    prefix, form = record.get("expert_key_prefix"), record.get("checkpoint_format", _PER_EXPERT)
    fields = ("moe_layer_id", "num_experts", "num_local_experts", "ep_size")
    sizes = [record.get(name) for name in fields]
    if not isinstance(prefix, str) or not prefix or not all(
        type(n) is int and 0 <= n < 1 << 24 for n in sizes
    ):  # fmt: skip
        raise NewerWriterError.of(
            f"a layer of {key} in {path}",
            expected=", ".join(("expert_key_prefix", *fields)),
            found=listed(sorted(map(str, record))) or "nothing",
            file=path,
        )
    number, experts, local, ep = sizes
    version = record.get("checkpoint_format_version")
    known = {_PER_EXPERT: (None, 1), _PARTITIONED: (1,)}
    if not isinstance(form, str) or version not in known.get(form, ()):
        raise UnsupportedError(
            f"{path} keeps the experts of {prefix} in the form {str(form)[:40]!r}"
            f" {str(version)[:20]}, which is not one that ftckpt knows",
            file=path,
        )
    if experts > _MOST:
        raise _odd(path, key, f"has {experts} experts of {prefix}, more than any model")
    if not local or local * ep != experts:
        raise _odd(path, key, f"shares {experts} experts of {prefix} over {ep} ranks of {local}")
    placement = record.get("expert_placement")
    if placement is not None and placement != _placement(experts, ep):
        raise UnsupportedError(
            f"{key} in {path} does not share the experts of {prefix} evenly and in their order",
            hint="DeepSpeed's own ds_to_universal.py puts them together",
            file=path,
        )
    ep_rank = record.get("ep_rank")
    if ep_rank is not None and (type(ep_rank) is not int or not 0 <= ep_rank < ep):
        raise _odd(path, key, f"is of an expert-parallel rank that {ep} have not")
    return StackedLayer(number, prefix, experts, local, form == _PARTITIONED, ep_rank)


def check_maps(path: str, tree: Mapping[Any, Any], layers: Sequence[StackedLayer]) -> None:
    """Require that the affine maps of a model's file say what its layers say.

    Every file of stage 3 repeats the maps of all ranks, so one file's are checked.

    Args:
        path: of the file.
        tree: its content.
        layers: what `read_layers` found there.

    Raises:
        CorruptError: a map contradicts its layer (`bad-metadata`).
        UnsupportedError: a map is malformed.
    """
    key = _key(tree)
    for layer, record in zip(layers, tree.get(key) or (), strict=True):
        maps = record.get("affine_maps")
        params = maps.get("params") if isinstance(maps, dict) else None
        if isinstance(params, dict):
            for name in layer.names:
                _require_the_same(path, key, layer, name, params.get(name))


def _require_the_same(path: str, key: str, layer: StackedLayer, name: str, record: Any) -> None:
    """Require that a parameter's affine map says the same as the placement."""
    told = read_map(record, name)
    for rank, part in enumerate(told.parts):
        rows = StackedRows(name, rank * layer.local, layer.local)
        box = Box((rows.first, *(0 for _ in told.shape[1:])), (rows.rows, *told.shape[1:]))
        if part.slabs != (Slab(box, Box.whole(box.sizes)),):
            raise _odd(path, key, f"has a map of {name} that is not that of its experts")
    if told.shape[:1] != (layer.experts,) or len(told.parts) * layer.local != layer.experts:
        raise _odd(path, key, f"has a map of {name} for other ranks or experts")


def _placement(experts: int, ep: int) -> dict[str, Any]:
    local = experts // ep
    ranks = [
        {"rank": n, "experts": [*range(n * local, (n + 1) * local)]} for n in range(ep)
    ]  # fmt: skip
    return {"version": 1, "num_experts": experts, "ep_size": ep, "ranks": ranks}


class ExpertRank(NamedTuple):
    """A rank of a job of AutoEP.

    Attributes:
        ep: ranks that share the experts of a layer.
        edp: ranks that hold the same experts.
        ep_rank, edp_rank: its place among both.
    """

    ep: int
    edp: int
    ep_rank: int
    edp_rank: int


def relaid(
    records: Sequence[Any], shapes: Mapping[str, Shape], rank: ExpertRank, *, partitioned: bool
) -> list[Any]:
    """Return the record of the layers as a rank of a job of other sizes writes it.

    Args:
        records: as the source has it.
        shapes: of the stacked parameters, whole.
        rank: which writes it.
        partitioned: whether the weights are partitioned, as stage 3 does.
    """
    made, ep = [], rank.ep
    for record in records:
        experts, prefix = record["num_experts"], record["expert_key_prefix"]
        local = experts // ep
        names = [name for leaf in _STACKED if (name := f"{prefix}.{leaf}") in shapes]
        sizes = {
            "num_local_experts": local,
            "ep_size": ep,
            "expert_placement": _placement(experts, ep),
            "affine_maps": {"version": 1, "params": {n: _map(shapes[n], ep) for n in names}},
            "ep_group_name": f"ep_size_{ep}",
            "checkpoint_format": _PARTITIONED if partitioned else _PER_EXPERT,
            "checkpoint_format_version": 1 if partitioned else None,
            "ep_rank": rank.ep_rank,
            "expert_data_parallel_rank": rank.edp_rank,
            "expert_data_parallel_world_size": rank.edp,
            "global_expert_start": rank.ep_rank * local,
            "global_expert_end": (rank.ep_rank + 1) * local,
        }
        made.append({key: sizes.get(key, value) for key, value in record.items()})
    return made


def _map(shape: Shape, ep: int) -> dict[str, Any]:
    """Return the affine map of a stacked parameter (see `affine`)."""
    own = [shape[0] // ep, *shape[1:]]
    strides = [*dense_strides(shape)]
    ranks = {}
    for rank in range(ep):
        source = [rank * own[0] * strides[0], strides]
        piece = {"shape": own, "source": source, "dest": [0, strides], "locations": [rank]}
        ranks[rank] = {"shard_shape": own, "pieces": [piece]}
    return {"logical_shape": [*shape], "ranks": ranks}


def _odd(path: str, key: str, what: str) -> CorruptError:
    return CorruptError(f"{key} in {path} {what}", kind="bad-metadata", file=path)


# What the name of an expert's parameter begins with, its number, and the rest.
_NAME = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,7})(\..*)", re.DOTALL)
# The name of a parameter group of experts says over how many ranks they are shared.
_GROUP = re.compile(r"ep_size_(\d{1,7})")


class ExpertLayer(NamedTuple):
    """One layer of experts.

    Attributes:
        number: of the layer, as the names of its files have it.
        experts: number of them in the whole model.
        local: number of them on one rank.
    """

    number: int
    experts: int
    local: int

    @property
    def ep(self) -> int:
        """Number of ranks that share the experts."""
        return self.experts // self.local


class ExpertName(NamedTuple):
    """The name of an expert's parameter, in three parts."""

    prefix: str
    number: int
    rest: str

    @property
    def full(self) -> str:
        """The name."""
        return f"{self.prefix}{self.number}{self.rest}"

    def on_rank(self, ep_rank: int, layer: ExpertLayer) -> str:
        """Return the name in the whole model of what an expert-parallel rank calls so."""
        return self._replace(number=self.number + ep_rank * layer.local).full

    def whole(self, shape: Shape, layer: ExpertLayer) -> dict[str, Shape]:
        """Return what all ranks together call so, by their names in the whole model."""
        numbers = range(self.number, layer.experts, layer.local)
        return {self._replace(number=number).full: shape for number in numbers}


class StackedName(NamedTuple):
    """The name of a parameter that AutoEP stacks; the same on all ranks."""

    full: str

    def on_rank(self, ep_rank: int, layer: ExpertLayer) -> str:
        """Return the name of the rows that an expert-parallel rank has."""
        return StackedRows(self.full, ep_rank * layer.local, layer.local).key

    def whole(self, shape: Shape, layer: ExpertLayer) -> dict[str, Shape]:
        """Return the parameter with the rows of all ranks."""
        return {self.full: (layer.experts, *shape[1:])}


def expert_name(name: str) -> ExpertName | None:
    """Take the name of an expert's parameter apart; None for other names."""
    match = _NAME.fullmatch(name)
    return None if match is None else ExpertName(match[1], int(match[2]), match[3])


def group_ep(group: object) -> int | None:
    """Return over how many ranks a parameter group of experts says they are shared."""
    name = group.get("name") if isinstance(group, dict) and group.get("moe") is True else None
    match = _GROUP.fullmatch(name) if isinstance(name, str) else None
    return int(match[1]) or None if match is not None else None
