"""Make `muon.tar.xz` and `muon_files.tar.xz` beside this file: `python make_muon.py`.

Needs megatron-core 0.16.1 and NVIDIA's emerging-optimizers (0.1.0, from its repository) with absl
in an environment of its own, and this repository's root on the path. Four gloo ranks, tp 2 x dp 2:
a GPT model with a gated MLP and bf16 weights, two steps of `get_megatron_muon_optimizer` (Muon for
matrices, Adam for the rest) with gradients of a seed. The truth is gathered from live memory.
`muon_files` is the same state as files of ranks: what `save_checkpoint` puts into
`model_optim_rng.pt`, without schedule and random streams, under the names of the module.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import typing
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions
from safetensors.torch import save_file
from torch.multiprocessing.spawn import spawn

from tests.peers.mcore_job import as_on_cuda, on_disk, without_cuda
from tests.peers.megatron_job import NoTriton

HERE = Path(__file__).parent
TP, WORLD = 2, 4
SIZES = {
    "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_query_groups": 2,
    "ffn_hidden_size": 12, "kv_channels": 4, "tensor_model_parallel_size": TP,
}  # fmt: skip
ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight")
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


def part(name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """Return what a tensor rank holds of a whole tensor."""
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(TP, 0)[rank] for half in whole.chunk(2, 0)], 0)
    if name.endswith(ROWS):
        return whole.chunk(TP, 0)[rank]
    return whole.chunk(TP, 1)[rank] if name.endswith(COLUMNS) else whole


def whole_of(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Put together what the tensor ranks hold: the inverse of `part`."""
    if name.endswith("linear_fc1.weight"):
        return torch.cat([p.chunk(2, 0)[half] for half in (0, 1) for p in parts], 0)
    if name.endswith(ROWS + COLUMNS):
        return torch.cat(parts, 0 if name.endswith(ROWS) else 1)
    return parts[0]


def logical(local: str) -> str:
    """Return the name under which a parameter is read."""
    stored, layer = on_disk(local, 0)
    return stored if layer is None else stored.replace(".layers.", f".layers.{layer}.", 1)


def state_of(
    model: Any, optimizer: Any, *, naming: Callable[[str], str], steps: bool
) -> dict[str, torch.Tensor]:
    """Return this rank's part of the weights and of their state."""
    names = {id(p): naming(name) for name, p in model.named_parameters()}
    found = {names[id(p)]: p.data.clone() for p in model.parameters()}
    for one in optimizer.chained_optimizers:
        groups = zip(one.float16_groups, one.fp32_from_float16_groups, strict=True)
        for weights, masters in groups:
            for weight, master in zip(weights, masters, strict=True):
                name = names[id(weight)]
                found[f"master:{name}"] = master.data.clone()
                for leaf, value in one.optimizer.state[master].items():
                    if leaf.startswith("exp_avg"):
                        found[f"{leaf}:{name}"] = value.clone()
                    elif leaf != "step" or steps:
                        found[f"optimizer:{name}.{leaf}"] = value.clone()
    return found


def keep(path: str, own: dict[str, torch.Tensor]) -> None:
    """Gather what the ranks hold; the first one saves the whole of it."""
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, own)
    if dist.get_rank() == 0:
        truth = {
            name: whole_of(name.removesuffix(".momentum_buffer"), [one[name] for one in every[:TP]])
            for name in own
        }
        save_file({n: t.contiguous() for n, t in truth.items()}, path)


def rank_main(rank: int, rendezvous: str, out: str) -> None:
    typing.override = typing_extensions.override  # type: ignore[attr-defined, unused-ignore]
    sys.meta_path.insert(0, NoTriton())
    without_cuda()
    compiler: Any = torch
    compiler.compile = lambda f=None, **_: f if f is not None else lambda g: g
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    as_on_cuda()
    ps.initialize_model_parallel(tensor_model_parallel_size=TP)
    half = torch.bfloat16
    config = TransformerConfig(
        **SIZES, params_dtype=half, pipeline_dtype=half, bf16=True, use_cpu_initialization=True,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        normalization="RMSNorm",
    )  # fmt: skip
    torch.manual_seed(3)
    model = GPTModel(
        config, get_gpt_decoder_block_spec(config, False, "RMSNorm"), vocab_size=16,
        max_sequence_length=8, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=False)
    chunk = DistributedDataParallel(config, ddp, Float16Module(config, model))
    optimizer = get_megatron_muon_optimizer(
        OptimizerConfig(optimizer="muon", lr=0.01, min_lr=0.001, weight_decay=0.1, bf16=True,
                        params_dtype=half, clip_grad=0.0, use_distributed_optimizer=False),
        [chunk],
    )  # fmt: skip
    mine = ps.get_tensor_model_parallel_rank()
    for step in (1, 2):
        generator = torch.Generator().manual_seed(step)
        for name, weight in model.named_parameters():
            shape = whole_of(name, [weight.data] * TP).shape
            weight.main_grad.copy_(part(name, torch.randn(shape, generator=generator), mine))
        optimizer.step()
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    sharded = model.sharded_state_dict(metadata=metadata)
    args = SimpleNamespace(
        **SIZES, world_size=WORLD, pipeline_model_parallel_size=1, data_parallel_size=WORLD // TP,
        iteration=2, swiglu=True, group_query_attention=False, normalization="RMSNorm",
        optimizer="muon", untie_embeddings_and_output_weights=True, add_bias_linear=False,
        position_embedding_type="rope", padded_vocab_size=16, max_position_embeddings=8,
        transformer_impl="local", use_distributed_optimizer=False, params_dtype=half, bf16=True,
    )  # fmt: skip
    state = {
        "args": args, "checkpoint_version": 3.0, "iteration": 2, "model": sharded,
        "optimizer": optimizer.sharded_state_dict(sharded, metadata=metadata),
    }  # fmt: skip
    where = Path(out) / "iter_0000002"
    if rank == 0:
        where.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(where), content_metadata=metadata)
    keep(f"{out}/truth.safetensors", state_of(model, optimizer, naming=logical, steps=False))
    files = Path(f"{out}_files") / "iter_0000002" / f"mp_rank_{mine:02d}"
    if rank < TP:
        files.mkdir(parents=True)
        of_rank = {
            "args": args, "checkpoint_version": 3.0, "iteration": 2,
            "model": chunk.state_dict_for_save_checkpoint(), "optimizer": optimizer.state_dict(),
        }  # fmt: skip
        torch.save(of_rank, files / "model_optim_rng.pt")
    dist.barrier()
    keep(f"{out}_files/truth.safetensors", state_of(model, optimizer, naming=str, steps=True))
    dist.barrier()
    os._exit(0)


def main() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as temporary:
        arguments = (f"{temporary}/rendezvous", f"{temporary}/muon")
        spawn(rank_main, arguments, nprocs=WORLD)  # type: ignore[no-untyped-call]
        tar = shutil.which("tar") or "tar"
        for name in ("muon", "muon_files"):
            archive = str(HERE / f"{name}.tar.xz")
            subprocess.run([tar, "-cJf", archive, "-C", temporary, name], check=True)


if __name__ == "__main__":
    main()
