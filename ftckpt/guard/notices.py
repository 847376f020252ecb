"""Hear that this machine is about to be taken away: clouds' metadata services, or a command.

Each source answers at once and is asked every few seconds:

- AWS: IMDSv2, a token by PUT, then `spot/instance-action` (404: nothing).
- Google: `instance/preempted` (TRUE), and `instance/maintenance-event` that ends the machine.
- Azure: Scheduled Events of this machine: Preempt, Terminate, Reboot, Redeploy; a Freeze of seconds
  is none.
- any other: a command that ends with 0 when there is one; a number on its first line of output is
  the seconds that are left.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

_LINK_LOCAL = "http://169.254.169.254"
_TIMEOUT = 3.0
_COMMAND_TIMEOUT = 30.0
_TOKEN_SECONDS = 21600
_GOOGLE_LEAVES, _LARGEST = 30.0, 64 << 10


class Notice(NamedTuple):
    """The announcement of a preemption.

    Attributes:
        source: who says so.
        seconds: that are left; None if it does not say.
        detail: its own words.
    """

    source: str
    seconds: float | None
    detail: str


class NoticeSource(Protocol):
    """Something that announces preemptions."""

    name: str

    def ask(self) -> Notice | None:
        """Return the announcement; None if there is none.

        Raises:
            OSError, ValueError: it did not answer, or not in the documented way.
        """


def answer(
    url: str, headers: Mapping[str, str], method: str = "GET", timeout: float = _TIMEOUT
) -> tuple[int, str]:
    """Return status and text of a small HTTP answer; no proxy is asked, no redirection followed."""
    place = urlsplit(url)
    link = http.client.HTTPConnection(place.hostname or "", place.port or 80, timeout=timeout)
    try:
        query = f"?{place.query}" if place.query else ""
        link.request(method, f"{place.path or '/'}{query}", headers=dict(headers))
        got = link.getresponse()
        return got.status, got.read(_LARGEST).decode("utf-8", "replace")
    except http.client.HTTPException as error:
        raise ValueError(f"{url}: {error or type(error).__name__}") from error
    finally:
        link.close()


def _until(then: datetime, now: datetime | None = None) -> float:
    then = then if then.tzinfo else then.replace(tzinfo=UTC)
    return max(0.0, (then - (now or datetime.now(UTC))).total_seconds())


class Aws:
    """Spot interruption notices of EC2, two minutes ahead."""

    name = "aws"

    def __init__(self, url: str = "") -> None:
        self._url = (url or os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "")) or _LINK_LOCAL
        self._url = self._url.rstrip("/")
        self._token, self._until = "", 0.0

    def ask(self) -> Notice | None:
        """Ask for `spot/instance-action`."""
        if time.monotonic() >= self._until:
            self._renew()
        status, text = self._get()
        if status == 401:  # the token has ended before its time
            self._renew()
            status, text = self._get()
        if status == 404:
            return None
        if status != 200:
            raise ValueError(f"aws: the metadata service answers {status}")
        said = json.loads(text)
        action, moment = str(said["action"]), datetime.fromisoformat(str(said["time"]))
        return Notice(self.name, _until(moment), f"spot instance: {action} at {said['time']}")

    def _get(self) -> tuple[int, str]:
        place = f"{self._url}/latest/meta-data/spot/instance-action"
        return answer(place, {"X-aws-ec2-metadata-token": self._token})

    def _renew(self) -> None:
        asked = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
        status, token = answer(f"{self._url}/latest/api/token", asked, "PUT")
        if status != 200:
            raise ValueError(f"aws: no token, the metadata service answers {status}")
        self._token, self._until = token, time.monotonic() + _TOKEN_SECONDS / 2


class Google:
    """Preemptions of Compute Engine, 30 seconds ahead, and maintenance that ends the machine."""

    name = "gcp"

    def __init__(self, url: str = "") -> None:
        host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
        self._url = (url or f"http://{host}").rstrip("/") + "/computeMetadata/v1/instance"

    def ask(self) -> Notice | None:
        """Ask for `preempted` and `maintenance-event`."""
        if self._get("preempted").strip() == "TRUE":
            return Notice(self.name, _GOOGLE_LEAVES, "instance preempted")
        event = self._get("maintenance-event").strip()
        if event.startswith("TERMINATE"):
            return Notice(self.name, None, f"maintenance event: {event}")
        return None

    def _get(self, key: str) -> str:
        status, text = answer(f"{self._url}/{key}", {"Metadata-Flavor": "Google"})
        if status != 200:
            raise ValueError(f"gcp: the metadata service answers {status} for {key}")
        return text


class Azure:
    """Scheduled Events that end this virtual machine."""

    name = "azure"
    _ENDING = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})

    def __init__(self, url: str = "") -> None:
        self._url = (url or _LINK_LOCAL).rstrip("/") + "/metadata"
        self._machine = ""

    def ask(self) -> Notice | None:
        """Ask for the events, which are those of all machines of a set."""
        if not self._machine:
            place = "instance/compute/name?api-version=2021-02-01&format=text"
            self._machine = self._get(place).strip()
        said = json.loads(self._get("scheduledevents?api-version=2020-07-01"))
        for event in said["Events"]:
            if event["EventType"] in self._ENDING and self._machine in event["Resources"]:
                before = str(event.get("NotBefore", ""))  # empty once it has begun
                seconds = _until(parsedate_to_datetime(before)) if before else 0.0
                return Notice(self.name, seconds, f"{event['EventType']} {before or 'now'}")
        return None

    def _get(self, place: str) -> str:
        status, text = answer(f"{self._url}/{place}", {"Metadata": "true"})
        if status != 200:
            raise ValueError(f"azure: the metadata service answers {status}")
        return text


class NoticeCommand:
    """A command of the user's."""

    name = "command"

    def __init__(self, command: str) -> None:
        self._command = command

    def ask(self) -> Notice | None:
        """Run it."""
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", self._command], stdin=subprocess.DEVNULL, capture_output=True,
                text=True, errors="replace", timeout=_COMMAND_TIMEOUT, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"--notice took more than {_COMMAND_TIMEOUT:g} s") from error
        if done.returncode != 0:
            return None
        first = done.stdout.strip().split("\n")[0]
        number = re.match(r"[0-9]+(?:\.[0-9]+)?", first)
        return Notice(self.name, float(number[0]) if number else None, first or self._command)


CLOUDS: Mapping[str, Callable[[str], NoticeSource]] = {"aws": Aws, "gcp": Google, "azure": Azure}


def sources(asked: Sequence[str], url: str = "") -> list[NoticeSource]:
    """Return the sources that were asked for: the names of clouds, and commands."""
    return [CLOUDS[one](url) if one in CLOUDS else NoticeCommand(one) for one in asked]


class NoticeThread(threading.Thread):
    """Asks sources until one announces something, or it is stopped.

    Args:
        asked: the sources.
        tell: is told the first notice.
        remark: is told, once a source, that it does not answer.
        every: seconds between two rounds.
    """

    def __init__(
        self,
        asked: Sequence[NoticeSource],
        tell: Callable[[Notice], None],
        remark: Callable[[str], None],
        *,
        every: float,
    ) -> None:
        super().__init__(name="ftckpt-notices", daemon=True)
        self._asked, self._tell, self._remark, self._every = asked, tell, remark, every
        self._ended = threading.Event()

    def run(self) -> None:
        """Ask until the end."""
        silent: set[str] = set()
        while self._asked and not self._ended.is_set():
            for source in self._asked:
                try:
                    notice = source.ask()
                    silent.discard(source.name)
                except (OSError, ValueError, KeyError, TypeError) as error:
                    if source.name not in silent:
                        silent.add(source.name)
                        self._remark(f"no notices from {source.name}: {error}")
                    continue
                if notice is not None:
                    self._tell(notice)
                    return
            self._ended.wait(self._every)

    def stop(self) -> None:
        """End the thread; a request under way is not waited for."""
        self._ended.set()


def write_notice(path: str, notice: Notice) -> None:
    """Write a notice into the file that the command may look for, whole or not at all."""
    deadline = None if notice.seconds is None else time.time() + notice.seconds
    text = json.dumps({**notice._asdict(), "deadline": deadline})
    with suppress(OSError):  # a full disk does not keep the signal back
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(f"{path}.new", path)
