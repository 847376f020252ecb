"""Take packed projections apart, as torch_dist stores them: each part of the rows is a tensor.

    decoder.layers.0.self_attention.in_proj.weight     … .in_proj.weight.query, .key, .value, .z, …
    decoder.layers.0.mixer.conv1d.weight               … .conv1d.weight.x, .B, .C

Since core 0.18 a state-space layer calls its convolution `mixer.conv1d_weight`; on disk it has the
older name. `families.sections` puts the parts together again.

Source: `_split_tensor_factory` in megatron/core/ssm/{gated_delta_net,mamba_mixer}.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ftckpt.checkpoint import Box
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.megatron.job.rules import block_sizes
from ftckpt.formats.megatron.rank_files.grid import Arguments
from ftckpt.transfer.content import TargetTensor

_CONVOLUTION = re.compile(r"(.*\.mixer\.conv1d)_(weight|bias)")
_KEYS, _VALUES, _VALUE_HEADS = "delta_keys", "delta_values", "delta_heads"
_INNER, _GROUPS, _HEADS = "mamba_inner", "mamba_groups", "mamba_heads"


class _Packed(NamedTuple):
    """Tensors of one kind: their names, and the parts of their rows with the size of each."""

    names: re.Pattern[str]
    parts: tuple[tuple[str, str], ...]


_PACKED = (
    _Packed(
        re.compile(r".*\.mixer\.in_proj\.weight"),
        (("z", _INNER), ("x", _INNER), ("B", _GROUPS), ("C", _GROUPS), ("dt", _HEADS)),
    ),
    _Packed(
        re.compile(r".*\.mixer\.conv1d\.(?:weight|bias)"),
        (("x", _INNER), ("B", _GROUPS), ("C", _GROUPS)),
    ),
    _Packed(
        re.compile(r".*\.self_attention\.in_proj\.weight"),
        (
            ("query", _KEYS), ("key", _KEYS), ("value", _VALUES), ("z", _VALUES),
            ("beta", _VALUE_HEADS), ("alpha", _VALUE_HEADS),
        ),
    ),
    _Packed(
        re.compile(r".*\.self_attention\.conv1d\.(?:weight|bias)"),
        (("query", _KEYS), ("key", _KEYS), ("value", _VALUES)),
    ),
)  # fmt: skip
# How the parts are put together again.
SECTIONS = tuple((one.names.fullmatch, [part for part, _ in one.parts]) for one in _PACKED)


class PackedTensors:
    """The packed projections of one job."""

    def __init__(self, args: Arguments) -> None:
        self._sizes: Mapping[str, int] = block_sizes(args)

    def parts(self, stored: str, wanted: TargetTensor) -> Iterator[tuple[str, TargetTensor]]:
        """Yield what a tensor is on disk: its parts with what follows its name, or itself with "".

        Args:
            stored: the name on disk of the weight that it is, or is state of in its shape.
            wanted: the tensor.

        Raises:
            UnsupportedError: the arguments do not record the sizes of the parts.
            UsageError: the parts make another number of rows.
        """
        found = next((one.parts for one in _PACKED if one.names.fullmatch(stored)), None)
        if found is None:
            yield "", wanted
            return
        if any(size not in self._sizes for _, size in found):
            raise UnsupportedError(
                f"{stored} is stored in parts, and the job's arguments do not record their sizes",
                tensor=stored,
            )
        rows = [self._sizes[size] for _, size in found]
        if not wanted.shape or sum(rows) != wanted.shape[0]:
            raise UsageError(
                f"{stored} of {list(wanted.shape)} is not made of parts of {rows} rows, as the"
                " job's arguments have them",
                tensor=stored,
            )
        rest = wanted.shape[1:]
        first = 0
        for (part, _), count in zip(found, rows, strict=True):
            box = Box((first, *(0 for _ in rest)), (count, *rest))
            first += count
            copies = tuple(wanted.moved(box, 0))
            yield f".{part}", wanted._replace(shape=(count, *rest), copies=copies)


def on_disk(name: str) -> str:
    """Return a name with the older one of a state-space layer's convolution, which is on disk."""
    match = _CONVOLUTION.fullmatch(name)
    return f"{match[1]}.{match[2]}" if match else name
