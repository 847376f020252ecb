"""Credentials in URLs: kept in memory for the requests, and in nothing that is written or printed.

`http://user:password@host/x` and a signed `https://host/x?X-Amz-Signature=...` are secrets. What a
run records (a delta's base, logs, alerts) and prints is the URL without them. A container in the
place of a user (`abfss://container@account`), and the user of `ssh://user@host`, are none.

A key of AWS holds `/` and `+`: `s3://AKIA…:ab/cd@bucket` has no user, by the letter. What
looks as if it was meant so is refused where it is typed, and nothing of it is printed.
"""

from __future__ import annotations

import re

from ftckpt.errors import UsageError

from .remotes import SCHEMES

_USERINFO = r"(?<![A-Za-z0-9+.-])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<user>[^/?#\s'\"]*)@"
_QUERY = r"(?P<object>https?://[^\s?#'\"]+)\?(?P<query>[^\s'\"]*)"
# The same of a word that is a URL and nothing else.
_TYPED = _USERINFO.replace(r"\s'\"", "")
_TYPED_QUERY = r"(?P<object>https?://[^?#]+)\?(?P<query>.*)"
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
_HERE = ("file", "local", "memory")  # places without a service
# A whole word: scheme, what stands up to the first slash, and the rest.
_WORD = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(?P<slashes>/*)(?P<host>[^/?#]*)(?P<rest>.*)", re.DOTALL
)
# Keys of a query that let anybody in; of HTTP every query is withheld.
_SIGNED = re.compile(
    r"[?#&](?:[\w-]*(?:signature|credential|secret|password|token)|sig|awsaccesskeyid|"
    r"(?:access|api|account)[-_]?key)=",
    re.IGNORECASE,
)

# What was typed in this process: users and passwords by scheme and host, queries by object.
_users: dict[str, str] = {}
_queries: dict[str, str] = {}


def hidden(text: str) -> str:
    """Return a text with what is secret left out of every URL in it."""
    if "://" not in text:
        return text
    for place, user in _users.items():  # as typed: a quote or a space ends a URL in a sentence
        scheme, _, host = place.partition("://")
        text = text.replace(f"{scheme}://{user}@{host.rpartition('@')[2]}", place)
    text = re.sub(_USERINFO, lambda m: f"{m['scheme']}://{_public(m['scheme'], m['user'])}", text)
    return re.sub(_QUERY, r"\g<object>", text, flags=re.IGNORECASE)


def masked(text: str) -> str:
    """Return what another program printed, with `***` for what looks like a secret."""
    text = _NAMED.sub(r"\g<name>\g<between>***", hidden(text))
    return _KEYS.sub(lambda m: f"{m['name'] or ''}***", text)


def withheld(url: str) -> str:
    """Return a URL as it may be recorded and printed; this process remembers what it leaves out.

    Raises:
        UsageError: it holds credentials that no store would use: in `s3://`, in a chain of
            filesystems, with a slash in a password, or a signature in place of an option.
    """
    _require_usable(url)
    match = re.match(_TYPED, url)
    if match is not None:
        scheme, user = match["scheme"].lower(), match["user"]
        if scheme in _S3:
            raise _unusable(scheme)
        shown = _public(scheme, user)
        rest = url[match.end() :]
        if shown != f"{user}@":
            _users[f"{scheme}://{shown}{_host(rest)}"] = user
        url = f"{match['scheme']}://{shown}{rest}"
    match = re.fullmatch(_TYPED_QUERY, url, re.IGNORECASE | re.DOTALL)
    if match is not None:
        _queries[match["object"]] = match["query"]
        url = match["object"]
    return url


def _require_usable(url: str) -> None:
    """Refuse a word that holds a secret which no store would use, and say nothing of it."""
    parts = url.split("::")
    for part in parts:
        word = _WORD.fullmatch(part)
        if word is None:
            continue
        scheme, host = word["scheme"].lower(), word["host"]
        if scheme in _HERE or not (word["slashes"] or scheme in SCHEMES):
            continue
        user, mark, _ = host.rpartition("@")
        chained = mark and ":" in user and (len(parts) > 1 or len(word["slashes"]) != 2)
        if chained or _is_cut(scheme, host, word["rest"]):
            raise _unusable(scheme)
        usable = len(parts) == 1 and scheme in _HTTP  # a query of HTTP alone
        if _SIGNED.search(word["rest"].partition("?")[0] if usable else word["rest"]):
            raise _unusable(scheme)


def _is_cut(scheme: str, host: str, rest: str) -> bool:
    """Whether a password with a slash, a `?` or a `#` in it ends what looks like a host.

    A host has a number after its colon; a bucket has no colon.
    """
    name, colon, port = host.rpartition(":")
    return (
        "@" in rest
        and "@" not in host
        and bool(colon)
        and not name.startswith("[")
        and (not port.isdigit() or scheme in _S3)
    )


def _unusable(scheme: str) -> UsageError:
    hint = "/, ?, # and @ in a password are %2F, %3F, %23, %40; a token is for the environment"
    if scheme in _S3:
        hint = "AWS_PROFILE, or the AWS credentials file"
    return UsageError(
        f"a URL of {scheme}: was typed with credentials in it, which are not used there", hint=hint
    )


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
