"""Make the checkpoints of AutoEP beside this file: `python -m tests.data.deepspeed.make_autoep`.

Needs what `make_deepspeed.py` needs. Every job trains a model of two layers with four experts each,
stacked as transformers 5 stacks Mixtral's; DeepSpeed's AutoEP gives each rank some of them.

- autoep_z1: four ranks, two of them in an expert-parallel group, stage 1, BF16
- autoep_data: four ranks, stage 1, data parallel before expert parallel
- autoep_off: ZeRO off, two ranks
- autoep_z3: four ranks, stage 3
- autoep_frozen: two ranks, stage 2, the experts of the first layer are not trained
- universal_autoep_z1: the first, by `ds_to_universal.py`
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from tests.data.deepspeed.make_deepspeed import BASE, BF16, HERE, STEPS, convert, gather, joined

JOBS: dict[str, dict[str, Any]] = {
    "autoep_z1": {"world": 4, "ep": 2, "zero": {"stage": 1}, **BF16},
    "autoep_data": {"world": 4, "ep": 2, "zero": {"stage": 1},
                    "use_data_before_expert_parallelism": True},
    "autoep_off": {"world": 2, "ep": 2, "zero": {"stage": 0}},
    "autoep_z3": {"world": 4, "ep": 2, "zero": {"stage": 3}},
    "autoep_frozen": {"world": 2, "ep": 2, "frozen": "layers.0.mlp.experts", "zero": {"stage": 2}},
}  # fmt: skip
STACKED = re.compile(r"\.experts\.w[123]$")


def start(rank: int, job: dict[str, Any], port: int) -> None:
    import deepspeed
    from deepspeed.comm import torch as backend

    # The operator makes sums on CPU faster, and takes minutes to build.
    backend.build_shm_op = lambda: None
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["world"]),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
    deepspeed.init_distributed("gloo")


class Router(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return torch.nn.functional.linear(x, self.weight)


class Experts(torch.nn.Module):
    """Four experts as transformers 5 stacks Mixtral's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(4, 6, 4) / 2)
        self.down_proj = torch.nn.Parameter(torch.randn(4, 4, 3) / 2)
        self.act_fn = torch.nn.SiLU()


class Sparse(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = Router(), Experts()


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)
        self.mlp = Sparse()

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.mlp(self.norm(x))


class Model(torch.nn.Module):
    """Two layers of experts between an embedding and its head, named as Mixtral's are."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_local_experts=4, num_experts_per_tok=2)
        self.model = torch.nn.ModuleDict({
            "embed_tokens": torch.nn.Embedding(7, 4),
            "layers": torch.nn.ModuleList([Layer(), Layer()]),
        })  # fmt: skip
        self.lm_head = torch.nn.Linear(4, 7, bias=False)

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.model["embed_tokens"](ids)
        for layer in self.model.get_submodule("layers").children():
            x = layer(x)
        x = self.lm_head(x).float().view(-1, 7)
        return torch.nn.functional.cross_entropy(x, ids.view(-1).roll(1))


def engine_of(job: dict[str, Any]) -> Any:
    import deepspeed

    torch.manual_seed(7)
    model = Model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("frozen" not in job or job["frozen"] not in name)
    rest = {k: v for k, v in job.items() if k not in ("world", "ep", "zero", "frozen")}
    config = BASE | rest | {
        "zero_optimization": {"overlap_comm": False} | job["zero"],
        "expert_parallel": {
            "enabled": True, "autoep_size": job["ep"], "use_grouped_mm": False,
            "moe_layer_pattern": r"model\.layers\.\d+\.mlp", "router_pattern": "gate",
            "expert_pattern": "experts", "expert_w1": "gate_up_proj", "expert_w2": "down_proj",
            "expert_w3": None, "num_experts_attr": "num_local_experts",
            "top_k_attr": "num_experts_per_tok",
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }  # fmt: skip
    trained = list(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    return engine


def train(engine: Any, steps: range) -> list[float]:
    """Take steps on batches that differ by rank and step; return the losses of this rank."""
    losses = []
    for step in steps:
        ids = torch.arange(6).mul(dist.get_rank() + 2).add(step).remainder(7).unsqueeze(0)
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def held_by(engine: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Return what this rank holds of the whole model; see `gather`."""
    from deepspeed.utils import groups

    ep_rank = groups._get_expert_parallel_rank(f"ep_size_{job['ep']}")
    held = {}
    for key, (shape, start, values) in gather(engine, job["zero"]["stage"], job["world"]).items():
        if shape and STACKED.search(key):
            start += ep_rank * torch.Size(shape).numel()
            shape = (shape[0] * job["ep"], *shape[1:])
        held[key] = (shape, start, values)
    return held


def run(rank: int, name: str, out: str, port: int) -> None:
    job = JOBS[name]
    start(rank, job, port)
    engine = engine_of(job)
    train(engine, range(STEPS))
    truth = held_by(engine, job)
    engine.save_checkpoint(out, tag=f"global_step{STEPS}", client_state={"iteration": STEPS})
    every: list[Any] = [None] * job["world"]
    dist.all_gather_object(every, truth)
    if rank == 0:
        torch.save(every, Path(out) / "truth.pt")
    dist.barrier()
    dist.destroy_process_group()


def make(name: str) -> None:
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as scratch:
        port = 29650 + list(JOBS).index(name)
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
    for wanted in sys.argv[1:] or [*JOBS, "universal_autoep_z1"]:
        (convert if wanted.startswith("universal_") else make)(wanted)
