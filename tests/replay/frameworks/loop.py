"""What the trainings share that are driven by torch alone, and how a broken save comes about."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import distributed

from tests.replay.frameworks import parts


class Saves:
    """What the save after a step holds: the state of then, or what `--drop` puts in its place."""

    def __init__(self, given: Any) -> None:
        self._at, self._torn = given.save_at, given.drop == "torn"
        self._back = parts.STALE.get(given.drop, 0)
        self._early: dict[str, Any] = {}

    def held(self, done: int, state: dict[str, Any]) -> dict[str, Any] | None:
        """Take the state after a step; return what is saved then, None where nothing is.

        A restart that begins after the older state has none, and saves the state of then.
        """
        if self._back and done == self._at - self._back:
            self._early = copy.deepcopy(state)
        if done != self._at:
            return None
        older = {k: v for k, v in self._early.items() if not self._torn or "optim" in k}
        return state | older


def start() -> tuple[int, parts.Net]:
    """Join the other ranks; return the own rank, and the network that all begin with."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    parts.seed(rank)
    net = parts.Net()
    torch.manual_seed(17 + rank)  # from here on each rank draws its own
    return rank, net


def tuned(model: Any) -> tuple[Any, Any]:
    """Return the optimizer of a model and its schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.5)


def counters(saved: int | None, drop: str) -> tuple[int, int]:
    """Return the step and the position in the data from which a run goes on.

    Args:
        saved: the step of the checkpoint; None where there is none.
        drop: what a restart leaves out.
    """
    if saved is None:
        return 0, 0
    return saved + (drop == "step"), 0 if drop == "cursor" else saved


def train(
    given: Any,
    done: int,
    batches: Iterable[Any],
    trained: tuple[Any, Any, Any],
    average: Callable[[], None],
    state: Callable[[int], dict[str, Any]],
    save: Callable[[dict[str, Any]], None],
) -> None:
    """Train until `--steps`, save once, and leave the other ranks.

    Args:
        given: the arguments.
        done: steps before this run.
        batches: of the data, from where this run goes on.
        trained: model, optimizer and schedule.
        average: takes the weights of a step into the average.
        state: all state after a step; what is the optimizer's is called so.
        save: writes a state.
    """
    model, optimizer, scheduler = trained
    saves = Saves(given)
    for batch in batches:
        done += 1
        loss = model(**batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        average()
        held = saves.held(done, state(done))
        if held is not None:
            save(held)
            distributed.barrier()
        if done >= given.steps:
            break
    distributed.destroy_process_group()
