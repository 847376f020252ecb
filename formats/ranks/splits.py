"""Decide how each plain tensor of rank files is cut: by its spec, a record, or a rule.

Asked in this order: what the entry or its file says, `metadata.json`, the user's table of rules.
What an optimizer keeps of a parameter is cut as the parameter is, where all ranks hold shards of
the same shape of both; its counters have no axis, so each rank has the whole of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ftckpt.checkpoint import Kind, TensorInfo, tensor_key
from ftckpt.checkpoint.sharding import Rules, global_shape, part_shape
from ftckpt.checkpoint.sharding import Split as Cut
from ftckpt.errors import CorruptError, UnsupportedError, UsageError
from ftckpt.findings import Finding, finding
from ftckpt.formats.state.rule_tables import built_in
from ftckpt.formats.torch_files.dtensor import Placement, local_of
from ftckpt.formats.torch_files.values import TensorRef

from .parse_files import RecordedConfig
from .specs import Spec
from .tensors import RankEntry, RankSplit, Report, TensorIdentity, odd

PARAMETERS = "params.json"  # of Meta's releases
_EMBEDDING, _OUTPUT, _NORM = "tok_embeddings.weight", "output.weight", "norm.weight"
_QUERIES = re.compile(r"layers\.\d+\.attention\.wq\.weight")

Groups = Mapping[str, tuple[TensorIdentity, Sequence[RankEntry]]]


def meta_rules(groups: Groups) -> Rules:
    """Return how Meta's releases are cut; shapes say along which axis the embedding is.

    Args:
        groups: every tensor's entries, by key.
    """
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for name in (_EMBEDDING, _NORM):
        found = groups.get(name)
        entries = found[1] if found is not None else ()
        shapes[name] = {getattr(entry.held, "shape", ()) for entry in entries}
    whole = {shape[-1] for shape in shapes[_NORM] if len(shape) == 1}
    held = {shape[-1] for shape in shapes[_EMBEDDING] if len(shape) == 2}
    return built_in("meta", {"columns": int(bool(whole) and bool(held) and whole != held)})


def check_release(
    tensors: Mapping[str, TensorInfo], said: Mapping[str, Any], file: str
) -> Iterator[Finding]:
    """Yield where a release of Meta's is not what its `params.json` says.

    Nothing else says how many files it has: without its last ones, joined tensors are too small.

    Args:
        tensors: joined, by key.
        said: the content of `params.json`; empty where there is none.
        file: its path.
    """
    dim, rows, heads = (_count(said, field) for field in ("dim", "vocab_size", "n_heads"))
    norm = tensors.get(_NORM)
    width = dim or (norm.shape[0] if norm is not None and len(norm.shape) == 1 else 0)
    known = f"{file} says" if dim else f"{_NORM} is"
    for name in (_EMBEDDING, _OUTPUT):
        info = tensors.get(name)
        if info is None or len(info.shape) != 2:
            continue
        if rows and info.shape[0] != rows:
            yield _odd(info, info.shape[0], rows, "rows", f"{file} says vocab_size = {rows}")
        if width and info.shape[1] != width:
            yield _odd(info, info.shape[1], width, "columns", f"{known} {width}")
    wide = _count(said, "head_dim") or (dim // heads if heads else 0)
    for name, info in tensors.items():
        # More rows are wider heads, which not every file of parameters names.
        if _QUERIES.fullmatch(name) and info.shape and info.shape[0] < heads * wide:
            said_of = f"{file} says {heads} heads of width {wide}"
            yield _odd(info, info.shape[0], heads * wide, "rows", said_of)
            return  # the other layers have as few


def _count(said: Mapping[str, Any], field: str) -> int:
    value = said.get(field)
    return value if type(value) is int and value > 0 else 0


def _odd(info: TensorInfo, has: int, wanted: int, axis: str, why: str) -> Finding:
    """Return the finding of one tensor: files are missing, or they are of another model."""
    what = f"{info.key} of all files together has {has} {axis}, and {why}"
    if has < wanted:
        return finding("missing-rank", f"{what}: files are missing", tensor=info.key)
    return finding("shape-mismatch", what, tensor=info.key)


class Splits:
    """The splits of the tensors of one component's files.

    Attributes:
        unruled: names of parameters that the user's rules do not speak of.
    """

    def __init__(
        self,
        recorded: RecordedConfig,
        rules: Rules | None,
        component: str,
        groups: Groups,
        report: Report,
    ) -> None:
        """Take what is known.

        Args:
            recorded: the record beside the files.
            rules: the user's table, or None.
            component: of the parameters.
            groups: every tensor's entries, by key.
            report: takes findings.
        """
        self._recorded, self._rules = recorded, rules
        self._component, self._groups, self._report = component, groups, report
        self.unruled: list[str] = []

    def of(
        self, identity: TensorIdentity, entries: Sequence[RankEntry]
    ) -> tuple[RankSplit | None, Sequence[RankEntry]]:
        """Return the split of a tensor, and its entries with the places that they have by it."""
        if not all(isinstance(e.held, TensorRef) for e in entries):
            return None, entries
        own = self._own(identity, entries)
        if own[0] is not None or identity.kind in (Kind.PARAM, Kind.BUFFER):
            return own
        weight = self._weight(identity)
        if weight is None:
            return own
        split, held = self._own(*weight)
        if split is None:
            return own
        if all(not e.held.shape for e in entries):
            return RankSplit((), None), entries
        shapes = [(e.rank, e.held.shape) for e in entries]
        if shapes != [(e.rank, e.held.shape) for e in held]:
            return own
        return split, [e._replace(spec=w.spec) for e, w in zip(entries, held, strict=True)]

    def _weight(
        self, identity: TensorIdentity
    ) -> tuple[TensorIdentity, Sequence[RankEntry]] | None:
        name = identity.name
        found = self._groups.get(tensor_key(self._component, Kind.PARAM, name))
        if found is None and identity.kind is Kind.OTHER:  # `<parameter>.step`
            parameter = name.rpartition(".")[0]
            found = self._groups.get(tensor_key(self._component, Kind.PARAM, parameter))
        return found

    def _own(
        self, identity: TensorIdentity, entries: Sequence[RankEntry]
    ) -> tuple[RankSplit | None, Sequence[RankEntry]]:
        if any(e.spec is not None and e.spec.tells for e in entries):
            return self._by_spec(identity, entries)
        recorded = self._recorded.splits
        stored = recorded.get(identity.stored_name)
        if stored is None and identity.kind in (Kind.PARAM, Kind.BUFFER):
            stored = recorded.get(identity.name)
        if stored is not None or self._rules is None:
            return stored, entries
        return self._by_rule(identity, entries), entries

    def _by_spec(
        self, identity: TensorIdentity, entries: Sequence[RankEntry]
    ) -> tuple[RankSplit | None, Sequence[RankEntry]]:
        """Follow what the files say; one that says otherwise than the first is left out."""
        head = next(e.spec for e in entries if e.spec is not None and e.spec.tells)
        agreeing = []
        for entry in entries:
            spec = entry.spec
            if spec is None or not spec.tells:
                what = "is said to be a shard in some files, and nothing is said in"
                self._report(odd("bad-metadata", identity, entry, what))
            elif (spec.shape, spec.placements, spec.mesh) != (
                head.shape, head.placements, head.mesh,
            ):  # fmt: skip
                what = f"is a shard of {_said(head)} elsewhere, and of {_said(spec)} in"
                self._report(odd("shape-mismatch", identity, entry, what))
            elif not spec.placements and not spec.offsets and entry.held.shape != spec.shape:
                what = f"is said to be whole, {list(spec.shape or ())}, and is not in"
                self._report(odd("shape-mismatch", identity, entry, what))
            else:
                agreeing.append(entry)
        assert head.shape is not None
        if head.offsets is not None:
            return RankSplit(head.shape, _axis_of(agreeing, head.shape)), agreeing
        if len(head.placements or ()) > 1:
            placed = list(self._on_mesh(identity, agreeing, head.shape, head.placements or ()))
            if not placed:
                raise CorruptError(
                    f"no shard of {identity.key} has the shape that its placements give it",
                    kind="shape-mismatch",
                    tensor=identity.key,
                )
            return RankSplit(head.shape, _axis_of(placed, head.shape)), placed
        return RankSplit(head.shape, head.dim), agreeing

    def _on_mesh(
        self,
        identity: TensorIdentity,
        entries: Sequence[RankEntry],
        shape: tuple[int, ...],
        placements: tuple[Placement, ...],
    ) -> Iterator[RankEntry]:
        """Yield the entries with their offsets: ranks count through the mesh, the last axis first.

        Raises:
            UnsupportedError: the mesh, or a rank's place in it, is not said.
        """
        for entry in entries:
            spec = entry.spec
            assert spec is not None
            mesh, at = spec.mesh, spec.coordinate
            if at is None and entry.rank is not None and entry.rank < prod(mesh):
                at = _unravelled(entry.rank, mesh)
            if at is None or len(mesh) != len(placements) or len(at) != len(mesh):
                raise UnsupportedError(
                    f"{identity.key} is placed on {len(placements)} mesh axes, and nothing says"
                    f" where rank {entry.rank} is among them",
                    hint="`mesh_shape` beside the placements says it, and `mesh_coordinate` where"
                    " ranks do not count through the mesh in order (docs/rules.md)",
                    file=entry.file,
                    tensor=identity.key,
                )
            local = local_of(shape, mesh, placements, at)
            if local.shape != entry.held.shape:
                what = f"needs a shard of {list(local.shape)} and has {list(entry.held.shape)} in"
                self._report(odd("shape-mismatch", identity, entry, what))
            elif local.patches:
                yield entry._replace(spec=spec._replace(offsets=local.patches[0].box.offsets))
            elif 0 in shape:  # a shard of another is empty where the rows do not suffice
                yield entry._replace(spec=spec._replace(offsets=(0,) * len(shape)))

    def _by_rule(self, identity: TensorIdentity, entries: Sequence[RankEntry]) -> RankSplit | None:
        """Follow the user's rule of a name.

        A moment of its own name follows its parameter, so only parameters and buffers are asked.
        """
        if identity.component != self._component or identity.kind not in (Kind.PARAM, Kind.BUFFER):
            return None
        assert self._rules is not None
        rule = self._rules.get(identity.name)
        if rule is None:
            self.unruled.append(identity.name)
            return None
        local, parts = entries[0].held.shape, 1 + max(e.part for e in entries)
        axis = rule.split.axis
        if axis is None:
            return RankSplit(local, None)
        try:
            if rule.split.blocks:
                shape = global_shape(local, rule.split, parts)
                part_shape(shape, rule.split, parts)
            else:
                rows = {e.part: e.held.shape[axis] for e in entries}
                shape = (*local[:axis], sum(rows.values()), *local[axis + 1 :])
        except (IndexError, UsageError):
            what = f"of shape {list(local)} cannot be cut as {self._rules.family} says, in"
            self._report(odd("shape-mismatch", identity, entries[0], what))
            return None
        return RankSplit(shape, axis, rule.split.blocks)


def _unravelled(rank: int, mesh: Sequence[int]) -> tuple[int, ...]:
    at: list[int] = []
    for size in reversed(mesh):
        rank, place = divmod(rank, size)
        at.append(place)
    return tuple(reversed(at))


def _said(spec: Spec) -> str:
    how = ", ".join(f"{p.how.value} {p.dim}" for p in spec.placements or ()) or "no cut"
    return f"{list(spec.shape or ())} ({how})"


def _axis_of(entries: Sequence[RankEntry], shape: tuple[int, ...]) -> int | None:
    """Return the one axis along which shards at offsets are cut; None where none is.

    A grid of several axes has no such axis: -1.
    """
    cut = {
        axis
        for entry in entries
        for axis, (size, whole) in enumerate(zip(entry.held.shape, shape, strict=True))
        if size != whole
    }
    return -1 if len(cut) > 1 else next(iter(cut), None)


def cut_of(split: RankSplit) -> Cut:
    """Return a split as the geometry knows it."""
    return Cut(split.dim, split.blocks)
