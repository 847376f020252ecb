"""The padding at the end of a vocabulary, which depends on the number of tensor-parallel ranks.

Megatron pads the vocabulary to a multiple of `make_vocab_size_divisible_by` times the tensor ranks
(`_vocab_size_with_padding` in megatron/training). How many rows are true is not recorded reliably,
so they are cut or added only where the user says it. Weights of padding are kept while there are
rows, and zero beyond; moments of padding that is made anew are zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ftckpt.checkpoint import Box, Kind
from ftckpt.checkpoint.sharding import Rules
from ftckpt.errors import UsageError
from ftckpt.findings import Finding, finding
from ftckpt.formats.megatron.rank_files.grid import Arguments
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.request.renaming import parameter_names, parted

_DIVISOR = 128  # of `--make-vocab-size-divisible-by`, where it was not recorded
_MOMENTS = (Kind.EXP_AVG, Kind.EXP_AVG_SQ)


def padded_size(args: Arguments, true: int, tp: int) -> int:
    """Return to how many rows Megatron pads a vocabulary of `true` rows."""
    multiple = (args.count("make_vocab_size_divisible_by") or _DIVISOR) * tp
    return -(-true // multiple) * multiple


def vocabulary_of(content: Content, rules: Rules) -> Callable[[TargetTensor], bool]:
    """Return what says of a tensor whether its first axis is the vocabulary."""
    names = parameter_names(content.tensors.values())

    def is_vocabulary(wanted: TargetTensor) -> bool:
        name, _ = parted(wanted, names)
        rule, weight = rules.get(name), content.tensors.get(name)
        if rule is None or weight is None or not rule.vocabulary:
            return False
        return bool(wanted.shape) and wanted.shape[0] == weight.shape[0]

    return is_vocabulary


def may_differ(args: Arguments, rows: int, before: int, after: int) -> bool:
    """Return whether Megatron may pad to another number of rows than it did.

    Args:
        args: of the job.
        rows: with the padding for `before` tensor ranks.
        before: tensor ranks of the source.
        after: those of the job that will load it.
    """
    divisor = args.count("make_vocab_size_divisible_by")
    if not divisor or before == after:
        return False
    return rows % (divisor * after) != 0 or after < before


def padding(true: int, rows: int) -> Finding:
    """Return the note that a vocabulary without padding gets some."""
    what = (
        f"the vocabulary's {true} rows are padded with zeros to {rows}, as Megatron pads them for"
        " these tensor ranks"
    )
    return finding("note", what)


def repadded(
    content: Content,
    is_vocabulary: Callable[[TargetTensor], bool],
    args: Arguments,
    tp: int,
    true: int | None,
) -> tuple[Content, int | None]:
    """Return the content with its vocabulary padded for `tp` ranks, and how many rows it then has.

    Args:
        content: what is written.
        is_vocabulary: says of a tensor whether its first axis is the vocabulary.
        args: of the job.
        tp: tensor-parallel ranks.
        true: rows that are no padding; None where the user does not say.

    Returns:
        None for the rows where they stay as they are.

    Raises:
        UsageError: the rows cannot be divided, or are fewer than the user says.
    """
    mine = [w for w in content.tensors.values() if is_vocabulary(w)]
    rows = {wanted.shape[0] for wanted in mine}
    for wanted in mine:
        if true is None and wanted.shape[0] % tp:
            raise UsageError(
                f"the {wanted.shape[0]} rows of {wanted.name} cannot be divided over {tp} tensor"
                " ranks",
                hint="--true-vocab-size N says how many are no padding; the others are made anew",
                tensor=wanted.key,
            )
        if true is not None and true > wanted.shape[0]:
            raise UsageError(
                f"{wanted.name} has {wanted.shape[0]} rows, fewer than --true-vocab-size {true}",
                tensor=wanted.key,
            )
    if true is None or not mine:
        return content, None
    size = padded_size(args, true, tp)
    if rows == {size}:
        return content, None
    names = {wanted.key for wanted in mine}
    tensors = (
        _cut(wanted, size, true) if key in names else wanted
        for key, wanted in content.tensors.items()
    )
    return replace(content, tensors={wanted.key: wanted for wanted in tensors}), size


def _cut(wanted: TargetTensor, size: int, true: int) -> TargetTensor:
    """Return a tensor of the vocabulary with `size` rows."""
    kept = min(size, wanted.shape[0], true if wanted.kind in _MOMENTS else size)
    box = Box.whole((kept, *wanted.shape[1:]))
    return wanted._replace(shape=(size, *wanted.shape[1:]), copies=tuple(wanted.moved(box, 0)))
