"""The list of the verbs, under headings, on one screen."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from .short_help import text_columns
from .verbs import FAMILIES, HEADINGS, VERBS, all_verbs, family


def all_help() -> str:
    """Return the help of the whole: the verbs under their headings, one line each."""
    width = text_columns()
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
