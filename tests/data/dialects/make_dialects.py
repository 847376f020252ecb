"""Write the archives beside this file: one step each, as trainers lay it out, by two gloo ranks.

    python tests/data/dialects/make_dialects.py [NAME …]

torch's own saves write every file (made with 2.13); the places and the keys are those of VeOmni,
prime-rl, pith-train, xtuner, RLinf, miles and S3StorageWriter, as their sources of 2026 say
(docs/formats.md). The truth is gathered from live memory: parameters, and the moments of each.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn

HERE = Path(__file__).parent
STEPS = (2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y


def whole(value: Any) -> torch.Tensor:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone().contiguous()  # type: ignore[no-any-return]


def truth(model: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {name: whole(value) for name, value in model.items()}
    for name, states in optimizer["state"].items():
        for slot in ("exp_avg", "exp_avg_sq"):
            found[f"{slot}:{name}"] = whole(states[slot])
    return found


def put(where: Path, value: Any) -> None:
    where.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, where)


def run(rank: int, root: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29631")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    out = Path(root)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    model = Net()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for step in range(1, 4):
        torch.manual_seed(100 + step)
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step in STEPS:
            weights, states = get_state_dict(model, optimizer)
            held = truth(weights, states)
            if rank == 0:
                save_file(held, out / f"truth-{step}.safetensors")
            write(out, rank, step, weights, states, schedule.state_dict())
            write_miles(out, rank, step, weights, states, schedule.state_dict())
            local = {name: value.to_local() for name, value in model.state_dict().items()}
            write_rlinf(out, rank, step, weights, states, local, optimizer.state_dict(), schedule)
        dist.barrier()
    dist.destroy_process_group()


def write(out: Path, rank: int, step: int, model: Any, optimizer: Any, schedule: Any) -> None:
    rng = torch.get_rng_state()

    place = out / "veomni" / f"global_step_{step}"
    put(
        place / f"extra_state/extra_state_rank_{rank}.pt",
        {"global_step": step, "lr_scheduler": schedule, "train_dataloader": {"at": step * 4},
         "environ_meter": {"consume_tokens": step * 10}, "torch_rng_state": rng},
    )  # fmt: skip
    save_dcp({"model": model, "optimizer": optimizer}, checkpoint_id=place)

    place = out / "prime" / f"step_{step}"
    put(place / f"trainer/dataloader/rank_{rank}.pt", {"dataset_state": {"step": step}})
    progress = {"step": step, "total_tokens": step * 10, "total_samples": step * 4}
    app = {"model": model, "optimizers": optimizer, "scheduler": schedule, "progress": progress}
    save_dcp({"app": app}, checkpoint_id=place / "trainer")

    pith = out / "pith" / f"step-{step:08d}"
    app = {"model": model, "optimizer": optimizer, "scheduler": [schedule]}
    save_dcp({"app": app}, checkpoint_id=pith)
    put(pith / f"rng-rank-{rank:05d}.pt", rng)

    xtuner = out / "xtuner" / f"step-{step}"
    save_dcp({"model": model, "optimizer": optimizer}, checkpoint_id=xtuner / "weights")

    rlinf = out / "rlinf" / f"global_step_{step}"
    state = {"model": model, "optimizers": optimizer, "lr_schedulers": [schedule],
             "fsdp_version": "fsdp2", "rng": {"cpu": rng}}  # fmt: skip
    for role in ("actor", "critic"):
        save_dcp({"fsdp_checkpoint": state}, checkpoint_id=rlinf / role / "dcp_checkpoint")
    full = {name: whole(value) for name, value in model.items()}

    s3 = out / "copies" / f"step-{step}"
    state = {"model": model, "optimizer": optimizer, "train_state": {"step": step}}
    save_dcp(state, checkpoint_id=s3)

    if rank == 0:
        put(place / "orchestrator/progress.pt", {"progress": progress, "train_source": {"at": 1}})
        put(xtuner / "dataloader", {"sampler": {"step": step}, "dataset": {}})
        put(xtuner / "lr_scheduler", schedule)
        (xtuner / "trainer_config.json").write_text("{}")
        said = {"cur_step": step, "cur_epoch": 0, "total_consumed_tokens": step * 10}
        (xtuner / "train_state.json").write_text(json.dumps(said))
        for role in ("actor", "critic"):
            put(rlinf / role / "model_state_dict/full_weights.pt", full)
        put(rlinf / "data/data.pt", {"sampler": {"step": step}})
        copied(s3)


def write_miles(out: Path, rank: int, step: int, model: Any, optimizer: Any, schedule: Any) -> None:
    """Write what miles' FSDP actor writes (miles/backends/fsdp_utils/checkpoint.py, `save`)."""
    root = out / "miles"
    place = root / f"iter_{step:07d}"
    save_dcp({"model_state": {"model": model}}, checkpoint_id=place / "model")
    save_dcp({"optim_state": {"optim": optimizer}}, checkpoint_id=place / "optimizer")
    save_dcp(
        {"lr_scheduler_state": {"lr_scheduler": schedule}}, checkpoint_id=place / "lr_scheduler"
    )
    if rank == 0:
        put(place / "rng.pt", {"torch": torch.get_rng_state(), "cuda": []})
        said = {"iteration": step, "rollout_id": step - 1, "next_rollout_id": step,
                "global_step": step, "micro_step": 0, "world_size": 2,
                "timestamp": 1700000000.0 + step}  # fmt: skip
        (place / "meta.json").write_text(json.dumps(said, indent=2, sort_keys=True))
        (root / "latest_checkpointed_iteration.txt").write_text(str(step))
        offset = {"sample_offset": 4 * step, "epoch_id": 0, "sample_group_index": step,
                  "sample_index": 4 * step, "metadata": {}}  # fmt: skip
        put(root / f"rollout/global_dataset_state_dict_{step - 1}.pt", offset)


def write_rlinf(
    out: Path, rank: int, step: int, model: Any, optimizer: Any, local: Any, states: Any, lr: Any
) -> None:
    """Write what RLinf's workers of SAC and of IQL write beside an actor's or in its place."""
    rng = {"cpu": torch.get_rng_state()}
    full = {name: whole(value) for name, value in model.items()}
    own = {"model": local, "optimizers": [states], "lr_schedulers": [lr.state_dict()],
           "fsdp_version": "fsdp2", "rng": rng}  # fmt: skip
    nested = {"model": model, "optimizers": optimizer, "lr_schedulers": [lr.state_dict()],
              "fsdp_version": "fsdp2", "rng": rng}  # fmt: skip

    # rlinf/workers/actor/fsdp_sac_policy_worker.py, `save_checkpoint`
    actor = out / "rlinf_sac" / f"global_step_{step}" / "actor"
    save_dcp({"fsdp_checkpoint": nested}, checkpoint_id=actor / "dcp_checkpoint")
    alpha = {"model": {"base_alpha": torch.full((1,), 0.1 * step)}, "optimizers": {},
             "lr_schedulers": [], "fsdp_version": "fsdp2", "rng": rng}  # fmt: skip
    parts = actor / "sac_components"
    save_dcp({"fsdp_checkpoint": alpha}, checkpoint_id=parts / "alpha/dcp_checkpoint")
    target = {name: value * 0.5 for name, value in full.items()}
    put(parts / f"target_model/checkpoint_rank_{rank}.pt", target)
    replay = parts / f"replay_buffer/rank_{rank}"
    put(replay / "trajectory_0_w.pt", {"rewards": torch.full((2, 3), float(step))})
    (replay / "metadata.json").write_text(json.dumps({"size": 1, "total_samples": 6}))
    (replay / "trajectory_index.json").write_text(
        json.dumps({"trajectory_index": {"0": {"shape": [2, 3]}}})
    )

    # rlinf/workers/actor/fsdp_iql_policy_worker.py, `save_checkpoint`
    iql = out / "rlinf_iql" / f"global_step_{step}" / "actor"
    for role in ("actor_policy", "critic", "value"):
        put(iql / role / f"local_shard_checkpoint/checkpoint_rank_{rank}.pt", own)
    if rank == 0:
        put(actor / "model_state_dict/full_weights.pt", full)
        for role in ("actor_policy", "critic", "value"):
            put(iql / role / "model_state_dict/full_weights.pt", full)
        put(iql / "iql_components/target_critic.pt", target)
        said = {"step": step, "global_step": step, "data_epoch": 0, "data_iter_offset": step}
        put(iql / "iql_components/state.pt", said)


def copied(place: Path) -> None:
    """Lay a store out with two copies of its data files, and let the metadata say so."""
    metadata = FileSystemReader(place).read_metadata()
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    metadata.storage_meta.modules = [*metadata.storage_meta.modules, "num_copies=2"]
    with (place / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)
    for copy in range(2):
        (place / f"copy-{copy}").mkdir()
        for data in place.glob("*.distcp"):
            shutil.copy(data, place / f"copy-{copy}" / data.name)
    for data in place.glob("*.distcp"):
        data.unlink()


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        spawn(run, (root,), nprocs=2)  # type: ignore[no-untyped-call]
        for kind in sorted(p for p in Path(root).iterdir() if p.is_dir()):
            if sys.argv[1:] and kind.name not in sys.argv[1:]:
                continue
            with tarfile.open(HERE / f"{kind.name}.tar.xz", "w:xz") as archive:
                archive.add(kind, kind.name)
        for file in Path(root).glob("*.safetensors") if not sys.argv[1:] else ():
            shutil.copy(file, HERE / file.name)


if __name__ == "__main__":
    main()
