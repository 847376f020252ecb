"""megatron-core as the judge: what we wrote as torch_dist becomes its models and its optimizers.

`FTCKPT_PEER_MCORE` names the Python of an environment that has it; `mcore.sh` makes one.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from functools import cache
from math import prod
from pathlib import Path

import pytest

from tests.builders.real_sets import real_set

PYTHON = os.environ.get("FTCKPT_PEER_MCORE", "")
JOB = Path(__file__).with_name("mcore_job.py")
DIST, PLAIN = "distributed", "plain"

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not PYTHON, reason="FTCKPT_PEER_MCORE names no Python with megatron-core"),
]

# Source, formats on the way, what it is written for, ranks (tensor, pipeline, data) and optimizer
# of what loads it, and since which core that can be: before 0.19 no common state is read from the
# store, nor what the arguments of later versions name.
CASES = [
    ("mcore0161_tp2dp2_dpreshard", [], "--tp 2 --pp 2 --dp 1", (2, 2, 1), DIST, (0, 16)),
    ("mcore0161_tp2dp2_dpreshard", [], "--tp 4", (1, 2, 1), DIST, (0, 16)),
    ("mcore0161_tp2dp2_dpreshard", [], "--tp 1 --dp 4", (1, 1, 3), DIST, (0, 16)),
    ("mcore0161_tp2dp2_dpreshard", ["dcp"], "--tp 1 --pp 2", (2, 1, 2), DIST, (0, 16)),
    ("mcore0161_tp2dp2_dpreshard", ["torchsave"], "--tp 4", (1, 2, 1), DIST, (0, 16)),
    ("mcore0161_tp2dp2_dpreshard", ["safetensors"], "--tp 1", (4, 1, 1), DIST, (0, 16)),
    ("mcore_torchdist_tp2pp2", [], "--tp 4 --pp 1", (4, 1, 1), PLAIN, (0, 19)),
    ("mcore_torchdist_tp2dp2_fullyreshard_bf16", [], "--pp 2", (2, 1, 1), DIST, (0, 19)),
    ("mcore_torch_tp2pp2", [], "", (1, 2, 1), PLAIN, (0, 19)),
    ("mcore_torch_tp2dp2_distopt_bf16", [], "--tp 1 --pp 2", (1, 2, 2), DIST, (0, 19)),
]


@cache
def version() -> tuple[int, ...]:
    """Return the version of the judge."""
    program = "import megatron.core as c; print(c.__version__)"
    done = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, check=True)
    return tuple(map(int, done.stdout.split()[-1].split(".")[:2]))


def ftckpt(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ftckpt", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def written(source: Path, formats: list[str], sizes: list[str], root: Path) -> Path:
    """Take a checkpoint to torch_dist by way of other formats; return it."""
    made = root / "iter_0000003"
    if not formats and (source / "metadata.json").exists():
        ftckpt("reshard", str(source), str(made), *sizes)
        return made
    for number, form in enumerate(formats):
        between = root / f"between{number}"
        ftckpt("convert", str(source), str(between), "--to", form)
        source = between
    # An entry that no job has, taken apart.
    drop = ["--drop", "content_metadata_note.*"] if formats[-1:] == ["dcp"] else []
    ftckpt("convert", str(source), str(made), "--to", "megatron-dist", *sizes, *drop)
    return made


@pytest.mark.parametrize(("name", "formats", "sizes", "run", "optimizer", "since"), CASES)
def test_megatron_core_loads_it(
    name: str,
    formats: list[str],
    sizes: str,
    run: tuple[int, int, int],
    optimizer: str,
    since: tuple[int, int],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if version() < since:
        pytest.skip(f"needs megatron-core {since[0]}.{since[1]}")
    place = real_set(name, "iter_0000003", tmp_path_factory)
    made = written(place, formats, sizes.split(), tmp_path)
    tp, pp, _ = run
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {"WORLD_SIZE": str(prod(run)), "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}  # fmt: skip
    truth = place.parents[1] / "truth"
    given = [PYTHON, str(JOB), str(made), str(truth), str(tp), str(pp), optimizer]
    jobs = [
        subprocess.Popen(given, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(prod(run))
    ]  # fmt: skip
    said = [job.communicate(timeout=300)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), said[0][-3000:]
    assert all("iteration 3, steps [3.0]" in text for text in said)
