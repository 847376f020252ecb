"""Help on one screen: what is needed of one verb every day."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence

# Text is not wider than that, however wide the terminal is.
_WIDEST = 80
# What stands for an option and its value; where more do, the words begin on a line of their own.
_TERM = 24
_EXAMPLES = 3


def screen(
    summary: str,
    usage: str,
    rows: Sequence[tuple[str, str]],
    examples: Sequence[tuple[str, str]],
    options: int,
    others: Sequence[str],
) -> str:
    """Return the short help of a verb.

    Args:
        summary: one sentence.
        usage: program, verb and what follows.
        rows: arguments and options, each with its words.
        examples: command lines with what each does; the first that fit are shown.
        options: how many there are.
        others: verbs of the same family.
    """
    width = text_columns()
    also = f"; see also {', '.join(others)}" if others else ""
    lines = [
        *textwrap.wrap(summary, width),
        f"Usage: {usage}",
        "",
        *_rows(rows, width),
        *([""] if rows else []),
        *_examples(examples, width),
        *textwrap.wrap(f"`--help` shows all {options} options{also}", width),
    ]
    return "\n".join(lines)


def _examples(examples: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    fitting = [one for one in examples if len(one[0]) <= width - 2]
    if fitting:
        yield "Examples:"
    for line, does in fitting[:_EXAMPLES]:
        yield f"  {line}"
        yield from textwrap.wrap(does, width, initial_indent="      ", subsequent_indent="      ")
    if fitting:
        yield ""


def _rows(rows: Iterable[tuple[str, str]], width: int) -> Iterator[str]:
    rows = list(rows)
    column = min(max((len(term) for term, _ in rows), default=0), _TERM) + 4
    for term, words in rows:
        begin = f"  {term}".ljust(column)
        if len(begin) > column:
            yield begin
            begin = " " * column
        yield from textwrap.wrap(
            words, width, initial_indent=begin, subsequent_indent=" " * column,
            break_on_hyphens=False,
        ) or [begin]  # fmt: skip


def text_columns() -> int:
    """Return the columns that help is wrapped to."""
    return max(40, min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST))
