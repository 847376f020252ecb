"""Jobs of several tensor slices and pipeline stages over one set of parameters.

Each model-parallel rank groups its own parameters as it likes. A job of several stages is a
pipeline, and keeps its weights in files of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from tests.formats.deepspeed.trees import Job, Place, save_job

Shapes = dict[str, tuple[int, ...]]


class State(NamedTuple):
    """What a run has come to.

    Attributes:
        seed: of all values.
        step: of training.
        lr: by now.
    """

    seed: int
    step: int
    lr: float


TRAINED = State(1000, 5, 0.25)
FRESH = State(7, 0, 0.5)


class GridJob(NamedTuple):
    """A job.

    Attributes:
        name: in its configuration.
        stages: for each pipeline stage its parameter groups, as names.
        tp, dp, stage, sub_group: sizes, and the stage of ZeRO.
    """

    name: str
    stages: Sequence[Sequence[Sequence[str]]]
    tp: int
    dp: int
    stage: int
    sub_group: int = 1000


def save_grid(job: GridJob, shapes: Shapes, state: State, folder: Path) -> Path:
    """Save what the ranks of a job would, in a state of the run.

    Args:
        job: whose layout it is.
        shapes: of all parameters, whole.
        state: of the run.
        folder: where.
    """
    folder.mkdir(parents=True)
    pp = len(job.stages)
    for stage, groups in enumerate(job.stages):
        for tp in range(job.tp):
            held = [_slices(shapes, kind, state, job.tp, tp) for kind in range(3)]
            own = [{name: tuple(held[0][name].shape) for name in group} for group in groups]
            names = [name for group in groups for name in group]
            rank = Job(
                own, job.dp, job.stage, job.sub_group,
                held=[{name: values[name] for name in names} for values in held],
                step=state.step, settings={"lr": state.lr, "weight_decay": 0.1}, name=job.name,
            )  # fmt: skip
            save_job(rank, folder, Place(stage * job.tp + tp, pp, job.tp))
            if pp > 1:
                _save_layers(held[0], names, folder, tp if job.tp > 1 else None)
    return folder


def _save_layers(
    held: dict[str, torch.Tensor], names: Sequence[str], folder: Path, tp: int | None
) -> None:
    for layer in {name.partition(".")[0] for name in names}:
        own = {n.partition(".")[2]: held[n].bfloat16() for n in names if n.startswith(f"{layer}.")}
        middle = "" if tp is None else f"model_{tp:02d}-"
        torch.save(own, folder / f"layer_{int(layer):02d}-{middle}model_states.pt")


def _slices(
    shapes: Shapes, kind: int, state: State, ranks: int, tp: int
) -> dict[str, torch.Tensor]:
    """Return one tensor slice's part of every parameter."""
    found = {}
    for number, (name, shape) in enumerate(shapes.items()):
        start = state.seed * (number + 1) + kind / 4
        value = torch.arange(prod(shape)).float().view(shape) + start
        what = name.partition(".")[2][:3]
        axis = {"sam": None, "row": 1}.get(what, 0)
        found[name] = value if axis is None else _dense(value.chunk(ranks, axis)[tp])
    return found


def _dense(value: torch.Tensor) -> torch.Tensor:
    """Return a copy; `contiguous` leaves strides of axes of one element as they are."""
    return value.clone(memory_format=torch.contiguous_format).flatten().view(value.shape)


@st.composite
def models(draw: st.DrawFn) -> Shapes:
    """Return parameters of a few layers, which one or two tensor slices can share."""
    shapes: Shapes = {}
    for layer in range(draw(st.integers(2, 4))):
        for number in range(draw(st.integers(1, 3))):
            what = draw(st.sampled_from(["same", "row", "column"]))
            even, any_ = st.sampled_from([2, 4, 6]), st.integers(1, 5)
            sizes = {"same": (any_,), "row": (any_, even), "column": (even, any_)}[what]
            shapes[f"{layer}.{what}{number}"] = tuple(draw(size) for size in sizes)
    return shapes


@st.composite
def jobs(draw: st.DrawFn, name: str, shapes: Shapes) -> GridJob:
    """Return any job over some parameters: their order and their groups are its own."""
    layers = sorted({name.partition(".")[0] for name in shapes})
    pp = draw(st.integers(1, min(2, len(layers))))
    cut = draw(st.integers(1, len(layers) - 1)) if pp > 1 else len(layers)
    stages = []
    for own in (layers[:cut], layers[cut:])[:pp]:
        names = draw(st.permutations([n for n in shapes if n.partition(".")[0] in own]))
        at = draw(st.integers(1, len(names)))
        stages.append([group for group in (names[:at], names[at:]) if group])
    stage = 1 if pp > 1 else draw(st.integers(1, 3))
    tp, dp = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return GridJob(name, stages, tp, dp, stage, draw(st.integers(1, 40)))
