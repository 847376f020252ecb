"""The model's weights made from their masters: rounded once, from what a restart continues from."""

from __future__ import annotations

from typing import NamedTuple

from ftckpt.checkpoint import Box, Kind, tensor_key
from ftckpt.errors import NotFoundError
from ftckpt.findings import counted, listed
from ftckpt.transfer.content import Content, Copy, TargetTensor


class FromMasters(NamedTuple):
    """Content whose weights come from masters.

    Attributes:
        content: what is written.
        masters: number of weights that do; the others are in single precision themselves.
    """

    content: Content
    masters: int


def from_masters(content: Content) -> FromMasters:
    """Return the content with each weight of the model filled from its master, in its type.

    A weight without a master stays if it is in single or double precision itself.

    Raises:
        NotFoundError: a weight of fewer bits has no master, or one of another shape.
    """
    stored = content.checkpoint.tensors
    # Tied weights have one master, under either name.
    tied = {owner: key for key, owner in content.checkpoint.aliases.items()}
    tied |= content.checkpoint.aliases
    made: list[TargetTensor] = []
    without: list[str] = []
    masters = 0
    for key, wanted in content.tensors.items():
        weight = wanted.component == "model" and wanted.kind is Kind.PARAM
        if not weight or wanted.dtype.family != "float":
            made.append(wanted)
            continue
        twin = stored.get(tied.get(key, ""))
        names = [wanted.name] if twin is None else [wanted.name, twin.name]
        keys = [tensor_key("optimizer", Kind.MASTER, name) for name in names]
        master = next((stored[one] for one in keys if one in stored), None)
        if master is not None and master.shape == wanted.shape:
            box = Box.whole(master.shape)
            made.append(wanted._replace(dtype=master.dtype, copies=(Copy(box, master.key, box),)))
            masters += 1
        else:
            if wanted.dtype.bits < 32:
                without.append(wanted.name)
            made.append(wanted)
    if without:
        raise NotFoundError(
            f"{content.checkpoint.source.url} holds no master for"
            f" {counted(len(without), 'weight')}: {listed(without)}",
            hint="without --from-master the stored weights are written",
        )
    return FromMasters(content.with_tensors(made), masters)
