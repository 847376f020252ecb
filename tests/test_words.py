"""Words that make a sentence be read twice: none is added, and fewer are left each time."""

from __future__ import annotations

import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# How often each still stands in the product and its pages; lower a number with each that goes.
MOST = {
    "upon": 0,
    "whoever": 0,
    "be it": 0,
    "reckon": 0,
    "so many": 0,
    "is no": 0,
}
_WORDS = {
    word: re.compile(rf"\b{word}\b" if word == "is no" else rf"\b{word}", re.IGNORECASE)
    for word in MOST
}


def prose(path: Path) -> Iterator[str]:
    """Yield what people read of a file: a page whole, of code its comments and strings."""
    text = path.read_text()
    if path.suffix != ".py":
        yield text
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.string


def pages() -> list[Path]:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for folder in ("ftckpt", "formats", "commands"):
        # The links inside the core show the other folders a second time.
        found += [p for p in (ROOT / folder).rglob("*.py") if "ftckpt/formats" not in str(p)]
    return [p for p in found if p.name != "CHANGELOG.md"]


@pytest.fixture(scope="module")
def found() -> Counter[str]:
    counts: Counter[str] = Counter()
    for path in pages():
        for text in prose(path):
            counts.update({word: len(said.findall(text)) for word, said in _WORDS.items()})
    return counts


@pytest.mark.parametrize("word", MOST)
def test_a_word_is_not_added(word: str, found: Counter[str]) -> None:
    assert found[word] <= MOST[word], f"{found[word]} times; write it as a plain sentence"


def test_pages_are_read() -> None:
    names = {path.name for path in pages()}
    assert {"README.md", "retention.md", "store.py", "verify.py"} <= names
