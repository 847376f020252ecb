"""Weights whose optimizer numbers them: matched with their moments by what was done to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ftckpt.commands.cli import app
from ftckpt.commands.cli.invocation import Invocation
from ftckpt.delta.pack import assemble as assembling
from ftckpt.delta.pack.pair import (
    DeltaPair,
    Sampled,
    Task,
    candidates,
    match,
    matched,
    pair,
    sample,
)
from ftckpt.delta.pack.tensor_bytes import TensorBytes, own_tensors
from ftckpt.errors import ExitCode
from tests.builders.checkpoints import open_checkpoint
from tests.json_run import ftckpt_json

LAYERS, WIDTH = 4, 32


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Train with one thread: several wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Block(torch.nn.Module):
    """A layer whose matrices have one shape, and whose names sort in another order than it has."""

    def __init__(self) -> None:
        super().__init__()
        self.value = torch.nn.Linear(WIDTH, WIDTH)
        self.key = torch.nn.Linear(WIDTH, WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.out(torch.tanh(self.value(x)) * torch.sigmoid(self.key(x)))
        return x + added


def _decays(name: str) -> bool:
    return not name.endswith("bias")


def _trained(
    root: Path,
    saved: Sequence[int],
    *,
    frozen: str = "",
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> dict[str, str]:
    """Train as Hugging Face's Trainer does and save in its way; return the truth: name -> number.

    A Trainer has a group that decays and one that does not, each in the model's order.
    """
    torch.manual_seed(3)
    embed = torch.nn.Embedding(64, WIDTH)
    blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
    model = torch.nn.ModuleDict({"tokens": embed, "layers": blocks})
    model["head"] = torch.nn.Linear(WIDTH, 64, bias=False)
    named = {n: p for n, p in model.named_parameters() if not frozen or frozen not in n}
    groups = [[n for n in named if _decays(n)], [n for n in named if not _decays(n)]]
    made = optimizer(
        [{"params": [named[n] for n in group], "weight_decay": decay}
         for group, decay in zip(groups, (0.01, 0.0), strict=True)],
        lr=1e-2,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LinearLR(made, 1.0, 0.0, 40)
    for step in range(1, max(saved) + 1):
        made.zero_grad()
        tokens = torch.randint(0, 64, (16, 9))
        x = embed(tokens[:, :-1])
        for block in blocks:
            x = block(x)
        logits = model["head"](x)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        made.step()
        schedule.step()
        if step in saved:
            folder = root / f"checkpoint-{step}"
            folder.mkdir(parents=True)
            state = {n: t.clone() for n, t in model.state_dict().items()}
            save_file(state, folder / "model.safetensors")
            torch.save(made.state_dict(), folder / "optimizer.pt")
            torch.save(schedule.state_dict(), folder / "scheduler.pt")
            (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return {n: f"{g}.{place}" for g, group in enumerate(groups) for place, n in enumerate(group)}


def _matched(target: Path, base: Path) -> tuple[list[DeltaPair], dict[str, str]]:
    """Return the pairs of two checkpoints, and what was matched: name -> number."""
    one, other = open_checkpoint(target), open_checkpoint(base)
    pairs = pair(own_tensors(one).values(), own_tensors(other))
    fills = TensorBytes(one), TensorBytes(other)
    made = matched(
        pairs, lambda tasks: [sample(pairs, t, fills[0].fill, fills[1].fill) for t in tasks]
    )
    for fill in fills:
        fill.close()
    found = {p.info.name: p.kin[1] for p, was in zip(made, pairs, strict=True) if p.kin != was.kin}
    for one_pair, was in zip(made, pairs, strict=True):
        if one_pair.kin != was.kin:
            numbers = {pairs[n].kin for n in one_pair.helpers.values()}
            assert numbers == {one_pair.kin}
    return made, found


@pytest.mark.parametrize("steps", [(9, 10), (9, 12), (3, 30)])
def test_every_match_is_the_true_one(steps: tuple[int, int], tmp_path: Path) -> None:
    truth = _trained(tmp_path, steps)
    base, target = (tmp_path / f"checkpoint-{step}" for step in steps)
    _, found = _matched(target, base)
    assert found == {name: truth[name] for name in found}
    if steps == (9, 10):
        # Biases here are smaller than what a choice is made for.
        assert set(found) == {name for name in truth if _decays(name)}
    assert found


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.AdamW, lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9)],
    ids=["adamw", "sgd"],
)
def test_a_trainers_folder_is_predicted_and_comes_back(
    optimizer: Callable[..., torch.optim.Optimizer], tmp_path: Path
) -> None:
    _trained(tmp_path, (9, 10), optimizer=optimizer)
    ratios = []
    for known in (False, True):
        with patch.object(assembling, "matched", matched if known else lambda pairs, _: pairs):
            ratios.append(_packed(tmp_path, f"packed-{known}"))
    assert ratios[1] > 1.25 * ratios[0], ratios
    _comes_back(tmp_path, "packed-True")


def test_a_wrong_match_costs_room_and_never_a_bit(tmp_path: Path) -> None:
    _trained(tmp_path, (9, 10))

    def wrong(
        pairs: Sequence[DeltaPair], sampled: Callable[..., Iterable[Sampled]]
    ) -> list[DeltaPair]:
        made = list(pairs)
        for weights, moments in candidates(pairs):
            list(sampled([*weights, *moments]))
            for weight, owner in zip(weights, reversed(moments), strict=True):
                assert weight.weight is not None
                helped = made[weight.weight]
                kin = pairs[next(iter(owner.moments.values()))].kin
                made[weight.weight] = helped._replace(helpers=owner.moments, kin=kin)
        return made

    with patch.object(assembling, "matched", wrong):
        _packed(tmp_path, "packed")
    _comes_back(tmp_path, "packed")


def _packed(root: Path, out: str) -> float:
    """Pack in this process, where the tests may change how, and return the ratio."""
    words = ["delta", "pack", *(str(root / f"checkpoint-{step}") for step in (9, 10))]
    words.append(str(root / out))
    result = app.run(words, Invocation(verb=app.scan(words).verb))
    assert result.code is ExitCode.OK, result.message
    before = sum(f.stat().st_size for f in (root / "checkpoint-10").iterdir())
    return before / sum(f.stat().st_size for f in (root / out).iterdir())


def _comes_back(root: Path, packed: str) -> None:
    ftckpt_json("delta", "unpack", str(root / packed), str(root / "again"))
    for file in (root / "checkpoint-10").iterdir():
        assert (root / "again" / file.name).read_bytes() == file.read_bytes()


def test_what_was_not_trained_is_left_alone(tmp_path: Path) -> None:
    truth = _trained(tmp_path, (9, 10), frozen="layers.1.")
    _, found = _matched(tmp_path / "checkpoint-10", tmp_path / "checkpoint-9")
    assert found == {name: truth[name] for name in truth if _decays(name)}
    assert not any("layers.1." in name for name in found)


def test_another_runs_moments_match_nothing(tmp_path: Path) -> None:
    _trained(tmp_path / "one", (9, 10))
    with patch.object(torch, "manual_seed", lambda _: torch.random.fork_rng()):
        _trained(tmp_path / "other", (9, 10))
    for step in (9, 10):
        ours = tmp_path / f"one/checkpoint-{step}/optimizer.pt"
        ours.write_bytes((tmp_path / f"other/checkpoint-{step}/optimizer.pt").read_bytes())
    _, found = _matched(tmp_path / "one/checkpoint-10", tmp_path / "one/checkpoint-9")
    assert found == {}


Array = np.ndarray[Any, Any]


def _unit(random: np.random.Generator, like: Array | None = None, share: float = 1.0) -> Array:
    values = random.standard_normal(1024)
    if like is not None:
        values = share * like + (1 - share**2) ** 0.5 * values / np.linalg.norm(values)
    values = values - values.mean()
    unit: Array = (values / np.linalg.norm(values)).astype("f4")
    return unit


def test_doubt_is_no_match() -> None:
    random = np.random.default_rng(5)
    moments = [Sampled(Task(None, {}), (_unit(random), _unit(random))) for _ in range(40)]

    def weights(share: float) -> list[Sampled]:
        return [Sampled(Task(n, {}), (_unit(random, m.directions[n % 2], share),))
                for n, m in enumerate(moments)]  # fmt: skip

    clear = {w.weight: m for w, m in match(weights(0.6), moments)}
    assert {n: m for n, m in clear.items() if n is not None} == dict(
        enumerate(m.task for m in moments)
    )
    assert not list(match(weights(0.1), moments))  # as much as chance would give
    twice = [*moments, *moments]
    assert not list(match(weights(0.9), twice))  # two moments for each weight
    assert not list(match([*weights(0.9), *weights(0.9)], moments))  # and two weights for each
    assert not list(match([Sampled(Task(0, {}), (None,))], moments))
    assert not list(match(weights(0.9), [Sampled(Task(None, {}), (None,))]))
