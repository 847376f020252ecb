"""Run shares by Ray, where a cluster has it already."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from ftckpt.errors import UnavailableError, UsageError
from ftckpt.packages import needing

from .share_process import RETRIES, ShareEnd, ShareFailedError, ShareTask, do_share


class RayEngine:
    """A Ray cluster.

    Args:
        text: what `--cluster` says: `ray://HOST:10001`, `ray:auto` for the cluster of this node,
            `ray:local` or `ray:local:N` for one on this machine.

    Raises:
        UsageError: it names no cluster.
        MissingPackageError: ray is not installed.
        UnavailableError: it does not answer.
    """

    dashboard = ""

    def __init__(self, text: str) -> None:
        settings = _settings(text)
        with needing("--cluster ray:…", "--part I/N by any scheduler"):
            import ray
        self.name = text
        self._ray = ray
        try:
            found = ray.init(**settings)
        except (OSError, RuntimeError, ValueError) as error:
            raise UnavailableError(f"no Ray cluster answers at {text}: {error}") from error
        url = str(getattr(found, "dashboard_url", "") or "")
        self.dashboard = f"http://{url}" if url else ""

    def slots(self) -> int:
        """Return the processors of the cluster."""
        return int(self._ray.cluster_resources().get("CPU", 1))

    def run(self, tasks: Sequence[ShareTask]) -> Iterator[ShareEnd]:
        """Yield what became of the shares as they end."""
        ray = self._ray
        remote = ray.remote(do_share).options(
            num_cpus=1, max_retries=RETRIES, retry_exceptions=[ShareFailedError]
        )
        left = [remote.remote(task) for task in tasks]
        try:
            while left:
                done, left = ray.wait(left, timeout=1.0)
                for one in done:
                    yield ray.get(one)
        except ray.exceptions.RayTaskError as error:
            raise UnavailableError(str(error.cause)) from error
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise UnavailableError(f"{self.name} is gone: {error}") from error
        finally:
            for one in left:
                ray.cancel(one, force=True)

    def close(self) -> None:
        """Leave the cluster, and end one that was started here."""
        self._ray.shutdown()


def _settings(text: str) -> dict[str, Any]:
    """Return how Ray is reached.

    Raises:
        UsageError: no cluster is named.
    """
    settings: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if text.startswith("ray://"):
        return settings | {"address": text}
    if text in ("ray:auto", "ray:local"):
        return settings | {"address": text[4:]}
    number = text.removeprefix("ray:local:")
    if number != text and number.isascii() and number.isdigit() and int(number):
        return settings | {"address": "local", "num_cpus": int(number)}
    raise UsageError(
        f"--cluster {text!r} names no cluster", hint="ray://HOST:10001, ray:auto, ray:local"
    )
