"""Weights that are stored as codes with scales beside them: what belongs to what."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

# Types of codes: packed values and 8-bit floats. Counters and indexes are int64, and no quantiser
# packs into it.
CODED = frozenset(
    {
        "int8", "uint8", "int16", "uint16", "int32", "uint32", "float8_e4m3fn", "float8_e5m2",
        "float8_e4m3fnuz", "float8_e5m2fnuz",
    }
)  # fmt: skip


class ScaleRule(StrEnum):
    """What the values of a tensor beside quantised weights may be.

    Attributes:
        POSITIVE: finite and greater than zero.
        NOT_NEGATIVE: finite and not less than zero: a block of zeros may have zero.
        EXPONENT: codes of E8M0 in bytes, of which 255 is NaN.
        ANY: nothing is known of them.
    """

    POSITIVE = "positive"
    NOT_NEGATIVE = "not negative"
    EXPONENT = "exponent"
    ANY = "any"


class QuantisedTensor(NamedTuple):
    """A weight in codes, and the tensors that say what they stand for.

    Attributes:
        scheme: how it is stored, in words (`block FP8`).
        key: of the tensor of codes.
        name: of the weight as the model calls it.
        shape: of the weight; the tensor of codes may pack several into one element.
        parts: keys of its scales and of what else belongs to it, by role.
        rules: what the values of those may be, by key.
    """

    scheme: str
    key: str
    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    rules: Mapping[str, ScaleRule]
