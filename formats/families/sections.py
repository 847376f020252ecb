"""Join the rows of a tensor that torch_dist stores in parts, each a tensor of its own.

Megatron-core cuts projections of linear attention and of state-space layers when it saves them, so
that each part can have other ranks: `….in_proj.weight.query`, `.key`, and so on.

Source: `_split_tensor_factory` in megatron/core/ssm/{gated_delta_net,mamba_mixer}.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ftckpt.checkpoint import Box
from ftckpt.errors import UnsupportedError
from ftckpt.findings import listed
from ftckpt.transfer.content import Content, Copy, TargetTensor
from ftckpt.transfer.request.renaming import parameter_names, parted

from .tables import Family

# Says of a name whether its tensor is stored in parts, and what follows the name for each.
Sections = Sequence[tuple[Callable[[str], object], Sequence[str]]]


def sections_of(family: Family) -> Sections:
    """Return how the names of a family's tensors in parts begin, each with what follows."""
    return [
        (name.numbers, entry.sections)
        for entry in family.entries
        for name in entry.megatron.values()
        if entry.sections
    ]


def joined_sections(content: Content, known: Sections) -> Content:
    """Return the content with such parts put together.

    Args:
        content: in parts, or whole.
        known: says of a name whether it is in parts, and what follows it, in order.

    Raises:
        UnsupportedError: a part is missing, or parts differ in type or in another axis.
    """
    if not known:
        return content
    parameters = parameter_names(content.tensors.values())
    tensors: dict[str, TargetTensor] = {}
    wholes: dict[tuple[str, str, str], dict[str, TargetTensor]] = {}
    sections: dict[tuple[str, str, str], tuple[str, ...]] = {}
    for key, wanted in content.tensors.items():
        parameter, rest = parted(wanted, parameters)
        bare, _, section = parameter.rpartition(".")
        found = next((every for fits, every in known if section in every and fits(bare)), None)
        if found is None or wanted.component.startswith("extra:"):
            tensors[key] = wanted
            continue
        whole = wanted.component, wanted.kind.value, bare + rest
        wholes.setdefault(whole, {})[section] = wanted
        sections[whole] = tuple(found)
    for whole, parts in wholes.items():
        made = _joined(whole[2], [parts.get(section) for section in sections[whole]], parts)
        if made.key in tensors:
            raise UnsupportedError(f"{made.key} is there whole and in parts", tensor=made.key)
        tensors[made.key] = made
    return content.with_tensors(tensors.values()) if wholes else content


def _joined(
    name: str, ordered: list[TargetTensor | None], parts: dict[str, TargetTensor]
) -> TargetTensor:
    some = next(iter(parts.values()))
    there = [part for part in ordered if part is not None]
    if len(there) < len(ordered):
        raise UnsupportedError(
            f"{name} is made of {len(ordered)} parts, and {listed(list(parts), 6)} are there",
            tensor=some.key,
        )
    if some.shape in ((), (1,)) and some.kind == "other":  # a counter: each part has the same
        return there[0]._replace(name=name)
    if len({(part.dtype, part.shape[1:], len(part.shape)) for part in there}) > 1:
        raise UnsupportedError(
            f"the parts of {name} differ in type or shape, so that they make no one tensor",
            tensor=some.key,
        )
    copies: list[Copy] = []
    row = 0
    for part in there:
        copies += part.moved(Box.whole(part.shape), row)
        row += part.shape[0]
    return some._replace(name=name, shape=(row, *some.shape[1:]), copies=tuple(copies))
