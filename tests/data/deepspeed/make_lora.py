"""Make the checkpoints of adapters beside this file: `python -m tests.data.deepspeed.make_lora`.

Needs what `make_deepspeed.py` needs, and peft 0.21. A frozen model with LoRA on two of its layers
and a trained copy of its head (`modules_to_save`), two ranks, BF16.

- lora_z2: stage 2
- lora_z3: stage 3
- lora_left: stage 3, saved with `exclude_frozen_parameters`
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from tests.data.deepspeed.make_deepspeed import BASE, BF16, HERE, STEPS, gather, joined

JOBS = {"lora_z2": 2, "lora_z3": 3, "lora_left": 3}
WORLD = 2


class Frozen(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5)
        self.up = torch.nn.Linear(5, 3)
        self.norm = torch.nn.LayerNorm(3)
        self.down = torch.nn.Linear(3, 5, bias=False)
        self.head = torch.nn.Linear(5, 7, bias=False)

    def forward(self, ids: torch.Tensor) -> Any:
        hidden = self.norm(torch.tanh(self.up(self.embed(ids))))
        return self.head(self.down(hidden)).float().square().mean()


def run(rank: int, name: str, out: str, port: int) -> None:
    import deepspeed
    from peft import LoraConfig, get_peft_model

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
    deepspeed.init_distributed("gloo")
    torch.manual_seed(7)
    adapters = LoraConfig(
        r=2, lora_alpha=4, target_modules=["up", "down"], init_lora_weights=False,
        modules_to_save=["head"],
    )  # fmt: skip
    model = get_peft_model(Frozen(), adapters)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    config = BASE | BF16 | {"zero_optimization": {"stage": JOBS[name], "overlap_comm": False}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(STEPS):
        engine.backward(engine(torch.tensor([rank, step, 4])))
        engine.step()
    left = name == "lora_left"
    trained = {n for n, p in engine.module.named_parameters() if p.requires_grad}
    truth = {
        key: value
        for key, value in gather(engine, JOBS[name], WORLD).items()
        if not left or key.rpartition(":")[2].removesuffix(".step") in trained
    }
    client = {"iteration": STEPS, "rng": {"cpu": torch.arange(6, dtype=torch.uint8)}}
    engine.save_checkpoint(
        out, tag=f"global_step{STEPS}", client_state=client, exclude_frozen_parameters=left
    )
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, truth)
    if rank == 0:
        torch.save(every, Path(out) / "truth.pt")
    dist.barrier()
    dist.destroy_process_group()


def make(name: str) -> None:
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as scratch:
        port = 29570 + list(JOBS).index(name)
        start_processes(  # type: ignore[no-untyped-call]
            run, (name, scratch, port), nprocs=WORLD, start_method="spawn"
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
