"""Find the parts of a training, and turn their state into items of a record.

It holds the modules that the training calls, and the optimizers, schedules, scalers and averaged
models that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from . import read_state as readings
from .root_modules import Outermost
from .tensors import tensor_digest

if TYPE_CHECKING:
    import torch

    See = Callable[[str, str, torch.Tensor], None]


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
        self._moments: list[readings.ParameterState] = []
        self._masters: list[tuple[int, str, str]] = []

    def made(self, kind: str, thing: Any) -> None:
        """Remember `optimizers`, `schedulers`, `scalers` or `averaged` models."""
        # Held for good: if the training drops them at its end, the last state is still readable.
        if all(other is not thing for other in self._made[kind]):
            self._made[kind].append(thing)

    def numbers(self) -> dict[str, dict[str, str]]:
        """Return the events of non-tensor state, without empty ones."""
        events = {
            "lr": readings.learning_rates(self._made["optimizers"]),
            "scheduler": readings.scheduler_items(self._made["schedulers"]),
            "scaler": readings.scaler_items(self._made["scalers"]),
        }
        return {key: items for key, items in events.items() if items}

    def averages(self) -> dict[str, dict[str, str]]:
        """Return the event of averaged weights, if there are any."""
        items: dict[str, str] = {}
        for place, model in enumerate(self._made["averaged"]):
            items |= readings.value_items(model.state_dict(), str(place), partial(self._see, "ema"))
        return {"ema": items} if items else {}

    def read_moments(self) -> None:
        """Read the optimizers' present state, for `moments`."""
        names = self.modules.parameter_names()
        see = partial(self._see, "optimizer")
        self._moments = list(readings.parameter_states(self._made["optimizers"], names, see))
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

        items = readings.value_items(value, see=see)
        return {prefix + name: inner for name, inner in items.items()}
