"""Variables of the environment: what each is called, and which names set nothing.

Common and storage options have one, FTCKPT_ENDPOINT for `--endpoint`. What a verb does is said on
its command line, and its defaults stand in the file of settings, so that nobody inherits a check
that is skipped. A misspelt name would set nothing in silence, so it is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from ftckpt.errors import UsageError

HELP = ("--help", "-h")
PREFIX = "FTCKPT_"
# Every name shares the prefix, so that less likeness than this is none.
_NEAR = 0.8
# Variables that set no option: the file of settings, what `replay` gives to the processes that it
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


def refuse_unknown(known: Collection[str], environment: Mapping[str, str] = os.environ) -> None:
    """Check every variable that begins with FTCKPT_.

    Args:
        known: the names that set an option.
        environment: the variables and their values.

    Raises:
        UsageError: one sets no option; the hint names the nearest that does.
    """
    for name in sorted(n for n in environment if n.startswith(PREFIX)):
        if name not in known and not re.fullmatch(_OTHERS, name):
            near = get_close_matches(name, known, 1, _NEAR)
            said = "common and storage options alone have variables: ftckpt help environment"
            raise UsageError(
                f"{name} sets no option", hint=f"did you mean {near[0]}?" if near else said
            )


def environment_flags(ctx: Any) -> dict[str, str]:
    """Return the environment variables that set flags of this run, with their values."""
    found = {}
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name)
        if source is not None and source.name == "ENVIRONMENT":
            found[param.envvar] = os.environ.get(param.envvar, "")
    return found


def environment_name(option: str) -> str:
    """Return the variable of a common or storage option: FTCKPT_ENDPOINT of `--endpoint`."""
    return PREFIX + option.lstrip("-").replace("-", "_").upper()
