"""Named remotes: places with a name, each with an endpoint and a profile.

`cold:run7/ckpt` is the place `run7/ckpt` below the URL of the remote `cold`. So one command can
reach two services, each with its own credentials. Only the user's TOML file defines remotes; it
names an AWS profile and never holds a secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from ftckpt.errors import FtckptError, UsageError

from .options import StoreOptions
from .settings import SettingsFile, config_path, read_settings

# Two slashes make a URL, a second colon a chain of filesystems.
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*):(?!//|:)(?P<rest>.*)", re.DOTALL)
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
# Which checkpoint of a root, after its place: `newest` says what `latest` does.
SELECTOR = r"@(?P<which>latest|newest|\d+)"
# The beginnings of URLs: a missing slash must not turn one into the name of a remote.
SCHEMES = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "file", "local", "memory", "http", "https"}
    | {"ftp", "sftp", "ssh", "hdfs", "hf", "smb", "webhdfs"}
)
_KINDS: dict[str, tuple[type, ...]] = {
    "url": (str,),
    "endpoint": (str,),
    "profile": (str,),
    "region": (str,),
    "requester_pays": (bool,),
    "anonymous": (bool,),
    "retry_seconds": (int, float),
    "timeout": (int, float),
}
_WORDS = {str: "a text", bool: "true or false", int: "a number of seconds"}
_S3_ONLY = ("endpoint", "profile", "region")
_SECRET = "(?i)key|secret|token|password|credential"


class Remote(NamedTuple):
    """A named place.

    Attributes:
        name: before the colon.
        url: the path or URL that names are relative to.
        settings: the fields of `StoreOptions` that it sets.
    """

    name: str
    url: str
    settings: tuple[tuple[str, Any], ...] = ()

    def place(self, rest: str) -> str:
        """Return the path or URL of `NAME:rest`.

        Raises:
            UsageError: `rest` climbs out of the remote.
        """
        rest = rest.lstrip("/")
        if ".." in rest.split("/"):
            raise UsageError(f"{self.name}:{rest} leads out of the remote {self.name}")
        return self.url if not rest else f"{self.url.rstrip('/')}{self._joint}{rest}"

    @property
    def _joint(self) -> str:
        # `s3://` alone names every bucket of a service.
        return "//" if self.url.endswith("://") else "/"

    def options(self, given: StoreOptions) -> StoreOptions:
        """Return the remote's options.

        Only the remote sets service and credentials: the flags of a command with two places belong
        to the other one.
        """
        patience = StoreOptions(retry_seconds=given.retry_seconds, timeout=given.timeout)
        return patience._replace(**dict(self.settings))


def remotes() -> dict[str, Remote]:
    """Return the user's remotes by name; none without a file of settings.

    Raises:
        UsageError: the file is wrong, or FTCKPT_CONFIG names a missing one.
        DeniedError: it may not be read.
    """
    settings = read_settings()
    rows = settings.tables.get("remotes", {})
    return {name: _remote(name, row, settings) for name, row in rows.items()}


def _remote(name: str, row: object, settings: SettingsFile) -> Remote:
    where = f"[remotes.{name}] in {settings.where('remotes', name)}"
    if not re.fullmatch(_NAME, name) or name.lower() in SCHEMES:
        raise UsageError(
            f"{where}: {name!r} cannot name a remote",
            hint="letters, digits, '_', '.' and '-', and no scheme of a URL such as s3",
        )
    if not isinstance(row, dict):
        raise UsageError(f"{where}: a remote is written as [remotes.NAME]")
    for key, value in row.items():
        where = f"[remotes.{name}] in {settings.where('remotes', name, key)}"
        if key not in _KINDS:
            raise UsageError(f"{where} has no setting {key!r}", hint=_hint(key))
        kinds = _KINDS[key]
        if not isinstance(value, kinds) or isinstance(value, bool) is not (kinds == (bool,)):
            raise UsageError(f"{where}: {key} must be {_WORDS[kinds[0]]}")
        if isinstance(value, (int, float)) and not 0 <= value < float("inf"):
            raise UsageError(f"{where}: {key} must be a number of seconds")
    where = f"[remotes.{name}] in {settings.where('remotes', name)}"
    url = row.get("url", "")
    scheme, is_url, _ = url.partition("://")
    if not url or "::" in url or not (is_url or os.path.isabs(url)):
        raise UsageError(f"{where} needs a url: s3://bucket/prefix, or a path from /")
    if _userinfo(url) or _userinfo(row.get("endpoint", "")):
        raise UsageError(
            f"{where} has a name or a password in its URL", hint="use profile = an AWS profile"
        )
    s3 = is_url and scheme.lower() in ("s3", "s3a")
    for key in _S3_ONLY:
        if key in row and not s3:
            raise UsageError(f"{where}: {key} is for s3:// alone")
    endpoint = row.get("endpoint", "")
    if endpoint and not re.match(r"https?://[^/]", endpoint):
        raise UsageError(f"{where}: endpoint must begin with https:// or http://")
    others = tuple((key, value) for key, value in row.items() if key != "url")
    return Remote(name, url if url.endswith("://") else url.rstrip("/") or "/", others)


def _hint(key: str) -> str:
    if re.search(_SECRET, key):
        return "no secret stands here: profile = NAME takes them from the AWS credentials file"
    near = _near(key, _KINDS)
    return f"did you mean {' or '.join(near)}?" if near else f"it may set {', '.join(_KINDS)}"


def _near(asked: str, names: Iterable[str]) -> list[str]:
    from difflib import get_close_matches

    return get_close_matches(asked, names)


def _userinfo(url: str) -> bool:
    from urllib.parse import urlsplit

    try:
        return "@" in urlsplit(url).netloc
    except ValueError:
        return True


def named(url: str) -> tuple[Remote, str] | None:
    """Return the remote of a place and the rest; None for a path or a URL.

    A remote takes precedence over a local file: `./cold:x` is the file. If no remote has the name,
    an existing file is meant.

    Raises:
        UsageError: the name is not a remote's, and no such file exists; or the settings are wrong.
        DeniedError: the settings may not be read.
    """
    match = _NAMED.fullmatch(url)
    if match is None or match["name"].lower() in SCHEMES:
        return None
    name, rest = match["name"], match["rest"]
    known = remotes()
    if name in known:
        return known[name], rest
    first = url.split("/")[0]
    # After one slash a URL was meant: opening the path reports that.
    if rest.startswith("/") or any(
        map(os.path.lexists, (first, re.sub(f"{SELECTOR}$", "", first)))
    ):
        return None
    near = _near(name, known)
    meant = f"did you mean {' or '.join(f'{one}:' for one in near)}? " if near else ""
    raise UsageError(
        f"unknown remote {name!r}",
        hint=f"{meant}[remotes.{name}] in {config_path()} makes one; a file is ./{url}",
    )


def split(url: str) -> tuple[str, str]:
    """Return the directory of a path, URL or name of a remote, and the last element."""
    parent, slash, name = url.rpartition("/")
    if not slash:
        try:
            found = named(url)
        except FtckptError:
            found = None
        if found is not None:
            return f"{found[0].name}:", found[1]
    return parent or slash or ".", name


def named_in(words: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the remotes that a command line (also as `--flag=value`) names, with settings."""
    found = {}
    for word in words:
        for text in (word, word.partition("=")[2]):
            try:
                one = named(text)
            except FtckptError:  # a text for people, or said already
                continue
            if one is not None:
                found[one[0].name] = {"url": one[0].url, **dict(one[0].settings)}
    return found
