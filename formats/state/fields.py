"""The non-tensor state of a checkpoint as named fields that can be compared with another's.

Every object is taken apart into its leaves. So are the namespaces that trainers pickle for their
arguments, and pickles kept as bytes inside the state (a stateful dataloader's position); what
cannot be taken apart is compared whole.
"""

from __future__ import annotations

import re
import reprlib
import struct
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import FtckptError
from ftckpt.formats.pickles.inert import Inert
from ftckpt.formats.pickles.unpickle import load
from ftckpt.formats.pickles.walk import Path, dotted, leaves
from ftckpt.formats.torch_files.table import TABLE
from ftckpt.formats.torch_files.values import TensorRef
from ftckpt.formats.torch_files.write_tree import CopiedTree
from ftckpt.inspection.training_state import GENERATORS, StateValue
from ftckpt.transfer.content import Content

from .objects import StateObjects
from .paths import recorded_paths
from .stored_names import OPTIMIZERS

if TYPE_CHECKING:
    from ftckpt.comparison import Field

_RANK = re.compile(r"rank_(\d+)\.(?=.)")
# Megatron stores a distributed optimizer's groups once for each set of ranks that share them, or
# once for all: one name for both.
_GROUP = re.compile(r"optimizer\.distributed\.dp_group_idx_(\d+)\.optimizer/shard_\d+_\d+\.\d+\.")
_LONG = 48  # characters of a value that are shown
# c10's CPUGeneratorImplState; words of MT19937, which Python and NumPy draw from.
_TORCH_STATE, _TWISTER = 5056, 624
_INSIDE = 4  # how many pickles and namespaces inside one another are taken apart


def state_fields(checkpoint: Checkpoint) -> Iterator[Field | FtckptError]:
    """Yield every field of the non-tensor state; an object that cannot be read gives its error.

    Tensors that the checkpoint lists are left out. A field's name is the path to it in the
    trainer's state, however the format cuts that state into objects.
    """
    from ftckpt.comparison import Field  # what reads contents alone compares nothing

    for one in _values(checkpoint, checkpoint.objects):
        if isinstance(one, FtckptError):
            yield one
            continue
        path, part = one
        digest = _digest(checkpoint, part)
        yield Field(*_owned(dotted(path)), _shown(part.value, digest), digest)


def state_contents(
    checkpoint: Checkpoint, names: Collection[str]
) -> Iterator[StateValue | FtckptError]:
    """Yield what the values of some objects plainly are; see `ftckpt.inspection.training_state`."""
    for one in _values(checkpoint, names):
        if isinstance(one, FtckptError):
            yield one
        else:
            yield StateValue(*_owned(dotted(one[0])), _form(one[1].value))


def _values(
    checkpoint: Checkpoint, names: Collection[str]
) -> Iterator[tuple[Path, CopiedTree] | FtckptError]:
    """Yield every value of some objects with its path; one that cannot be read gives its error."""
    objects = StateObjects(Content.of(checkpoint), recorded_paths(checkpoint).nested_objects())
    for name in names:
        try:
            for leaf in objects.fields(name):
                if leaf.path[-1:] == ("param_groups",) and leaf.value.value == []:
                    continue  # torch has no optimizer without groups: a writer's placeholder
                for path, value in _apart(leaf.path, leaf.value.value, _INSIDE):
                    yield path, leaf.value._replace(value=value)
        except FtckptError as error:
            error.tensor = error.tensor or name
            yield error


def _apart(path: Path, value: Any, left: int) -> Iterator[tuple[Path, Any]]:
    """Yield what a leaf is made of where it is a namespace or a pickle; else the leaf."""
    tree = _inside(value) if left else None
    if tree is None:
        yield path, value
        return
    for inner, member in leaves(tree, path):
        yield from _apart(inner, member, left - 1)


def _inside(value: Any) -> Any:
    """Return what a namespace or a pickle holds; None for any other value, and for nothing."""
    if isinstance(value, Inert):
        namespace = not value.args and not value.items and isinstance(value.state, dict)
        return (value.state or None) if namespace else None
    if type(value) is bytes and value[:1] == b"\x80" and value[-1:] == b".":
        try:
            tree = load(value, file="", table=TABLE).value
        except FtckptError:
            return None  # bytes that only look like a pickle, or one that we do not take apart
        return tree if isinstance(tree, (dict, list, Inert)) and tree else None
    return None


def _owned(name: str) -> tuple[str, int | None]:
    """Return the name of a value without its rank, and the rank."""
    name = name.removeprefix("0.")  # Megatron keeps its common state in a list of one
    first, _, rest = name.partition(".")
    if first in OPTIMIZERS and rest.startswith("param_groups"):
        name = f"optimizer.{rest}"  # the word for it does not differ
    for pattern, instead in ((_RANK, ""), (_GROUP, "optimizer.optimizer.")):
        match = pattern.match(name)
        if match:
            return instead + name[match.end() :], int(match[1])
    return name, None


def _form(value: Any) -> str:
    """Return what a value plainly is; see `StateValue.form`."""
    if value is None or value in ((), [], {}, ""):
        return "empty"
    if type(value) in (bool, str):
        return "text"
    if type(value) in (int, float):
        return "integer" if type(value) is int else "number"
    if type(value) is TensorRef:
        return _tensor_form(value)
    if type(value) is bytes:
        return "rng-torch" if len(value) == _TORCH_STATE else ""
    if isinstance(value, Inert):
        return next((key for start, key in _CLASSES if value.qualname.startswith(start)), "")
    if type(value) is tuple or type(value) is list:
        return _generator(value) or _members_form(value)
    return ""


# Classes whose instances are one component, pickled whole.
_CLASSES = (
    ("torch.optim.lr_scheduler.", "scheduler"), ("torch.amp.grad_scaler.", "scaler"),
    ("torch.cuda.amp.grad_scaler.", "scaler"), ("random.Random", "rng-python"),
    ("numpy.random.", "rng-numpy"), ("torch._C.Generator", "rng-torch"),
)  # fmt: skip


def _tensor_form(value: TensorRef) -> str:
    if value.dtype.name == "uint8" and len(value.shape) == 1:
        return GENERATORS.get(value.shape[0], "")
    return "number" if value.numel == 1 else ""


def _members_form(value: Sequence[Any]) -> str:
    """Return what a tuple or list is by its members: generators of devices, or a few numbers."""
    forms = {_tensor_form(one) for one in value if type(one) is TensorRef}
    if forms - {"", "number"}:
        return min(forms - {"", "number"})
    few = len(value) < _TWISTER and not forms
    return "number" if few and set(map(type, value)) <= {float, bool, str} else ""


def _generator(value: Sequence[Any]) -> str:
    """Recognise `random.getstate()` and `numpy.random.get_state()`."""
    if len(value) == _TWISTER + 1 and set(map(type, value)) == {int}:
        return "rng-python"  # in JSON, where it is a list in a list
    if len(value) == 3 and value[0] in (2, 3) and type(value[0]) is int:
        words = value[1]
        if type(words) in (tuple, list) and len(words) == _TWISTER + 1:
            return "rng-python" if all(type(word) is int for word in words) else ""
    if len(value) == 5 and type(value[0]) is str and type(value[2]) is int:
        return "rng-numpy" if value[0] in ("MT19937", "PCG64", "Philox", "SFC64") else ""
    return ""


def _digest(checkpoint: Checkpoint, part: CopiedTree) -> bytes:
    value = part.value
    if type(value) is float:  # by its bits: NaN, -0.0
        return b"float" + struct.pack("<d", value)
    if value is None or type(value) in (bool, int, str):
        plain = f"{type(value).__name__} {value if type(value) is not int else hex(value)}"
        return plain.encode("utf-8", "surrogatepass")
    from .same_object import state_digest

    return state_digest(checkpoint, [part])


class _Brief(reprlib.Repr):
    """Values in a few words, whatever a file says that they are."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 4
        self.maxstring = self.maxother = self.maxlong = _LONG

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if abs(x) < 1 << 128 else f"an integer of {x.bit_length()} bits"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return f"{len(x)} bytes"


_BRIEF = _Brief()


def _shown(value: Any, digest: bytes) -> str:
    if type(value) is TensorRef:
        return f"{value.dtype.name}{list(value.shape)} #{digest.hex()[:8]}"
    text = _BRIEF.repr(value)
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."
