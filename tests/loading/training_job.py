"""One rank of a job that resumes from checkpoints of several makers, and trains on.

Arguments: a JSON file with `[{"name", "place", "torch", "flags", "ways"}, ...]`, and where rank 0
writes what it found. Each is loaded into an FSDP2 model (nested as torch's `get_state_dict` nests
it, and flattened as torchtitan saves it), or a DDP model; every tensor and setting is held to the
state that was saved, and three further steps to those after torch's own load of the same state.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ftckpt.torch import Reader
from tests.formats.dcp.fsdp2_loading import Model, require_equal, trained

dcp: Any = checkpoint
taken: Any = get_state_dict

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
TOKENS = torch.arange(13)


def made(way: str, world: int) -> tuple[Any, torch.optim.AdamW]:
    """Return an untrained model that is divided in one way, and its optimizer.

    In two groups, unless the way says one.
    """
    torch.manual_seed(12)
    model: Any = Model()
    one, way = way.endswith("-one"), way.removesuffix("-one")
    if way == "ddp":
        model = DistributedDataParallel(model)
    elif way == "tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    else:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if one:
        return model, torch.optim.AdamW(model.parameters(), lr=1.0)
    bias = [p for n, p in model.named_parameters() if n.endswith("bias")]
    rest = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    return model, torch.optim.AdamW([{"params": rest}, {"params": bias}], lr=1.0)


def steps(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Train three steps; return the whole state on rank 0."""
    for _ in range(3):
        model(TOKENS).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return get_state_dict(model, optimizer, options=WHOLE)


def loaded(way: str, reader: Any, world: int) -> tuple[Any, torch.optim.AdamW]:
    """Return a model and its optimizer with what a reader has loaded."""
    model, optimizer = made(way.removesuffix("-flat"), world)
    if way.endswith("-flat"):
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        weights, settings = taken(model, optimizer, options=options)
        state = {**weights, "optim": settings}
        dcp.load(state, storage_reader=reader)
        set_model_state_dict(model, {name: state[name] for name in weights})
        set_optimizer_state_dict(model, optimizer, state["optim"], options=options)
        return model, optimizer
    weights, settings = taken(model, optimizer)
    nested = {"model": weights, "optimizer": settings}
    dcp.load(nested, storage_reader=reader)
    set_state_dict(
        model, optimizer,
        model_state_dict=nested["model"], optim_state_dict=nested["optimizer"],
    )  # fmt: skip
    return model, optimizer


def case(one: dict[str, Any], way: str, world: int, truth: Any) -> str:
    model, optimizer = loaded(way, Reader(one["place"], **one.get("flags", {})), world)
    got = taken(model, optimizer, options=WHOLE)
    if dist.get_rank() == 0:
        require_equal(got[0], truth[0])
        require_equal(got[1]["state"], truth[1]["state"])
        want = dict(truth[1]["param_groups"][0])
        for group in got[1]["param_groups"]:
            require_equal({k: v for k, v in group.items() if k != "params"},
                          {k: v for k, v in want.items() if k != "params"})  # fmt: skip
        assert len(got[1]["param_groups"]) == 2 - way.endswith("-one")  # the job's own
    if way.endswith("-one"):  # torch itself loads this
        own = loaded(way, dcp.FileSystemReader(one["torch"]), world)
        want_after, after = steps(*own), steps(model, optimizer)
        if dist.get_rank() == 0:
            require_equal(after[0], want_after[0])
            require_equal(after[1]["state"], want_after[1]["state"])
    return "equal"


def main(asked: str, answer: str) -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    truth = get_state_dict(*trained())
    found: dict[str, str] = {}
    for one in json.loads(Path(asked).read_text()):
        for way in one["ways"]:
            if way.startswith("tp") and world % 2:
                continue
            try:
                said = case(one, way, world, truth)
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            everyone: list[Any] = [None] * world
            dist.all_gather_object(everyone, said)
            found[f"{one['name']}, {way}"] = next((s for s in everyone if s != "equal"), "equal")
    if dist.get_rank() == 0:
        Path(answer).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
