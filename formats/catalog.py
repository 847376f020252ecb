"""The formats in the order in which they are asked: the first that recognises a place reads it.

A format's own module knows names and no more; its `open` imports what reads a checkpoint. So a
command imports the reader of the format at hand: all of them take longer than most answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, overload

from ftckpt import plugins
from ftckpt.discovery.recognise import Format
from ftckpt.errors import UnsupportedError
from ftckpt.formats.deepspeed.universal import DeepSpeedUniversal
from ftckpt.formats.megatron.fsdp import MegatronFsdp
from ftckpt.formats.megatron.torch_dist import MegatronDist

from .dcp import Dcp
from .deepspeed import DeepSpeed
from .delta import Delta
from .folders import Folder
from .megatron import Megatron
from .nvrx import NvrxLocal
from .orbax import Orbax
from .pieces import Pieces
from .ranks import Ranks
from .safetensors import Safetensors
from .torch_checkpointing import TorchCheckpointing
from .torchsave import TorchSave
from .trainer_dirs import Bundle
from .trainer_dirs.marks import marked
from .unsupported import RECOGNISED

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.checkpoint.rules import Rules
    from ftckpt.findings import Finding

    from .safetensors.reader import SafetensorsCheckpoint


def _described(checkpoint: Checkpoint) -> Iterator[Finding]:
    names = {name.rpartition("/")[2] for name in checkpoint.source.entries}
    if not names.isdisjoint(("config.json", "adapter_config.json")):
        from .huggingface.wrapped_names import check_wrapped

        yield from check_wrapped(checkpoint)
    if "config.json" in names:
        from .against_config import check_described

        yield from check_described(checkpoint)
    if "adapter_config.json" in names:
        from .lora.recorded_ranks import check_recorded

        yield from check_recorded(checkpoint)


def _twice(checkpoint: SafetensorsCheckpoint) -> None:
    """Join second copies where names show that there may be one."""
    top = (name for name in checkpoint.source.entries if "/" not in name)
    if any(name.endswith(".bin") or name.startswith("consolidated") for name in top):
        from .second_copies import join_second_copies

        join_second_copies(checkpoint)


# What is known by name and refused comes last, so that it never hides what can be read; before it
# those of other packages, which change nothing that ours know.
# A directory of several parts comes before the formats that would read one part of it, and what a
# job saved to go on before weights alone, which people export into the same directory.
_PARTS: tuple[Format, ...] = (
    MegatronDist(),
    MegatronFsdp(),
    Dcp(),
    Safetensors(),
    TorchSave(),
    Ranks(),
)
_FIRST: tuple[Format, ...] = (
    Delta(lambda rules, bases: formats(rules, bases)),
    MegatronDist(),  # a DCP store too
    MegatronFsdp(),  # and so is this
    Dcp(),
    TorchCheckpointing(),
    Bundle(_PARTS, described=_described),
    Megatron(),
    DeepSpeedUniversal(),
    DeepSpeed(),
    NvrxLocal(),
    Orbax(),
    Ranks(marked=marked),
    Pieces(),
    Safetensors(_described, _twice),
    TorchSave(_described),
)


@cache
def _added() -> tuple[Format, ...]:
    """Return the formats of other packages; one that does not work is noted and left out."""
    found = []
    own = {one.name for one in (*_FIRST, *RECOGNISED)}
    for name in plugins.plugins(plugins.FORMATS):
        try:
            made = plugins.load(plugins.FORMATS, name)
            one = made() if callable(made) else made
            if one.name != name or one.name in own:
                raise ValueError(f"a format called {one.name!r} cannot be added under this name")
            if not (callable(one.recognise) and callable(one.open)):
                raise TypeError("recognise and open are methods of a format")
        except UnsupportedError:  # noted where it was found
            continue
        except Exception as error:
            plugins.failed(plugins.FORMATS, name, error)
            continue
        found.append(one)
    return tuple(found)


class Formats(Sequence[Format]):
    """Formats in their order; those of other packages are looked for where no earlier one knows.

    Args:
        first: ours that are asked before them.
        last: ours that are asked after them.
    """

    def __init__(self, first: Sequence[Format], last: Sequence[Format] = ()) -> None:
        self._first, self._last = first, last

    def __iter__(self) -> Iterator[Format]:
        yield from self._first
        yield from _added()
        yield from self._last

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @overload
    def __getitem__(self, place: int) -> Format: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Format]: ...

    def __getitem__(self, place: int | slice) -> Format | Sequence[Format]:
        return tuple(self)[place]


FORMATS: Sequence[Format] = Formats(_FIRST, (*RECOGNISED, Folder(lambda: _IN_FOLDERS)))
# What a folder of parts may be made of; a delta has bases elsewhere, and names of refused formats
# say nothing of what lies beside.
_IN_FOLDERS: Sequence[Format] = Formats([one for one in _FIRST if not isinstance(one, Delta)])

_BY_RULES = (Megatron, DeepSpeed, DeepSpeedUniversal, Ranks)


def formats(rules: Rules | None, bases: Sequence[str] = ()) -> Sequence[Format]:
    """Return the formats in their order, with what the user says about reading.

    Args:
        rules: a table of how tensors are cut, asked before what a format knows itself; or None.
        bases: places where the bases of deltas may lie, asked before those that are recorded.
    """
    if rules is None and not bases:
        return FORMATS
    return tuple(_told(one, rules, bases) for one in FORMATS)


def reads_by_rules(name: str) -> bool:
    """Say whether checkpoints of a format are read by the user's table of rules."""
    return any(isinstance(one, (*_BY_RULES, Bundle, Folder)) for one in FORMATS if one.name == name)


def _told(one: Format, rules: Rules | None, bases: Sequence[str]) -> Format:
    if isinstance(one, Delta):
        return Delta(one.formats, rules, bases, one.stores)
    if rules is not None and isinstance(one, Bundle):
        return Bundle(_PARTS, DeepSpeed(rules), described=_described)
    if rules is not None and isinstance(one, Ranks):
        return Ranks(rules, one.marked)
    if rules is not None and isinstance(one, Folder):
        parts = tuple(_told(inner, rules, ()) for inner in _IN_FOLDERS)
        return Folder(lambda: parts)
    if rules is not None and isinstance(one, _BY_RULES):
        return type(one)(rules)
    return one
