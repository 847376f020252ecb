"""What other packages add: verbs and formats, by the entry points of their metadata.

    [project.entry-points."ftckpt.verbs"]
    checksum-list = "mine.checksum_list"        # a module as those of ftckpt.commands are

    [project.entry-points."ftckpt.formats"]
    mine = "mine.formats:Mine"                  # a class as ftckpt.discovery.recognise.Format

They are looked for where a name or a place is not known, and in help: then the metadata beside the
packages are read, which takes 2 ms where `importlib.metadata` takes 45. Packages in the working
directory add nothing: it may hold anybody's files. docs/extending.md says how to write one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout, suppress
from functools import cache
from importlib import import_module
from threading import RLock
from typing import Any, NamedTuple

from ftckpt.errors import UnsupportedError

VERBS, FORMATS = "ftckpt.verbs", "ftckpt.formats"
_METADATA = (".dist-info", ".egg-info")
# What other packages may do and shall not end a verb by: one that is a script calls sys.exit.
MISTAKES = (Exception, SystemExit)


class Plugin(NamedTuple):
    """An entry point.

    Attributes:
        name: of the verb or format.
        value: `module` or `module:attribute`.
        package: name and version of what it comes with.
    """

    name: str
    value: str
    package: str


_failed: dict[str, None] = {}
# Of two threads that redirect, the first would end it for the second, and the second for good.
_importing = RLock()


@cache
def plugins(group: str) -> Mapping[str, Plugin]:
    """Return what a group has, by name; a name that two packages add is of neither."""
    found: dict[str, Plugin] = {}
    twice: dict[str, list[str]] = {}
    for of, one in _entry_points():
        if of == group and (other := found.setdefault(one.name, one)) != one:
            twice.setdefault(one.name, [other.package]).append(one.package)
    for name, packages in twice.items():
        said = (
            f"{_called(group, name)} is added by {' and '.join(sorted(packages))}: neither is used"
        )
        _failed[said] = None
        del found[name]
    return found


def load(group: str, name: str) -> Any:
    """Return what an entry point names.

    What its package prints as it is imported (many greet) is no part of an answer: it goes to
    stderr.

    Raises:
        UnsupportedError: it cannot be imported.
    """
    one = plugins(group)[name]
    module, _, attribute = one.value.partition(":")
    try:
        with _importing, redirect_stdout(sys.stderr):
            found = import_module(module.strip())
        for part in filter(None, attribute.strip().split(".")):
            found = getattr(found, part)
    except MISTAKES as error:
        raise failed(group, name, error) from error
    return found


def failed(group: str, name: str, error: BaseException) -> UnsupportedError:
    """Note that a plug-in does not work, and return it as an error."""
    package = plugins(group)[name].package
    said = " ".join(f"{type(error).__name__}: {error}".split())
    sentence = f"{_called(group, name)} of the package {package} does not work: {said}"
    _failed[sentence] = None
    return UnsupportedError(sentence, hint=f"mend or remove {package.partition(' ')[0]}")


def failures() -> list[str]:
    """Return a sentence for each plug-in that was tried so far and does not work."""
    return list(_failed)


def _called(group: str, name: str) -> str:
    return f"the {group.rpartition('.')[2].rstrip('s')} {name!r}"


@cache
def _entry_points() -> tuple[tuple[str, Plugin], ...]:
    return tuple(_read())


def _read() -> Iterator[tuple[str, Plugin]]:
    """Yield every entry point of ours, each with its group; of two versions the first counts."""
    here, seen = os.getcwd(), set()
    for place in dict.fromkeys(os.path.abspath(path) for path in sys.path if path):
        if place == here:
            continue
        with suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                stem, kind = os.path.splitext(entry.name)
                if kind not in _METADATA:
                    continue
                name, _, version = stem.partition("-")
                if name.lower() in seen:
                    continue
                seen.add(name.lower())
                with suppress(OSError, UnicodeDecodeError):
                    path = os.path.join(entry.path, "entry_points.txt")
                    with open(path, encoding="utf-8") as file:
                        yield from _parsed(file, f"{name} {version.partition('-')[0]}".rstrip())


def _parsed(lines: Iterator[str], package: str) -> Iterator[tuple[str, Plugin]]:
    group = ""
    for line in lines:
        line = line.strip()
        if line.startswith("["):
            group = line.strip("[] ")
        elif group in (VERBS, FORMATS) and "=" in line and line[0] not in "#;":
            name, _, value = line.partition("=")
            yield group, Plugin(name.strip(), value.partition("[")[0].strip(), package)
