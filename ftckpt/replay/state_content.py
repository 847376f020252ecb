"""Recognise components of a training state by content, whatever their names.

The trainer chooses names: `py`, `sch`, `rng.rank_0`. The content is fixed: Python's generator is a
version, 625 numbers and a cached deviate; torch's is 5,056 bytes; a schedule keeps `last_epoch`. So
content may show a component that no known name shows; and while some content is not understood, no
component is known to be absent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ftckpt.checkpoint import Checkpoint
from ftckpt.comparison.state import Field, about
from ftckpt.errors import FtckptError
from ftckpt.findings import listed
from ftckpt.inspection.resume import SHOWN, Presence, ResumeItem, rank_in
from ftckpt.inspection.training_state import TABLE

# Names that lie side by side in one place, by the component that they show: of torch's schedules,
# its GradScaler, apex's and Megatron's, torchdata's loaders and samplers, NumPy's bit generators.
_SIDE_BY_SIDE: tuple[tuple[str, frozenset[str]], ...] = (
    ("scheduler", frozenset({"last_epoch", "_step_count"})),
    ("scheduler", frozenset({"last_epoch", "base_lrs"})),
    ("scaler", frozenset({"scale", "growth_factor", "growth_interval"})),
    ("scaler", frozenset({"cur_scale", "cur_iter"})),
    ("scaler", frozenset({"loss_scale", "unskipped"})),
    ("data", frozenset({"_sampler_iter_yielded"})),
    ("data", frozenset({"_num_yielded"})),
    ("data", frozenset({"_snapshot", "_steps_since_snapshot"})),
    ("data", frozenset({"_sampler_iter_state"})),
    ("rng-numpy", frozenset({"bit_generator", "state"})),
)
# Bytes of a generator's state as a tensor of uint8: torch's on the processor, CUDA's.
_GENERATORS = {5056: "rng-torch", 16: "rng-cuda"}
# Components that one whole number can hold; no number is a generator's state.
_HELD_BY_A_NUMBER = frozenset({"data", "step"})
_NO_COMPONENT = frozenset({"text", "number"})
# Part of the optimizer, which the resume check judges by the tensors.
_OPTIMIZERS = re.compile(r"(?:^|[./:])param_groups?(?=[./:]|$)")


def judge_by_content(
    items: Sequence[ResumeItem], checkpoint: Checkpoint, fields: Iterable[Field | FtckptError]
) -> tuple[ResumeItem, ...]:
    """Return the resume check's verdicts, completed by content for unknown names.

    `fields` are the checkpoint's non-tensor state, and the reasons why some of it cannot be read.
    """
    unread: list[str] = []
    read: list[Field] = []
    for field in fields:
        if isinstance(field, FtckptError):
            unread.append(field.tensor or field.file or "what cannot be read")
        else:
            read.append(field)
    shown = _shown(checkpoint, read)
    used = {name for names in shown.values() for name in names}
    unknown, numbers = _not_understood(checkpoint, read, used)
    unknown = [*unread, *unknown]
    plain = {_plain(name) for name in used}
    out = []
    for item in items:
        if item.presence is Presence.CANNOT_TELL and item.key in _BY_NAME and item.where and all(
            _plain(name) in plain for name in item.where
        ):  # fmt: skip
            # Its content shows that the ambiguous name is something else.
            item = replace(item, presence=Presence.ABSENT, where=(),
                           reason="no name in the checkpoint shows it")  # fmt: skip
        out.append(_judged(item, shown.get(item.key, []), unknown, numbers))
    return tuple(out)


def _plain(name: str) -> str:
    return name.replace(":", ".").removeprefix("extra.")


def _judged(
    item: ResumeItem, names: Sequence[str], unknown: Sequence[str], numbers: Sequence[str]
) -> ResumeItem:
    by_name_alone = item.presence is not Presence.PRESENT and item.key in _BY_NAME
    if by_name_alone and names:
        ranks = {rank for name in names if (rank := rank_in(name)) is not None}
        return replace(
            item, presence=Presence.PRESENT, reason=f"{names[0]} holds it, as its content shows",
            where=tuple(names[:SHOWN]), needed=True, ranks=(len(ranks) or None),
        )  # fmt: skip
    if by_name_alone and item.presence is Presence.ABSENT and item.needed:
        may = [*unknown, *(numbers if item.key in _HELD_BY_A_NUMBER else ())]
        if may:
            return replace(
                item, presence=Presence.CANNOT_TELL, where=tuple(may[:SHOWN]),
                reason=f"nothing shows it, and what is not understood may hold it: {listed(may)}",
            )  # fmt: skip
    return item


_BY_NAME = frozenset(row.key for row in TABLE if row.known is not None)


def _shown(checkpoint: Checkpoint, fields: Sequence[Field]) -> dict[str, list[str]]:
    """Return the names that show each component, by the component's key."""
    shown: dict[str, list[str]] = {}
    for field in fields:
        if field.form.startswith("rng-"):
            shown.setdefault(field.form, []).append(_full(field))
    for info in checkpoint.tensors.values():
        key = _GENERATORS.get(info.nbytes) if info.dtype.name == "uint8" else None
        if key and len(info.shape) == 1 and info.component not in ("optimizer", "ema"):
            shown.setdefault(key, []).append(info.key)
    below: dict[str, set[str]] = {}
    for field in fields:
        for parent, child in _steps(_full(field)):
            below.setdefault(parent, set()).add(child)
    for parent, children in below.items():
        for key, names in _SIDE_BY_SIDE:
            if names <= children and parent:
                shown.setdefault(key, []).append(parent)
                break
    return shown


def _not_understood(
    checkpoint: Checkpoint, fields: Sequence[Field], used: set[str]
) -> tuple[list[str], list[str]]:
    """Return the names of unknown content, and of whole numbers that stand for something."""
    unknown: list[str] = []
    numbers: list[str] = []
    for field in fields:
        name = _full(field)
        if any(name == one or name.startswith(f"{one}.") for one in used):
            continue
        if about(field.name)[0] != "other" or _OPTIMIZERS.search(name):
            continue
        if field.form == "integer":
            numbers.append(name)
        elif field.form not in _NO_COMPONENT:
            unknown.append(name)
    unknown += [
        info.key for info in checkpoint.tensors.values()
        if info.component.startswith("extra") and info.key not in used
        and about(info.key)[0] == "other"
    ]  # fmt: skip
    return list(dict.fromkeys(unknown)), list(dict.fromkeys(numbers))


def _full(field: Field) -> str:
    return field.name if field.rank is None else f"rank_{field.rank}.{field.name}"


def _steps(name: str) -> Iterator[tuple[str, str]]:
    """Yield each prefix of a name with its next part: (`a.b`, `c`)."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        yield ".".join(parts[:count]), parts[count]
