"""Pages of the site that are made when it is built: one a verb, of the same tables as the help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.manual.markdown import markdown_pages

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files


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
