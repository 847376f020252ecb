"""Make the checkpoint of AutoTP beside this file: `python -m tests.data.deepspeed.make_autotp`.

Needs what `make_deepspeed.py` needs, and transformers 5.23. DeepSpeed cuts a model of transformers
for tensor parallelism and records an affine map of each parameter.

- autotp: Llama, two tensor slices of two partitions, stage 1; 11 rows of the head are cut unevenly
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

JOBS = {"autotp": 4}
TP = 2
ROWS = ("o_proj.weight", "down_proj.weight")
COLUMNS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight",
           "lm_head.weight")  # fmt: skip


def model() -> Any:
    import transformers

    torch.manual_seed(7)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=6, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
    ))  # fmt: skip


def run(rank: int, name: str, out: str, port: int) -> None:
    import deepspeed

    world = JOBS[name]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
    deepspeed.init_distributed("gloo")
    llama = model()
    config = BASE | BF16 | {
        "zero_optimization": {"stage": 1, "overlap_comm": False},
        "tensor_parallel": {"autotp_size": TP},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=llama, config=config, model_parameters=llama.parameters()
    )
    for step in range(STEPS):
        ids = torch.tensor([[rank // TP, step, 4, 5, 6, 1]])
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    truth = gather(engine, 1, world // TP)
    client = {"iteration": STEPS, "rng": {"cpu": torch.arange(6, dtype=torch.uint8)}}
    engine.save_checkpoint(out, tag=f"global_step{STEPS}", client_state=client)
    every: list[Any] = [None] * world
    dist.all_gather_object(every, truth)
    if rank == 0:
        torch.save(every, Path(out) / "truth.pt")
    dist.barrier()
    dist.destroy_process_group()


def whole(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Put the tensor slices together."""
    found = {}
    for key in parts[0]:
        held = [part[key] for part in parts]
        name = key.rpartition(":")[2]
        if key.startswith("optimizer:"):
            found[key] = held[0]
        elif name.endswith(ROWS):
            found[key] = torch.cat(held, dim=1)
        elif name.endswith(COLUMNS):
            found[key] = torch.cat(held)
        else:
            assert all(torch.equal(one, held[0]) for one in held), key
            found[key] = held[0]
    return found


def make(name: str) -> None:
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as scratch:
        port = 29580 + list(JOBS).index(name)
        start_processes(  # type: ignore[no-untyped-call]
            run, (name, scratch, port), nprocs=JOBS[name], start_method="spawn"
        )
        parts = torch.load(Path(scratch) / "truth.pt", weights_only=False)
        truth = whole([joined(parts[slice_::TP]) for slice_ in range(TP)])
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
