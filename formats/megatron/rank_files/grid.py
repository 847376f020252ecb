"""Map the directories of a legacy Megatron checkpoint to ranks of its grid.

    mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt      tensor, pipeline and expert rank

`_PPP` is there with pipeline parallelism, `_EEE` with expert parallelism, so that `mp_rank_00_001`
alone can mean either: the pickled arguments decide. Each directory is written by one rank. Ranks
are numbered tensor first, pipeline last; the tensor and expert ranks of the experts (`etp`, `ep`)
run over the same ranks with sizes of their own, and not every pair of a tensor and an expert rank
exists.

Source: `get_checkpoint_name` and `save_checkpoint` in megatron/training/checkpointing.py,
`RankGenerator` in megatron/core/parallel_state.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import lcm
from typing import Any, NamedTuple

from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.formats.pickles.unpickle import Inert

WEIGHTS = "model_optim_rng.pt"
OPTIMIZER = "distrib_optim.pt"
_LARGEST = 1 << 20


class Coordinate(NamedTuple):
    """Tensor, pipeline and expert rank of one directory."""

    tp: int
    pp: int
    ep: int


class Arguments:
    """The pickled command line (`args`), read and never trusted."""

    def __init__(self, record: Any = None) -> None:
        self.record = record  # as pickled: the inert stand-in of a namespace, or a dict

    def get(self, name: str, default: Any = None) -> Any:
        """Return one argument as inert data; `default` where it was not recorded or is None."""
        found = None
        if isinstance(self.record, (Inert, dict)):
            found = self.record.get(name)
        return default if found is None else found

    def count(self, name: str, default: int = 0) -> int:
        """Return an argument that counts something; `default` where it does not."""
        found = self.get(name)
        return found if type(found) is int and 0 <= found < _LARGEST else default

    def flag(self, name: str) -> bool:
        """Return whether an argument is recorded and true."""
        return self.get(name) is True


class MegatronGrid(NamedTuple):
    """The sizes of the groups of ranks."""

    tp: int  # tensor-parallel ranks
    pp: int  # pipeline stages
    ep: int  # expert-parallel ranks
    etp: int  # tensor-parallel ranks of the experts
    cp: int = 1  # context-parallel ranks
    dp: int | None = None  # data-parallel ranks; None where not recorded

    @property
    def world(self) -> int | None:
        """All ranks of the job; None where the data-parallel ones are not recorded."""
        return None if self.dp is None else self.tp * self.pp * self.cp * self.dp

    @property
    def dense_ranks(self) -> int:
        """Ranks that share the bucket of a dense parameter's gradients."""
        return (self.dp or 1) * self.cp

    @property
    def expert_ranks(self) -> int:
        """Ranks that share the bucket of an expert's gradients."""
        return max(1, self.tp * self.dense_ranks // (self.etp * self.ep))

    @property
    def experts_apart(self) -> bool:
        """Whether experts have a data-parallel group, and so an optimizer, of their own."""
        return self.ep > 1 or self.etp != self.tp

    def require_size(self) -> None:
        """Refuse sizes that would only be somebody's way to fill the memory.

        Raises:
            CorruptError: more ranks than any cluster has (`bad-metadata`).
        """
        if lcm(self.tp, self.etp * self.ep) * self.pp > _LARGEST:
            what = f"the arguments record more ranks than any cluster has: {self}"
            raise CorruptError(what, kind="bad-metadata")

    def directories(self) -> list[Coordinate]:
        """Return the coordinates that a complete checkpoint has, in the order of their names."""
        pairs = sorted(self.expert_parts())
        return sorted(Coordinate(t, p, e) for t, e in pairs for p in range(self.pp))

    def expert_parts(self) -> Mapping[tuple[int, int], int]:
        """Return, for each (tensor rank, expert rank) that exists, the experts' tensor rank.

        Raises:
            UnsupportedError: two ranks with different parts of the experts share a directory, as
                Megatron lets them: one has overwritten the other.
        """
        found: dict[tuple[int, int], int] = {}
        for rank in range(lcm(self.tp, self.etp * self.ep)):
            pair = rank % self.tp, rank // self.etp % self.ep
            part = rank % self.etp
            if found.setdefault(pair, part) != part:
                raise UnsupportedError(
                    f"experts are divided over {self.etp} tensor ranks and all else over {self.tp}:"
                    " this layout has one directory for ranks that hold different parts"
                )
        return found

    def first_rank(self, at: Coordinate) -> int:
        """Return the first rank of a directory's coordinate, counted within its stage."""
        span = range(lcm(self.tp, self.etp * self.ep))
        pairs = ((rank % self.tp, rank // self.etp % self.ep) for rank in span)
        return next(rank for rank, pair in enumerate(pairs) if pair == (at.tp, at.ep))

    def rank(self, at: Coordinate) -> int | None:
        """Return the rank that writes a directory; None where the job's size is not recorded."""
        return None if self.world is None else self.first_rank(at) + at.pp * self.world // self.pp

    def may_be_of(self, rank: int, at: Coordinate, *, stages_outermost: bool) -> bool:
        """Say whether a rank can hold what a directory is of: tensor ranks are neighbours."""
        if rank % self.tp != at.tp:
            return False
        return not stages_outermost or not self.world or rank * self.pp // self.world == at.pp

    def name(self, at: Coordinate) -> str:
        """Return the name of a directory."""
        name = f"mp_rank_{at.tp:02d}"
        name += f"_{at.pp:03d}" if self.pp > 1 else ""
        return name + (f"_{at.ep:03d}" if self.ep > 1 else "")

    def coordinate(self, ranks: tuple[int, ...]) -> Coordinate | None:
        """Return what the numbers of a name mean, or None where they do not fit the sizes."""
        rest = list(ranks)
        tp = rest.pop(0)
        pp = rest.pop(0) if self.pp > 1 and rest else 0
        ep = rest.pop(0) if self.ep > 1 and rest else 0
        if rest or tp >= self.tp or pp >= self.pp or ep >= self.ep:
            return None
        given = 1 + (self.pp > 1) + (self.ep > 1)
        return Coordinate(tp, pp, ep) if len(ranks) == given else None


def grid_of(args: Arguments, found: Iterable[tuple[int, ...]]) -> MegatronGrid:
    """Return the sizes that the arguments record.

    Where there are no arguments (converters leave them out) names of one number say them all.

    Args:
        args: of any rank.
        found: the numbers in the directories' names.

    Raises:
        UnsupportedError: no arguments, and names of more than one number.
        CorruptError: more ranks than any cluster has (`bad-metadata`).
    """
    tp = args.count("tensor_model_parallel_size") or args.count("model_parallel_size")
    found = list(found)
    if not tp:
        if any(len(ranks) > 1 for ranks in found):
            raise UnsupportedError(
                "the checkpoint does not record its arguments, and without them the second number"
                " of mp_rank_TT_NNN may be a pipeline or an expert rank"
            )
        tp = 1 + max(ranks[0] for ranks in found)
    grid = MegatronGrid(
        tp=tp,
        pp=args.count("pipeline_model_parallel_size", 1) or 1,
        ep=args.count("expert_model_parallel_size", 1) or 1,
        etp=args.count("expert_tensor_parallel_size", tp) or tp,
        cp=args.count("context_parallel_size", 1) or 1,
        dp=args.count("data_parallel_size") or None,
    )
    grid.require_size()
    return grid
