"""Refuse environment variables that look like ours and set nothing.

A misspelt `FTCKPT_LATEST_VERFY=content` would otherwise skip the check that its author relies on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from ftckpt.errors import UsageError

from .verbs import NO_ENVIRONMENT, VERBS, environment_name, load

PREFIX = "FTCKPT_"
# Every name shares the prefix, so that less likeness than this is none.
_NEAR = 0.8
# Variables that set no flag: the file of remotes, what `replay` gives to the processes that it
# records, and what the tests read.
# Kubernetes makes the others in every pod beside a Service named ftckpt or ftckpt-something.
_OTHERS = re.compile(
    r"FTCKPT_(?:CONFIG|REPLAY_[A-Z_]+|MEGATRON|PEER_[A-Z_]+"
    r"|(?:[A-Z0-9_]+_)?(?:SERVICE_(?:HOST|PORT(?:_[A-Z0-9_]+)?)|PORT(?:_[0-9]+_[A-Z0-9_]+)?))"
)


def refuse_unknown(environment: Mapping[str, str] = os.environ) -> None:
    """Check every variable that begins with FTCKPT_.

    Only the verbs that such a variable may belong to are loaded: without one nothing is.

    Raises:
        UsageError: one sets no flag of any verb; the hint names the nearest that does.
    """
    for name in sorted(n for n in environment if n.startswith(PREFIX)):
        if any(name in _names(verb) for verb in _owners(name)):
            continue
        if _OTHERS.fullmatch(name) and not _names_replay_flag(name):
            continue
        raise UsageError(f"{name} sets no flag", hint=_hint(name))


def _names_replay_flag(name: str) -> bool:
    """Return whether a name speaks of a verb such as `replay run`, and so of one of its flags."""
    return any(name.startswith(_prefix(verb)) for verb in VERBS if verb.startswith("replay "))


def _owners(name: str) -> Iterator[str]:
    return (verb for verb in VERBS if name.startswith(_prefix(verb)))


def _prefix(verb: str) -> str:
    return f"{PREFIX}{verb.replace(' ', '_').upper()}_"


def _names(verb: str) -> set[str]:
    return {name for p in load(verb).params if isinstance(name := getattr(p, "envvar", None), str)}


def _hint(name: str) -> str:
    for verb in _owners(name):
        for flag in NO_ENVIRONMENT:
            if name == environment_name(verb, [f"--{flag.replace('_', '-')}"]):
                flag = flag.replace("_", "-")
                return f"--{flag} has no variable, so that nobody inherits it: type it"
    known = {one for verb in list(_owners(name)) or VERBS for one in _names(verb)}
    near = get_close_matches(name, known, 1, _NEAR)
    return f"did you mean {near[0]}?" if near else "ftckpt help environment explains the names"
