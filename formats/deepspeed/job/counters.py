"""Store step counters as an example does: a fused Adam counts steps in plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ftckpt.checkpoint import Kind, tensor_key
from ftckpt.checkpoint.dtypes import decode_scalar
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import UnsupportedError
from ftckpt.transfer.content import Content, TargetTensor

from . import STEP, DeepSpeedJob

Numbers = Mapping[str, Mapping[str, Any]]


class Counters(NamedTuple):
    """What is stored as plain numbers.

    Attributes:
        numbers: parameter -> leaf -> value.
        used: keys of the source's tensors that became numbers.
    """

    numbers: dict[str, dict[str, Any]]
    used: set[str]


def counters_of(content: Content, example: DeepSpeedJob, numbers: Numbers) -> Counters:
    """Make plain numbers of the counters that an example has as such.

    Args:
        content: what is to be written.
        example: the job that the result is laid out for.
        numbers: parameter -> leaf -> value of the source's states that are no tensors.

    Raises:
        UnsupportedError: a counter of the example is not there, or is not such a number.
    """
    made = Counters({name: dict(own) for name, own in numbers.items()}, set())
    for mp, number in example.param_groups():
        counters = example.numbers[mp][number]
        if example.counts_in_settings(mp, number):
            counters = {**counters, STEP: example.settings[mp][number][STEP]}
        for leaf, like in counters.items():
            for name in example.members(mp, number):
                if leaf not in made.numbers.setdefault(name, {}):
                    key = tensor_key("optimizer", Kind.OTHER, f"{name}.{leaf}")
                    made.numbers[name][leaf] = _number(content, key, like)
                    made.used.add(key)
    return made


def _number(content: Content, key: str, like: Any) -> Any:
    """Return a tensor's value as a number of the type of another."""
    wanted = content.tensors.get(key)
    value = None if wanted is None else _scalar(content, wanted)
    if value is None or type(like) not in (int, float) or type(like)(value) != value:
        raise UnsupportedError(
            f"{key} is not there as a number, and the example has it", tensor=key
        )
    return type(like)(value)


def _scalar(content: Content, wanted: TargetTensor) -> float | None:
    if wanted.shape != () or len(wanted.copies) != 1:
        return None
    return decode_scalar(wanted.dtype, read_tensor(content.checkpoint, wanted.copies[0].key))
