"""Read the state of a running training: random streams, nested state, optimizer state.

Runs in the user's process, which has imported torch. It changes nothing and draws no random number.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from .floats import written
from .streams import device_stream, numpy_stream, python_stream, torch_stream
from .tensors import tensor_digest

if TYPE_CHECKING:
    import torch

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
