"""Make the archives of local replicas beside this file: `python make_replicas.py`.

Needs megatron-core 0.16.1 in an environment of its own. Four gloo ranks, tp 2 x dp 2, save through
`megatron.core.dist_checkpointing`. The replicas are in no release: a rank adds them to its sharded
state as the open pull requests of Megatron-LM describe it (4628, 5556: `__shadow_R__` before the
name, for what another rank of its data-parallel group saves; 3392: `.__tp_replica_T` behind it, for
what every tensor rank holds), and the released library writes them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.multiprocessing.spawn import spawn

HERE = Path(__file__).parent
LAYERS, HIDDEN, TP = 2, 8, 2
# Name -> shape without the axis of layers, and the axis that tensor ranks divide.
WEIGHTS = {
    "decoder.layers.self_attention.linear_proj.weight": ((HIDDEN, HIDDEN), 1),
    "decoder.layers.mlp.linear_fc2.weight": ((HIDDEN, 4 * HIDDEN), 1),
    "decoder.layers.input_layernorm.weight": ((HIDDEN,), None),
    "decoder.final_layernorm.weight": ((HIDDEN,), None),
    "embedding.word_embeddings.weight": ((32, HIDDEN), 0),
}
STATES = ("", "optimizer.state.param.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
KINDS = dict(zip(STATES, ("", "master:", "exp_avg:", "exp_avg_sq:"), strict=True))


def tensors() -> dict[str, torch.Tensor]:
    """Return the whole tensors by stored name, layers stacked."""
    torch.manual_seed(7)
    made: dict[str, torch.Tensor] = {}
    for state in STATES:
        for name, (shape, _) in WEIGHTS.items():
            lead = (LAYERS,) if ".layers." in name else ()
            value = (
                torch.randn(*lead, *shape).abs_() if "sq" in state else torch.randn(*lead, *shape)
            )
            if state == "optimizer.state.param.":
                value = made[name].float()
            made[state + name] = value.bfloat16() if not state else value
    return made


def sharded(rank: int, kind: str) -> dict[str, Any]:
    """Return what one rank gives to be saved."""
    from megatron.core.dist_checkpointing import ShardedTensor

    tp, dp = rank % TP, rank // TP
    state: dict[str, Any] = {}
    for number, (name, whole) in enumerate(tensors().items()):
        weight = next(own for own in WEIGHTS if name.endswith(own))
        axis = WEIGHTS[weight][1]
        lead = int(".layers." in name)
        for layer in range(LAYERS if lead else 1):
            local = whole[layer] if lead else whole
            offsets = [(0, layer, LAYERS)] if lead else []
            if axis is not None:
                local = local.chunk(TP, dim=axis)[tp]
                offsets.append((axis + lead, tp, TP))
            saver = (number + layer) % 2  # the rank of the group that saves this one
            key = name
            first = axis is not None or tp == 0
            if kind == "tensor_ranks" and axis is None:
                key, first = f"{name}.__tp_replica_{tp}", True
            one = ShardedTensor.from_rank_offsets(
                key, local.clone(), *offsets, replica_id=0 if first and dp == saver else 1,
                prepend_axis_num=lead,
            )  # fmt: skip
            state[f"{key}/{layer}"] = one
            if kind == "shadows" and first and dp != saver:
                state[f"__shadow_{rank}__{key}/{layer}"] = replace(
                    one, key=f"__shadow_{rank}__{key}", data=local.clone(), replica_id=0
                )
    return state


def rank_main(rank: int, kind: str, rendezvous: str, out: str) -> None:
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint import default_planner

    if kind == "shadows":  # a planner's own rule, which the pull requests lift for shadows
        default_planner._validate_global_plan = lambda *_: []
    torch.cuda.synchronize = lambda *_: None  # the writer waits for a device that is not here
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=4)
    state = sharded(rank, kind)
    sizes = {"world_size": 4, "tensor_model_parallel_size": TP, "pipeline_model_parallel_size": 1}
    state["args"] = SimpleNamespace(**sizes, data_parallel_size=2, iteration=2)
    state |= {"iteration": 2, "checkpoint_version": 3.0}
    where = Path(out) / "iter_0000002"
    if rank == 0:
        where.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(where), validate_access_integrity=kind != "shadows")
    if rank == 0:
        truth: dict[str, torch.Tensor] = {}
        for name, whole in tensors().items():
            state_of = next(s for s in reversed(STATES) if name.startswith(s))
            bare = name.removeprefix(state_of)
            head, found, rest = bare.partition(".layers.")
            for layer in range(LAYERS if found else 1):
                own = f"{head}.layers.{layer}.{rest}" if found else bare
                truth[KINDS[state_of] + own] = (
                    (whole[layer] if found else whole).contiguous().clone()
                )
        save_file(truth, Path(out) / "truth.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def main(kinds: list[str]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for kind in kinds or ["shadows", "tensor_ranks"]:
        with tempfile.TemporaryDirectory() as temporary:
            out = Path(temporary) / kind
            arguments = (kind, f"{temporary}/rendezvous", str(out))
            spawn(rank_main, arguments, nprocs=4)  # type: ignore[no-untyped-call]
            archive = HERE / f"{kind}.tar.xz"
            tar = shutil.which("tar") or "tar"
            subprocess.run([tar, "-cJf", str(archive), "-C", temporary, kind], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
