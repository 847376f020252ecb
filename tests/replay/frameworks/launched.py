"""Starts the two ranks of a program as torchrun would, in forks: torch is imported once.

    python launched.py PROGRAM WORDS...

Each rank is recorded as an interpreter of its own would be; tests/replay/test_ranks.py holds that
torchrun's are.
"""

from __future__ import annotations

import os
import socket
import sys
from importlib import import_module
from pathlib import Path

# Of torch, what the programs take and what an optimizer's first step imports. They themselves are
# imported by a rank, so that they find what is recorded in its place.
PARTS = ("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch._dynamo")
LATER = "TESTS_LATER_"  # hides the recorder's settings until there is a rank


def main() -> None:
    asked = {name: value for name, value in os.environ.items() if name.startswith("FTCKPT_")}
    if asked:
        for name, value in asked.items():
            os.environ[LATER + name] = value
            del os.environ[name]
        os.execv(sys.executable, [sys.executable, *sys.argv])
    for module in PARTS:
        import_module(module)
    del sys.argv[0]
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    ranks = [fork(rank, port) for rank in range(2)]
    sys.exit(any(os.waitpid(rank, 0)[1] for rank in ranks))


def fork(rank: int, port: str) -> int:
    child = os.fork()
    if child:
        return child
    later = {n.removeprefix(LATER): v for n, v in os.environ.items() if n.startswith(LATER)}
    os.environ |= later | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    from ftckpt import hook

    hook.install()
    import_module(f"tests.replay.frameworks.{Path(sys.argv[0]).stem}").main()
    from tests.replay.frameworks import parts

    parts.leave()
    return 0


main()
