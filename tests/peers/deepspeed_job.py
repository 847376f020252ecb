"""Train with DeepSpeed from a checkpoint, and say what it loaded: `python deepspeed_job.py SPEC`.

Runs in DeepSpeed's own environment and knows nothing of ftckpt. SPEC is JSON:

    world, zero, bf16        ranks, `zero_optimization`, whether weights are bf16
    stages                   of a pipeline; 0 for the network that is none
    load, universal          a checkpoint or null, and whether it is a universal one
    steps                    [first, last) step to train
    save, to                 the step before which to save, or null, and the directory
    out                      file for the answer: losses of each rank, steps, the client's note; and
                             what memory held, after loading or at saving
                             (`<out>.held.safetensors`) and in the end (`<out>.end.safetensors`)
    port                     where the ranks meet
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "data" / "deepspeed"))
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

kept: Any = importlib.import_module("make_deepspeed")


def job(rank: int, spec: dict[str, Any]) -> None:
    import deepspeed

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(spec["world"]),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(spec["port"]))  # fmt: skip
    deepspeed.init_distributed("gloo")
    torch.manual_seed(7)
    config = kept.config_of({"zero": spec["zero"], **(kept.BF16 if spec["bf16"] else {})})
    if spec["universal"]:
        config["checkpoint"] = {"load_universal": True}
    if spec["stages"]:
        model, config["gradient_accumulation_steps"] = pipeline(spec["stages"]), 2
    else:
        model = kept.Tiny()
    optimizer = kept.optimizer_of(model, "job")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    client = {}
    held = None
    if spec["load"]:
        path = Path(spec["load"])
        found, client = engine.load_checkpoint(str(path.parent), tag=path.name)
        assert found, f"DeepSpeed loads nothing from {path}"
        held = kept.gather(engine, spec["zero"]["stage"], spec["world"])
    losses = []
    for step in range(*spec["steps"]):
        if step == spec["save"]:
            # Before its first step an optimizer has no state.
            held = kept.gather(engine, spec["zero"]["stage"], spec["world"]) if step else {}
            state = {"note": "ours", "rng": {"cpu": torch.arange(6, dtype=torch.uint8)}}
            engine.save_checkpoint(spec["to"], tag=f"global_step{step}", client_state=state)
        if spec["stages"]:
            partition = engine.grid.get_data_parallel_rank()
            losses.append(float(engine.train_batch(batches(partition, step))).hex())
            continue
        loss = engine(torch.tensor([(rank + 3 * step) % 7, step % 7, 4]))
        losses.append(float(loss).hex())
        engine.backward(loss)
        engine.step()
    end = kept.gather(engine, spec["zero"]["stage"], spec["world"])
    every: list[Any] = [None] * spec["world"]
    dist.all_gather_object(every, (losses, held, end))
    if rank == 0:
        from safetensors.torch import save_file

        for name, place in (("held", 1), ("end", 2)):
            whole = kept.joined([mine[place] for mine in every])
            memory = {key: value.contiguous().clone() for key, value in whole.items()}
            save_file(memory, f"{spec['out']}.{name}.safetensors")
        answer = {"losses": [mine[0] for mine in every], "step": engine.global_steps}
        Path(spec["out"]).write_text(json.dumps(answer | {"note": client.get("note")}))
    dist.barrier()
    dist.destroy_process_group()


def pipeline(stages: int) -> Any:
    """Return layers of which the first and the last share a module."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    # A matrix and a vector for each of four stages: DeepSpeed's norm of the gradients waits for
    # ever where stages have unequal numbers of parameter groups.
    layers = [
        TiedLayerSpec("embed", torch.nn.Embedding, 7, 5),
        *(LayerSpec(torch.nn.Linear, 5, 5) for _ in range(5)),
        LayerSpec(torch.nn.LayerNorm, 5),
        TiedLayerSpec("embed", torch.nn.Embedding, 7, 5,
                      forward_fn=lambda module, x: x @ module.weight.t()),
    ]  # fmt: skip
    loss = torch.nn.CrossEntropyLoss()
    return PipelineModule(
        layers, num_stages=stages, loss_fn=lambda y, t: loss(y.float().view(-1, 7), t.view(-1)),
        partition_method="uniform",
    )  # fmt: skip


def batches(partition: int, step: int) -> Any:
    """Return the micro-batches of one step; each is another for every partition."""
    first = 2 * step + 5 * partition
    numbers = range(first, first + 2)
    return iter([
        (torch.tensor([[i % 7, 3, 2]]), torch.tensor([[3, 2, i % 5]])) for i in numbers
    ])  # fmt: skip


if __name__ == "__main__":
    # What takes a job's time is imported once, before it becomes ranks.
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    spec = json.loads(sys.argv[1])
    start_processes(  # type: ignore[no-untyped-call]
        job, (spec,), nprocs=spec["world"], start_method="fork"
    )
