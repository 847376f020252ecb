"""Make local checkpoints of NVIDIA's resiliency extension, as Megatron-Core's jobs save them.

Started by torchrun with megatron-core and nvidia-resiliency-ext installed, 4 processes, CPU:

    torchrun --nproc-per-node 4 make_nvrx.py OUT REPLICATION

A GPT of two layers, tensor parallel by 2 and data parallel by 2, fp32 weights.
`LocalCheckpointManager` saves iterations 10 and 20. Ranks 0 and 1 have the folder `node0`, ranks 2
and 3 `node1`. With REPLICATION 1, ranks 0 and 2, and 1 and 3, keep each other's file too.
`truth.safetensors` is gathered from live memory.
"""

from __future__ import annotations

import os
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "peers"))

import torch
import torch.distributed as dist
from mcore_job import as_on_cuda, part, without_cuda  # noqa: F401


def main(out: Path, *, replicated: bool) -> None:
    without_cuda()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
        LocalCheckpointManager,
    )
    from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import GroupWrapper
    from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
        CliqueReplicationStrategy,
    )

    as_on_cuda()
    tp, dp = 2, 2
    ps.initialize_model_parallel(tensor_model_parallel_size=tp)
    torch.manual_seed(7)
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2,
        ffn_hidden_size=24, tensor_model_parallel_size=tp, params_dtype=torch.float32,
        use_cpu_initialization=True, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, normalization="RMSNorm",
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_decoder_block_spec(config, False, "RMSNorm"), vocab_size=32,
        max_sequence_length=8, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=False)
    chunk = DistributedDataParallel(config, ddp, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-4, params_dtype=torch.float32,
                        clip_grad=0.0, use_distributed_optimizer=False),
        [chunk], use_gloo_process_groups=True,
    )  # fmt: skip

    strategy = None
    if replicated:
        mine = [0, 2] if rank % 2 == 0 else [1, 3]
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        strategy = CliqueReplicationStrategy(GroupWrapper(groups[mine[0]]), target_device="cpu")
    node = out / f"node{rank // 2}"
    manager = LocalCheckpointManager(str(node), session_id="run7", repl_strategy=strategy)
    manager._cleanup = lambda iteration: None  # keep both iterations
    for iteration in (10, 20):
        for parameter in model.parameters():
            generator = torch.Generator().manual_seed(iteration + parameter.numel())
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer.step()
        state: dict[str, Any] = {
            "args": Namespace(
                world_size=4, tensor_model_parallel_size=tp, pipeline_model_parallel_size=1,
                data_parallel_size=dp, num_layers=2, hidden_size=16, iteration=iteration,
            ),
            "checkpoint_version": 3.0, "iteration": iteration,
            "num_floating_point_operations_so_far": 0,
        }  # fmt: skip
        state["model"] = model.sharded_state_dict()
        state["optimizer"] = optimizer.sharded_state_dict(state["model"])
        if iteration == 20:
            truth(out, model, optimizer, config)
        aware, _ = MCoreTensorAwareStateDict.from_state_dict(
            state, algo="fully_parallel", parallelization_group=ps.get_data_parallel_group()
        )
        manager.save(aware, iteration)
    dist.barrier()


def truth(out: Path, model: Any, optimizer: Any, config: Any) -> None:
    """Gather the whole weights and moments from the live job, and write them."""
    from megatron.core import parallel_state as ps
    from safetensors.torch import save_file

    group = ps.get_tensor_model_parallel_group()
    found = {}
    for name, parameter in model.named_parameters():
        state = optimizer.optimizer.state[parameter]
        for kind, value in (("", parameter.data), ("exp_avg:", state["exp_avg"]),
                            ("exp_avg_sq:", state["exp_avg_sq"])):  # fmt: skip
            parts = [torch.empty_like(value) for _ in range(2)]
            dist.all_gather(parts, value.contiguous(), group=group)
            if getattr(parameter, "tensor_model_parallel", False):
                if name.endswith("linear_fc1.weight"):
                    halves = [one.chunk(2, 0) for one in parts]
                    whole = torch.cat([h[0] for h in halves] + [h[1] for h in halves])
                else:
                    whole = torch.cat(parts, parameter.partition_dim)
            else:
                whole = parts[0]
            found[kind + name] = whole.contiguous().clone()
    if dist.get_rank() == 0:
        save_file(found, str(out / "truth.safetensors"))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    if os.environ["RANK"] == "0":
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    import time

    time.sleep(1)
    main(place, replicated=sys.argv[2] == "1")
    sys.stdout.flush()
    os._exit(0)
