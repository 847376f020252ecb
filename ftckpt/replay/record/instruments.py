"""Wrap torch so that a training is recorded without changing it.

Global optimizer-step hooks and the global forward hooks are torch's own; `autograd.backward`, the
data loader's iterator, `torch.save` and the constructors of optimizers, schedules, scalers and
averaged models are wrapped. Code that never calls these (a fused trainer without a torch optimizer,
a loader written in C++) must call `ftckpt.hook.step` instead.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .step_records import Recorder


def install(recorder: Recorder) -> None:
    """Instrument torch and related modules, now or when the training imports them."""
    after: dict[str, Callable[[ModuleType], None]] = {
        "torch": lambda module: instrument(module, recorder),
        "torch.distributed.checkpoint": lambda module: _saving(
            module, ("save", "async_save", "save_state_dict"), recorder
        ),
        "torch.distributed.checkpoint.state_dict": lambda module: _making_state(module, recorder),
        "safetensors.torch": lambda module: _saving(
            module, ("save_file", "save_model", "save"), recorder
        ),
        "numpy.random": lambda module: _seeding(module, "seed", "numpy", recorder),
    }
    _seeding(random, "seed", "python", recorder)
    for name in list(after):
        if name in sys.modules:
            after.pop(name)(sys.modules[name])
    if after:
        sys.meta_path.insert(0, _AfterImport(after))


class _AfterImport(MetaPathFinder):
    """Calls a function after the import of a module; finds no module itself."""

    def __init__(self, after: dict[str, Callable[[ModuleType], None]]) -> None:
        self._after = after

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in self._after:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                _call_after(spec.loader, self._after.pop(fullname))
                return spec
        return None


def _call_after(loader: Loader, function: Callable[[ModuleType], None]) -> None:
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        try:
            function(module)
        except AttributeError as error:  # another torch; the missing log will show it
            print(f"ftckpt: {module.__name__} cannot be recorded: {error}", file=sys.stderr)

    loader.exec_module = exec_module  # type: ignore[method-assign]


def instrument(torch: Any, recorder: Recorder) -> None:
    """Wrap the recorded functions; torch has just been imported."""
    optim = torch.optim
    _constructor(optim.Optimizer, "optimizers", recorder)
    _constructor(optim.lr_scheduler.LRScheduler, "schedulers", recorder)
    _constructor(torch.amp.GradScaler, "scalers", recorder)
    _constructor(optim.swa_utils.AveragedModel, "averaged", recorder)
    _stepping(import_module("torch.optim.optimizer"), recorder)
    _forward(torch, recorder)
    _backward(torch.autograd, recorder)
    _differentiating(torch.autograd, recorder)
    _scaling(torch.amp.GradScaler, recorder)
    _loader(torch.utils.data.dataloader._BaseDataLoaderIter, recorder)
    _saving(torch, ("save",), recorder)
    _seeding(torch, "manual_seed", "torch", recorder)


def _constructor(of: Any, kind: str, recorder: Recorder) -> None:
    make = of.__init__

    @wraps(make)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        recorder.made(kind, self)

    of.__init__ = __init__


def _stepping(hooks: Any, recorder: Recorder) -> None:
    def has_closure(arguments: Any, named: Any) -> bool:
        return callable(named.get("closure", arguments[0] if arguments else None))

    def before(optimizer: Any, arguments: Any, named: Any) -> None:
        # A closure computes the gradients within the step; before it they are another step's.
        if not has_closure(arguments, named):
            recorder.gradients(optimizer)

    def after(optimizer: Any, arguments: Any, named: Any) -> None:
        if has_closure(arguments, named):
            recorder.gradients(optimizer)
        recorder.updated()

    hooks.register_optimizer_step_pre_hook(before)
    hooks.register_optimizer_step_post_hook(after)


def _forward(torch: Any, recorder: Recorder) -> None:
    def before(module: Any, arguments: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        recorder.forward(module, arguments)

    def after(module: Any, arguments: Any, named: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        recorder.called(module, named)

    torch.nn.modules.module.register_module_forward_pre_hook(before)
    # The global hook before a call does not see keyword arguments; the one after it does.
    torch.nn.modules.module.register_module_forward_hook(after, with_kwargs=True)


def _backward(autograd: Any, recorder: Recorder) -> None:
    run = autograd.backward

    @wraps(run)
    def backward(tensors: Any, *arguments: Any, **named: Any) -> Any:
        for tensor in tensors if isinstance(tensors, (list, tuple)) else (tensors,):
            recorder.backward(tensor)
        return run(tensors, *arguments, **named)

    # torch.Tensor.backward looks it up here at each call.
    autograd.backward = backward


def _differentiating(autograd: Any, recorder: Recorder) -> None:
    run = autograd.grad

    @wraps(run)
    def grad(*arguments: Any, **named: Any) -> Any:
        recorder.differentiated()
        return run(*arguments, **named)

    autograd.grad = grad


def _making_state(module: Any, recorder: Recorder) -> None:
    """Mark the step that torch makes in `get_state_dict` to create an optimizer's state."""
    run = getattr(module, "_init_optim_state", None)
    if run is None:
        return

    @wraps(run)
    def init_optim_state(*arguments: Any, **named: Any) -> Any:
        with recorder.making_state():
            return run(*arguments, **named)

    module._init_optim_state = init_optim_state


def _scaling(scaler: Any, recorder: Recorder) -> None:
    run = scaler.scale

    @wraps(run)
    def scale(self: Any, outputs: Any) -> Any:
        result = run(self, outputs)
        recorder.scaled(outputs, result)
        return result

    scaler.scale = scale


def _loader(iterator: Any, recorder: Recorder) -> None:
    following = iterator.__next__

    @wraps(following)
    def __next__(self: Any) -> Any:
        recorder.fetching()
        batch = following(self)
        recorder.fetched(batch)
        return batch

    iterator.__next__ = __next__


def _saving(module: Any, names: tuple[str, ...], recorder: Recorder) -> None:
    for name in names:
        run = getattr(module, name, None)
        if run is not None:
            setattr(module, name, _saved(run, recorder))


def _saved(run: Any, recorder: Recorder) -> Any:
    @wraps(run)
    def save(*arguments: Any, **named: Any) -> Any:
        done = run(*arguments, **named)
        given = (*arguments, *named.values())
        where = [a for a in given if isinstance(a, str) or _is_path(a)]
        state = named.get("obj", named.get("state_dict", arguments[0] if arguments else None))
        recorder.saved(str(where[0]) if where else "", state)
        return done

    return save


def _is_path(value: Any) -> bool:
    return hasattr(value, "__fspath__")


def _seeding(module: Any, name: str, who: str, recorder: Recorder) -> None:
    run = getattr(module, name)

    @wraps(run)
    def seed(*arguments: Any, **named: Any) -> Any:
        recorder.note(f"{who} seeded with {arguments[0] if arguments else named or 'the clock'}")
        return run(*arguments, **named)

    setattr(module, name, seed)
