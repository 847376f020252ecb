"""Run shares by Ray, where a cluster has it already.

A process of its own speaks with Ray: when the head of a cluster dies, Ray ends the process that it
lives in, and it writes what it likes to the terminal. Both are the end of that process here, and
the answer is a sentence.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from typing import Any

from ftckpt.errors import UnavailableError, UsageError
from ftckpt.packages import needing

from .share_process import ShareEnd, ShareTask

_DRIVER = "ftckpt.operations.many.ray_driver"
_LEAVE = 5.0  # seconds for the driver to say goodbye to its cluster
_LAST_WORDS = 500  # characters
_INSTEAD = "--part I/N by any scheduler"
_FORMS = "ray://HOST:10001, ray:auto, ray:local, ray:local:N"


class RayEngine:
    """A Ray cluster.

    Args:
        text: what `--cluster` says: `ray://HOST:10001`, `ray:auto` for the cluster of this node,
            `ray:local` or `ray:local:N` for one on this machine.

    Raises:
        UsageError: it names no cluster.
        MissingPackageError: ray, or what its client needs, is not installed.
        UnavailableError: it does not answer.
    """

    def __init__(self, text: str) -> None:
        settings = settings_of(text)
        self.name = text
        for package in ("ray", "grpc") if text.startswith("ray://") else ("ray",):
            with needing(f"--cluster {text.partition(':')[0]}:…", _INSTEAD):
                if find_spec(package) is None:
                    raise ModuleNotFoundError(name=package)
        self._stack = ExitStack()
        try:
            self._start(settings)
            found = self._hear()
            if "error" in found:
                raise UnavailableError(
                    f"no Ray cluster answers at {text}: {found['error']}",
                    hint="is it the port of Ray's client server (10001)? A cluster that asks for a"
                    " token needs RAY_AUTH_MODE=token here, too"
                    if text.startswith("ray://")
                    else _FORMS,
                )
        except BaseException:
            self._stack.close()
            raise
        self._slots = int(found["slots"])
        self.dashboard = str(found["dashboard"])

    def slots(self) -> int:
        """Return the processors of the cluster."""
        return self._slots

    def run(self, tasks: Sequence[ShareTask]) -> Iterator[ShareEnd]:
        """Yield what became of the shares as they end."""
        try:
            self._say(list(tasks))
        except OSError as error:
            raise self._gone() from error
        for _ in tasks:
            found = self._hear()
            if "error" in found:
                raise UnavailableError(str(found["error"]))
            yield ShareEnd(*found["end"])

    def close(self) -> None:
        """Leave the cluster, and end one that was started here."""
        self._stack.close()

    def _start(self, settings: dict[str, Any]) -> None:
        """Start the process that speaks with Ray."""
        said = tempfile.TemporaryFile()  # noqa: SIM115 (the stack closes it)
        self._stack.enter_context(said)
        reader, writer = os.pipe()
        self._answers = self._stack.enter_context(os.fdopen(reader, encoding="utf-8"))
        line = [sys.executable, "-P", "-m", _DRIVER, str(os.getpid()), str(writer)]
        try:
            # A signal from the terminal is for this process, which then ends that one.
            process = subprocess.Popen(
                line, stdin=subprocess.PIPE, stdout=said, stderr=said, pass_fds=(writer,),
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(writer)
        self._process, self._words = process, said
        self._stack.callback(self._end)
        self._say(settings)

    def _say(self, value: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value).encode() + b"\n")
        self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        """Return the next answer.

        Raises:
            UnavailableError: there is none any more.
        """
        line = self._answers.readline()
        if not line.endswith("\n"):
            raise self._gone()
        found: dict[str, Any] = json.loads(line)
        return found

    def _gone(self) -> UnavailableError:
        self._process.kill()
        self._process.wait()
        self._words.seek(0, os.SEEK_END)
        self._words.seek(max(0, self._words.tell() - _LAST_WORDS))
        said = self._words.read().decode(errors="replace").strip().rpartition("\n")[2]
        return UnavailableError(f"{self.name} is gone" + (f": {said}" if said else ""))

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_LEAVE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with suppress(OSError):  # what was never sent
            assert self._process.stdin is not None
            self._process.stdin.close()


def settings_of(text: str) -> dict[str, Any]:
    """Return how Ray is reached, as `ray.init` takes it.

    Raises:
        UsageError: no cluster is named.
    """
    if text.startswith("ray://") and text != "ray://":
        return {"address": text}
    if text in ("ray:auto", "ray:local"):
        return {"address": text[4:]}
    number = text.removeprefix("ray:local:")
    if number != text and number.isascii() and number.isdigit() and int(number):
        return {"address": "local", "num_cpus": int(number)}
    raise UsageError(f"--cluster {text!r} names no cluster", hint=_FORMS)
