"""Credentials in URLs: kept in memory for the requests, and in nothing that is written or printed.

`http://user:password@host/x` and a signed `https://host/x?X-Amz-Signature=...` are secrets. What a
run records (a delta's base, logs, alerts) and prints is the URL without them. A container in the
place of a user (`abfss://container@account`), and the user of `ssh://user@host`, are none.
"""

from __future__ import annotations

import re

from ftckpt.errors import UsageError

_USERINFO = r"(?<![A-Za-z0-9+.-])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<user>[^/?#\s'\"]*)@"
_QUERY = r"(?P<object>https?://[^\s?#'\"]+)\?(?P<query>[^\s'\"]*)"
# In what other programs print: a value beside a word for a secret, and keys of known services.
_NAMED = re.compile(
    r"(?P<name>(?:api|access|secret|private|auth|account)[-_ ]?key(?:[-_]?id)?|token|secret"
    r"|passw(?:or)?d|passwd|passphrase|credentials?|authorization)"
    r"(?P<between>['\"]?\s*[:=]\s*['\"]?(?:(?:bearer|basic|token)\s+)?)"
    r"(?P<value>[^\s'\",;&]+)",
    re.IGNORECASE,
)
_KEYS = re.compile(
    r"(?P<name>\bbearer\s+)[^\s'\",;]+"
    r"|\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|ASIA|AIza)[A-Za-z0-9_-]{12,}",
    re.IGNORECASE,
)
_HTTP = ("http", "https")
_S3 = ("s3", "s3a")

# What was typed in this process: users and passwords by scheme and host, queries by object.
_users: dict[str, str] = {}
_queries: dict[str, str] = {}


def hidden(text: str) -> str:
    """Return a text with what is secret left out of every URL in it."""
    if "://" not in text:
        return text
    text = re.sub(_USERINFO, lambda m: f"{m['scheme']}://{_public(m['scheme'], m['user'])}", text)
    return re.sub(_QUERY, r"\g<object>", text, flags=re.IGNORECASE)


def masked(text: str) -> str:
    """Return what another program printed, with `***` for what looks like a secret."""
    text = _NAMED.sub(r"\g<name>\g<between>***", hidden(text))
    return _KEYS.sub(lambda m: f"{m['name'] or ''}***", text)


def withheld(url: str) -> str:
    """Return a URL as it may be recorded and printed; this process remembers what it leaves out.

    Raises:
        UsageError: `s3://` with credentials, which no store would use.
    """
    match = re.match(_USERINFO, url)
    if match is not None:
        scheme, user = match["scheme"].lower(), match["user"]
        if scheme in _S3:
            raise UsageError(
                f"the URL {hidden(url)} was typed with credentials in it",
                hint="AWS_PROFILE, or the AWS credentials file",
            )
        shown = _public(scheme, user)
        rest = url[match.end() :]
        if shown != f"{user}@":
            _users[f"{scheme}://{shown}{_host(rest)}"] = user
        url = f"{match['scheme']}://{shown}{rest}"
    match = re.fullmatch(_QUERY, url, re.IGNORECASE)
    if match is not None:
        _queries[match["object"]] = match["query"]
        url = match["object"]
    return url


def complete(url: str) -> str:
    """Return a URL with the user and password that were typed for its host."""
    scheme, mark, rest = url.partition("://")
    user = _users.get(f"{scheme.lower()}://{_host(rest)}") if mark else None
    return url if user is None else f"{scheme}://{user}@{rest.rpartition('@')[2]}"


def queries() -> dict[str, str]:
    """Return the queries that were typed, by their objects' URLs."""
    return dict(_queries)


def _public(scheme: str, user: str) -> str:
    """Return what may be shown of the part before the host, with its `@`."""
    name, mark, _ = user.partition(":")
    return "" if scheme.lower() in (*_HTTP, *_S3) else f"{name}@" if mark or name else ""


def _host(rest: str) -> str:
    return re.split(r"[/?#]", rest, maxsplit=1)[0]
