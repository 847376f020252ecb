"""Make the checkpoints of Megatron-FSDP beside this file: `python make_megatron_fsdp.py`.

Needs megatron-core 0.16.1 in an environment of its own. Four gloo ranks. Megatron-FSDP trains on a
GPU only, so the shards of weights and moments are cut here, unevenly and in whole rows; all that
makes a `fsdp_dtensor` checkpoint of them is the library's own: `make_fsdp_dtensor`,
`handle_experts_in_state_dict`, `handle_swiglu_in_state_dict`, `handle_fp8_extra_state_case` and
`preprocess_state_dict_for_uneven_dtensor`, in the order and with the keys of Megatron-LM's
`preprocess_fsdp_dtensor_state_dict` and `generate_state_dict`, and torch's own save.

- dense: tp 2 x dp 2, gated MLP, untied embeddings
- experts: tp 2 x dp 2, experts ep 2 x dp 2, four experts, grouped
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_with_torch
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.spawn import spawn

HERE = Path(__file__).parent
WORLD, TP, EP, EXPERTS = 4, 2, 2, 4
HIDDEN, FFN, HEADS, LAYERS, VOCAB = 8, 16, 2, 2, 16
STEP = 2
# Weights of a layer: shape, and the axis that tensor ranks divide.
ATTENTION = {
    "self_attention.linear_proj.weight": ((HIDDEN, HIDDEN), 1),
    "self_attention.linear_qkv.layer_norm_weight": ((HIDDEN,), None),
    "self_attention.linear_qkv.weight": ((3 * HIDDEN, HIDDEN), 0),
}
DENSE = {
    "mlp.linear_fc1.layer_norm_weight": ((HIDDEN,), None),
    "mlp.linear_fc1.weight": ((2 * FFN, HIDDEN), 0),
    "mlp.linear_fc2.weight": ((HIDDEN, FFN), 1),
}
ROUTED = {
    "pre_mlp_layernorm.weight": ((HIDDEN,), None),
    "mlp.router.weight": ((EXPERTS, HIDDEN), None),
}
EXPERT = {"linear_fc1.weight": (2 * FFN, HIDDEN), "linear_fc2.weight": (HIDDEN, FFN)}
ENDS = {
    "embedding.word_embeddings.weight": ((VOCAB, HIDDEN), 0),
    "decoder.final_layernorm.weight": ((HIDDEN,), None),
    "output_layer.weight": ((VOCAB, HIDDEN), 0),
}


def weights(kind: str) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Return shape and divided axis of every weight but the experts', in the model's order."""
    layer = ATTENTION | (DENSE if kind == "dense" else ROUTED)
    names = {
        f"decoder.layers.{n}.{name}": how for n in range(LAYERS) for name, how in layer.items()
    }
    first, *others = ENDS
    return {first: ENDS[first], **names, **{name: ENDS[name] for name in others}}


def experts(kind: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every expert's weight, by the name that all ranks together give it."""
    if kind == "dense":
        return {}
    return {
        f"decoder.layers.{n}.mlp.experts.{name}{expert}": shape
        for n in range(LAYERS) for name, shape in EXPERT.items() for expert in range(EXPERTS)
    }  # fmt: skip


def values(kind: str) -> dict[str, dict[str, torch.Tensor]]:
    """Return weights and moments, whole, by name."""
    torch.manual_seed(11)
    shapes = {name: shape for name, (shape, _) in weights(kind).items()} | experts(kind)
    found = {}
    for name, shape in shapes.items():
        found[name] = {
            "": torch.randn(shape),
            "exp_avg": torch.randn(shape),
            "exp_avg_sq": torch.randn(shape).square(),
        }
    return found


class Model:
    """What the library asks of the model: its parameters, by their names on this rank."""

    def __init__(self, count: int | None) -> None:
        self.config = SimpleNamespace(num_moe_experts=count)
        self.parameters: dict[str, Any] = {}

    def get_parameter(self, name: str) -> Any:
        while name.startswith("module."):
            name = name.removeprefix("module.")
        return self.parameters[name]


def of_tensor_rank(whole: torch.Tensor, name: str, axis: int | None, tp: int) -> torch.Tensor:
    if axis is None:
        return whole
    if "linear_fc1.weight" in name:  # a rank's gates, then its ups
        gate, up = whole.chunk(2)
        return torch.cat([gate.chunk(TP)[tp], up.chunk(TP)[tp]])
    return whole.chunk(TP, dim=axis)[tp].contiguous()


def sharded(kind: str, rank: int) -> tuple[Model, dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the model, and DTensors of its weights and moments, by this rank's names."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import (
        make_fsdp_dtensor,
    )
    from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import FSDPDistributedIndex

    mesh = DeviceMesh(
        "cpu", torch.arange(WORLD).view(WORLD // TP, TP), mesh_dim_names=("dp_cp", "tp")
    )
    # Ranks 0 and 2 have the first experts, 1 and 3 the others.
    meshes = [DeviceMesh("cpu", [[e], [e + EP]], mesh_dim_names=("dp_cp", "tp")) for e in range(EP)]
    index = FSDPDistributedIndex(
        device_mesh=mesh, dp_shard_dim="dp_cp", tp_dim="tp", expt_device_mesh=meshes[rank % EP]
    )
    dp, tp, ep = rank // TP, rank % TP, rank % EP
    model = Model(EXPERTS if kind == "experts" else None)
    state: dict[str, Any] = {}
    moments: dict[str, dict[str, Any]] = {}
    held = EXPERTS // EP
    for number, (name, own) in enumerate(values(kind).items()):
        expert = name in experts(kind)
        local = name
        axis = None
        if expert:
            which = int(name.rpartition("weight")[2])
            if which // held != ep:
                continue
            local = f"{name.rpartition('weight')[0]}weight{which % held}"
        else:
            axis = weights(kind)[name][1]
        made: dict[str, Any] = {}
        for leaf, whole in own.items():
            part = of_tensor_rank(whole, name, axis, tp)
            parameter = nn.Parameter(torch.empty_like(part))
            if not expert:
                parameter.tensor_model_parallel = axis is not None  # type: ignore[attr-defined]
                parameter._mcore_tp = True  # type: ignore[attr-defined]
                parameter._tp_duplicated = axis is None  # type: ignore[attr-defined]
                parameter._tp_partition_dim = axis  # type: ignore[attr-defined]
                parameter.partition_dim = axis  # type: ignore[attr-defined]
                parameter.partition_stride = 1  # type: ignore[attr-defined]
            cut = (number * 3) % (part.shape[0] + 1)  # uneven; nothing on one rank for some
            start, stop = ((0, cut), (cut, part.shape[0]))[dp]
            made[leaf] = make_fsdp_dtensor(
                part[start:stop].clone(), parameter, index, is_expert_param=expert, run_check=True,
                update_uneven_dtensor_chunk_meta=True,
            )  # fmt: skip
            if not leaf:
                row = part[0].numel() if part.ndim > 1 else 1
                shard = made[leaf]
                for key, value in vars(parameter).items():
                    setattr(shard, key, value)
                shard.megatron_fsdp_slice = slice(start * row, stop * row)
                shard.megatron_fsdp_dist_index = index
                model.parameters[local] = shard
        state[f"module.{local}"] = made.pop("")
        moments[f"module.module.module.{local}"] = made
    return model, state, moments


def arguments(kind: str) -> Namespace:
    said: dict[str, Any] = {
        "num_layers": LAYERS, "hidden_size": HIDDEN, "ffn_hidden_size": FFN,
        "num_attention_heads": HEADS, "kv_channels": HIDDEN // HEADS,
        "group_query_attention": False, "num_query_groups": 1, "padded_vocab_size": VOCAB,
        "vocab_size": VOCAB, "make_vocab_size_divisible_by": 8, "normalization": "RMSNorm",
        "norm_epsilon": 1e-5, "swiglu": True, "add_bias_linear": False, "add_qkv_bias": False,
        "qk_layernorm": False, "position_embedding_type": "rope", "rotary_base": 10000,
        "rotary_percent": 1.0, "add_position_embedding": True, "max_position_embeddings": 32,
        "seq_length": 32, "untie_embeddings_and_output_weights": True, "attention_dropout": 0.0,
        "hidden_dropout": 0.0, "transformer_impl": "transformer_engine", "bf16": True,
        "fp16": False, "params_dtype": torch.bfloat16, "optimizer": "adam",
        "use_distributed_optimizer": True, "use_megatron_fsdp": True, "iteration": STEP,
        "data_parallel_sharding_strategy": "optim_grads_params", "ckpt_format": "fsdp_dtensor",
        "world_size": WORLD, "data_parallel_size": WORLD // TP, "tensor_model_parallel_size": TP,
        "pipeline_model_parallel_size": 1, "context_parallel_size": 1, "num_experts": None,
        "expert_model_parallel_size": 1, "expert_tensor_parallel_size": TP,
    }  # fmt: skip
    if kind == "experts":
        said |= {
            "num_experts": EXPERTS, "moe_ffn_hidden_size": FFN, "moe_router_topk": 2,
            "moe_grouped_gemm": True, "expert_model_parallel_size": EP, "moe_layer_freq": 1,
            "expert_tensor_parallel_size": 1, "moe_aux_loss_coeff": 0.01,
        }  # fmt: skip
    return Namespace(**said)


def group(*, decay: bool, expert: bool) -> dict[str, Any]:
    return {
        "wd_mult": float(decay), "lr_mult": 1.0, "is_expert_parallel": expert,
        "is_decoupled_lr": False, "default_config": True, "max_lr": 1e-3, "min_lr": 1e-5,
        "lr": 5e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1 * decay,
        "bias_correction": True, "step": STEP,
    }  # fmt: skip


def rng() -> dict[str, Any]:
    return {
        "random_rng_state": random.Random(3).getstate(),
        "np_rng_state": np.random.RandomState(3).get_state(),
        "torch_rng_state": torch.arange(64, dtype=torch.uint8),
        "cuda_rng_state": torch.arange(16, dtype=torch.uint8),
        "rng_tracker_states": {"model-parallel-rng": torch.arange(16, dtype=torch.uint8)},
    }


def rank_main(rank: int, kind: str, rendezvous: str, out: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    torch.Tensor.cuda = lambda self, *_: self  # type: ignore[method-assign]
    from megatron.core import parallel_state
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor
    from megatron.core.transformer import fsdp_dtensor_checkpoint as library

    parallel_state.get_expert_model_parallel_world_size = lambda: EP
    parallel_state.get_expert_model_parallel_rank = lambda: rank % EP
    model, weights_, moments = sharded(kind, rank)
    count = model.config.num_moe_experts
    named = library.handle_experts_in_state_dict(moments, count)
    meta = {
        name: group(decay=not name.endswith("norm_weight") and "layernorm" not in name,
                    expert=".experts." in name)
        for name in named
    }  # fmt: skip
    weights_["module.decoder.layers.0.self_attention._extra_state"] = None
    library.handle_fp8_extra_state_case(weights_)
    optimizer: dict[str, Any] = {"state": named, "param_to_group_meta": meta}
    weights_, optimizer = library.handle_swiglu_in_state_dict(model, weights_, optimizer)
    state: dict[str, Any] = {
        "args": arguments(kind),
        "checkpoint_version": 3.0,
        "iteration": STEP,
        "model": library.handle_experts_in_state_dict(weights_, count),
        "optimizer": optimizer,
        "opt_param_scheduler": {"max_lr": 1e-3, "num_steps": 2 * STEP, "wd_incr_steps": 10},
        "rng_state": {f"(0, {rank % TP})": [rng()]},
        "num_floating_point_operations_so_far": 1.5,
    }
    uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(state)
    where = Path(out) / f"iter_{STEP:07d}"
    save_with_torch(state, storage_writer=FileSystemWriter(where))
    if rank == 0:
        tensors = {
            name: value for name, value in rng().items() if isinstance(value, torch.Tensor)
        } | {"rng_tracker_states.model-parallel-rng": rng()["cuda_rng_state"]}
        truth = {
            f"extra:rng_state:(0, {tp}).0.{name}": value.clone()
            for tp in range(TP) for name, value in tensors.items()
        }  # fmt: skip
        for name, own in values(kind).items():
            head, found, number = name.rpartition("weight")
            if ".experts." in name:
                head = head.replace(".experts.", f".experts.local_experts.{number}.")
                name = head + found
            for leaf, whole in own.items():
                truth[f"{leaf}:{name}" if leaf else name] = whole
        save_file(truth, Path(out) / "truth.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def main(kinds: list[str]) -> None:
    for kind in kinds or ["dense", "experts"]:
        with tempfile.TemporaryDirectory() as temporary:
            out = Path(temporary) / kind
            out.mkdir()
            arguments = (kind, f"{temporary}/rendezvous", str(out))
            spawn(rank_main, arguments, nprocs=WORLD)  # type: ignore[no-untyped-call]
            tar = shutil.which("tar") or "tar"
            archive = HERE / f"{kind}.tar.xz"
            subprocess.run([tar, "-cJf", str(archive), "-C", temporary, kind], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
