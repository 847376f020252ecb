"""Train experts of AutoEP from a checkpoint, and say what it loaded: `python autoep_job.py SPEC`.

Runs in DeepSpeed's own environment and knows nothing of ftckpt. SPEC is JSON:

    world, ep, stage         ranks, those that share the experts of a layer, the stage of ZeRO
    load, universal          a checkpoint or null, and whether it is a universal one
    steps                    [first, last) step to train
    save, to                 the step before which to save, or null, and the directory
    out                      file for the answer: losses of each rank; and what memory held after
                             loading or at saving (`<out>.held.safetensors`) and in the end
                             (`<out>.end.safetensors`)
    port                     where the ranks meet
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from tests.data.deepspeed import make_autoep, make_deepspeed


def job(rank: int, spec: dict[str, Any]) -> None:
    of = {"world": spec["world"], "ep": spec["ep"], "zero": {"stage": spec["stage"]}}
    make_autoep.start(rank, of, spec["port"])
    loads = {"checkpoint": {"load_universal": True}} if spec["universal"] else {}
    engine = make_autoep.engine_of(of | loads)
    held: dict[str, Any] = {}
    if spec["load"]:
        path = Path(spec["load"])
        found, _ = engine.load_checkpoint(str(path.parent), tag=path.name)
        assert found, f"DeepSpeed loads nothing from {path}"
        held = make_autoep.held_by(engine, of)
    losses = []
    for step in range(*spec["steps"]):
        if step == spec["save"]:
            held = make_autoep.held_by(engine, of)
            engine.save_checkpoint(spec["to"], tag=f"global_step{step}")
        losses += [loss.hex() for loss in make_autoep.train(engine, range(step, step + 1))]
    every: list[Any] = [None] * spec["world"]
    dist.all_gather_object(every, (losses, held, make_autoep.held_by(engine, of)))
    if rank == 0:
        from safetensors.torch import save_file

        for name, place in (("held", 1), ("end", 2)):
            whole = make_deepspeed.joined([mine[place] for mine in every])
            memory = {key: value.contiguous().clone() for key, value in whole.items()}
            save_file(memory, f"{spec['out']}.{name}.safetensors")
        Path(spec["out"]).write_text(json.dumps([mine[0] for mine in every]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    import deepspeed.module_inject.auto_ep  # noqa: F401  (once, before it becomes ranks)

    given = json.loads(sys.argv[1])
    start_processes(  # type: ignore[no-untyped-call]
        job, (given,), nprocs=given["world"], start_method="fork"
    )
