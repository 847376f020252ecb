"""The process that speaks with Ray for one command line; `ray_engine` starts it.

It reads lines of JSON: how the cluster is reached, then lists of shares. It answers with a line for
the cluster and one for each share that has ended, or with one error, which is its last word.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from ftckpt.workers.processes import die_with

from .share_process import RETRIES, ShareFailedError, ShareTask, do_share


def serve(lines: Iterator[str], answer: Any) -> None:
    """Connect, and do what the lines ask for.

    Args:
        lines: that are read.
        answer: is called with what is answered.
    """
    import ray

    settings = json.loads(next(lines))
    try:
        found = ray.init(**settings, logging_level="CRITICAL", log_to_driver=False)
        slots = int(ray.cluster_resources().get("CPU", 1))
    except Exception as error:  # whatever Ray has to say
        answer({"error": str(error) or type(error).__name__})
        return
    try:
        url = str(getattr(found, "dashboard_url", "") or "")
        answer({"slots": slots, "dashboard": f"http://{url}" if url else ""})
        for line in lines:
            _run(ray, [ShareTask(*task) for task in json.loads(line)], answer)
    except Exception as error:  # Ray raises also what is none of its own where the head is gone
        answer({"error": _reason(ray, error)})
    finally:
        with suppress(Exception):
            ray.shutdown()


def _run(ray: Any, tasks: Sequence[ShareTask], answer: Any) -> None:
    remote = ray.remote(do_share).options(
        num_cpus=1, max_retries=RETRIES, retry_exceptions=[ShareFailedError]
    )
    left = [remote.remote(task) for task in tasks]
    while left:
        done, left = ray.wait(left, timeout=1.0)
        for one in done:
            answer({"end": list(ray.get(one))})


def _reason(ray: Any, error: Exception) -> str:
    """Return in a sentence why the shares are not done."""
    known = ray.exceptions
    if isinstance(error, known.RayTaskError):
        return f"{error.cause}; {RETRIES + 1} times"
    said = str(error) or type(error).__name__
    if isinstance(error, known.WorkerCrashedError | known.OutOfMemoryError):
        return f"workers die of a share: {said}"
    return f"Ray does not go on: {said}"


def main(arguments: Sequence[str]) -> None:
    """Serve the process that has started this one."""
    parent, descriptor = map(int, arguments)
    die_with(parent)
    # `finally` above leaves the cluster, so that it lets go of the shares.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    with os.fdopen(descriptor, "w", encoding="utf-8") as answers:

        def answer(value: object) -> None:
            answers.write(json.dumps(value) + "\n")
            answers.flush()

        serve(iter(sys.stdin), answer)


if __name__ == "__main__":
    main(sys.argv[1:])
