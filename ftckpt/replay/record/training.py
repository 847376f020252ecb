"""Find the parts of a training, and turn their state into items of a record.

It holds the modules that the training calls, and the optimizers, schedules, scalers and averaged
models that it makes.

Read the state of a running training: random streams, nested state, optimizer state.

Runs in the user's process, which has imported torch. It changes nothing and draws no random number.

The outermost modules that a training calls, and the names of their parameters.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from .log import written
from .streams import device_stream, numpy_stream, python_stream, torch_stream
from .tensors import tensor_digest

if TYPE_CHECKING:
    import torch

    See = Callable[[str, str, torch.Tensor], None]


# Maximum depth of nested state: a batch, a scheduler and a sampler are shallow.
_DEEPEST = 12


def random_streams(*, whole: bool) -> dict[str, dict[str, Any]]:
    """Return the state of every generator of the process, by name.

    With `whole` it includes the words of the state, so that draws between two states can be
    counted.
    """
    import torch

    streams = {"python": python_stream(random.getstate())}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        streams["numpy"] = numpy_stream(numpy.get_state())
    streams["torch"] = torch_stream(bytes(torch.get_rng_state().numpy()))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state = torch.cuda.get_rng_state()
        device = torch.cuda.current_device()
        streams[f"cuda:{device}"] = device_stream(bytes(state.numpy()))
    return {name: stream.record(whole=whole) for name, stream in streams.items()}


def value_items(
    value: Any, name: str = "", see: Callable[[str, torch.Tensor], None] | None = None
) -> dict[str, str]:
    """Return nested state as items: floats as they are, tensors and the rest as digests.

    Args:
        value: lists, tuples and mappings of tensors, arrays, numbers and text.
        name: of the value; items inside are `name.key`, or their place.
        see: called with each item's name and tensor.
    """
    import torch

    items = {}
    for key, inner in _walk(value, name, 0):
        if isinstance(inner, torch.Tensor):
            if see is not None:
                see(key, inner)
            items[key] = tensor_digest(inner)
        else:
            items[key] = inner
    return items


def _walk(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield items by name; tensors as they are, all else as in a record."""
    import torch

    if isinstance(value, torch.Tensor):
        yield name or "0", value
    elif isinstance(value, bool) or value is None:
        yield name or "0", str(value)
    elif isinstance(value, float):
        yield name or "0", written(value)
    elif isinstance(value, (int, str)):
        yield name or "0", _short(str(value))
    elif isinstance(value, bytes):
        yield name or "0", f"bytes:{_hash(value)}"
    elif depth < _DEEPEST and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _walk(inner, f"{name}.{key}" if name else str(key), depth + 1)
    elif depth < _DEEPEST and isinstance(value, (list, tuple, set, frozenset)):
        ordered = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        for place, inner in enumerate(ordered):
            yield from _walk(inner, f"{name}.{place}" if name else str(place), depth + 1)
    elif hasattr(value, "dtype") and hasattr(value, "tobytes"):  # numpy's arrays and scalars
        shape = ",".join(map(str, getattr(value, "shape", ())))
        yield name or "0", f"{value.dtype}[{shape}]:{_hash(value.tobytes())}"
    else:
        # Unknown content, whose text may show an address: only its type is compared.
        yield name or "0", f"{type(value).__name__}: not read"


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"text:{_hash(text.encode(errors='surrogatepass'))}"


def _hash(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def scalar(loss: Any) -> Any:
    """Return a loss as in a record: type and bits of a scalar, anything else as it is."""
    import torch

    if not isinstance(loss, torch.Tensor):
        return loss
    if hasattr(loss, "full_tensor"):
        loss = loss.full_tensor()
    if loss.numel() != 1:
        return loss
    return written(float(loss.detach()), str(loss.dtype).removeprefix("torch."))


def learning_rates(optimizers: list[Any]) -> dict[str, str]:
    """Return the learning rate of each parameter group of each optimizer."""
    rates = {}
    for place, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            if "lr" in group:
                rates[f"{place}.{number}"] = written(float(group["lr"]))
    return rates


class ParameterState(NamedTuple):
    """An optimizer's state of one parameter.

    Attributes:
        parameter: its `id`.
        place: its place in the optimizers, for one without a name: `0.12`.
        items: the state: `exp_avg`, `step`, ….
    """

    parameter: int
    place: str
    items: dict[str, str]


def parameter_states(
    optimizers: list[Any],
    names: Mapping[int, str],
    see: Callable[[str, torch.Tensor], None],
) -> Iterator[ParameterState]:
    """Yield optimizer state, parameter by parameter, in the order of their groups.

    `names` are known parameter names by `id`; `see` is called with each item's name and tensor.
    """
    for place, optimizer in enumerate(optimizers):
        ordered = chain.from_iterable(g["params"] for g in optimizer.param_groups)
        for number, parameter in enumerate(ordered):
            state = optimizer.state.get(parameter)
            if state:
                one = f"{place}.{number}"
                name = names.get(id(parameter), one)
                items = value_items(state, name, see)
                keys = {key.removeprefix(f"{name}."): value for key, value in items.items()}
                yield ParameterState(id(parameter), one, keys)


def scheduler_items(schedulers: list[Any]) -> dict[str, str]:
    """Return the state of learning-rate schedules as items."""
    items: dict[str, str] = {}
    for place, scheduler in enumerate(schedulers):
        items |= value_items(scheduler.state_dict(), str(place))
    return items


def scaler_items(scalers: list[Any]) -> dict[str, str]:
    """Return scale and growth counters of enabled loss scalers."""
    items: dict[str, str] = {}
    for place, scaler in enumerate(scalers):
        if scaler.is_enabled():
            items |= value_items(scaler.state_dict(), str(place))
    return items


_INSIDE = -1


class Outermost:
    """Modules in the order of their first call, without those inside another."""

    def __init__(self) -> None:
        self._roots: list[Any] = []
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._roots)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._roots)

    def __getitem__(self, place: int) -> Any:
        return self._roots[place]

    def knows(self, module: Any) -> bool:
        """Whether a module was called before, or lies inside one that was."""
        return id(module) in self._places

    def add(self, module: Any) -> int:
        """Add an unknown module with all modules inside it; return its place."""
        place = len(self._roots)
        self._roots.append(module)
        self._places |= {id(inner): _INSIDE for inner in module.modules()} | {id(module): place}
        return place

    def place(self, module: Any) -> int | None:
        """Return the place of an outermost module; None for another."""
        place = self._places.get(id(module), _INSIDE)
        return None if place == _INSIDE else place

    def named(self, place: int, name: str) -> str:
        """Return a name within a module; names of the first have no prefix."""
        return name if place == 0 else f"{place}:{name}"

    def parameter_names(self) -> dict[int, str]:
        """Return the name of each parameter, by its `id`."""
        return {
            id(parameter): self.named(place, name)
            for place, root in enumerate(self._roots)
            for name, parameter in root.named_parameters()
        }


class Training:
    """The modules and optimizers of this process's training.

    Args:
        see: called with event, item name and tensor for each tensor that is read.

    Attributes:
        modules: those that were called.
    """

    def __init__(self, see: See) -> None:
        self.modules = Outermost()
        self._see = see
        self._made: dict[str, list[Any]] = {
            kind: [] for kind in ("optimizers", "schedulers", "scalers", "averaged")
        }
        self._moments: list[ParameterState] = []
        self._masters: list[tuple[int, str, str]] = []

    def made(self, kind: str, thing: Any) -> None:
        """Remember `optimizers`, `schedulers`, `scalers` or `averaged` models."""
        # Held for good: if the training drops them at its end, the last state is still readable.
        if all(other is not thing for other in self._made[kind]):
            self._made[kind].append(thing)

    def numbers(self) -> dict[str, dict[str, str]]:
        """Return the events of non-tensor state, without empty ones."""
        events = {
            "lr": learning_rates(self._made["optimizers"]),
            "scheduler": scheduler_items(self._made["schedulers"]),
            "scaler": scaler_items(self._made["scalers"]),
        }
        return {key: items for key, items in events.items() if items}

    def averages(self) -> dict[str, dict[str, str]]:
        """Return the event of averaged weights, if there are any."""
        items: dict[str, str] = {}
        for place, model in enumerate(self._made["averaged"]):
            items |= value_items(model.state_dict(), str(place), partial(self._see, "ema"))
        return {"ema": items} if items else {}

    def read_moments(self) -> None:
        """Read the optimizers' present state, for `moments`."""
        names = self.modules.parameter_names()
        see = partial(self._see, "optimizer")
        self._moments = list(parameter_states(self._made["optimizers"], names, see))
        self._masters = [
            (id(parameter), place, self.digest("masters", place, parameter))
            for place, parameter in self._parameters()
            if id(parameter) not in names
        ]

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield the optimizers' parameters, by place: `0.12`."""
        for number, optimizer in enumerate(self._made["optimizers"]):
            ordered = chain.from_iterable(group["params"] for group in optimizer.param_groups)
            yield from ((f"{number}.{place}", one) for place, one in enumerate(ordered))

    def masters(self) -> dict[str, str]:
        """Return the optimizers' parameters that no module called so far has."""
        names = self.modules.parameter_names()
        return {place: digest for parameter, place, digest in self._masters
                if parameter not in names}  # fmt: skip

    def accumulated(self, place: int) -> dict[str, str]:
        """Return the present gradients of an outermost module's parameters."""
        named = (
            (self.modules.named(place, name), parameter.grad)
            for name, parameter in self.modules[place].named_parameters()
        )
        return {
            name: self.digest("grad_start", name, gradient)
            for name, gradient in named
            if gradient is not None
        }

    def moments(self) -> dict[str, str]:
        """Return the result of `read_moments`, under the parameters' present names.

        Parameters of a module that is called later in a step have no name when the step begins.
        """
        names = self.modules.parameter_names()
        return {
            f"{names.get(state.parameter, state.place)}.{key}": value
            for state in self._moments
            for key, value in state.items.items()
        }

    def forget_moments(self) -> None:
        """Forget the last reading, because the new step may not be read."""
        self._moments, self._masters = [], []

    def weights(self, place: int) -> dict[str, dict[str, str]]:
        """Return the events of parameters and buffers of an outermost module."""
        root = self.modules[place]
        events = {}
        for event, tensors in (
            ("params", root.named_parameters()),
            ("buffers", root.named_buffers()),
        ):
            named = ((self.modules.named(place, name), tensor) for name, tensor in tensors)
            events[event] = {name: self.digest(event, name, tensor) for name, tensor in named}
        return {event: items for event, items in events.items() if items}

    def digest(self, event: str, item: str, tensor: torch.Tensor) -> str:
        """Return the digest of a tensor that is an item of its own."""
        self._see(event, item, tensor)
        return tensor_digest(tensor)

    def items(self, event: str, value: Any, *, prefix: str = "") -> dict[str, str]:
        """Return nested state as items of an event; each name begins with the prefix."""

        def see(item: str, tensor: torch.Tensor) -> None:
            self._see(event, prefix + item, tensor)

        items = value_items(value, see=see)
        return {prefix + name: inner for name, inner in items.items()}
