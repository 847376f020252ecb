"""Hand an alert to the user's command, or post it to a webhook; in bounded time, whatever they do.

The command gets the document (`docs/schemas/alert.schema.json`) on its standard input and runs in
a session of its own, so that all of it can be ended. The webhook is posted to by urllib: https is
verified, and a redirect is not followed, because it could lead a token elsewhere.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit

from ftckpt.errors import UsageError

SCHEMA = "ftckpt.alert/1"
COMMAND_S, WEBHOOK_S = 60.0, 20.0
# Characters of a message in a variable: the system refuses a command with a long one.
_LONGEST = 1_000


class AlertHook(NamedTuple):
    """Who is told.

    Attributes:
        command: for the shell; "" for none.
        url: of a webhook; "" for none.
    """

    command: str = ""
    url: str = ""

    def require(self) -> None:
        """Refuse a webhook that is none.

        Raises:
            UsageError: it is not an http or https URL with a host.
        """
        if not self.url:
            return
        try:
            parts = urlsplit(self.url)
            right = parts.scheme in ("http", "https") and bool(parts.hostname)
            _ = parts.port
            right = right and all(" " < letter != "\x7f" for letter in self.url)
        except ValueError:
            right = False
        if not right:
            # The URL itself may hold a token.
            raise UsageError("--alert-url is not a URL", hint="https://HOST/PATH, or http://")


def alert_document(
    *,
    event: str,
    verb: str,
    target: str,
    time: float,
    kind: str,
    message: str,
    hint: str = "",
    about: Sequence[str] = (),
    since: float | None = None,
) -> dict[str, Any]:
    """Return the document of one alert.

    Args:
        event: `raised` or `cleared`.
        verb: which found it.
        target: the root, as typed.
        time: now, in seconds since the epoch.
        kind: a word that scripts may match.
        message: one sentence.
        hint: what to do.
        about: what it is about: names of checkpoints.
        since: when it was first told.
    """
    return {
        "schema": SCHEMA,
        "event": event,
        "verb": verb,
        "target": target,
        "host": os.uname().nodename,
        "time": time,
        "kind": kind,
        "message": message,
        "hint": hint,
        "about": list(about),
        "since": time if since is None else since,
    }


def deliver(
    hook: AlertHook,
    document: Mapping[str, Any],
    *,
    command_s: float = COMMAND_S,
    webhook_s: float = WEBHOOK_S,
) -> list[str]:
    """Hand a document to the command and to the webhook; return what went wrong, in sentences.

    Nothing is raised for a hook that fails or hangs: it is ended after its seconds.
    """
    data = json.dumps(document).encode()
    problems = []
    if hook.command:
        problems.append(_run(hook.command, document, data, command_s))
    if hook.url:
        problems.append(_post(hook.url, data, webhook_s))
    return [problem for problem in problems if problem]


def _run(command: str, document: Mapping[str, Any], data: bytes, seconds: float) -> str:
    message = str(document["message"]).replace("\0", " ")
    told = os.environ | {
        "FTCKPT_ALERT_KIND": str(document["kind"]),
        "FTCKPT_ALERT": message if len(message) <= _LONGEST else f"{message[:_LONGEST]}...",
        "FTCKPT_ALERT_EVENT": str(document["event"]),
    }
    try:
        running = subprocess.Popen(
            ["/bin/sh", "-c", command], env=told, stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return f"--on-alert failed: {error}"
    try:
        running.communicate(data + b"\n", timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"--on-alert did not end within {seconds:g} s, and was ended"
    finally:
        # A signal may have come, and what the command has left behind must not outlive its time.
        if running.poll() is None:
            with suppress(OSError):
                os.killpg(running.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                running.wait(5)
        if running.stdin is not None:
            with suppress(OSError):
                running.stdin.close()
    return f"--on-alert ended with {running.returncode}" if running.returncode else ""


def _post(url: str, data: bytes, seconds: float) -> str:
    """Post in a thread: a server that answers byte by byte would outlast every timeout."""
    said: list[str] = []
    thread = threading.Thread(
        target=lambda: said.append(_posted(url, data, seconds)), name="ftckpt-webhook", daemon=True
    )
    thread.start()
    thread.join(seconds)
    return said[0] if said else f"--alert-url did not answer within {seconds:g} s"


def _apart(url: str) -> tuple[str, dict[str, str]]:
    """Return a URL without its user and password, and the header that sends them."""
    parts = urlsplit(url)
    who, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, {}
    user, _, word = who.partition(":")
    pair = b64encode(unquote_to_bytes(user) + b":" + unquote_to_bytes(word)).decode()
    return parts._replace(netloc=host).geturl(), {"Authorization": f"Basic {pair}"}


def _posted(url: str, data: bytes, seconds: float) -> str:
    import ssl
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

    class NoRedirect(HTTPRedirectHandler):
        """Leaves a redirect to be an error."""

        def redirect_request(self, *_: Any) -> None:
            return None

    opener = build_opener(NoRedirect, HTTPSHandler(context=ssl.create_default_context()))
    try:
        url, secret = _apart(url)
        head = {"Content-Type": "application/json", "User-Agent": "ftckpt", **secret}
        with opener.open(Request(url, data, head, method="POST"), timeout=seconds) as answer:
            answer.read(1)
    except HTTPError as error:
        with error:
            if 300 <= error.code < 400:
                return f"--alert-url answers {error.code}: redirects are not followed"
            return f"--alert-url answers {error.code}"
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        return f"--alert-url failed: {type(error).__name__}: {reason}"
    except (HTTPException, ValueError) as error:
        # Their words quote the URL, or the answer of the server.
        return f"--alert-url failed: {type(error).__name__}"
    return ""
