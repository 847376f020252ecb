"""Name tensors in a safetensors file, and record in the header what a name lacks.

Weights have their own names. The optimizer's tensors are `<kind>.<name>`, so are masters and
moments of other components. What is left, stands as JSON in the header's `__metadata__` under
`ftckpt`, where other readers pass it by:

    {"component": "ema",                                         of all tensors in the file
     "kinds": {"rope.inv_freq": "buffer"},                       by stored name
     "aliases": [["model", "param", "lm_head.weight", "embed.weight"]],
     "partial": true}                                            others were left out on demand

An alias (tied weights) is stored once: component, kind and name of the other tensor, and the stored
name of the one that holds the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ftckpt.checkpoint import Box, Extent, Kind, Piece, TensorInfo
from ftckpt.checkpoint.dtypes import DType
from ftckpt.errors import CorruptError
from ftckpt.formats.state.stored_names import StoredName, weight_kind
from ftckpt.formats.torch_files.dtensor import LazyPieces
from ftckpt.strict_json import JsonLimits, parse

from .header import Header, HeaderTensor

if TYPE_CHECKING:
    from ftckpt.transfer.content import TargetTensor

REMARKS = "ftckpt"
_KINDS = {kind.value: kind for kind in Kind}
_STATES = frozenset((Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ))
_LIMITS = JsonLimits(4, objects=3, keys=1_000_100, items=4_000_000, naturals=True)


class Alias(NamedTuple):
    """A tensor that shares the bytes of another one of the same file."""

    component: str
    kind: Kind
    name: str
    stored: str


class Remarks(NamedTuple):
    """What a header adds; all empty where it adds nothing.

    Attributes:
        component: of the file's tensors.
        kinds: by stored name, where the name and the type do not show it.
        aliases: tensors that are not stored of themselves.
        partial: whether weights of the model were left out on demand.
    """

    component: str = ""
    kinds: Mapping[str, Kind] = {}
    aliases: Sequence[Alias] = ()
    partial: bool = False


def stored_name(wanted: TargetTensor) -> str:
    """Return the name of a tensor in the header."""
    if wanted.component == "optimizer" or wanted.kind in _STATES:
        return f"{wanted.kind}.{wanted.name}"
    return wanted.name


def metadata(
    component: str,
    tensors: Mapping[str, TargetTensor],
    aliases: Sequence[Alias],
    partial: bool = False,
) -> dict[str, str]:
    """Return the metadata of a file's header.

    Args:
        component: of all its tensors.
        tensors: by stored name.
        aliases: of tensors in it.
        partial: whether weights of the model were left out on demand.
    """
    said: dict[str, Any] = {}
    if component not in ("model", "optimizer"):
        said["component"] = component
    kinds = {
        name: wanted.kind.value
        for name, wanted in tensors.items()
        if _identify(name, wanted.dtype, component, {}) != (wanted.kind, wanted.name)
    }
    if kinds:
        said["kinds"] = kinds
    if aliases:
        said["aliases"] = [list(alias) for alias in aliases]
    if partial and component == "model":
        said["partial"] = True
    plain = {"format": "pt"}  # without it, transformers refuses the file
    return plain | {REMARKS: json.dumps(said, ensure_ascii=False)} if said else plain


class WholePiece(LazyPieces):
    """The one piece of a tensor, which lies dense in a file as the header says."""

    __slots__ = ("_file", "_tensor")

    def __init__(self, file: str, tensor: HeaderTensor) -> None:
        self._file, self._tensor = file, tensor

    def __len__(self) -> int:
        return 1

    def box(self, index: int) -> Box:
        """Return the box of the whole tensor."""
        return Box.whole(self._tensor.shape)

    def piece(self, index: int) -> Piece:
        """Return the piece; see `LazyPieces.piece`."""
        _, _, shape, begin, end = self._tensor
        return Piece(Box.whole(shape), Extent(self._file, begin, end - begin))


def read_remarks(header: Header, file: str) -> Remarks:
    """Return what the header of `file` adds.

    Raises:
        CorruptError: it is not of the form above (`bad-header`).
        UnsafeError: equal keys, or nested too deep (`unsafe-header`).
    """
    text = header.metadata.get(REMARKS)
    if text is None:
        return Remarks()
    said = parse(
        text.encode(),
        _LIMITS,
        file=file,
        what="metadata",
        bad="bad-header",
        unsafe="unsafe-header",
    )
    if not isinstance(said, dict):
        _malformed(file)
    component, kinds = said.get("component", ""), said.get("kinds", {})
    aliases, partial = said.get("aliases", []), said.get("partial", False)
    if (
        not isinstance(partial, bool)
        or not isinstance(component, str)
        or not isinstance(kinds, dict)
    ):
        _malformed(file)
    if not all(isinstance(kind, str) and kind in _KINDS for kind in kinds.values()):
        _malformed(file)
    held = {tensor.name for tensor in header.tensors}
    if not isinstance(aliases, list) or not all(_is_alias(a, held) for a in aliases):
        _malformed(file)
    return Remarks(
        component,
        {name: _KINDS[kind] for name, kind in kinds.items()},
        [Alias(a[0], _KINDS[a[1]], a[2], a[3]) for a in aliases],
        partial,
    )


def tensors_of(
    header: Header,
    file: str,
    component: str,
    remarks: Remarks,
    sections: Mapping[str, StoredName],
) -> Iterator[tuple[TensorInfo, str | None]]:
    """Yield the tensors of a file, and for each alias the key of the tensor that owns its bytes.

    Args:
        header: of the file.
        file: its name.
        component: of its tensors, where the remarks name none.
        remarks: of the header.
        sections: see `flat_state.sections_of`.
    """
    component = remarks.component or component
    owners: dict[str, TensorInfo] = {}
    for tensor in header.tensors:
        stored = tensor.name
        kind, name = _identify(stored, tensor.dtype, component, remarks.kinds)
        said = "" if stored == name else stored
        place = WholePiece(file, tensor)
        info = TensorInfo(component, name, kind, tensor.shape, tensor.dtype, place, said)
        at = sections.get(stored)
        if at is not None:
            info = info._replace(
                component=at.component, kind=at.kind, name=at.name, stored_name=stored
            )
        owners[stored] = info
        yield owners[stored], None
    for alias in remarks.aliases:
        owner = owners[alias.stored]
        yield (
            owner._replace(
                component=alias.component,
                kind=alias.kind,
                name=alias.name,
                stored_name=alias.stored,
            ),
            owner.key,
        )


def _identify(
    stored: str, dtype: DType, component: str, kinds: Mapping[str, Kind]
) -> tuple[Kind, str]:
    """Return kind and name of a tensor; another first word makes all of it the name."""
    word, dot, rest = stored.partition(".")
    prefix = _KINDS.get(word) if dot and rest else None
    if component == "optimizer":
        return (prefix, rest) if prefix is not None else (Kind.OTHER, stored)
    said = kinds.get(stored)
    if said in _STATES and said is prefix:
        return prefix, rest
    return said or weight_kind(stored, dtype), stored


def _is_alias(value: Any, held: set[str]) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 4
        and all(isinstance(text, str) for text in value)
        and value[1] in _KINDS
        and value[3] in held
    )


def _malformed(file: str) -> NoReturn:
    raise CorruptError(
        f"the metadata that ftckpt left in the header of {file} is not of its form",
        kind="bad-header",
        file=file,
    )
