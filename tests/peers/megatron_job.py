"""Let Megatron-LM load a checkpoint and save what it loaded: `megatron_job.py RANKS ARGUMENTS…`.

Runs on the CPU, in a Python with torch and with Megatron-LM's checkout on its path, and knows
nothing of ftckpt. ARGUMENTS are those of `pretrain_gpt.py`. Without `--load` the model gets
optimizer states from a step with random gradients.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import socket
import sys
import types
import typing
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import torch
import typing_extensions
from torch.multiprocessing.spawn import start_processes


class NoTriton(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Megatron's modules import triton for kernels that no CPU can run."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] == "triton":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: Any) -> None:
        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return MagicMock()

        module.__getattr__ = missing
        module.jit = unchanged
        module.__version__ = "3.0.0"


def unchanged(function: Any = None, **options: Any) -> Any:
    return function if function is not None else unchanged


class Idle:
    """A stream or an event of a device that is not there."""

    def __init__(self, *args: Any, **options: Any) -> None: ...
    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *args: Any) -> None: ...
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: True


class Generators:
    def __getitem__(self, device: Any) -> torch.Generator:
        return torch.default_generator


def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **options: Any) -> Any:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return make(*args, **options)

    return made


def pretend_to_have_a_device() -> None:
    cuda: Any = torch.cuda
    device = types.SimpleNamespace(major=8, minor=0, multi_processor_count=1, total_memory=1 << 30)
    for name, value in {
        "current_device": torch.device("cpu"), "set_device": None, "device_count": 1,
        "is_available": False, "synchronize": None, "get_device_capability": (8, 0),
        "get_device_properties": device, "memory_allocated": 0, "max_memory_allocated": 0,
        "memory_reserved": 0, "empty_cache": None,
    }.items():  # fmt: skip
        setattr(cuda, name, partial(lambda value, *args, **options: value, value))
    cuda.get_rng_state = lambda *args, **options: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda._lazy_call = lambda call, **options: call()
    cuda.default_generators = Generators()
    cuda.Stream = cuda.Event = cuda.stream = cuda.current_stream = Idle
    for name in ("Float", "Int", "Long", "Byte", "Double", "Half", "BFloat16"):
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    for name in ("zeros", "empty", "ones", "tensor", "full", "arange", "rand", "randn"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    kind = tensor.type
    tensor.cuda = lambda self, *args, **options: self
    tensor.type = lambda self, *args: (
        kind(self, *args) if args else kind(self).replace("torch.", "torch.cuda.", 1)
    )
    module: Any = torch.nn.Module
    module.cuda = lambda self, *args, **options: self
    compiler: Any = torch
    compiler.compile = unchanged


def job(rank: int, world: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
    load: Any = importlib.import_module
    # Before core 0.19 what initialises Megatron reads them.
    getattr(load("megatron.training.arguments"), "parse_and_validate_args", lambda: None)()
    initialize = load("megatron.training.initialize")
    initialize._compile_dependencies = lambda *args, **options: None
    distributed: Any = load("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    put = distributed._set_main_param_and_optimizer_states

    # torch's Adam, which stands in for the fused one, keeps its step among the tensors.
    def put_tensors(self: Any, weight: Any, tensors: Any) -> None:
        group, order = self.model_param_group_index_map[weight]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        put(self, weight, {**tensors, **{k: v for k, v in state.items() if k == "step"}})

    distributed._set_main_param_and_optimizer_states = put_tensors
    initialize.initialize_megatron(allow_no_cuda=True)
    arguments = load("megatron.training.global_vars").get_args()
    provider = partial(load("model_provider").model_provider, load("gpt_builders").gpt_builder)
    kind = load("megatron.core.enums").ModelType.encoder_or_decoder
    setup = load("megatron.training.training").setup_model_and_optimizer
    model, optimizer, scheduler = setup(model_type=kind, model_provider_func=provider)
    if arguments.load is None:
        torch.manual_seed(torch.distributed.get_rank() // arguments.data_parallel_size)
        for chunk in model:
            for weight in chunk.parameters():
                weight.main_grad.normal_()
        optimizer.step()
        arguments.iteration = 1
    save = load("megatron.training.checkpointing").save_checkpoint
    save(arguments.iteration, model, optimizer, scheduler, 0)


def main() -> None:
    sys.meta_path.insert(0, NoTriton())
    typing.override = typing_extensions.override  # type: ignore[attr-defined, unused-ignore]
    pretend_to_have_a_device()
    # What takes a job's time is imported once, before it becomes ranks.
    importlib.import_module("megatron.training.training")
    world = int(sys.argv.pop(1))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start_processes(  # type: ignore[no-untyped-call]
        job, (world, port), nprocs=world, start_method="fork"
    )


if __name__ == "__main__":
    main()
