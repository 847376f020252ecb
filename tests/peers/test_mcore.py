"""megatron-core as the judge: what we wrote as torch_dist becomes its models and its optimizers.

`FTCKPT_PEER_MCORE` names the Python of an environment that has it; `mcore.sh` makes one.
"""

from __future__ import annotations

import os
import socket
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ftckpt.formats.megatron_dist_writer import MegatronDistWriter
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Wishes
from tests.checkpoints import open_checkpoint
from tests.materialise import materialise
from tests.real_sets import real_set

PYTHON = os.environ.get("FTCKPT_PEER_MCORE", "")
JOB = Path(__file__).with_name("mcore_job.py")
WRITER = MegatronDistWriter()

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not PYTHON, reason="FTCKPT_PEER_MCORE names no Python with megatron-core"),
]

# Source, what it is written for, what loads it, the optimizer, and since which core that can be:
# before 0.19 no common state is read from the store, nor what the arguments of later versions name.
CASES = [
    ("mcore0161_tp2dp2_dpreshard", {"tp": 2, "pp": 2, "dp": 1}, (2, 2), "distributed", (0, 16)),
    ("mcore0161_tp2dp2_dpreshard", {"tp": 4}, (1, 2), "distributed", (0, 16)),
    ("mcore_torchdist_tp2pp2", {"tp": 4, "pp": 1}, (4, 1), "plain", (0, 19)),
    ("mcore_torchdist_tp2dp2_fullyreshard_bf16", {"pp": 2}, (2, 1), "distributed", (0, 19)),
    ("mcore_torch_tp2pp2", {}, (1, 2), "plain", (0, 19)),
    ("mcore_torch_tp2dp2_distopt_bf16", {"tp": 1, "pp": 2}, (1, 2), "distributed", (0, 19)),
]


@cache
def version() -> tuple[int, ...]:
    """Return the version of the judge."""
    program = "import megatron.core as c; print(c.__version__)"
    done = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, check=True)
    return tuple(map(int, done.stdout.split()[-1].split(".")[:2]))


@pytest.mark.parametrize(("name", "wishes", "run", "optimizer", "since"), CASES)
def test_megatron_core_loads_it(
    name: str,
    wishes: dict[str, Any],
    run: tuple[int, int],
    optimizer: str,
    since: tuple[int, int],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if version() < since:
        pytest.skip(f"needs megatron-core {since[0]}.{since[1]}")
    place = real_set(name, "iter_0000003", tmp_path_factory)
    source = open_checkpoint(place)
    materialise(WRITER.layout(Content.of(source), Wishes(**wishes)), source, tmp_path)
    tp, pp = run
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {"WORLD_SIZE": str(tp * pp), "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}  # fmt: skip
    truth = place.parents[1] / "truth"
    given = [PYTHON, str(JOB), str(tmp_path), str(truth), str(tp), str(pp), optimizer]
    jobs = [
        subprocess.Popen(given, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(tp * pp)
    ]  # fmt: skip
    said = [job.communicate(timeout=300)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), said[0][-3000:]
    assert all("iteration 3, steps [3.0]" in text for text in said)
