"""The user's file of settings: where it lies, what stands in it, and on which line.

It holds remotes (`remotes`), defaults of options and policies by root (`ftckpt.commands.config`).
Whatever else stands in it is an error, which names the line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from ftckpt.errors import DeniedError, UnavailableError, UsageError

VARIABLE = "FTCKPT_CONFIG"
TABLES = ("remotes", "defaults", "policies")

# One part of a dotted key.
_PART = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)"""
_HEADER = rf"\s*\[\s*({_PART}(?:\s*\.\s*{_PART})*)\s*\]"
_KEY = rf"\s*({_PART}(?:\s*\.\s*{_PART})*)\s*="


class SettingsFile(NamedTuple):
    """A file of settings.

    Attributes:
        path: where it lies, also where there is none.
        text: what it holds.
        tables: the same, parsed; only names of `TABLES`.
    """

    path: str
    text: str
    tables: Mapping[str, Any]

    def where(self, *keys: str) -> str:
        """Return file and line of a key, as an error names it."""
        line = self.line(*keys)
        return self.path if line is None else f"{self.path}, line {line}"

    def line(self, *keys: str) -> int | None:
        """Return the line of a key, or of the table around it."""
        found: dict[tuple[str, ...], int] = {}
        table: tuple[str, ...] = ()
        for number, line in enumerate(self.text.splitlines(), 1):
            if match := re.match(_HEADER, line):
                table = _parts(match[1])
                found.setdefault(table, number)
            elif match := re.match(_KEY, line):
                found.setdefault(table + _parts(match[1]), number)
        wanted = range(len(keys), 0, -1)
        return next((found[keys[:size]] for size in wanted if keys[:size] in found), None)


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(one.strip("\"'") for one in re.findall(_PART, dotted))


def config_path() -> str:
    """Return the path of the user's settings; the file may not exist."""
    given = os.environ.get(VARIABLE, "")
    if given:
        return given
    home = os.environ.get("XDG_CONFIG_HOME", "")
    # The specification says to ignore relative values.
    base = home if os.path.isabs(home) else os.path.join(os.path.expanduser("~"), ".config")
    # A relative HOME would name a file of whatever directory this runs in.
    return os.path.join(base, "ftckpt", "config.toml") if os.path.isabs(base) else os.devnull


def read_settings() -> SettingsFile:
    """Return the user's settings; empty without a file of them.

    Raises:
        UsageError: the file is wrong, or FTCKPT_CONFIG names a missing one.
        DeniedError, UnavailableError: it cannot be read.
    """
    path = config_path()
    try:
        with open(path, "rb") as file:
            seen = os.fstat(file.fileno())
            return _parsed(path, (seen.st_ino, seen.st_mtime_ns, seen.st_size))
    except (FileNotFoundError, NotADirectoryError) as error:
        if os.environ.get(VARIABLE):
            raise UsageError(f"{VARIABLE} names {path}, which is not there") from error
        return SettingsFile(path, "", {})
    except IsADirectoryError as error:
        raise UsageError(f"{path} is a directory, not a file of settings") from error
    except PermissionError as error:
        if not os.environ.get(VARIABLE) and not _is_seen(path):
            return SettingsFile(path, "", {})  # another user's home
        raise DeniedError(f"cannot read {path}: {error.strerror}") from error
    except OSError as error:
        raise UnavailableError(f"cannot read {path}: {error.strerror}") from error


def _is_seen(path: str) -> bool:
    """Say whether there is such a file, where its directory may be searched."""
    try:
        os.stat(path)
    except OSError:
        return False
    return True


@lru_cache(maxsize=4)
def _parsed(path: str, _seen: tuple[int, int, int]) -> SettingsFile:
    import tomllib

    try:
        with open(path, "rb") as file:
            text = file.read().decode()
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        # The message gives the place of the error, never its text.
        where = re.search(r"\(at [^)]*\)$", str(error))
        raise UsageError(f"{path} is not TOML {where[0] if where else ''}".rstrip()) from error
    found = SettingsFile(path, text, table)
    for name in table:
        if name not in TABLES:
            shown = ", ".join(f"[{one}]" for one in TABLES)
            raise UsageError(
                f"{found.where(name)}: there are no settings {name!r}",
                hint=f"it holds {shown}; [remotes.NAME] for a remote",
            )
        if not isinstance(table[name], dict):
            raise UsageError(f"{found.where(name)}: {name} is written as [{name}]")
    return found
