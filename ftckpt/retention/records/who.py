"""Who changes a root."""

from __future__ import annotations

import os


def login_name() -> str:
    """Return the user of this process, by the system and not by the environment."""
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container often has no name for its user
        return f"uid-{os.getuid()}"


def actor() -> str:
    """Return the actor for a root's log: `alice@login1`."""
    return f"{login_name()}@{os.uname().nodename}"
