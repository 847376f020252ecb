"""Runs many small trainings in forked processes: torch is imported once for all of them.

    python forks.py LISTS    # LISTS: JSON, lists of {"arguments": [...], "environment": {...}}

The lists run side by side, the runs of a list one after the other.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from importlib import import_module
from pathlib import Path

import torch

from ftckpt import hook
from tests.replay import train


def main() -> None:
    torch.set_num_threads(1)
    lists = json.loads(Path(sys.argv[1]).read_text())
    if any(run["environment"].get("WORLD_SIZE", "1") != "1" for runs in lists for run in runs):
        import_module("torch._dynamo")  # or the first step of each rank imports it anew
    children = []
    for runs in lists:
        child = os.fork()
        if child:
            children.append(child)
            continue
        for run in runs:
            inner = os.fork()
            if inner == 0:
                os.environ |= run["environment"]
                hook.install()
                sys.argv[1:] = run["arguments"]
                train.main()
                atexit._run_exitfuncs()  # the recorder's; taking torch apart would take a second
                os._exit(0)
            if os.waitpid(inner, 0)[1]:
                os._exit(1)
        os._exit(0)
    if any(os.waitpid(child, 0)[1] for child in children):
        sys.exit(1)


main()
