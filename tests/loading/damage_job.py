"""One rank of a job that loads bad checkpoints: every rank must end with an error, and soon.

Arguments: a JSON file with `[{"name", "place", "flags", "rank"}, ...]`. Each rank prints, a line a
case, what it met. In the last case, `killed`, a rank ends itself in the middle of its reading.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ftckpt.loading import fill
from ftckpt.storage import StoreOptions
from ftckpt.torch import Reader
from tests.formats.dcp.fsdp2_loading import Model

dcp: Any = checkpoint


def model(world: int) -> torch.nn.Module:
    torch.manual_seed(12)
    made = Model()
    fully_shard(made, mesh=init_device_mesh("cpu", (world,)))
    return made


def case(one: dict[str, Any], world: int) -> str:
    state = {"model": get_model_state_dict(model(world))}
    for name, value in one.get("more", {}).items():
        state["model"][name] = torch.zeros(value)
    stores = StoreOptions(**one.get("stores", {}))
    try:
        dcp.load(state, storage_reader=Reader(one["place"], stores=stores, **one.get("flags", {})))
    except BaseException as error:
        failures = getattr(error, "failures", {})
        said = {rank: f"{type(e).__name__}: {e}" for rank, (e, _) in failures.items()}
        return json.dumps(said or {"-1": f"{type(error).__name__}: {error}"})
    return "loaded"


def main(asked: str) -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    world, rank = dist.get_world_size(), dist.get_rank()
    carry_out = fill.Filler.carry_out
    for one in json.loads(Path(asked).read_text()):
        if one["name"] == "killed":

            def dying(self: Any, *given: Any) -> Any:
                if rank == world - 1:
                    sys.stdout.flush()
                    os._exit(0)
                return carry_out(self, *given)

            setattr(fill.Filler, "carry_out", dying)  # noqa: B010
        print(one["name"], case(one, world), flush=True)
    # A group that has lost a rank is not destroyed in peace.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
