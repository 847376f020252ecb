"""One rank of a job that megatron-core itself loads a torch_dist checkpoint into, on CPU.

Started by an interpreter that has megatron-core, which is not this project's own. The model, the
optimizer and what they ask the checkpoint for are made by Megatron; every rank compares what it got
with its part of the truth, cut here by hand, and ends with 1 where a bit differs.

    mcore_job.py CHECKPOINT TRUTH TP PP {plain,distributed}

Ranks beyond TP times PP are of data.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

_ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight")
_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_LAYERS = 4


def without_cuda() -> None:
    """Let Megatron, which asks for CUDA at every turn, run on the processor."""

    class Stream:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def wait_stream(self, *_: Any) -> None: ...

    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *_: None
    cuda.set_device = lambda *_: None
    cuda.FloatTensor = torch.FloatTensor
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.Stream = Stream
    cuda.current_stream = lambda *_: Stream()
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    for name in ("tensor", "zeros", "ones", "empty", "full"):
        setattr(torch, name, on_processor(getattr(torch, name)))


def as_on_cuda() -> None:
    """Let tensors say that they are on a device, which Megatron's optimizers insist on."""
    tensor: Any = torch.Tensor
    kind = tensor.type
    tensor.type = lambda self, *to: kind(self, *to) if to else f"torch.cuda.{kind(self)[6:]}"


def on_processor(make: Any) -> Any:
    """Return what makes a tensor in memory, whatever device is asked for."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        return make(*args, **{k: v for k, v in kwargs.items() if k != "device" or v == "meta"})

    return made


def with_steps(distributed_optimizer: Any) -> None:
    """Let torch's Adam, which counts its steps in its state, load what Megatron's own writes."""
    load = distributed_optimizer._set_main_param_and_optimizer_states

    def loaded(self: Any, parameter: Any, tensors: Any) -> Any:
        group, order = self.model_param_group_index_map[parameter]
        main = self.optimizer.param_groups[group]["params"][order]
        return load(self, parameter, {"step": self.optimizer.state[main]["step"], **tensors})

    distributed_optimizer._set_main_param_and_optimizer_states = loaded


def part(name: str, whole: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """Return what a tensor rank holds of a whole tensor."""
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(tp, 0)[rank] for half in whole.chunk(2, 0)], 0)
    if name.endswith(_ROWS):
        return whole.chunk(tp, 0)[rank]
    return whole.chunk(tp, 1)[rank] if name.endswith(_COLUMNS) else whole


def main(checkpoint: Path, truth: Path, tp: int, pp: int, distributed: bool) -> int:
    """Load, compare, and return the exit code."""
    without_cuda()
    dist.init_process_group("gloo")
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    with_steps(DistributedOptimizer)
    as_on_cuda()
    wanted = load_file(truth / "state.safetensors")
    states = load_file(truth / "optim.safetensors")
    ps.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    half = distributed
    dtype = torch.bfloat16 if half else torch.float32
    config = TransformerConfig(
        num_layers=_LAYERS, hidden_size=64, num_attention_heads=8, num_query_groups=4,
        ffn_hidden_size=168, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        pipeline_dtype=dtype, params_dtype=dtype, bf16=half, use_cpu_initialization=True,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        normalization="RMSNorm",
    )  # fmt: skip
    stage = ps.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config, get_gpt_decoder_block_spec(config, False, "RMSNorm"),
        vocab_size=wanted["output_layer.weight"].shape[0], max_sequence_length=16,
        pre_process=stage == 0, post_process=stage == pp - 1, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    chunk = DistributedDataParallel(config, ddp, Float16Module(config, model) if half else model)
    common = dist_checkpointing.load_common_state_dict(str(checkpoint))
    saved = common["optimizer"].get("optimizer", common["optimizer"])["param_groups"][0]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=saved["max_lr"], min_lr=saved["min_lr"], bf16=half,
                        params_dtype=dtype, clip_grad=0.0, use_distributed_optimizer=distributed),
        [chunk], use_gloo_process_groups=True,
    )  # fmt: skip

    for parameter in model.parameters():  # torch's Adam has no state to load into before a step
        parameter.main_grad.zero_()
    optimizer.step()

    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    asked: dict[str, Any] = {"model": model.sharded_state_dict(metadata=metadata)}
    asked["optimizer"] = optimizer.sharded_state_dict(
        asked["model"], is_loading=True, metadata=metadata
    )
    loaded, unasked, absent = dist_checkpointing.load(asked, checkpoint, strict="return_all")
    # Modules of Transformer Engine would ask for more of what is kept beside weights.
    passed_over = re.compile(r"rng_state.*|.*\._extra_state", re.DOTALL)
    if absent or not all(map(passed_over.fullmatch, unasked)):
        print(f"the checkpoint lacks {absent} and has {unasked}, which nobody asks for")
        return 1
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])

    rank = ps.get_tensor_model_parallel_rank()
    compared = 0
    for local, parameter in model.named_parameters():
        name, layer = on_disk(local, stage * (_LAYERS // pp))
        for kind, span, value in held(optimizer, parameter, distributed):
            whole = wanted[name] if kind == "" else states[f"optimizer.state.{kind}.{name}"]
            mine = part(name, whole if layer is None else whole[layer], tp, rank)
            if not torch.equal(mine.flatten()[slice(*span)], value.flatten()):
                print(f"rank {dist.get_rank()}: {kind} {name} of layer {layer} differs")
                return 1
            compared += 1
    groups = optimizer.param_groups
    steps = {float(s["step"]) for one in chained(optimizer) for s in one.optimizer.state.values()}
    print(f"equal {compared}, iteration {loaded['iteration']}, steps {sorted(steps)}, "
          f"weight decay {[group['wd_mult'] for group in groups]}")  # fmt: skip
    return 0


def on_disk(local: str, first: int) -> tuple[str, int | None]:
    """Return a parameter's name in the store and its number there."""
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", local)
    if match is None:
        return local, None
    rest = match[2]
    for norm, fused in _NORMS.items():
        rest = rest.replace(norm, fused)
    return f"decoder.layers.{rest}", first + int(match[1])


def held(optimizer: Any, parameter: Any, distributed: bool) -> list[tuple[str, Any, Any]]:
    """Return the weight and its state on this rank: kind, range of elements, values."""
    every = (None, None)
    found: list[tuple[str, Any, Any]] = [("", every, parameter.data)]
    for one in chained(optimizer):
        if not distributed:
            state = one.optimizer.state[parameter]
            found += [(leaf, every, state[leaf]) for leaf in ("exp_avg", "exp_avg_sq")]
            continue
        for by_type in one.gbuf_ranges:
            for buckets in by_type.values():
                for bucket in buckets:
                    if parameter in bucket["param_map"]:
                        span = bucket["param_map"][parameter]["param"]
                        state = one._get_main_param_and_optimizer_states(parameter)
                        place = (span.start, span.end)
                        found += [(k, place, v) for k, v in state.items() if v.dim()]
    return found


def chained(optimizer: Any) -> list[Any]:
    """Return the optimizers that one is made of."""
    found: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return found


if __name__ == "__main__":
    _, checkpoint, truth, tp, pp, kind = sys.argv
    code = main(Path(checkpoint), Path(truth), int(tp), int(pp), kind == "distributed")
    sys.stdout.flush()
    os._exit(code)
