"""From what a shell says of its command line to the lines that its script takes.

The first line is `words`, `nospace` (the word goes on) or `files` (the shell completes names of
files itself); the words follow. For bash and zsh a word is the text to insert.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ftckpt.storage.options import StoreOptions

from .line import quoted, split_line
from .places import Looking, candidates
from .table import ARGUMENTS, SWITCHES, option_kind

# A word that ends in one of these goes on.
_OPEN = ("/", ":", ".")


class Asked(NamedTuple):
    """What is completed.

    Attributes:
        verb: the verb, of two words where `ARGUMENTS` names such a one.
        kind: of the word, as in `table`.
        current: the beginning of the word, without quotes and without `--option=`.
        arguments: the verb's arguments before it.
        given: values of options before it.
    """

    verb: str
    kind: str
    current: str
    arguments: tuple[str, ...]
    given: Mapping[str, str]


def answer(arguments: Sequence[str], deadline: float) -> str:
    """Return the lines for a shell's script.

    Args:
        arguments: `bash LINE TEXT`, `zsh QUOTE TEXT WORD...` or `fish WORD...`: TEXT is the
            beginning of what the shell replaces, as typed; of the words the last is completed.
        deadline: when the shell has no use for it any more, by the monotonic clock.
    """
    shell, *rest = arguments
    quote = text = ""
    if shell == "bash":
        line, text = rest
        words, quote = split_line(line)
        words = words[1:]
    elif shell == "zsh":
        quote, text, *words = rest
    else:
        words = list(rest)
    asked = parse(words)
    looking = Looking(asked.verb, asked.arguments, _stores(asked), deadline)
    found = candidates(asked.kind, asked.current, looking)
    if found is None:
        return "files\n"
    # A name in a store must not move the cursor, nor end a line.
    begun = [one for one in found if one.startswith(asked.current) and one.isprintable()]
    goes_on = len(begun) == 1 and begun[0].endswith(_OPEN)
    if shell == "fish":
        # A word with a description of its own, if an empty one, is not given the option's.
        shown = [f"{one}\t" for one in begun]
    else:
        shown = [text + quoted(one[len(asked.current) :], quote) for one in begun]
    return "\n".join(["nospace" if goes_on else "words", *shown, ""])


def parse(words: Sequence[str]) -> Asked:
    """Find out what the last of the words after the program's name is."""
    *before, current = words
    arguments: list[str] = []
    given: dict[str, str] = {}
    waiting = ""
    options = True
    for word in before:
        if waiting:
            given[waiting] = word
            waiting = ""
        elif options and word == "--":
            options = False
        elif options and len(word) > 1 and word.startswith("-"):
            name, joined, value = word.partition("=")
            if joined:
                given[name] = value
            elif name not in SWITCHES:
                waiting = name
        else:
            arguments.append(word)
    size = 2 if " ".join(arguments[:2]) in ARGUMENTS else 1
    verb, arguments = " ".join(arguments[:size]), arguments[size:]
    if options and not waiting and current.startswith("--"):
        waiting, _, current = current.partition("=")
    kinds = ARGUMENTS.get(verb, ("place",))
    kind = kinds[min(len(arguments), len(kinds) - 1)] if not waiting else option_kind(verb, waiting)
    return Asked(verb, kind, current, tuple(arguments), given)


def _stores(asked: Asked) -> StoreOptions:
    """Return how to reach object stores: as said on the line or in the environment, impatiently."""

    def said(flag: str) -> str:
        variable = f"FTCKPT_{asked.verb}_{flag}".replace(" ", "_").upper()
        return asked.given.get(f"--{flag}", os.environ.get(variable, ""))

    return StoreOptions(
        endpoint=said("endpoint"),
        profile=said("profile"),
        region=said("region"),
        retry_seconds=3,
        timeout=5,
    )
