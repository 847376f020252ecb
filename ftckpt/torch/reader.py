"""Load any checkpoint that ftckpt reads into a job, by `torch.distributed.checkpoint`.

    import torch.distributed.checkpoint as dcp
    from ftckpt.torch import Reader

    dcp.load(state, storage_reader=Reader("s3://run7/ckpt@latest"))

One rank opens the checkpoint. The others are sent the names and shapes, and then the places of the
pieces that they need. Each tensor is one chunk to torch: torch's planner says which boxes each rank
wants, and ftckpt's own geometry finds them in whatever pieces the files hold.

What is damaged raises on every rank before `dcp.load` returns, and nothing that a file holds is
executed. Source of the contract: `torch/distributed/checkpoint/{storage,state_dict_loader,
default_planner}.py`, 2.6 to 2.15. `read_metadata` takes no `**kwargs`: torch 2.9 would call it a
second time for each rank alone after an error, and switch collectives off on that rank only.
"""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch
from torch import distributed
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ftckpt.errors import (
    FtckptError,
    NotFoundError,
    RefusedError,
    UnsupportedError,
    UsageError,
)
from ftckpt.extents import Box
from ftckpt.findings import counted, listed
from ftckpt.loading.evidence import CheckedBytes
from ftckpt.loading.fill import fill
from ftckpt.loading.shares import RankShare, divide
from ftckpt.loading.targets import Wanted
from ftckpt.loading.tensors import StagingBuffers, TensorTarget
from ftckpt.operations.loadable import (
    LOAD_LEVELS,
    AskedName,
    LoadableState,
    RequestFlags,
    StateTable,
    is_computed,
    requested,
    require_structure,
    setting_of,
    similar,
    threads_alone,
    verify_used,
    what_is,
)
from ftckpt.operations.opening import STORES
from ftckpt.progress import NULL, Counter
from ftckpt.transfer.read.elements import Gatherer
from ftckpt.workers import Work, limits
from ftckpt.workers.memory import in_a_job

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.operations.loadable import AskedNames, LoadedSettings
    from ftckpt.storage import StoreOptions
    from ftckpt.transfer.content import Shard

_LOG = logging.getLogger("ftckpt.torch")
_MOST_THREADS = 8
_NAMED = 10
# Pieces of which the structure is checked before anything is read; of more, beside the reading.
_AT_ONCE = 20_000


@dataclass(frozen=True)
class LoadReport:
    """What was loaded by one rank.

    Attributes:
        tensors: number of boxes of tensors.
        values: number of values that are no tensors.
        nbytes: bytes of the tensors.
        cast: names of tensors whose type in the job is another one.
        left: names in the checkpoint that the job did not ask for; all on the rank that opened it,
            the first ten on the others.
        evidence: how many bytes were checked, and by what.
        verified: whether what tensors are computed from was verified before it was read.
        seconds: from the plan to the end.
    """

    tensors: int = 0
    values: int = 0
    nbytes: int = 0
    cast: Sequence[str] = ()
    left: Sequence[str] = ()
    evidence: CheckedBytes = CheckedBytes()  # noqa: RUF009 (a NamedTuple)
    verified: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class StateCheck:
    """How a job's state and a checkpoint fit, before a byte is read.

    Attributes:
        missing: names that the job asks for and the checkpoint does not have, each with similar
            ones that it has.
        unexpected: names in the checkpoint that the job does not ask for.
        shapes: names whose shapes differ: of the checkpoint, of the job.
        cast: names whose types differ: of the checkpoint, of the job.
        quantised: names that are stored in codes, and would have to be computed.
    """

    missing: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unexpected: Sequence[str] = ()
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    cast: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    quantised: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether all that the job asks for can be loaded."""
        return not (self.missing or self.shapes or self.quantised)

    def __str__(self) -> str:
        lines = []
        for name, near in list(self.missing.items())[:_NAMED]:
            lines.append(f"missing: {name}" + (f" (there is {' or '.join(near)})" if near else ""))
        if len(self.missing) > _NAMED:
            lines.append(f"missing: {len(self.missing) - _NAMED} more")
        for name, (there, here) in list(self.shapes.items())[:_NAMED]:
            lines.append(f"shape: {name} is {list(there)} and the job has {list(here)}")
        if self.quantised:
            lines.append(f"quantised: {listed(list(self.quantised))}; dtype= computes them")
        if self.cast:
            lines.append(f"cast: {listed(list(self.cast))}")
        if self.unexpected:
            lines.append(f"not asked for: {listed(list(self.unexpected))}")
        return "\n".join(lines) or "everything fits"


class _RankPlan(NamedTuple):
    """What a rank is sent with its plan.

    Attributes:
        share: what it reads; shards of the tensor items in the order of the plan, None for those
            that are the step of all parameters.
        steps: numbers of these, among the tensor items.
        values: what `torch.load` is handed, by the job's name.
        settings: of the optimizer.
        left: names that no rank asks for: the first ones.
        more: how many they are.
    """

    share: RankShare
    steps: frozenset[int]
    values: Mapping[str, bytes]
    settings: LoadedSettings | None
    left: Sequence[str]
    more: int


class _Listed(dict[str, Any]):
    """The metadata's mapping: lists the names of the checkpoint, and answers to the job's too."""

    def __init__(self, table: StateTable, names: AskedNames) -> None:
        super().__init__()
        self._table, self._names = table, names
        for row in table.rows:
            if hasattr(torch, row.dtype):
                super().__setitem__(row.listed, None)
        for name in table.objects:
            super().__setitem__(name, None)

    def __contains__(self, asked: object) -> bool:
        return isinstance(asked, str) and what_is(asked, self._table, self._names) is not None

    def __getitem__(self, asked: str) -> Any:
        found = what_is(asked, self._table, self._names)
        if found is None:
            raise KeyError(asked)
        if found.row is not None:
            kind = getattr(torch, found.row.dtype, None)
            if kind is None:
                raise UnsupportedError(
                    f"torch has no type {found.row.dtype}, which {asked} is stored in", tensor=asked
                )
            return _chunk(kind, found.row.shape)
        return _chunk(torch.float32, ()) if found.step else BytesStorageMetadata()

    def get(self, asked: str, default: Any = None) -> Any:
        """Return the entry of a name, or a default."""
        return self[asked] if asked in self else default  # noqa: RUF100, SIM401

    def items(self) -> Any:
        """Return the listed names with their entries."""
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        """Return the entries of the listed names."""
        return [self[name] for name in self]


class _Failed(dict[str, Any]):
    """The mapping of a checkpoint that could not be opened: it raises why, whatever is asked.

    torch 2.9 and later report an error of `read_metadata` as another one, without its class.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def _fail(self, *given: Any) -> Any:
        raise self._error

    __contains__ = __getitem__ = __iter__ = __len__ = keys = items = values = get = _fail
    __bool__ = _fail


def _chunk(kind: torch.dtype, shape: tuple[int, ...]) -> TensorStorageMetadata:
    size = torch.Size(shape)
    whole = ChunkStorageMetadata(offsets=torch.Size((0,) * len(shape)), sizes=size)
    return TensorStorageMetadata(properties=TensorProperties(dtype=kind), size=size, chunks=[whole])


class CheckpointReader(StorageReader):
    """Reads any checkpoint for `torch.distributed.checkpoint.load`.

    Args:
        place: a checkpoint, `ROOT@STEP` or `ROOT@latest`; local or any URL.
        level: `content`: the checkpoint is held to its format's rules by the rank that opens it,
            and what is read to the CRC-32s or the manifest that there are; `structure`: the first
            alone; `bytes`: the second alone; `none`: neither.
        strict_dtype: refuse a tensor whose type in the job is not that of the checkpoint, which
            torch casts without a word.
        allow: classes, by qualified name, that values may be of beside plain data. torch makes them
            as it loads: allow none that you do not trust.
        jobs: threads of each rank; 0 for its share of the processors, at most 8, and for 8 where
            the checkpoint lies on an object store.
        process_group, coordinator_rank, no_dist: as they are given to `dcp.load`.
        stores: how to reach object stores.
        limit_rate: bytes a second of this rank, or a text such as "200MiB/s".
        counter: is told of the work.
        flags: what of the source is loaded, and as what (`operations.loadable.RequestFlags`):
            `names`, `only`, `drop`, `dtype`, `from_master`, `also`, `adapter`, and others.

    Attributes:
        report: what this rank has loaded last.
    """

    def __init__(
        self,
        place: str | os.PathLike[str] = "",
        *,
        level: str = "content",
        strict_dtype: bool = False,
        allow: Collection[str] = (),
        jobs: int = 0,
        process_group: Any = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
        stores: StoreOptions = STORES,
        limit_rate: float | str = "",
        counter: Counter = NULL,
        _staged: bool = False,
        **flags: Unpack[RequestFlags],
    ) -> None:
        super().__init__()
        if level not in LOAD_LEVELS:
            hint = ", ".join(LOAD_LEVELS)
            if level == "values":
                hint = "ftckpt verify --level values, before the job starts"
            raise UsageError(f"level={level!r} is not a level of a load", hint=hint)
        unknown = flags.keys() - RequestFlags.__annotations__.keys()
        if unknown:
            raise TypeError(f"Reader() got an unexpected keyword argument {min(unknown)!r}")
        for name in ("also", "bases", "adapter", "drop", "spelling"):
            given: Any = flags.get(name)
            if isinstance(given, (str, os.PathLike)):
                flags[name] = [os.fspath(given)]
            elif given:
                flags[name] = [os.fspath(one) for one in given]
        self.report = LoadReport()
        self._place = os.fspath(place)
        self._flags = flags
        self._check = level in ("content", "bytes")
        self._structure = level in ("content", "structure")
        self._strict = strict_dtype
        self._allow = frozenset([allow] if isinstance(allow, str) else allow)
        self._jobs = jobs
        self._group, self._opener, self._alone = process_group, coordinator_rank, no_dist
        self._stores, self._staged = stores, _staged
        self._work = threads_alone(Work.of(jobs or _share_of_processors(), limit_rate, counter))
        self._forget()

    def _forget(self) -> None:
        self._table: StateTable | None = None
        self._state: LoadableState | None = None
        self._names: AskedNames | None = None
        self._error: Exception | None = None
        self._checking: Any = None

    # --- torch's contract ------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read another checkpoint from now on, if one is given."""
        self._forget()
        if checkpoint_id:
            self._place = os.fspath(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say whether a place can be read: any path or URL can be asked for."""
        return isinstance(checkpoint_id, (str, os.PathLike))

    def read_metadata(self) -> Metadata:
        """Return the names and shapes; on every rank of the group at once.

        Where the checkpoint cannot be opened, whatever is asked of them raises why, on every rank.
        """
        self._error = None
        try:
            table, names = self._known()
        except Exception as error:
            self._error = error
            return Metadata(state_dict_metadata=_Failed(error), planner_data=_Failed(error))
        found = Metadata(state_dict_metadata=_Listed(table, names))
        found.planner_data = {name: (name,) for name in found.state_dict_metadata}
        return found

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Raise why the checkpoint could not be opened, if it could not.

        Raises:
            FtckptError: the same error on every rank.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Give each rank the places of what it reads, the values, and what it checks.

        Raises:
            FtckptError: a record around a value is damaged, or a value is not handed to torch.
        """
        state = self._state
        if state is None:  # another rank coordinates than the one that opened it: each opens
            return plans
        with in_a_job():
            return self._planned(state, plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill this rank's tensors, check what was read, and hand over the values.

        Raises:
            CorruptError: damage, by tensor, rank, file and range.
            FtckptError: something cannot be read, or does not fit.
        """
        began = time.monotonic()
        with in_a_job(), torch.no_grad():
            found = self._read(plan, planner)
            if self._checking is not None:
                self._checking.result()
            self.report = replace(found, seconds=time.monotonic() - began)
        self._say()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # --- what a user asks ------------------------------------------------------------------------

    def check(self, state: Mapping[str, Any]) -> StateCheck:
        """Say what a load would miss, before a byte of a tensor is read.

        In a job of several ranks every rank calls it, because one of them opens the checkpoint.

        Args:
            state: as it is given to `dcp.load`.
        """
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict
        from torch.distributed.checkpoint.stateful import Stateful

        table, names = self._known()
        plain = {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state.items()}
        flat, _ = flatten_state_dict(plain)
        missing, shapes, casts, quantised = {}, {}, {}, []
        seen: set[str] = set()
        coded = frozenset(table.coded)
        for name, value in flat.items():
            found = what_is(name, table, names)
            if found is None:
                missing[name] = similar(name, names)
                continue
            seen.add(found.row.listed if found.row is not None else found.value or "")
            row = found.row
            if row is None or not isinstance(value, torch.Tensor):
                continue
            here = str(value.dtype).removeprefix("torch.")
            if tuple(row.shape) != tuple(value.shape):
                shapes[name] = (tuple(row.shape), tuple(value.shape))
            if row.key in coded and here != row.dtype:
                quantised.append(name)
            elif here != row.dtype:
                casts[name] = (row.dtype, here)
        left = [one for one in _listed_names(table) if one not in seen]
        return StateCheck(missing, left, shapes, casts, quantised)

    # --- opening once ----------------------------------------------------------------------------

    def _known(self) -> tuple[StateTable, AskedNames]:
        """Return the table; the first time one rank opens the checkpoint and all receive it."""
        if self._table is None:
            table = self._opened_by_one()
            self._table, self._names = table, table.names()
        assert self._names is not None
        return self._table, self._names

    def _opened_by_one(self) -> StateTable:
        if not self._place:
            raise UsageError("no place to load from", hint="Reader(PLACE), or checkpoint_id=PLACE")
        together = not self._alone and distributed.is_available() and distributed.is_initialized()
        rank = distributed.get_rank(self._group) if together else 0
        if together and rank < 0:
            together, rank = False, self._opener
        told: list[Any] = [None]
        if not together or rank == self._opener:
            try:
                self._state = self._open()
                told = [self._state.table]
            except Exception as error:  # every rank waits for an answer
                if not together:
                    raise
                told = [error if isinstance(error, FtckptError) else RuntimeError(repr(error))]
        if together:
            source = self._opener
            if self._group is not None:
                source = distributed.get_global_rank(self._group, self._opener)
            distributed.broadcast_object_list(told, src=source, group=self._group)
        if isinstance(told[0], Exception):
            raise told[0]
        table: StateTable = told[0]
        return table

    def _open(self) -> LoadableState:
        with in_a_job():
            state = LoadableState.of(requested(self._place, self._stores, **self._flags))
            if self._structure and state.pieces <= _AT_ONCE:
                require_structure(state.content)
            elif self._structure:  # it takes longer than opening: the ranks read meanwhile
                self._checking = ThreadPoolExecutor(1).submit(_checked_in_a_job, state)
        return state

    def _own_state(self) -> LoadableState:
        """Open the checkpoint on this rank too; it must be the one that was opened first.

        Raises:
            RefusedError: it has changed meanwhile.
        """
        table, _ = self._known()
        if self._state is None:
            place = self._place if self._flags.get("also") else table.url
            self._state = LoadableState.of(requested(place, self._stores, **self._flags))
            mine = self._state.table
            if mine.url != table.url or mine.files != table.files:
                raise RefusedError(
                    f"{table.url} has changed while the ranks of the job opened it",
                    hint="name one checkpoint that nobody writes to",
                )
        return self._state

    # --- the plan --------------------------------------------------------------------------------

    def _planned(self, state: LoadableState, plans: Sequence[LoadPlan]) -> list[LoadPlan]:
        table, names = self._known()
        asked: list[list[Shard]] = []
        steps: list[frozenset[int]] = []
        values: dict[str, str] = {}
        fields: set[str] = set()
        seen: set[str] = set()
        known: dict[str, AskedName] = {}
        for plan in plans:
            shards: list[Shard] = []
            common: set[int] = set()
            for item in plan.items:
                name = item.storage_index.fqn
                found = known.get(name)
                if found is None:
                    one = what_is(name, table, names)
                    if one is None:
                        raise NotFoundError(f"the checkpoint has no {name}", tensor=name)
                    found = known[name] = one
                if found.setting is not None:
                    fields.add(found.setting.field)
                elif found.value is not None:
                    values[name] = found.value
                    seen.add(found.value)
                elif found.step:
                    common.add(len(shards) + len(common))
                else:
                    seen.add(found.row.listed)
                    box = Box(tuple(item.storage_offsets), tuple(item.lengths))
                    shards.append(state.content.part(found.row.key, box))
            asked.append(shards)
            steps.append(frozenset(common))
        checkpoint = state.content.checkpoint
        loaded: dict[str, bytes] = {}
        settings = None
        gatherer = Gatherer(checkpoint)
        try:
            if self._check and values:
                state.check_objects(values.values(), self._work)
            for name, value in values.items():
                loaded[name] = state.value(value, gatherer, self._allow)
            if fields:
                settings = state.settings(fields, gatherer, self._allow)
        finally:
            gatherer.close()
        computed = is_computed(checkpoint)
        if computed and self._check:
            keys = set(_keys(known))
            verify_used(state.content, keys, self._work)
        shares = divide(
            checkpoint, asked, None if computed else state.manifest,
            check=self._check and not computed,
        )  # fmt: skip
        if len(plans) > 1 and not _can_be_sent(checkpoint):
            shares = [one._replace(checkpoint=None) for one in shares]
        left = [one for one in _listed_names(table) if one not in seen]
        self._left = left
        planned = []
        for plan, share, common_steps in zip(plans, shares, steps, strict=True):
            wanted = {item.storage_index.fqn for item in plan.items}
            some = {name: data for name, data in loaded.items() if name in wanted}
            sent = _RankPlan(share, common_steps, some, settings, left[:_NAMED], len(left))
            planned.append(replace(plan, storage_data=sent))
        return planned

    # --- reading ---------------------------------------------------------------------------------

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> LoadReport:
        table, names = self._known()
        sent = plan.storage_data
        if not isinstance(sent, _RankPlan):
            sent = self._planned(self._own_state(), [plan])[0].storage_data
            assert isinstance(sent, _RankPlan)
        items = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        places = [planner.resolve_tensor(item) for item in items]
        self._require_fit(items, places, table, names)
        staging = StagingBuffers(_device_of(places), forced=self._staged)
        wanted: list[Wanted] = []
        shards = iter(sent.share.shards)
        for number, (item, tensor) in enumerate(zip(items, places, strict=True)):
            name = item.dest_index.fqn
            if number in sent.steps:
                tensor.detach().fill_(table.step or 0.0)
                continue
            shard = next(shards)
            if tensor.numel():
                wanted.append(Wanted(name, shard, TensorTarget(tensor, staging, name)))
        checkpoint = sent.share.checkpoint
        if checkpoint is None:
            checkpoint = self._own_state().content.checkpoint
        work = self._work
        if not self._jobs and not checkpoint.source.store.traits.local:
            work = replace(
                work, threads=_MOST_THREADS
            )  # which wait for the store, and no processor
        work = threads_alone(work, checkpoint)
        found = fill(checkpoint, wanted, sent.share.evidence, work=work)
        staging.finish()
        for item, tensor in zip(items, places, strict=True):
            planner.commit_tensor(item, tensor)
        count = self._hand_over(plan, planner, sent, names)
        cast = [
            one.name for one in wanted if one.target.dtype != one.shard.dtype
        ]  # fmt: skip
        return LoadReport(
            tensors=len(items),
            values=count,
            nbytes=sum(tensor.numel() * tensor.element_size() for tensor in places),
            cast=cast,
            left=self._left if self._state is not None and self._left else sent.left,
            evidence=found,
            verified=sent.share.evidence.off and self._check,
        )

    _left: Sequence[str] = ()

    def _require_fit(
        self,
        items: Sequence[ReadItem],
        places: Sequence[torch.Tensor],
        table: StateTable,
        names: AskedNames,
    ) -> None:
        coded = frozenset(table.coded)
        for item, tensor in zip(items, places, strict=True):
            name = item.storage_index.fqn
            if tuple(tensor.size()) != tuple(item.lengths):
                raise UnsupportedError(
                    f"{name} is asked for with {list(item.lengths)} elements, and the job's tensor"
                    f" has {list(tensor.size())}",
                    tensor=name,
                )
            found = what_is(name, table, names)
            row = None if found is None else found.row
            here = str(tensor.dtype).removeprefix("torch.")
            if row is None or here == row.dtype:
                continue
            if row.key in coded:
                raise UnsupportedError(
                    f"{name} is stored in codes of a quantised weight, and the job's tensor is of"
                    f" {here}: the codes would be taken for numbers",
                    hint='Reader(..., dtype="bf16") computes the weights',
                    tensor=name,
                )
            if self._strict:
                raise UnsupportedError(
                    f"{name} is stored as {row.dtype}, and the job's tensor is of {here}",
                    hint="strict_dtype=False casts it",
                    tensor=name,
                )

    def _hand_over(
        self, plan: LoadPlan, planner: LoadPlanner, sent: _RankPlan, names: AskedNames
    ) -> int:
        """Give the planner the values that are no tensors; the members of groups stay the job's."""
        count = 0
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO:
                continue
            name = item.storage_index.fqn
            setting = None if name in sent.values else setting_of(name)
            if setting is None:
                data = sent.values[name]
            elif setting.field == "params":
                continue
            else:
                assert sent.settings is not None
                members = self._members(setting, planner, names)
                data = sent.settings.value(setting, members)
            planner.load_bytes(item, io.BytesIO(data))
            count += 1
        return count

    def _members(self, setting: Any, planner: Any, names: AskedNames) -> list[str]:
        """Return the parameters of a group of the job's, as the checkpoint calls them."""
        held: Mapping[str, Any] = getattr(planner, "state_dict", {})
        members = held.get(setting.members) if isinstance(held, Mapping) else None
        if isinstance(members, (list, tuple)):
            return [names.parameter(one) for one in members if isinstance(one, str)]
        return [] if setting.group.isdecimal() else [names.parameter(setting.group)]

    def _say(self) -> None:
        """Tell the job's log what was not checked, and what was not asked for."""
        report = self.report
        if self._check and report.evidence.none:
            _LOG.warning(
                "%s of %s have no recorded sum and were loaded unchecked: ftckpt seal records them",
                counted(report.evidence.none, "byte"), self._place,
            )  # fmt: skip
        if self._state is not None and report.left:
            _LOG.info("not asked for: %s", listed(list(report.left)))


def _keys(known: Mapping[str, AskedName]) -> Iterator[str]:
    return (one.row.key for one in known.values() if one.row is not None)


def _listed_names(table: StateTable) -> Iterator[str]:
    yield from (row.listed for row in table.rows)
    yield from table.objects


def _checked_in_a_job(state: LoadableState) -> None:
    with in_a_job():
        require_structure(state.content)


def _can_be_sent(checkpoint: Checkpoint) -> bool:
    """Return whether other ranks can be sent the store of a checkpoint; else each opens its own."""
    import pickle

    try:
        pickle.dumps(checkpoint.source.store)
    except Exception:  # pickling raises whatever an object of a client's raises
        return False
    return True


def _device_of(places: Sequence[torch.Tensor]) -> torch.device:
    """Return the GPU that tensors are on, else the CPU."""
    found = {tensor.device for tensor in places if tensor.device.type == "cuda"}
    if len(found) > 1:
        names = listed(sorted(map(str, found)))
        raise UnsupportedError(f"one rank's tensors are on several devices: {names}")
    return found.pop() if found else torch.device("cpu")


def _share_of_processors() -> int:
    """Return how many threads a rank has: its share of what the job may use on this machine."""
    try:
        ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        ranks = 1
    return max(1, min(_MOST_THREADS, limits.jobs() // ranks))
