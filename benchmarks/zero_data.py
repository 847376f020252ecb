"""Let DeepSpeed save a training state: `python zero_data.py PLACE NBYTES RANKS STAGE`.

Runs in an environment that has DeepSpeed, on the processor with gloo. The parameters are a Llama's,
in bf16, in two groups; the loss is the sum of their squares, so that one step gives every
parameter a gradient and every optimizer state a value without the cost of a forward pass.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from reshard_data import BYTES_A_PARAMETER, layers_of, llama

os.environ["DS_ACCELERATOR"] = "cpu"


def _model(nbytes: int) -> Any:
    import torch

    class Squares(torch.nn.Module):
        def forward(self, factor: torch.Tensor) -> torch.Tensor:
            return sum(((p.float() * factor).square().mean() for p in self.parameters()), factor)

    whole = Squares()
    for name, value in llama(layers_of(nbytes, BYTES_A_PARAMETER), torch.float32).items():
        *path, last = name.split(".")
        place: torch.nn.Module = whole
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, torch.nn.Module())
            place = place.get_submodule(part)
        place.register_parameter(last, torch.nn.Parameter(value))
    return whole


def _rank(rank: int, place: str, nbytes: int, ranks: int, stage: int) -> None:
    import deepspeed
    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}  # fmt: skip
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = _model(nbytes)
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) is decay], "weight_decay": rate}
        for decay, rate in ((True, 0.1), (False, 0.0))
    ]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20_000_000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=1e-3), config=config
    )
    engine.backward(engine(torch.tensor(1.0)))
    engine.step()
    # ds_to_universal.py asks for it; without tensor parallelism it has nothing to say.
    state = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    engine.save_checkpoint(place, tag="global_step1", client_state=state)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    from torch.multiprocessing.spawn import start_processes

    place, nbytes, ranks, stage = sys.argv[1], *map(int, sys.argv[2:5])
    Path(place).mkdir(parents=True, exist_ok=True)
    start_processes(  # type: ignore[no-untyped-call]
        _rank, (place, nbytes, ranks, stage), nprocs=ranks, start_method="spawn"
    )


if __name__ == "__main__":
    main()
