"""Check that a checkpoint has the parts and the world size for a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from ftckpt.checkpoint import Checkpoint, Topology
from ftckpt.errors import UsageError

if TYPE_CHECKING:
    from ftckpt.inspection.resume import ResumeItem
    from ftckpt.inspection.training_state import Contents


class Part(StrEnum):
    """A part of the training state that a restart can require."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    RNG = "rng"
    DATALOADER = "dataloader"
    STEP = "step"
    SCALER = "scaler"


# The rows of the resume check (`ftckpt.inspection.training_state.TABLE`) for each part. Python's,
# NumPy's and the device's random state are not required: many trainers never draw from them, and no
# file says so.
_ROWS = {
    Part.MODEL: ("weights",),
    Part.OPTIMIZER: ("moments", "masters"),
    Part.SCHEDULER: ("scheduler",),
    Part.RNG: ("rng-torch",),
    Part.DATALOADER: ("data",),
    Part.STEP: ("step",),
    Part.SCALER: ("scaler",),
}

Condition = Callable[[Checkpoint], str]


def parse_parts(text: str) -> tuple[Part, ...]:
    """Parse a list of parts such as `model,optimizer,rng`.

    Raises:
        UsageError: one is unknown; the hint lists them.
    """
    names = [name.strip() for name in text.split(",")]
    wrong = [name for name in names if name not in list(Part)]
    if wrong:
        raise UsageError(
            f"--require {wrong[0]!r} is not part of a training state", hint=", ".join(Part)
        )
    return tuple(dict.fromkeys(Part(name) for name in names))


def lacking(
    checkpoint: Checkpoint,
    parts: Iterable[Part],
    note: Callable[[str], None] = lambda _: None,
    contents: Contents | None = None,
) -> str:
    """Return which required parts a checkpoint lacks, and why; "" if it has all.

    "Cannot tell" is not "present", with one exception, reported to `note`: single parameters
    without moments are most often buffers or frozen. `contents` is for `resume_check`.

    Raises:
        FtckptError: its headers cannot be read.
    """
    wanted = {row: part for part in parts for row in _ROWS[part]}
    if not wanted:
        return ""
    from ftckpt.inspection.resume import resume_check

    reasons = []
    for item in resume_check(checkpoint, contents):
        reason = _shortfall(item, checkpoint.saving_ranks) if item.key in wanted else ""
        if reason and item.key == "moments" and item.missing:
            note(f"note: {checkpoint.source.url}: {reason}")
        elif reason:
            reasons.append(f"{wanted[item.key]}: {item.presence}, {reason}")
    return f"lacks what --require asks for ({'; '.join(reasons)})" if reasons else ""


def _shortfall(item: ResumeItem, saving_ranks: int | None) -> str:
    """Return why one row of the resume check does not count as present; "" if it does.

    `saving_ranks` is the number of ranks that save a state of their own; None if unknown.
    """
    from ftckpt.inspection.resume import Presence

    # Some trainers update 16-bit weights without masters; masters of only some parameters are a
    # loss.
    if not item.needed or (item.key == "masters" and item.presence is Presence.ABSENT):
        return ""
    # With random state of only some ranks, the others would be seeded anew.
    few = item.ranks is not None and saving_ranks is not None and item.ranks < saving_ranks
    return item.reason if few or item.presence is not Presence.PRESENT else ""


def not_at_world(checkpoint: Checkpoint, world_size: int) -> str:
    """Return why a checkpoint does not load as it is with `world_size` ranks; "" if it does."""
    if checkpoint.loads_at_any_world:
        return ""
    written = checkpoint.topology.world_size
    if written == world_size:
        return ""
    if written is None:
        return f"was written by a number of ranks that is not recorded, not surely {world_size}"
    return f"was written by {written} ranks and does not load with {world_size}"


def grid_for(topology: Topology, world_size: int) -> dict[str, int]:
    """Return flags of `reshard` that lay a checkpoint out for a number of ranks.

    Tensor and pipeline parallelism stay and the data-parallel size changes; a job with only
    tensor-parallel ranks changes those.

    Raises:
        UsageError: tp x pp ranks do not divide the world size; the user must choose the grid.
    """
    tp, pp = topology.tp or 1, topology.pp or 1
    if tp > 1 and tp * pp == topology.world_size and pp == 1 and world_size % tp:
        return {"tp": world_size}
    if world_size % (tp * pp):
        raise UsageError(
            f"{world_size} ranks cannot be {tp} tensor-parallel by {pp} pipeline ranks",
            hint="choose the grid: --tp N --pp N --dp N",
        )
    grid = {"tp": topology.tp, "pp": topology.pp}
    return {name: size for name, size in grid.items() if size} | {"dp": world_size // (tp * pp)}


def grid_of(topology: Topology, world_size: int, wanted: Mapping[str, int]) -> dict[str, int]:
    """Return the flags of `reshard` for a number of ranks, with the user's sizes.

    `wanted` holds some of `tp`, `pp` and `dp`; if it is empty, see `grid_for`.

    Raises:
        UsageError: the sizes do not multiply to the world size.
    """
    if not wanted:
        return grid_for(topology, world_size)
    tp, pp = wanted.get("tp", topology.tp or 1), wanted.get("pp", topology.pp or 1)
    dp = wanted.get("dp", world_size // (tp * pp))
    if tp * pp * dp != world_size:
        raise UsageError(f"tp {tp} x pp {pp} x dp {dp} are not {world_size} ranks")
    known = {n: size for n, size in (("tp", tp), ("pp", pp)) if getattr(topology, n)}
    return {**known, **wanted, "dp": dp}


def not_at_grid(checkpoint: Checkpoint, world_size: int, wanted: Mapping[str, int]) -> str:
    """Return why a checkpoint does not load on a grid of ranks; "" if it does.

    `wanted` holds the user's sizes, of `tp`, `pp` and `dp`.
    """
    reason = not_at_world(checkpoint, world_size)
    if reason or checkpoint.loads_at_any_world:
        return reason
    for name, size in wanted.items():
        written = getattr(checkpoint.topology, name)
        if written != size and (written is not None or size != 1):
            return f"was written with {name} {written or 'not recorded'}, not {size}"
    return ""


def all_of(conditions: Sequence[Condition]) -> Condition:
    """Return the condition that all of several hold."""

    def unmet(checkpoint: Checkpoint) -> str:
        return next((said for one in conditions if (said := one(checkpoint))), "")

    return unmet
