"""Deltas by several processes: the bytes that threads make, whatever becomes of a process."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.delta.packs import save_steps
from tests.workers import forked as forks

# The command in a process of its own. Data files and blocks are small, so that there are many; who
# did what is told on standard error.
COMMAND = """
import os, sys
import ftckpt.comparison.read
import ftckpt.delta.pack.assemble, ftckpt.delta.pack.build
import ftckpt.transfer.prove.against_source, ftckpt.verification.selfchecks
from ftckpt.commands.cli.app import main
ftckpt.delta.pack.build.LEAST = 1 << 13
ftckpt.delta.pack.assemble._SAMPLED = 1
ftckpt.comparison.read._BATCH = 1 << 14
ftckpt.transfer.prove.against_source._TASK = ftckpt.verification.selfchecks._TASK = 1 << 14
real = os.fork
def told():
    number = real()
    if number:
        print("forked", number, file=sys.stderr)
    return number
os.fork = told
{more}
main(sys.argv[1:])
"""

# A process that dies at its k-th write of a data file, as by `kill -9`.
DYING = """
import os, signal
from ftckpt.storage.local.write_in_place import LocalUpload
write, left, first = LocalUpload.write, {left}, os.getpid()
def counted(self, offset, view):
    global left
    left -= 1
    if not left:
        write(self, offset, view[: len(view) // 2])
        os.kill({who}, signal.SIGKILL)
        signal.pause()
    write(self, offset, view)
LocalUpload.write = counted
"""

# The files of a checkpoint in another store.
FAR = """
from pathlib import Path
from ftckpt.storage import open_store
far, near = open_store("memory://far"), Path({place!r})
for path in near.rglob("*.safetensors"):
    far.put(path.relative_to(near).as_posix(), path.read_bytes())
"""


def start(words: Sequence[object], more: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(more=more), *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(words: Sequence[object], more: str = "", code: int = 0) -> str:
    """Return what the command says to standard error."""
    done = ended(words, more)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stderr


def ended(words: Sequence[object], more: str = "") -> subprocess.CompletedProcess[str]:
    return forks.run([*map(str, words)], os.environ, program=COMMAND.format(more=more))


def forked(said: str) -> list[int]:
    return [int(number) for number in re.findall(r"forked (\d+)", said)]


def files(place: Path) -> dict[str, bytes]:
    """Return what stands at a place, but what says when it was made, and of which base."""
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file() and path.name not in ("ftckpt.manifest.json", "ftckpt.delta")
    }


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save_steps(tmp_path_factory.mktemp("steps"), 3, rows=400)


@pytest.fixture(scope="module")
def packed(steps: list[Path]) -> Path:
    """Return the delta of the second step based on the first, made by one thread."""
    out = steps[0].parent / "by-one"
    assert not forked(run(["delta", "pack", *steps[:2], out, "--jobs", 1]))
    assert len(files(out)) > 10
    return out


def test_packing_gives_the_same_bytes(steps: list[Path], packed: Path, tmp_path: Path) -> None:
    said = run(["delta", "pack", *steps[:2], tmp_path / "d", "--jobs", 2])
    assert len(forked(said)) == 2 * 3  # to choose, to encode and to prove
    assert files(tmp_path / "d") == files(packed)


def test_a_delta_is_compared_by_processes(steps: list[Path], packed: Path) -> None:
    found = []
    for jobs in (1, 3):
        words = ["diff", packed, steps[0], "--jobs", jobs, "--json"]
        done = ended(words)
        assert done.returncode == 3
        assert len(forked(done.stderr)) == (3 if jobs > 1 else 0)
        found.append(json.loads(done.stdout))
        del found[-1]["seconds"]
    assert found[0] == found[1]
    assert not forked(run(["diff", packed, steps[1], "--jobs", 3, "--limit-rate", "9G"]))


# Says which blocks are decoded, of which no more than one is kept. A block is more than is written
# at a time.
TELLING = """
from ftckpt.transfer.read.elements import Gatherer
Gatherer.chunk = 1 << 14
from ftckpt.delta.codec.decode import DeltaDecoder
from ftckpt.formats.delta.checkpoint import ChainDecoder
ChainDecoder._kept = lambda self, nbytes: 0
decode = DeltaDecoder._decode
def telling(self, number, block, out):
    os.write(2, f"decoded {number}/{block}\\n".encode())
    decode(self, number, block, out)
DeltaDecoder._decode = telling
"""


def test_unpacking_decodes_each_block_once(packed: Path, tmp_path: Path) -> None:
    words = ["delta", "unpack", packed, tmp_path / "full", "--jobs", 1, "--no-proof"]
    decoded = Counter(re.findall(r"decoded (\S+)", run(words, TELLING)))
    assert len(decoded) == 11
    assert set(decoded.values()) == {1}


def test_comparing_decodes_each_block_once(steps: list[Path], packed: Path, tmp_path: Path) -> None:
    keeping = TELLING.replace("lambda self, nbytes: 0", "lambda self, nbytes: nbytes")
    said = run(["diff", packed, steps[1], "--jobs", 1], keeping)
    decoded = Counter(re.findall(r"decoded (\S+)", said))
    assert len(decoded) == 11
    assert set(decoded.values()) == {1}


def test_what_lies_where_a_block_should_counts_only_if_it_is_right(
    steps: list[Path], packed: Path, tmp_path: Path
) -> None:
    wrong = """
from ftckpt.transfer.staging.local import LocalStaging
def peek(self, path, offset, view):
    view[:] = bytes(len(view))
    return True
LocalStaging.peek = peek
"""
    words = ["delta", "unpack", packed, tmp_path / "full", "--jobs", 1, "--no-proof"]
    decoded = Counter(re.findall(r"decoded (\S+)", run(words, wrong + TELLING)))
    assert max(decoded.values()) > 1
    assert files(tmp_path / "full") == files(steps[1])


def test_unpacking_gives_the_same_bytes(steps: list[Path], packed: Path, tmp_path: Path) -> None:
    said = run(["delta", "unpack", packed, tmp_path / "full", "--jobs", 3])
    assert len(forked(said)) == 3 + 2 + 3  # to verify, to write two files, and to prove
    assert files(tmp_path / "full") == files(steps[1])


@pytest.mark.parametrize("to", ["dcp", "torchsave"])
def test_other_formats_with_checksums_too(packed: Path, tmp_path: Path, to: str) -> None:
    made = []
    for jobs in (1, 2):
        out = tmp_path / f"by-{jobs}"
        said = run(["delta", "unpack", packed, out, "--to", to, "--jobs", jobs])
        assert bool(forked(said)) == (jobs > 1)
        made.append(out.read_bytes() if out.is_file() else files(out))
    assert made[0] == made[1]


def test_a_chain_is_decoded_by_processes(steps: list[Path], packed: Path, tmp_path: Path) -> None:
    run(["delta", "pack", packed, steps[2], tmp_path / "d", "--jobs", 2])
    said = run(["convert", tmp_path / "d", tmp_path / "full", "--to", "safetensors", "-j", 2])
    assert forked(said)
    run(["diff", tmp_path / "full", steps[2]])


def test_a_rate_is_kept_by_threads(steps: list[Path], packed: Path, tmp_path: Path) -> None:
    more = ["--jobs", 2, "--limit-rate", "1GB/s"]
    assert not forked(run(["delta", "pack", *steps[:2], tmp_path / "d", *more]))
    assert not forked(run(["delta", "unpack", packed, tmp_path / "full", *more]))


def test_what_lies_elsewhere_is_read_by_threads(
    steps: list[Path], packed: Path, tmp_path: Path
) -> None:
    # Connections must not be shared; this store has none, and is elsewhere all the same.
    more = FAR.format(place=str(steps[0]))
    assert not forked(run(["delta", "pack", "memory://far", steps[1], tmp_path / "d", "-j2"], more))
    words = ["delta", "unpack", packed, tmp_path / "full", "-j2", "--base", "memory://far"]
    assert not forked(run(words, more))
    assert files(tmp_path / "full") == files(steps[1])


@pytest.mark.parametrize(("verb", "left"), [("pack", 1), ("pack", 4), ("unpack", 1)])
def test_a_process_that_dies_ends_the_run_and_the_next_goes_on(
    verb: str, left: int, steps: list[Path], packed: Path, tmp_path: Path
) -> None:
    sources = steps[:2] if verb == "pack" else [packed]
    wanted = files(packed if verb == "pack" else steps[1])
    words = ["delta", verb, *sources, tmp_path / "out", "--jobs", 2]
    said = run(words, DYING.format(left=left, who="os.getpid()"), code=12)
    assert "killed" in said
    assert "--jobs 1" in said
    assert not (tmp_path / "out").exists()
    assert forked(run(words))
    assert files(tmp_path / "out") == wanted


@pytest.mark.parametrize(("verb", "left"), [("pack", 3), ("unpack", 1)])
def test_the_first_process_dies_and_the_next_run_goes_on_at_once(
    verb: str, left: int, steps: list[Path], packed: Path, tmp_path: Path
) -> None:
    sources = steps[:2] if verb == "pack" else [packed]
    wanted = files(packed if verb == "pack" else steps[1])
    words = ["delta", verb, *sources, tmp_path / "out", "--jobs", 2]
    said = run(words, DYING.format(left=left, who="first"), code=-signal.SIGKILL)
    # Nobody is told that another run is still writing: copies hold the lock, and are dying.
    again = run(words)
    assert files(tmp_path / "out") == wanted
    assert not any(os.path.exists(f"/proc/{number}/exe") for number in forked(said + again))


def test_an_interruption_leaves_no_process(steps: list[Path], tmp_path: Path) -> None:
    words = ["delta", "pack", *steps[:2], tmp_path / "out", "--jobs", 2]
    slow = "from ftckpt.storage.local.write_in_place import LocalUpload; import time\n"
    slow += "LocalUpload.write = lambda self, offset, view: time.sleep(20)"
    with start(words, slow) as process:
        assert process.stderr is not None
        numbers: list[int] = []
        # Those that choose have ended; those that write are the third and fourth.
        while len(numbers) < 4:
            assert process.poll() is None
            numbers += forked(process.stderr.readline())
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    until = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{number}/exe") for number in numbers):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_verifying_finds_the_same_damage(packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed, packed.parent / "damaged")
    place = packed.parent / "damaged"
    for number in (2, 5, 9):
        block = place / f"{number:05d}.blocks"
        data = bytearray(block.read_bytes())
        data[len(data) // 2] ^= 4
        block.write_bytes(data)
    found = []
    for jobs in (1, 2):
        with start(["verify", place, "--jobs", jobs, "--json"]) as process:
            out, said = process.communicate(timeout=60)
        assert process.returncode == 4
        assert bool(forked(said)) == (jobs > 1)
        document = json.loads(out)
        found.append((sorted(map(json.dumps, document["findings"])), document["bytes_read"]))
    assert found[0] == found[1]
    assert len(found[0][0]) >= 3
