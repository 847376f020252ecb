"""The words of a command line of bash, and quotes for what is inserted there."""

from __future__ import annotations

import re

# What a word may hold without a quote in bash and zsh; no letter outside ASCII means anything.
_PLAIN = re.compile(r"[\w./:@%+,=-]", re.ASCII)


def split_line(line: str) -> tuple[list[str], str]:
    """Return the words up to the cursor, without quotes, and the quote that is open there.

    The last word is the one that is being typed; it may be empty. Assignments before the command
    are left out. Nothing is expanded.
    """
    words: list[str] = []
    word: str | None = None
    quote = ""
    letters = iter(line)
    for letter in letters:
        if quote == "'":
            if letter == "'":
                quote = ""
            else:
                word = (word or "") + letter
        elif letter == "\\":
            after = next(letters, "")
            keep = quote and after not in '"\\$`'
            word = (word or "") + ("\\" if keep else "") + after
        elif quote:
            if letter == '"':
                quote = ""
            else:
                word = (word or "") + letter
        elif letter in "'\"":
            quote, word = letter, word or ""
        elif letter.isspace():
            if word is not None:
                words.append(word)
            word = None
        else:
            word = (word or "") + letter
    words.append(word or "")
    while len(words) > 1 and re.match(r"[A-Za-z_]\w*=", words[0]):
        words = words[1:]
    return words, quote


def quoted(text: str, quote: str) -> str:
    """Return a text as it must be typed inside an open quote, or outside any."""
    if quote == "'":
        return text.replace("'", "'\\''")
    if quote == '"':
        return re.sub(r'(["\\$`])', r"\\\1", text)
    return "".join(one if _PLAIN.match(one) or not one.isascii() else f"\\{one}" for one in text)
