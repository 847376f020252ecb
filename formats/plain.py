"""Turn inert data into what JSON can hold, bounded: for people and scripts to look at.

Lossy on purpose: long things are abbreviated, records become dicts, what cannot be shown is named.
Nothing recurses over the data itself: it may be a million levels deep.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from ftckpt.dtypes import DType

from .inert_tree import step_of
from .torch_values import Composite, StorageRef, SubclassRef, TensorRef
from .unpickle import Inert

DEPTH, ITEMS, TEXT = 12, 64, 400
_MAX_VALUES = 20_000
# numpy's own type codes -> struct's; only one-element values are decoded.
_NUMPY = {
    "f2": "e", "f4": "f", "f8": "d", "i1": "b", "i2": "h", "i4": "i", "i8": "q",
    "u1": "B", "u2": "H", "u4": "I", "u8": "Q", "b1": "?",
}  # fmt: skip
_PATHS = ("pathlib.", "pathlib._local.")


def plain(value: Any, *, depth: int = DEPTH, items: int = ITEMS, text: int = TEXT) -> Any:
    """Return `value` as dict, list, str, int, float, bool and None.

    Namespaces and other records become dicts of their state, enums their value, numpy scalars
    numbers, paths text, tensors a line. NaN and infinities become text, because JSON has none.

    Args:
        value: what `Checkpoint.load_object` returned.
        depth: levels shown; below stands the name of the type.
        items: members shown of each container; `…` says how many more there are.
        text: characters shown of each string.
    """
    return _Converter(items, text).convert(value, depth)


class _Converter:
    def __init__(self, items: int, text: int) -> None:
        self.items, self.text = items, text
        self.left = _MAX_VALUES

    def convert(self, value: Any, depth: int) -> Any:
        """Convert one value; recursion is bounded by `depth`."""
        self.left -= 1
        if value is None or type(value) is bool:
            return value
        if type(value) is int:
            # JSON readers and str() both have limits that a file need not have.
            return value if abs(value) < 1 << 64 else hex(value)[: self.text]
        if type(value) is float:
            return value if math.isfinite(value) else str(value)
        if type(value) is str:
            return self._text(value)
        if isinstance(value, (bytes, bytearray)):
            return f"<{len(value)} bytes>"
        shown = _line(value)
        if shown is not None:
            return shown
        if isinstance(value, Inert):
            return self._record(value, depth)
        if depth <= 0 or self.left <= 0:
            return f"<{type(value).__name__}>"
        if isinstance(value, dict):
            return self._dict(value, depth)
        if isinstance(value, (list, tuple, set, frozenset)):
            return self._list(value, len(value), depth)
        return f"<{type(value).__name__}>"

    def _text(self, value: str) -> str:
        if len(value) > self.text:
            value = value[: self.text] + f"… ({len(value)} characters)"
        return value.encode("utf-8", "replace").decode()

    def _dict(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        for number, (key, member) in enumerate(value.items()):
            if number == self.items or self.left <= 0:
                shown["…"] = f"{len(value) - number} more"
                break
            shown[self._text(str(step_of(key)))] = self.convert(member, depth - 1)
        return shown

    def _list(self, value: Iterable[Any], length: int, depth: int) -> list[Any]:
        shown: list[Any] = []
        for number, member in enumerate(value):
            if number == self.items or self.left <= 0:
                shown.append(f"… {length - number} more")
                break
            shown.append(self.convert(member, depth - 1))
        return shown

    def _record(self, value: Inert, depth: int) -> Any:
        number = _numpy_scalar(value)
        if number is not None:
            return number if math.isfinite(number) else str(number)
        name = value.qualname
        if name.startswith(_PATHS) and all(type(part) is str for part in value.args):
            return self._text("/".join(value.args).replace("//", "/"))
        state = value.state
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] if isinstance(state[0], dict) else {}), **state[1]}
        if depth <= 0 or self.left <= 0:
            return f"<{name}>"
        if isinstance(state, dict):
            return self._dict(state, depth)
        if value.items:
            pairs = all(type(item) is tuple and len(item) == 2 for item in value.items)
            members = {f"{step_of(k)}": v for k, v in value.items} if pairs else None
            if members is not None:
                return self._dict(members, depth)
            return self._list(value.items, len(value.items), depth)
        if state is None and len(value.args) == 1 and type(value.args[0]) in (int, str, float):
            return self.convert(value.args[0], depth)  # an enum member, a device, a version
        if name.startswith("collections.") and len(value.args) == 1:
            return self.convert(value.args[0], depth)
        if state is None and value.args and "ndarray" not in name and "_reconstruct" not in name:
            return {name: self._list(value.args, len(value.args), depth)}
        return f"<{name}>"


def _line(value: Any) -> str | None:
    """Return one line for a tensor and its relatives, None for everything else."""
    if type(value) is DType:
        return f"torch.{value.name}"
    if type(value) is TensorRef:
        return f"<tensor {value.dtype.name}{list(value.shape)}>"
    if type(value) is StorageRef:
        return f"<storage {value.dtype.name}[{value.numel}]>"
    if type(value) is SubclassRef:
        return f"<{value.type_name}>"
    if type(value) is Composite:
        return f"<{value.how} tensor>"
    return None


def _numpy_scalar(value: Inert) -> float | int | None:
    """Return the number in a pickled numpy scalar: `scalar(dtype(code, …), bytes)`."""
    if not value.qualname.endswith("multiarray.scalar") or len(value.args) != 2:
        return None
    dtype, data = value.args
    if not isinstance(dtype, Inert) or not dtype.args or type(dtype.args[0]) is not str:
        return None
    code = _NUMPY.get(dtype.args[0].lstrip("<=|"))
    if code is None or type(data) is not bytes or len(data) != struct.calcsize("<" + code):
        return None
    number: float | int = struct.unpack("<" + code, data)[0]
    return number
