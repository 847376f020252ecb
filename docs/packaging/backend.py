"""The build backend: setuptools', after it has made the man pages.

The pages are made of the verbs' help, so they are in no checkout. An sdist has the two links that
make its three folders one package, which setuptools leaves out.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tarfile
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 (the other hooks are setuptools' own)

# What the help is made with; a build without it (`--no-build-isolation`) needs it installed.
_NEEDED = ["typer>=0.24", "click>=8.2"]
_LINKS = ("ftckpt/commands", "ftckpt/formats")
_PAGES = "build/man"


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return what setuptools needs, and what the pages need."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_NEEDED]


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel, with man pages."""
    _make_pages()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """Build the sdist, with the links and without generated pages."""
    shutil.rmtree(_PAGES, ignore_errors=True)
    name = build_meta.build_sdist(sdist_directory, config_settings)
    _add_links(os.path.join(sdist_directory, name))
    return name


def _make_pages() -> None:
    """Write the pages to where pyproject.toml's data-files find them."""
    shutil.rmtree(_PAGES, ignore_errors=True)
    sys.path.insert(0, os.getcwd())
    import ftckpt

    if not os.path.isdir("ftckpt/commands"):  # a checkout without links
        ftckpt.__path__.append(os.getcwd())
    from ftckpt.commands.manual import write_pages

    write_pages(_PAGES)


def _add_links(path: str) -> None:
    with tarfile.open(path) as archive:
        members = [
            (one, archive.extractfile(one).read() if one.isfile() else b"")  # type: ignore[union-attr]
            for one in archive.getmembers()
        ]
    top = members[0][0].name.split("/")[0]
    with tarfile.open(path, "w:gz") as archive:
        for one, data in members:
            archive.addfile(one, io.BytesIO(data))
        for link in _LINKS:
            made = tarfile.TarInfo(f"{top}/{link}")
            made.type, made.linkname = tarfile.SYMTYPE, f"../{os.path.basename(link)}"
            made.mtime = members[0][0].mtime
            if made.name not in {one.name for one, _ in members}:
                archive.addfile(made)
