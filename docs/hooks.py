"""What is made when the site is built: a page a verb, and the order of what a search finds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ftckpt.commands.manual.contents import markdown_pages

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

# A stranger searches for a task; the page of a verb lists every flag and has every word. Each word
# of a question counts for all that begin with it too, so "to" finds "torchtitan" everywhere.
BOOSTS = {
    "tasks/": 3.0, "tasks/ship-a-torchtitan-run.md": 1.5, "frameworks/": 1.5, "sealing.md": 1.5,
    "verbs/": 0.5,
}  # fmt: skip


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the verbs into the navigation."""
    nav: list[dict[str, Any]] = config.nav or []
    for tab in nav:
        if "Verbs" in tab:
            tab["Verbs"] = [name for name, _ in markdown_pages()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page a verb."""
    from mkdocs.structure.files import File

    for name, text in markdown_pages():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    r"""Weigh a page for the search by its folder, and write code in tables as this site reads it.

    GitHub wants `a\|b` in a cell; here the backslash would be shown.
    """
    for start, boost in BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta["search"] = {"boost": boost}
    return re.sub(r"^\|.*", _code_as_it_is, markdown, flags=re.MULTILINE)


def _code_as_it_is(row: re.Match[str]) -> str:
    return re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0])
