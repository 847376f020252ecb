"""Reading the state of a running training: digests of tensors, random streams, small state.

These run in the user's process, which has imported torch. Tensors are digested where they lie, with
the sums of `ftckpt.tensor_digest`, whose integer additions no order of reduction can change; so two
processes and two devices agree. Nothing that is read is changed, and no random number is drawn.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.checkpoint import Box
from ftckpt.dtypes import DTYPES
from ftckpt.tensor_digest import TensorDigest

from .device_sums import device_sums
from .floats import written
from .streams import device_stream, numpy_stream, python_stream, torch_stream

if TYPE_CHECKING:
    import torch

# How deep nested state is followed: a batch, a scheduler and a sampler are shallow.
_DEEPEST = 12


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return `dtype[shape]:S1S2`, the sums in hexadecimal; of a distributed tensor, its local part.

    A sparse or quantized tensor, and one without storage, is told by type and shape alone.
    """
    import torch

    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    tensor = tensor.detach()
    name = str(tensor.dtype).removeprefix("torch.")
    head = f"{name}[{','.join(map(str, tensor.shape))}]"
    dense = tensor.layout is torch.strided and not tensor.is_quantized
    if not dense or tensor.device.type == "meta" or name not in DTYPES:
        return f"{head}:not read"
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.contiguous()
    if tensor.device.type == "cpu":
        digest = TensorDigest(DTYPES[name], tensor.shape)
        raw = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
        digest.update(Box.whole(tuple(tensor.shape)), raw)
        sums = digest.sums
    else:
        sums = device_sums(tensor)
    return f"{head}:{sums[0]:016x}{sums[1]:016x}"


def random_streams(*, whole: bool) -> dict[str, dict[str, Any]]:
    """Return the state of every generator that the process uses, by name.

    Args:
        whole: with the words of the state, so that draws between two states can be counted.
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


def value_items(value: Any, name: str = "") -> dict[str, str]:
    """Return nested state as items: floats as they are, tensors and the rest as digests.

    Args:
        value: lists, tuples and mappings of tensors, arrays, numbers and text.
        name: of the value; items inside are `name.key`, or their place.
    """
    return dict(_walk(value, name, 0))


def _walk(value: Any, name: str, depth: int) -> Iterator[tuple[str, str]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield name or "0", tensor_digest(value)
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
        # What it holds is not known, and its text may show an address: only its type is compared.
        yield name or "0", f"{type(value).__name__}: not read"


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"text:{_hash(text.encode(errors='surrogatepass'))}"


def _hash(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def scalar(loss: Any) -> Any:
    """Return a loss as it stands in a record: its type and its bits; what is no scalar as it is."""
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
    """What an optimizer keeps for one parameter.

    Attributes:
        parameter: its `id`.
        place: its place in the optimizers, for one that has no name: `0.12`.
        items: the state: `exp_avg`, `step`, ….
    """

    parameter: int
    place: str
    items: dict[str, str]


def parameter_states(optimizers: list[Any]) -> Iterator[ParameterState]:
    """Yield what optimizers keep, parameter by parameter, in the order of their groups."""
    for place, optimizer in enumerate(optimizers):
        ordered = chain.from_iterable(g["params"] for g in optimizer.param_groups)
        for number, parameter in enumerate(ordered):
            state = optimizer.state.get(parameter)
            if state:
                yield ParameterState(id(parameter), f"{place}.{number}", value_items(state))


def scheduler_items(schedulers: list[Any]) -> dict[str, str]:
    """Return the state of learning-rate schedules as items."""
    items: dict[str, str] = {}
    for place, scheduler in enumerate(schedulers):
        items |= value_items(scheduler.state_dict(), str(place))
    return items


def scaler_items(scalers: list[Any]) -> dict[str, str]:
    """Return scale and growth counters of loss scalers; nothing of those that are disabled."""
    items: dict[str, str] = {}
    for place, scaler in enumerate(scalers):
        if scaler.is_enabled():
            items |= value_items(scaler.state_dict(), str(place))
    return items
