"""The form of each tensor in a result: name, shape, type, tiling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, Piece, TensorInfo
from ftckpt.checkpoint.coverage import check_coverage, check_replicas
from ftckpt.checkpoint.replicas import Copies, copies_of
from ftckpt.errors import CorruptError
from ftckpt.findings import Severity

from .content import Content, Known, TargetTensor


class ResultTensor(NamedTuple):
    """A tensor as a result holds it.

    Attributes:
        key: of what was wanted, which it should equal.
        info: of the result.
    """

    key: str
    info: TensorInfo


def pairs(content: Content, result: Checkpoint) -> Iterator[ResultTensor]:
    """Yield every tensor that was wanted with what the result holds of it.

    Tied weights may be one tensor here and two there. What the result stores as a tensor is
    compared as one, whatever its reader says that it is tied to.

    Raises:
        CorruptError: nothing says what one of them should be (`failed-proof`).
    """
    tensors, aliases = result.tensors, result.aliases
    for key in content.tensors:
        yield ResultTensor(key, tensors[key if key in tensors else aliases[key]])
    for key, owner in content.aliases.items():
        if key in content.tensors or key not in tensors:
            continue
        if owner not in content.tensors:
            raise failed(f"the result has {key}, and nothing says what it should be", key)
        yield ResultTensor(owner, tensors[key])


def copies_in(tensors: Iterable[ResultTensor]) -> Iterator[tuple[ResultTensor, Copies]]:
    """Yield what the pieces of tensors hold, and the replicas that several tensors share but once.

    All parameters of a group may have one step counter, of which every rank has a copy. Where the
    pieces are those of a tensor before, the copies are known to be equal and only one comes again.
    """
    seen: dict[int, Sequence[Piece]] = {}
    for pair in tensors:
        pieces = pair.info.pieces
        again = seen.get(id(pieces)) is pieces
        for held in copies_of(pair.info):
            if held.replicas:
                seen[id(pieces)] = pieces  # kept, so that no other object gets its id
            yield pair, held._replace(pieces=held.pieces[:1]) if again else held


def nbytes_in(tensors: Iterable[ResultTensor]) -> int:
    """Return the bytes of all that `copies_in` yields."""
    return sum(
        len(held.pieces) * pair.info.dtype.nbytes(held.stop - held.start)
        for pair, held in copies_in(tensors)
    )


def compare_forms(content: Content, result: Checkpoint) -> None:
    """Compare names, shapes and types, and look whether pieces tile their tensors.

    Raises:
        CorruptError: they differ (`failed-proof`).
    """
    _compare_names(content, result)
    for key, info in pairs(content, result):
        _compare_form(content.tensors[key], info)
    for key, known in content.known.items():
        _compare_form(known, result.tensors[key])


def require_all_read(result: Checkpoint) -> None:
    """Require that its reader could take all that a result holds for a part of it.

    Raises:
        CorruptError: something contradicts the rest, and was left out (`failed-proof`).
    """
    for one in result.open_findings:
        if one.severity is Severity.ERROR:
            raise failed(f"in the result {one.message}", one.tensor, one.file)


def _compare_names(content: Content, result: Checkpoint) -> None:
    wanted = content.tensors.keys() | content.aliases.keys() | content.known.keys()
    has = result.tensors.keys() | result.aliases.keys()
    # A reader may list the tensors inside objects, which are compared as parts of those.
    inside = {key for key, info in result.tensors.items() if info.component.startswith("extra:")}
    missing, more = sorted(wanted - has), sorted(has - wanted - inside)
    if missing or more:
        what = f"lacks {missing[0]}" if missing else f"has {more[0]}, which nobody asked for"
        count = len(missing) + len(more)
        raise failed(f"the result {what} ({count} names differ)", (missing + more)[0])


def _compare_form(want: TargetTensor | Known, has: TensorInfo) -> None:
    if (has.shape, has.dtype) != (want.shape, want.dtype):
        raise failed(
            f"{has.key} is {has.dtype.name}{list(has.shape)} in the result and not "
            f"{want.dtype.name}{list(want.shape)}",
            has.key,
        )
    for gap in chain(check_coverage(has.shape, has.pieces), check_replicas(has.shape, has.pieces)):
        raise failed(f"{has.key} in the result: {gap.message}", has.key)


def failed(message: str, key: str | None, file: str | None = None) -> CorruptError:
    """Return the error of a proof that failed: why, at which tensor or object, in which file."""
    return CorruptError(
        f"the proof failed: {message}",
        kind="failed-proof",
        file=file,
        tensor=key,
        hint="nothing was made visible, the source is untouched; --restart builds it anew",
    )
