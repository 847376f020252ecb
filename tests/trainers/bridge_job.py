"""Save a small GPT with Megatron-Bridge's own `save_checkpoint`, without a GPU.

`python bridge_job.py OUT RANK WORLD PORT`: writes OUT/sync and OUT/async, each with `iter_0000001`.
Stand-ins: Transformer Engine (Bridge imports one class of it for LoRA, which is not used), and five
functions of `torch.cuda`. All else is the installed Megatron-Bridge and megatron-core.
"""

from __future__ import annotations

import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
cuda: Any = torch.cuda  # here, so that the process that writes for Bridge has them too
cuda.synchronize = lambda *_: None
cuda.set_device = lambda *_: None
cuda.device_count = lambda: 1
cuda.current_device = lambda: "cpu"
cuda.get_rng_state = lambda *_: torch.get_rng_state()


def stand_in() -> None:
    """Stand in for what needs a GPU; megatron-core is imported before, so it sees no TE."""
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model
    import megatron.core.models.gpt.moe_module_specs

    engine: Any = ModuleType("transformer_engine")
    layers: Any = ModuleType("transformer_engine.pytorch")
    layers.Linear = type("Linear", (), {})
    layers.ops = SimpleNamespace(Sequential=object)
    engine.pytorch = layers
    for module in (engine, layers):
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    assert megatron.core


def provider() -> Any:
    """Return a provider of a GPT of two layers, on the ranks' tensor-parallel group."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection

    made = GPTModelProvider(
        num_layers=2, hidden_size=16, ffn_hidden_size=24, num_attention_heads=4,
        num_query_groups=2, kv_channels=4, vocab_size=32, seq_length=16, normalization="RMSNorm",
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        position_embedding_type="rope", share_embeddings_and_output_weights=False,
        make_vocab_size_divisible_by=8, use_cpu_initialization=True, params_dtype=torch.float32,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
    )  # fmt: skip
    made._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    return made


def config(model: Any, save: Path, **more: Any) -> Any:
    """Return the configuration of a run."""
    from megatron.bridge.training import config as kinds
    from megatron.bridge.training.tokenizers.config import TokenizerConfig

    data = kinds.MockGPTDatasetConfig(
        random_seed=1, seq_length=16, reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False,
    )  # fmt: skip
    return kinds.ConfigContainer(
        train=kinds.TrainingConfig(global_batch_size=2, micro_batch_size=1, train_iters=3),
        model=model, dataset=data, logger=kinds.LoggerConfig(),
        optimizer=kinds.OptimizerConfig(lr=1e-3, use_distributed_optimizer=False),
        scheduler=kinds.SchedulerConfig(lr_decay_iters=3),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=32),
        checkpoint=kinds.CheckpointConfig(save=str(save), save_interval=1, **more),
    )  # fmt: skip


def save(out: Path, model: Any, made: Any, *, waits: bool) -> None:
    """Save as the training loop does: `save_checkpoint`, and finalise what runs beside it."""
    from megatron.bridge.training import checkpointing
    from megatron.bridge.training.callbacks import CallbackManager
    from megatron.bridge.training.state import GlobalState, TrainState

    from ftckpt.trainers.bridge import SealBridge

    manager = CallbackManager()
    manager.add(SealBridge(strict=True))
    state = GlobalState()
    state.cfg = config(made, out, async_save=not waits)
    state.train_state = TrainState(step=1)
    state.initialize_async_checkpoint_worker()
    told = "on_checkpoint_save" in manager.events
    more = {"callback_manager": manager} if told else {}
    checkpointing.save_checkpoint(state, [model], None, None, 0, **more)
    checkpointing.maybe_finalize_async_save(
        state, state.cfg.checkpoint, blocking=True, terminate=True
    )


def main(out: Path, rank: int, world: int, port: str) -> None:
    """Save twice on one rank of a job."""
    stand_in()
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    torch.manual_seed(1)
    made = provider()
    made.finalize()
    model = made.provide()
    save(out / "sync", model, made, waits=True)
    save(out / "async", model, made, waits=False)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
