"""Forks the ranks of small jobs: torch is imported once for all of them, which takes seconds.

Reads jobs from its input, one a line: a list of ranks, each `{"words": [program, ...],
"environment": {...}, "output": path}`. They run side by side; the answer is a line with their exit
codes. It ends with its input.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from importlib import import_module
from typing import Any

NEEDED = (
    "torch.distributed.checkpoint.state_dict", "torch.distributed.checkpoint.state_dict_loader",
    "torch.distributed.checkpoint.state_dict_saver", "torch.distributed.fsdp",
    "torch._dynamo",  # or the first step of each optimizer imports it anew
)  # fmt: skip


def main() -> None:
    for name in NEEDED:
        import_module(name)
    for line in sys.stdin:
        children = [_forked(rank) for rank in json.loads(line)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)


def _forked(rank: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        said = os.open(rank["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for number, fd in enumerate((nothing, said, said)):
            os.dup2(fd, number)
        os.environ.clear()
        os.environ.update(rank["environment"])
        sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.argv = rank["words"]
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # taking torch apart would take a second


if __name__ == "__main__":
    main()
