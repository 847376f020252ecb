"""Make the DeepSpeed checkpoints beside this file: `python make_deepspeed.py [NAME …]`.

Needs DeepSpeed 0.19.8 and torch on CPU in an environment of its own (`DS_BUILD_OPS=0
DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed`). Each set is a tag's folder as the
engine saved it, and `truth.safetensors`: what the job's own memory held at that moment, gathered
from the ranks by the addresses that DeepSpeed keeps for itself, under ftckpt's keys.

- z1: four ranks, two groups (the last rank of the second holds only padding), a frozen parameter,
  tied weights, buffers, a random state as client state
- z2: stage 2, elastic, parameters aligned to 16 bytes and in round-robin order, three ranks
- z3: stage 3, three ranks, several sub-groups, parameters smaller than the ranks, a frozen one
- bf16: BF16_Optimizer, three ranks
- pipe: two stages, an embedding tied across them, a layer without parameters
- tp: two tensor slices of two partitions, with `universal_checkpoint_info`
- wrap: stage 2, two ranks, modules in the wrapper of torch's activation checkpointing
- off: ZeRO off
- universal_z1, universal_z3, universal_wrap, universal_tp: the same, by `ds_to_universal.py` (which
  fails on pipe)
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", OMP_NUM_THREADS="1")

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

HERE = Path(__file__).parent
STEPS = 2
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "steps_per_print": 1000,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
BF16 = {"bf16": {"enabled": True}}
JOBS: dict[str, dict[str, Any]] = {
    "z1": {"world": 4, "zero": {"stage": 1}, **BF16},
    "z2": {
        "world": 3,
        "zero": {"stage": 2, "elastic_checkpoint": True, "parameter_alignment": True,
                 "round_robin_gradients": True},
        **BF16,
    },
    "z3": {"world": 3, "zero": {"stage": 3, "sub_group_size": 30}},
    "bf16": {"world": 3, "zero": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}, **BF16},
    "pipe": {"world": 2, "zero": {"stage": 1}, **BF16},
    "tp": {"world": 4, "zero": {"stage": 1}, **BF16},
    "wrap": {"world": 2, "zero": {"stage": 2}, **BF16},
    "off": {"world": 1, "zero": {"stage": 0}},
}  # fmt: skip
# Patterns are matched at the start of a name.
INFO = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": ["norm"],
    "parameter_to_average_patterns": ["mean"],
    "parameter_with_row_parallelism_patterns": ["down"],
    "parameter_with_2_sub_params_cat_dim_0": ["fc1"],
    "vocabulary_parameter_patterns": ["embed"],
    "original_vocab_size": 11,
}


class Tiny(torch.nn.Module):
    """Sizes that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5)
        self.up = torch.nn.Linear(5, 3)
        self.frozen = torch.nn.Linear(3, 3, bias=False).requires_grad_(False)
        self.down = torch.nn.Linear(3, 5, bias=False)
        self.gain = torch.nn.Parameter(torch.randn(2))
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(3, dtype=torch.int64))
        self.register_buffer("rope", torch.randn(4))

    def forward(self, ids: torch.Tensor) -> Any:
        hidden = self.down(self.frozen(torch.tanh(self.up(self.embed(ids)))))
        return self.head(hidden * self.gain.sum()).float().square().mean()


class Sliced(torch.nn.Module):
    """One tensor slice of two: the job needs no true tensor parallelism, only its files."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        torch.manual_seed(100 + tp)
        shapes = {"embed": (6, 4), "column": (3, 4), "fc1": (6, 4), "down": (4, 3)}
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))
        torch.manual_seed(99)
        for name in ("norm", "mean"):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(4)))

    def forward(self, ids: torch.Tensor) -> Any:
        sums = (p.float().square().sum() for n, p in self.named_parameters() if n != "norm")
        local: Any = sum(sums)
        return local * ids.sum() + self.get_parameter("norm").float().square().sum()


class Grid:
    """Two tensor slices; the ranks of a slice are its partitions."""

    def __init__(self) -> None:
        rank = dist.get_rank()
        self.tp, self.dp = rank % 2, rank // 2
        slices = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        partitions = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        self._slice, self._partition = slices[self.dp], partitions[self.tp]

    get_model_parallel_rank = get_tensor_model_parallel_rank = lambda self: self.tp
    get_model_parallel_world_size = get_tensor_model_parallel_world_size = lambda self: 2
    get_model_parallel_group = get_tensor_model_parallel_group = lambda self: self._slice
    get_data_parallel_rank = lambda self: self.dp  # noqa: E731
    get_data_parallel_world_size = lambda self: 2  # noqa: E731
    get_data_parallel_group = lambda self: self._partition  # noqa: E731
    get_pipeline_model_parallel_world_size = lambda self: 1  # noqa: E731
    get_pipeline_model_parallel_rank = lambda self: 0  # noqa: E731


def optimizer_of(model: torch.nn.Module, name: str) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "off":  # torch's own numbers can be given names where there is one group
        return torch.optim.AdamW(trained, lr=1e-2)
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2)


def config_of(job: dict[str, Any]) -> dict[str, Any]:
    rest = {k: v for k, v in job.items() if k not in ("world", "zero")}
    return BASE | rest | {"zero_optimization": {"overlap_comm": False} | job["zero"]}


def run(rank: int, name: str, out: str, port: int) -> None:
    import deepspeed

    job = JOBS[name]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["world"]),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
    deepspeed.init_distributed("gloo")
    torch.manual_seed(7)
    if name == "pipe":
        engine, truth = pipeline(config_of(job))
    else:
        grid = Grid() if name == "tp" else None
        model = Tiny() if grid is None else Sliced(grid.tp)
        if name == "wrap":
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
                checkpoint_wrapper,
            )

            for part in ("up", "frozen"):
                setattr(model, part, checkpoint_wrapper(model.get_submodule(part)))
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer_of(model, name), config=config_of(job), mpu=grid
        )
        first = rank % 7 if grid is None else grid.dp  # what slices repeat must stay equal
        for step in range(STEPS):
            engine.backward(engine(torch.tensor([first, step, 4])))
            engine.step()
        truth = gather(engine, job["zero"]["stage"], job["world"])
    client: dict[str, Any] = {"note": "tiny", "rng": {"cpu": torch.arange(6, dtype=torch.uint8)}}
    client |= {"universal_checkpoint_info": INFO} if name == "tp" else {"iteration": STEPS}
    engine.save_checkpoint(out, tag=f"global_step{STEPS}", client_state=client)
    every: list[Any] = [None] * job["world"]
    dist.all_gather_object(every, truth)
    if rank == 0:
        torch.save(every, Path(out) / "truth.pt")
    dist.barrier()
    dist.destroy_process_group()


def pipeline(config: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Train two stages whose first and last layer share a module."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers = [
        TiedLayerSpec("embed", torch.nn.Embedding, 7, 5),
        LayerSpec(torch.nn.Linear, 5, 5),
        torch.tanh,
        LayerSpec(torch.nn.LayerNorm, 5),
        TiedLayerSpec("embed", torch.nn.Embedding, 7, 5,
                      forward_fn=lambda module, x: x @ module.weight.t()),
    ]  # fmt: skip
    loss = torch.nn.CrossEntropyLoss()
    model = PipelineModule(
        layers, num_stages=2, loss_fn=lambda y, t: loss(y.float().view(-1, 7), t.view(-1)),
        partition_method="uniform",
    )  # fmt: skip
    params = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(params, lr=1e-2),
        config=config | {"gradient_accumulation_steps": 2},
    )
    data = [(torch.tensor([[i % 7, 3, 2]]), torch.tensor([[3, 2, i % 5]])) for i in range(64)]
    batches = iter(data)
    for _ in range(STEPS):
        engine.train_batch(data_iter=batches)
    return engine, gather(engine, 1, 2)


def gather(engine: Any, stage: int, world: int) -> dict[str, Any]:
    """Return what this rank holds: (name, kind) -> (shape, start in the parameter, values)."""
    held: dict[str, Any] = {}
    names = dict(engine.module.named_parameters())
    buffers = dict(engine.module.named_buffers())
    for name, value in engine.module.state_dict().items():
        if stage < 3 or name in buffers:
            held[name] = (tuple(value.shape), 0, value.detach().clone().flatten())
    for name, param in names.items():
        if not param.requires_grad:
            if stage == 3:
                shape = tuple(param.ds_shape)
                start = param.ds_tensor.numel() * dist.get_rank()
                held[name] = (shape, start, param.ds_tensor.detach().clone().flatten())
            continue
        if stage == 0:
            for key, value in engine.optimizer.state[param].items():
                held[_key(name, key)] = (tuple(value.shape), 0, value.clone().flatten())
        elif stage == 3:
            _gather_stage3(engine, name, param, held)
        else:
            _gather_fragment(engine, name, param, held)
    return held


def _key(name: str, state: str) -> str:
    return f"optimizer:{name}.step" if state == "step" else f"{state}:{name}"


def _gather_fragment(engine: Any, name: str, param: Any, held: dict[str, Any]) -> None:
    mapping = getattr(param, "_hp_mapping", None)
    group = next(
        g for g, members in enumerate(_bit16_groups(engine.optimizer))
        if any(p is param for p in members)
    )  # fmt: skip
    state = engine.optimizer.optimizer.state[
        engine.optimizer.optimizer.param_groups[group]["params"][0]
    ]
    held[_key(name, "step")] = ((), 0, state["step"].clone().flatten())
    if mapping is None:  # none of it is in this rank's partition
        return
    place, inside = mapping.hp_fragment_address, mapping.lp_fragment_address
    shape = tuple(param.shape)
    for key, flat in [("master", mapping.hp_fragment), *state.items()]:
        if key == "master":
            held[_key(name, key)] = (shape, inside.start, flat.detach().clone())
        elif flat.dim():
            values = flat.narrow(0, place.start, place.numel).clone()
            held[_key(name, key)] = (shape, inside.start, values)


def _bit16_groups(optimizer: Any) -> Any:
    return getattr(optimizer, "bit16_groups", None) or optimizer.bf16_groups


def _gather_stage3(engine: Any, name: str, param: Any, held: dict[str, Any]) -> None:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    shape = tuple(param.ds_shape)
    held[_key(name, "master")] = (shape, 0, safe_get_full_fp32_param(param).flatten().clone())
    for key in ("exp_avg", "exp_avg_sq"):
        full = safe_get_full_optimizer_state(param, key)
        held[_key(name, key)] = (shape, 0, full.flatten().clone())
    steps = [s["step"] for s in engine.optimizer.optimizer.state.values()]
    held[_key(name, "step")] = ((), 0, steps[0].clone().flatten())


def joined(parts: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Put the ranks' runs together; a stage 3 fragment may end in padding."""
    whole: dict[str, torch.Tensor] = {}
    for part in parts:
        for key, (shape, start, values) in part.items():
            numel = torch.Size(shape).numel()
            full = whole.setdefault(key, torch.full((numel,), 0, dtype=values.dtype).view(shape))
            length = max(min(values.numel(), numel - start), 0)
            full.view(-1)[start : start + length] = values[:length]
    return whole


def sliced(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Put two tensor slices together as `INFO` says they are cut."""
    whole = {}
    for key in parts[0]:
        a, b = (part[key] for part in parts)
        name = key.partition(":")[2] or key
        if key.startswith("optimizer:") or name in ("norm", "mean"):
            whole[key] = a
        elif name == "fc1":
            (g0, u0), (g1, u1) = a.chunk(2), b.chunk(2)
            whole[key] = torch.cat([g0, g1, u0, u1])
        else:
            whole[key] = torch.cat([a, b], dim=1 if name == "down" else 0)
    return whole


def make(name: str) -> None:
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as scratch:
        port = 29500 + list(JOBS).index(name)
        start_processes(  # type: ignore[no-untyped-call]
            run, (name, scratch, port), nprocs=JOBS[name]["world"], start_method="spawn"
        )
        parts = torch.load(Path(scratch) / "truth.pt", weights_only=False)
        if name == "tp":
            truth = sliced([joined(parts[0::2]), joined(parts[1::2])])
        else:
            truth = joined(parts)
        truth = {key.replace("_checkpoint_wrapped_module.", ""): v for key, v in truth.items()}
        place = HERE / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        save_file(
            {k: v.contiguous().clone() for k, v in truth.items()}, place / "truth.safetensors"
        )
        shutil.copytree(Path(scratch) / f"global_step{STEPS}", place / f"global_step{STEPS}")


def convert(name: str) -> None:
    """Let DeepSpeed's own converter make a universal checkpoint of a set."""
    from deepspeed.checkpoint import ds_to_universal

    source = name.removeprefix("universal_")
    place = HERE / name
    shutil.rmtree(place, ignore_errors=True)
    ds_to_universal.main(
        SimpleNamespace(
            input_folder=str(HERE / source / f"global_step{STEPS}"),
            output_folder=str(place / f"global_step{STEPS}_universal"),
            num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
            inject_missing_state=source != "tp",
        )
    )  # fmt: skip
    (place / "latest_universal").unlink()


if __name__ == "__main__":
    universal = [f"universal_{name}" for name in ("z1", "z3", "wrap", "tp")]
    for wanted in sys.argv[1:] or [*JOBS, *universal]:
        (convert if wanted.startswith("universal_") else make)(wanted)
