"""Flags from the environment: what their variables are called, and which names set nothing.

A misspelt `FTCKPT_LATEST_VERFY=content` would otherwise skip the check that its author relies on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from ftckpt.errors import UsageError

# Flags that delete, overwrite or skip a check: nobody may inherit them from an environment.
NO_ENVIRONMENT = frozenset(
    {
        "apply",
        "create_root",
        "no_check",
        "force",
        "no_proof",
        "purge_now",
        "restart",
        "skip_unverified",
        "yes",
    }
    | {
        "trust_recorded",
        "backwards",
        "allow_gaps",
        "allow_missing_tier",
        "no_lock",
        "retry_suspected",
        "any_name",
        "delete_corrupt",
        "free",
        "max_delete",
        "min_survivors",
        "policy",
        "trash_ttl",
    }
)

HELP = ("--help", "-h")
PREFIX = "FTCKPT_"
# Every name shares the prefix, so that less likeness than this is none.
_NEAR = 0.8
# Variables that set no flag: the file of remotes, what `replay` gives to the processes that it
# records, what `guard` tells its command, and what the tests read.
# Kubernetes makes the others in every pod beside a Service named ftckpt or ftckpt-something.
_OTHERS = (
    r"FTCKPT_(?:CONFIG|REPLAY_[A-Z_]+|MEGATRON|RESUME|STEP|ATTEMPT|NOTICE|GUARD|ELASTIC"
    r"|ALERT(?:_KIND|_EVENT)?|PEER_[A-Z_]+"
    r"|(?:[A-Z0-9_]+_)?(?:SERVICE_(?:HOST|PORT(?:_[A-Z0-9_]+)?)|PORT(?:_[0-9]+_[A-Z0-9_]+)?))"
)


# Variables and flags whose values are shown to nobody: a webhook's address lets anybody post there,
# and the command of an alert holds what it logs in with.
_SECRET = r"(?i).*(?:SECRET|TOKEN|KEY|PASSW|CREDENTIAL|ALERT[-_]URL|ON[-_]ALERT).*"


def is_secret(name: str) -> bool:
    """Say whether the value of a variable, or of a flag, is not to be shown."""
    return re.fullmatch(_SECRET, name) is not None


def said_again(words: Sequence[str]) -> list[str]:
    """Return a command line as it may be printed: without the alerts, whose values are secret."""
    kept: list[str] = []
    end = words.index("--") if "--" in words else len(words)
    skip = False
    for word in words[:end]:
        flag, valued, _ = word.partition("=")
        secret = not skip and word.startswith("--") and is_secret(flag)
        if not skip and not secret:
            kept.append(word)
        skip = secret and not valued
    return [*kept, *words[end:]]


def refuse_unknown(
    verbs: Collection[str],
    load: Callable[[str], Any],
    environment: Mapping[str, str] = os.environ,
    *,
    more: Callable[[], Collection[str]] = tuple,
) -> None:
    """Check every variable that begins with FTCKPT_.

    Only the verbs that such a variable may belong to are loaded: without one nothing is.

    Args:
        verbs: the names of all verbs.
        load: returns the command of a verb.
        environment: the variables and their values.
        more: returns names of verbs that are asked after all others.

    Raises:
        UsageError: one sets no flag of any verb; the hint names the nearest that does.
    """
    known = _Verbs(verbs, load)
    for name in sorted(n for n in environment if n.startswith(PREFIX)):
        if any(name in known.variables(verb) for verb in known.owners(name)):
            continue
        if re.fullmatch(_OTHERS, name) and not known.begins_as_replay(name):
            continue
        added = _Verbs(more(), load)
        if any(name in added.variables(verb) for verb in added.owners(name)):
            continue
        raise UsageError(f"{name} sets no flag", hint=known.hint(name))


class _Verbs(NamedTuple):
    names: Collection[str]
    load: Callable[[str], Any]

    def begins_as_replay(self, name: str) -> bool:
        """Return whether a name means a verb such as `replay run`, and so one of its flags."""
        return any(name.startswith(_prefix(v)) for v in self.names if v.startswith("replay "))

    def owners(self, name: str) -> Iterator[str]:
        return (verb for verb in self.names if name.startswith(_prefix(verb)))

    def variables(self, verb: str) -> set[str]:
        params = self.load(verb).params
        return {name for p in params if isinstance(name := getattr(p, "envvar", None), str)}

    def hint(self, name: str) -> str:
        for verb in self.owners(name):
            for flag in NO_ENVIRONMENT:
                if name == environment_name(verb, [f"--{flag.replace('_', '-')}"]):
                    flag = flag.replace("_", "-")
                    return f"--{flag} has no variable, so that nobody inherits it: type it"
        verbs = list(self.owners(name)) or self.names
        near = get_close_matches(name, {one for v in verbs for one in self.variables(v)}, 1, _NEAR)
        return f"did you mean {near[0]}?" if near else "ftckpt help environment explains the names"


def _prefix(verb: str) -> str:
    return f"{PREFIX}{verb.replace(' ', '_').upper()}_"


def environment_flags(ctx: Any) -> dict[str, str]:
    """Return the environment variables that set flags of this run, with their values."""
    found = {}
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name)
        if source is not None and source.name == "ENVIRONMENT":
            found[param.envvar] = os.environ.get(param.envvar, "")
    return found


def environment_name(verb: str, flags: Sequence[str]) -> str:
    """Return the variable that sets a flag: FTCKPT_VERIFY_MAX_MEMORY for `--max-memory`.

    Of a flag's names the first long one counts; others stand for it.
    """
    flag = next(flag for flag in flags if flag.startswith("--"))
    name = f"ftckpt_{verb}_{flag.lstrip('-')}"
    return name.replace("-", "_").replace(" ", "_").upper()
