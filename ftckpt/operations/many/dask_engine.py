"""Run shares by Dask: on a scheduler that runs, on this machine, or by jobs of a batch system."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from ftckpt.errors import UnavailableError, UsageError
from ftckpt.packages import needing

from .share_process import RETRIES, ShareEnd, ShareFailedError, ShareTask, do_share

# Batch systems that dask-jobqueue starts workers by, with the names of its classes.
_JOBS = {
    "slurm": "SLURMCluster", "pbs": "PBSCluster", "lsf": "LSFCluster", "sge": "SGECluster",
    "htcondor": "HTCondorCluster", "oar": "OARCluster", "moab": "MoabCluster",
}  # fmt: skip
_ANSWER = 30  # seconds that a scheduler, or its first worker, may take to answer
_FORMS = "tcp://HOST:8786, a scheduler file, local:N, slurm:jobs=4,cores=8,memory=16GB, ray:…"


class DaskEngine:
    """A Dask cluster.

    Args:
        text: what `--cluster` says.

    Raises:
        UsageError: it names no cluster.
        MissingPackageError: distributed or dask-jobqueue is not installed.
        UnavailableError: the scheduler does not answer.
    """

    def __init__(self, text: str) -> None:
        with needing("--cluster", "--part I/N by any scheduler"):
            import distributed
        self.name = text
        self._stack = ExitStack()
        self._expected = 0
        self._waits: float | None = _ANSWER
        word, _, rest = text.partition(":")
        # What it has to say is said here, in a sentence.
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        try:
            if word == "local":
                where: dict[str, Any] = {"address": self._local(rest)}
            elif word in _JOBS:
                where = {"address": self._jobs(word, rest)}
            elif "://" in text or rest.isdigit():
                where = {"address": text}
            elif text.endswith(".json"):
                where = {"scheduler_file": text}
            else:
                raise UsageError(f"--cluster {text!r} names no cluster", hint=_FORMS)
            try:
                client = distributed.Client(**where, timeout=_ANSWER, set_as_default=False)
            except (OSError, TimeoutError, ValueError) as error:
                raise UnavailableError(
                    f"no Dask scheduler answers at {text}: {error}", hint=_FORMS
                ) from error
            self._client = client
            self._stack.callback(self._leave)
        except BaseException:
            self._stack.close()
            raise
        self.dashboard = _dashboard(client)

    def slots(self) -> int:
        """Return the threads of the workers, or of those that were asked for."""
        try:
            self._client.wait_for_workers(1, timeout=self._waits)
        except TimeoutError as error:
            raise UnavailableError(
                f"{self.name} has no workers", hint="start some: dask worker ADDRESS"
            ) from error
        return max(self._expected, int(sum(self._client.nthreads().values())))

    def run(self, tasks: Sequence[ShareTask]) -> Iterator[ShareEnd]:
        """Yield what became of the shares as they end."""
        from distributed import as_completed
        from distributed.scheduler import KilledWorker

        futures = [
            self._client.submit(do_share, task, pure=False, retries=RETRIES) for task in tasks
        ]
        try:
            with self._client.as_current():
                ended = as_completed(futures)
            for future in ended:
                if future.status in ("cancelled", "lost"):
                    raise UnavailableError(f"the scheduler of {self.name} is gone")
                try:
                    end: ShareEnd = future.result()
                except KilledWorker as error:
                    raise UnavailableError(f"workers die of a share: {error}") from error
                except ShareFailedError as error:
                    raise UnavailableError(f"{error}; {RETRIES + 1} times") from error
                except (OSError, TimeoutError) as error:
                    raise UnavailableError(f"{self.name} is gone: {error}") from error
                yield end
        finally:
            with suppress(Exception):
                self._client.cancel(futures)

    def close(self) -> None:
        """Leave the cluster, and end one that was started here."""
        self._stack.close()

    def _leave(self) -> None:
        with suppress(Exception):  # a scheduler that is gone cannot be told
            self._client.close(timeout=2)

    def _local(self, rest: str) -> Any:
        from distributed import LocalCluster

        if rest and not (rest.isascii() and rest.isdigit() and int(rest)):
            raise UsageError(f"--cluster local:{rest} says no number of workers", hint=_FORMS)
        return self._stack.enter_context(
            LocalCluster(
                n_workers=int(rest) if rest else None, threads_per_worker=1, processes=True,
                memory_limit=0, dashboard_address="127.0.0.1:0", silence_logs=logging.CRITICAL,
            )
        )  # fmt: skip

    def _jobs(self, word: str, rest: str) -> Any:
        with needing(f"--cluster {word}:…", "--part I/N by any scheduler"):
            import dask_jobqueue
        settings = _settings(rest)
        jobs = settings.pop("jobs", 1)
        if type(jobs) is not int or jobs < 1:
            raise UsageError(f"--cluster {word}:jobs={jobs} says no number of jobs", hint=_FORMS)
        try:
            cluster = getattr(dask_jobqueue, _JOBS[word])(**settings)
        except (TypeError, ValueError) as error:
            raise UsageError(f"--cluster {word}: {error}", hint=_FORMS) from error
        self._stack.enter_context(cluster)
        cluster.scale(jobs=jobs)
        self._expected = jobs * int(settings.get("cores", 1))
        self._waits = None  # a queue may take hours
        return cluster


def _settings(text: str) -> dict[str, Any]:
    """Return `a=1,b=x` as arguments.

    Raises:
        UsageError: it is something else.
    """
    found: dict[str, Any] = {}
    for one in filter(None, text.split(",")):
        name, equal, value = one.partition("=")
        if not (equal and name.isidentifier()):
            raise UsageError(f"--cluster: {one!r} is not NAME=VALUE", hint=_FORMS)
        found[name] = int(value) if value.isascii() and value.isdigit() else value
    return found


def _dashboard(client: Any) -> str:
    """Return the URL of the scheduler's page; "" where it has none: it needs bokeh."""
    from importlib.util import find_spec

    with suppress(Exception):
        return str(client.dashboard_link) if find_spec("bokeh") else ""
    return ""
