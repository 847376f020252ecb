"""Help on one screen: all verbs by headings, and what is needed of one verb every day."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from .verbs import FAMILIES, HEADINGS, VERBS, all_verbs, family

if TYPE_CHECKING:
    import click

    from .derive import Verb

# Text is not wider than that, however wide the terminal is.
_WIDEST = 80
# What stands for an option and its value; where more do, the words begin on a line of their own.
_TERM = 24
_EXAMPLES = 3


def short_help(verb: Verb, ctx: click.Context) -> str:
    """Return what is needed of a verb every day: 24 lines at most, where 80 columns are."""
    width = _width()
    summary = (verb.help or "").strip().partition("\n")[0]
    rows = []
    for param in verb.everyday_params(ctx):
        term, words = param.get_help_record(ctx) or ("", "")
        if param.param_type_name == "argument":
            words = words.removesuffix("  [required]")
        elif param.metavar is None and getattr(param, "words", None):
            term, words = _without_words(param, term, words)
        rows.append((term, words))
    lines = [
        *textwrap.wrap(summary, width),
        f"Usage: {ctx.command_path} {' '.join(verb.collect_usage_pieces(ctx))}",
        "",
        *_rows(rows, width),
        *([""] if rows else []),
        *_examples(verb, width),
    ]
    number = sum(one.param_type_name == "option" for one in verb.get_params(ctx))
    others = [one for one in family(str(verb.name).split()[0]) if one != verb.name]
    also = f"; see also {', '.join(others)}" if others else ""
    return "\n".join([*lines, *textwrap.wrap(f"`--help` shows all {number} options{also}", width)])


def _without_words(param: click.Parameter, term: str, says: str) -> tuple[str, str]:
    """Return an option's row with the words that it takes beside it, not in its name."""
    known = param.words  # type: ignore[attr-defined]
    if not all(word in says for word in known):
        text, mark, rest = says.partition(".  [")
        says = f"{text.rstrip('.')}: {', '.join(known)}{mark or '.'}{rest}"
    return f"{term.partition(' [')[0]} WORD", says


def _examples(verb: Verb, width: int) -> Iterator[str]:
    fitting = [one for one in verb.examples if len(one[0]) <= width - 2]
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


def all_help() -> str:
    """Return the help of the whole: the verbs under their headings, one line each."""
    width = _width()
    lines = [
        "Operate the checkpoints of large-model training.",
        "",
        "Usage: ftckpt VERB [OPTIONS] ...",
    ]
    column = max(len(name) for name, _ in _listed()) + 4
    for heading, verbs in _headings().items():
        lines += ["", heading]
        for name, says in verbs.items():
            lines += textwrap.wrap(
                says, width, initial_indent=f"  {name}".ljust(column),
                subsequent_indent=" " * column,
            )  # fmt: skip
    lines += [
        "",
        "ftckpt VERB -h shows one screen about a verb, ftckpt VERB --help all of it;",
        "ftckpt help exit-codes says what scripts can rely on. Options of every verb,",
        "such as --json and -q, are taken before it, too. -V, --version: the version.",
    ]
    return "\n".join(lines)


def _listed() -> Iterator[tuple[str, str]]:
    return ((name, says) for verbs in _headings().values() for name, says in verbs.items())


def _headings() -> dict[str, dict[str, str]]:
    """Return the headings with their verbs: one line a family, other packages' verbs last."""
    found: dict[str, dict[str, str]] = {}
    for heading, verbs in HEADINGS.items():
        rows = found.setdefault(heading, {})
        for verb, says in verbs.items():
            first = verb.split()[0]
            rows[first if first in FAMILIES else verb] = FAMILIES.get(first, says)
    others = {name: says for name, says in all_verbs().items() if name not in VERBS}
    return found | ({"Of other packages": others} if others else {})


def family_help(first: str) -> str:
    """Return the verbs that begin with a word, one line each."""
    verbs = {verb: VERBS.get(verb) or all_verbs()[verb] for verb in family(first)}
    column = max(map(len, verbs)) + 4
    rows = [f"  {name}".ljust(column) + says for name, says in verbs.items()]
    return "\n".join([f"Usage: ftckpt {first} VERB ...", "", *rows, "",
                      f"ftckpt {first} VERB -h shows one screen about a verb"])  # fmt: skip


def _width() -> int:
    return max(40, min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST))
