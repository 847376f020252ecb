"""Make the checkpoints of experts beside this file: `python -m tests.data.deepspeed.make_experts`.

Needs what `make_deepspeed.py` needs. Every job has two layers of experts
(`deepspeed.moe.layer.MoE`): `a` with four and top-1 gating, `b` with two, a residual expert and
top-2 gating.

- moe_z1: four ranks, two of them in an expert-parallel group, stage 1, BF16
- moe_z2: two ranks, stage 2; `a` is split over both, `b` is whole on each: two groups of experts
- moe_data: four ranks, stage 1, data parallel before expert parallel
- moe_bf16: BF16_Optimizer, two ranks
- moe_off: ZeRO off, two ranks
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from tests.data.deepspeed.make_deepspeed import BASE, BF16, HERE, STEPS, gather, joined

JOBS: dict[str, dict[str, Any]] = {
    "moe_z1": {"world": 4, "ep": (2, 2), "zero": {"stage": 1}, **BF16},
    "moe_z2": {"world": 2, "ep": (2, 1), "zero": {"stage": 2}},
    "moe_data": {"world": 4, "ep": (2, 2), "zero": {"stage": 1},
                 "use_data_before_expert_parallelism": True},
    "moe_bf16": {"world": 2, "ep": (2, 2), "zero": {"stage": 1},
                 "data_types": {"grad_accum_dtype": "fp32"}, **BF16},
    "moe_off": {"world": 2, "ep": (2, 2), "zero": {"stage": 0}},
}  # fmt: skip
LOCAL = re.compile(r"(.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.(.*)")


class Expert(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 3)
        self.down = torch.nn.Linear(3, 4, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(torch.tanh(self.up(x)))


class Experts(torch.nn.Module):
    """Two layers of experts between an embedding and its head."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        first, second = sizes
        self.embed = torch.nn.Embedding(7, 4)
        self.a = MoE(4, Expert(), 4, first, k=1, capacity_factor=4.0)
        self.norm = torch.nn.LayerNorm(4)
        self.b = MoE(4, Expert(), 2, second, k=2, use_residual=True, capacity_factor=4.0)
        self.head = torch.nn.Linear(4, 7, bias=False)

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        x = self.norm(x + self.a(x)[0])
        x = self.head(x + self.b(x)[0])
        return torch.nn.functional.cross_entropy(x.float().view(-1, 7), ids.view(-1).roll(1))


def engine_of(job: dict[str, Any]) -> Any:
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    torch.manual_seed(7)
    model = Experts(job["ep"])
    groups = split({"params": list(model.parameters()), "name": "dense"})
    rest = {k: v for k, v in job.items() if k not in ("world", "ep", "zero")}
    config = BASE | rest | {"zero_optimization": {"overlap_comm": False} | job["zero"]}
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train(engine: Any, steps: range) -> list[float]:
    """Take steps on batches that differ by rank and step; return the losses of this rank."""
    losses = []
    for step in steps:
        batch = torch.arange(6).mul(dist.get_rank() + 2).add(step).remainder(7)
        loss = engine(batch.unsqueeze(0))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def global_name(engine: Any, name: str) -> str:
    """Return a parameter's name with the number that its expert has in the whole model."""
    from deepspeed.utils import groups

    if (match := LOCAL.fullmatch(name)) is None:
        return name
    layer = engine.module.get_submodule(match[1])
    first = groups._get_expert_parallel_rank(layer.expert_group_name) * layer.num_local_experts
    return name[: match.start(2)] + str(first + int(match[2])) + name[match.end(2) :]


def held_by(engine: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Return what this rank holds; see `gather`."""
    held = {}
    for key, value in gather(engine, job["zero"]["stage"], job["world"]).items():
        kind, colon, name = key.rpartition(":")
        held[kind + colon + global_name(engine, name)] = value
    return held


def start(rank: int, name: str, port: int) -> dict[str, Any]:
    import deepspeed

    job = JOBS[name]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["world"]),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
    deepspeed.init_distributed("gloo")
    return job


def run(rank: int, name: str, out: str, port: int) -> None:
    job = start(rank, name, port)
    engine = engine_of(job)
    train(engine, range(STEPS))
    truth = held_by(engine, job)
    client = {"iteration": STEPS, "rng": {"cpu": torch.arange(6, dtype=torch.uint8)}}
    engine.save_checkpoint(out, tag=f"global_step{STEPS}", client_state=client)
    every: list[Any] = [None] * job["world"]
    dist.all_gather_object(every, truth)
    if rank == 0:
        torch.save(every, Path(out) / "truth.pt")
    dist.barrier()
    dist.destroy_process_group()


def make(name: str) -> None:
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as scratch:
        port = 29550 + list(JOBS).index(name)
        start_processes(  # type: ignore[no-untyped-call]
            run, (name, scratch, port), nprocs=JOBS[name]["world"], start_method="spawn"
        )
        truth = joined(torch.load(Path(scratch) / "truth.pt", weights_only=False))
        place = HERE / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        save_file(
            {k: v.contiguous().clone() for k, v in truth.items()}, place / "truth.safetensors"
        )
        shutil.copytree(Path(scratch) / f"global_step{STEPS}", place / f"global_step{STEPS}")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or JOBS:
        make(wanted)
