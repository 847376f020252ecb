"""Find parameters with a vocabulary's rows, and count the rows without padding."""

from __future__ import annotations

from functools import cache

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.sharding import Rules
from ftckpt.comparison import Vocabulary
from ftckpt.errors import FtckptError
from ftckpt.formats.state.rule_tables import built_in, families

from .facts import arguments_of


def is_vocabulary(name: str) -> bool:
    """Say whether the first axis of a parameter counts a vocabulary, in any family that we know."""
    return any((rule := rules.get(name)) is not None and rule.vocabulary for rules in _tables())


@cache
def _tables() -> tuple[Rules, ...]:
    return tuple(built_in(family) for family in families())


def recorded_rows(checkpoint: Checkpoint) -> int | None:
    """Return how many rows of a vocabulary Megatron recorded to be true; None where it did not.

    It pads to `padded_vocab_size`; `vocab_size` is recorded where the job was told it
    (`_vocab_size_with_padding` in megatron/training).

    Raises:
        CorruptError, UnsafeError: the object that holds the arguments is damaged or hostile.
    """
    args = arguments_of(checkpoint)
    true, padded = args.count("vocab_size"), args.count("padded_vocab_size")
    return true if 0 < true < padded and not args.count("vocab_extra_ids") else None


def vocabulary_of(ours: Checkpoint, theirs: Checkpoint, rows: int | None = None) -> Vocabulary:
    """Return what is known of the vocabulary that two checkpoints share.

    Args:
        ours: one of them.
        theirs: the other.
        rows: that are no padding, where the user says so; else what either recorded.
    """
    for checkpoint in (ours, theirs):
        try:
            rows = rows or recorded_rows(checkpoint)
        except FtckptError:
            continue  # the state that holds it is damaged, and is reported as that
    return Vocabulary(is_vocabulary, rows)
