"""Text for man pages, with everything that roff would take as its own escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SPECIAL = {
    "\\": "\\e",
    "-": "\\-",
    "'": "\\(aq",
    "`": "\\(ga",
    "^": "\\(ha",
    "~": "\\(ti",
}


def plain(text: str) -> str:
    """Return words of one line as they are to be read; no line of it is a request."""
    words = " ".join(text.split())
    out = "".join(_SPECIAL.get(one, one if one.isascii() else _named(one)) for one in words)
    return f"\\&{out}" if out.startswith(".") else out


def _named(letter: str) -> str:
    return f"\\[u{ord(letter):04X}]"


def bold(text: str) -> str:
    """Return words in bold."""
    return f"\\fB{plain(text)}\\fR"


def paragraphs(*texts: str) -> str:
    """Return paragraphs; an empty line separates them in a text too."""
    blocks = [one for text in texts for one in re.split(r"\n\s*\n", text) if one.strip()]
    return "".join(f".PP\n{plain(one)}\n" for one in blocks)


def rows(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a list of terms, each with its words; both are roff already."""
    return "".join(f".TP\n{term}\n{words}\n" for term, words in pairs)


def example(line: str) -> str:
    """Return a command line, unbroken and indented."""
    return f".PP\n.RS 4\n.nf\n{plain(line)}\n.fi\n.RE\n"
