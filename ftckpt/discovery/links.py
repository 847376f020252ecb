"""Links are followed for reading, and said to be."""

from __future__ import annotations

from collections.abc import Iterable

from ftckpt.findings import Finding, finding
from ftckpt.storage.source import Source

# A hub's cache is all links: then one note says so.
NAMED = 5


def followed_links(source: Source, members: Iterable[str]) -> list[Finding]:
    """Note each of `members` that is a symbolic link (`link-followed`); one note for many."""
    entries = source.entries
    links = sorted(n for n in members if n in entries and entries[n].link is not None)
    if len(links) > NAMED:
        message = f"{len(links)} files are links and were followed, such as {links[0]}"
        return [finding("link-followed", message)]
    return [
        finding("link-followed", f"{name} is a link to {entries[name].link}", file=name)
        for name in links
    ]
