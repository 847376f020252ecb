"""Who does something to a root."""

from __future__ import annotations

import os


def login_name() -> str:
    """Return who runs this process, by the system and not by the environment."""
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container often has no name for its user
        return f"uid-{os.getuid()}"


def actor() -> str:
    """Return who does something to a root, for its log: `alice@login1`."""
    return f"{login_name()}@{os.uname().nodename}"
