"""How a job is written as a store of torch_dist: tensors by stored name, and other state.

The common state is a dict that every rank shares: arguments, iteration, scheduler, groups of the
optimizer. Its optimizer is written so that any number of ranks can load it: a distributed one as
`fully_reshardable`, whatever the source had; one that is not distributed as it is.

Source: `DistributedOptimizer.sharded_state_dict` and `ChainedOptimizer.sharded_state_dict` in
megatron/core/optimizer; `_build_sharded_state_dict_metadata` in megatron/training/checkpointing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ftckpt.checkpoint import Extent
from ftckpt.checkpoint.optimizer_states import named_state
from ftckpt.formats.megatron.job.layout import MegatronJob, recorded
from ftckpt.formats.megatron.job.optimizer_tree import RESHARDABLE, SHARDING, numbered
from ftckpt.formats.megatron.rank_files.grid import Arguments
from ftckpt.formats.pickles.inert import Inert
from ftckpt.formats.torch_files.values import StoredStorage
from ftckpt.formats.torch_files.write_tree import CopiedTree, save
from ftckpt.transfer.content import TargetTensor
from ftckpt.transfer.layout import Segment, Stored

from .names import StoredForm

_OF_OPTIMIZER = "distrib_optim_sharding_type"
_METADATA = "content_metadata"
# Without these entries of the common state a job does not load a store at all.
NEEDED = ("args", "checkpoint_version", "iteration", _METADATA)


class Blob(NamedTuple):
    """One byte item of a store, or a file of its own."""

    tree: Any = None  # what torch.save is to write
    stored: Extent | None = None  # where the source has it, if it is copied as it is
    transforms: tuple[str, ...] = ()  # to undo there

    def segments(self, base: int = 0, folder: str = "archive") -> list[Segment]:
        """Return its bytes.

        Args:
            base: where it begins in its file.
            folder: see `write_tree.save`.

        Raises:
            UnsupportedError: it holds what torch.save cannot write.
        """
        if self.stored is not None:
            return [Stored(self.stored)]
        return save(self.tree, folder=folder, base=base)


@dataclass
class Common:
    """The common state."""

    root: dict[Any, Any]  # the dict; a value may be `CopiedTree`
    # of the tensors in values that are not
    storages: Mapping[str, StoredStorage] = field(default_factory=dict)
    file: bool = True  # whether it is a file beside the store (up to core 0.18) or an object in it
    stored: Extent | None = None  # where the source has it, as it is
    transforms: tuple[str, ...] = ()  # to undo there

    @property
    def args(self) -> Arguments:
        """The job's arguments."""
        return Arguments(self.root.get("args"))

    def put(self, key: str, value: Any) -> None:
        """Change one entry."""
        if self.root.get(key, Inert) != value:
            self.root[key] = value
            self.stored = None

    def remove(self, keys: Iterable[str]) -> None:
        """Leave entries out."""
        for key in self.root.keys() & set(keys):
            del self.root[key]
            self.stored = None

    def change_arguments(self, changes: Mapping[str, Any]) -> None:
        """Give arguments other values, where the job recorded its arguments.

        Raises:
            UnsupportedError: they are neither a namespace nor a dict.
        """
        args = self.args
        said = {name: value for name, value in changes.items() if _raw(args, name) != value}
        if args.record is None or not said:
            return
        self.root["args"] = recorded(args, said)
        self.stored = None

    def make_reshardable(self, optimizers: Mapping[Any, Mapping[Any, Any]]) -> None:
        """Say how the optimizer is stored.

        Args:
            optimizers: what each holds beside the state of its parameters, by number; one alone
                has the number None.
        """
        if not optimizers:
            return
        self.put("optimizer", optimizers.get(None, optimizers))
        said = dict(self.root.get(_METADATA) or {})
        if any(one.get(SHARDING) == RESHARDABLE for one in optimizers.values()):
            said[_OF_OPTIMIZER] = RESHARDABLE
        if None not in optimizers:  # else several optimizers have their numbers in their keys
            said["chained_optim_avoid_prefix"] = True
        if said:
            self.put(_METADATA, said)

    def blob(self) -> Blob:
        """Return its bytes: the source's own where nothing has changed."""
        if self.stored is not None:
            return Blob(stored=self.stored, transforms=self.transforms)
        tree = CopiedTree(self.root, self.storages)
        return Blob(tree if self.file else [tree])


@dataclass(frozen=True, kw_only=True)
class StorePlan:
    """How a job is written as a store."""

    # its tensors have their names on disk, and its objects are those that the result will have byte
    # for byte
    job: MegatronJob
    common: Common | None  # the state that all ranks share; None where the source has none
    weights: Collection[str]  # their names
    form_of: Callable[[str], StoredForm]  # how a weight, and what is kept of it, is to be stored
    # keys of tensors that are stored under a name of their own
    as_stored: Mapping[str, str] = field(default_factory=dict)
    # every byte item but the common state, by name
    objects: Mapping[str, Blob] = field(default_factory=dict)
    # by name: the stage and tensor rank whose RNG state an item is
    random: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    beside: Sequence[str] = ()  # files of the source that go with the store
    configuration: bytes  # of the store: the content of `metadata.json`

    @property
    def optimizers(self) -> Mapping[Any, Mapping[Any, Any]]:
        """Those of the common state by number; one alone has the number None."""
        return numbered(self.common.root.get("optimizer")) if self.common is not None else {}

    def weight(self, wanted: TargetTensor) -> str:
        """Return the weight that a tensor is, or is state of.

        A state that the table of states knows follows the weight's name; another comes first.
        """
        shorter = name = wanted.name
        known = named_state(name, self.weights).parameter
        if name not in self.weights and known in self.weights:
            return known
        while shorter and shorter not in self.weights:
            shorter = shorter.partition(".")[2]
        return shorter or name

    def form(self, wanted: TargetTensor) -> StoredForm:
        """Return how a tensor is to be stored."""
        return self.form_of(self.weight(wanted))


def _raw(args: Arguments, name: str) -> Any:
    """Return one argument; a class that no argument is where it is not recorded."""
    record = args.record
    return record.get(name, Inert) if isinstance(record, (Inert, dict)) else Inert
