"""`retention.toml`: policies by tier. Read only if `--policy` names it, never found in a root.

    [[tier]]
    name = "nvme"
    roots = ["/local/*"]
    keep-last = 3

Keys are the flags without their dashes; unknown keys are refused. A root belongs to the one tier
whose pattern matches its path or URL.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ftckpt.amounts import duration
from ftckpt.errors import UsageError
from ftckpt.retention.policy import DeleteLimit, Metric, Policy

_NUMBERS = {
    f"keep-{unit}": f"keep_{unit}"
    for unit in ("last", "every", "hourly", "daily", "weekly", "monthly", "best")
} | {"min-survivors": "min_survivors"}


@dataclass(frozen=True, slots=True)
class PolicyTier:
    """One tier of a policy file; `roots` are shell patterns."""

    name: str
    roots: tuple[str, ...]
    policy: Policy


def parse_policy_file(data: bytes, file: str) -> tuple[PolicyTier, ...]:
    """Parse a policy file; `file` is its name for messages.

    Raises:
        UsageError: not TOML, an unknown key, a value of the wrong type, or no tier.
    """
    try:
        document = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{file} is not TOML: {error}") from None
    rows = document.pop("tier", None)
    if document or not isinstance(rows, list) or not rows:
        odd = f"it holds {sorted(document)[0]}" if document else "there is none"
        raise UsageError(f"{file} is made of [[tier]] tables, and {odd}")
    tiers = tuple(_tier(row, file) for row in rows)
    names = [tier.name for tier in tiers]
    if len(set(names)) < len(names):
        raise UsageError(f"two tiers of {file} have one name")
    return tiers


def tier_of(
    tiers: tuple[PolicyTier, ...], url: str, file: str, name: str | None = None
) -> PolicyTier:
    """Return the tier called `name`, or else the one that `url` belongs to.

    Raises:
        UsageError: none, or several.
    """
    path = url.rstrip("/") or url
    found = [
        tier
        for tier in tiers
        if (tier.name == name if name else any(fnmatchcase(path, p) for p in tier.roots))
    ]
    if len(found) == 1:
        return found[0]
    what = f"no tier of {file} is called {name}" if name else f"no tier of {file} matches {url}"
    if found:
        what = f"{' and '.join(t.name for t in found)} of {file} both match {url}"
    raise UsageError(what, hint="name one: --tier " + ", ".join(t.name for t in tiers))


def _tier(row: object, file: str) -> PolicyTier:
    if not isinstance(row, dict):
        raise UsageError(f"{file}: tier is written as [[tier]]")
    values = dict(row)
    name = values.pop("name", None)
    if not isinstance(name, str) or not name:
        raise UsageError(f"a tier of {file} has no name")
    roots = _texts(values.pop("roots", []), f"roots of tier {name} in {file}")
    try:
        return PolicyTier(name, roots, _policy(values, f"of tier {name} in {file}"))
    except UsageError as error:
        where = f" (tier {name} in {file})" if file not in error.message else ""
        raise UsageError(f"{error.message}{where}", hint=error.hint) from None


def _policy(values: Mapping[str, object], where: str) -> Policy:
    fields: dict[str, object] = {}
    for key, value in values.items():
        if key in _NUMBERS:
            if type(value) is not int:
                raise UsageError(f"{key} {where} is not a whole number")
            fields[_NUMBERS[key]] = value
        elif key == "keep-within":
            fields["keep_within"] = duration(_text(value, f"{key} {where}"), "--keep-within")
        elif key == "metric":
            fields["metric"] = Metric.parse(_text(value, f"{key} {where}"))
        elif key == "keep-tag":
            fields["keep_tags"] = _texts(value, f"{key} {where}")
        elif key == "thin-after":
            text = str(value) if type(value) is int else _text(value, f"{key} {where}")
            fields |= thin_fields(text)
        elif key == "max-delete":
            text = str(value) if type(value) is int else _text(value, f"{key} {where}")
            fields["max_delete"] = DeleteLimit.parse(text)
        else:
            others = ("keep-within", "metric", "keep-tag", "thin-after", "max-delete")
            known = ", ".join((*_NUMBERS, *others))
            raise UsageError(f"{key} {where} is not known", hint=f"known are {known}")
    return Policy(**fields)  # type: ignore[arg-type]


def thin_fields(text: str) -> dict[str, object]:
    """Return the fields of a policy that `--thin-after` sets: a number of saves, or an age.

    Raises:
        UsageError: it is neither.
    """
    text = text.strip()
    if text.isascii() and text.isdecimal():
        if len(text) > 18:
            raise UsageError(f"--thin-after {text[:20]}… is more than any run saves")
        return {"thin_beyond": int(text)}
    return {"thin_after": duration(text, "--thin-after")}


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{what} is not text")
    return value


def _texts(value: object, what: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise UsageError(f"{what} is not a list of texts")
    return tuple(value)
