"""Defaults of options, and policies by root, out of the user's file of settings.

They change how fast a verb works, what it shows and whom it tells. Nothing that deletes, overwrites
or skips a check can be set there: only what `_DEFAULTS` lists, and a policy from there is for plans
alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from ftckpt import amounts
from ftckpt.errors import UsageError
from ftckpt.storage.settings import SettingsFile, read_settings


class _Kind(NamedTuple):
    """What a default may be.

    Attributes:
        types: of its value in TOML.
        says: the same in words.
        check: raises UsageError for a value that the option would refuse.
    """

    types: tuple[type, ...]
    says: str
    check: Callable[[Any], object]


def _at_least(least: float) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if not least <= value < float("inf"):
            raise UsageError(f"it is below {least}")

    return check


def _one_of(*words: str) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if value not in words:
            raise UsageError(f"it is one of {', '.join(words)}")

    return check


_DEFAULTS = {
    "jobs": _Kind((int,), "a whole number", _at_least(0)),
    "limit-rate": _Kind((str,), "a text such as '200MiB/s'", amounts.rate),
    "max-memory": _Kind((str,), "a text such as '1GiB'", amounts.size),
    "retry-seconds": _Kind((int, float), "a number of seconds", _at_least(0)),
    "progress": _Kind((str,), "a text", _one_of("auto", "json")),
    "expect-interval": _Kind((str,), "a text such as '22m'", partial(amounts.seconds, flag="it")),
    "on-alert": _Kind((str,), "a command", str),
    "alert-url": _Kind((str,), "a URL", str),
}


class Default(NamedTuple):
    """A default that the file sets.

    Attributes:
        verb: for which it holds; "" for all that have the option.
        option: without dashes in front.
        value: as TOML has it.
        line: on which it stands.
    """

    verb: str
    option: str
    value: Any
    line: int | None


def defaults(settings: SettingsFile, is_verb: Callable[[str], bool]) -> list[Default]:
    """Return what `[defaults]` and `[defaults.VERB]` set; those for all verbs first.

    Raises:
        UsageError: a key that may not stand there, or a value that its option would refuse.
    """
    table = settings.tables.get("defaults", {})
    found = []
    for name, value in table.items():
        if not isinstance(value, dict):
            found.append(_default(settings, "", name, value))
    for verb, row in table.items():
        if isinstance(row, dict):
            if not is_verb(verb):
                raise UsageError(f"{settings.where('defaults', verb)}: no verb is called {verb!r}")
            found += [_default(settings, verb, name, value) for name, value in row.items()]
    return found


def _default(settings: SettingsFile, verb: str, name: str, value: Any) -> Default:
    keys = ("defaults", verb, name) if verb else ("defaults", name)
    where = settings.where(*keys)
    kind = _DEFAULTS.get(name)
    if kind is None:
        raise UsageError(
            f"{where}: {name!r} has no default to set", hint=f"there are {', '.join(_DEFAULTS)}"
        )
    if not isinstance(value, kind.types) or isinstance(value, bool):
        raise UsageError(f"{where}: {name} must be {kind.says}")
    try:
        kind.check(value)
    except UsageError as error:
        raise UsageError(f"{where}: {name}: {error.message}", hint=error.hint) from error
    return Default(verb, name, value, settings.line(*keys))


def defaults_of(verb: str, is_verb: Callable[[str], bool]) -> dict[str, Any]:
    """Return the defaults of a verb by its parameters' names: its own go before those of all.

    Raises:
        UsageError: the file of settings is wrong.
        DeniedError: it may not be read.
    """
    settings = read_settings()
    if not settings.tables:
        return {}
    policies(settings)  # a mistake anywhere in it is told at once
    found = [one for one in defaults(settings, is_verb) if one.verb in ("", verb)]
    return {one.option.replace("-", "_"): one.value for one in found}


class RootPolicy(NamedTuple):
    """Which policy belongs to a root.

    Attributes:
        root: path, URL or place on a remote.
        file: the retention.toml.
        where: file and line that say so.
    """

    root: str
    file: str
    where: str


def policies(settings: SettingsFile) -> list[RootPolicy]:
    """Return what `[policies]` says.

    Raises:
        UsageError: a value that is not the path of a file from `/` or `~`.
    """
    rows: Mapping[str, Any] = settings.tables.get("policies", {})
    found = []
    for root, file in rows.items():
        where = settings.where("policies", root)
        if not root or not isinstance(file, str) or not os.path.isabs(os.path.expanduser(file)):
            raise UsageError(
                f'{where}: a policy is written as "ROOT" = "FILE"',
                hint="with the path of FILE from / or ~",
            )
        found.append(RootPolicy(root, os.path.expanduser(file), where))
    return found


def policy_of(root: str) -> RootPolicy | None:
    """Return the policy of exactly this root; None where the file of settings names none."""
    same = _identity(root)
    return next((one for one in policies(read_settings()) if _identity(one.root) == same), None)


def _identity(root: str) -> str:
    from ftckpt.storage.remotes import named

    is_local = "://" not in root and named(root) is None
    return os.path.realpath(os.path.expanduser(root)) if is_local else root.rstrip("/")
