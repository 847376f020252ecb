"""Without a Python package, and without the calls that Linux alone has.

What needs no package runs, what needs it is 13 with the pip line; what only Linux has degrades. A
package is made absent in a process of its own, by a finder that refuses to find it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.workers import forked

DATA = Path(__file__).parent / "data"
# Each command in a fork of one process, which has imported what all share.
PROGRAM = """
import json, os, sys

absent, prelude, commands = json.loads(sys.argv[1])
assert not set(absent) & set(sys.modules)

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
exec(prelude)
from ftckpt.__main__ import main

if len(commands) > 9:  # else each would import what all need
    import importlib, pkgutil, ftckpt
    for module in pkgutil.walk_packages(ftckpt.__path__, "ftckpt."):
        of_torch = ("ftckpt.torch.", "ftckpt.trainers.", "ftckpt.loading.tensors.")
        if not (module.name + ".").startswith(of_torch):
            importlib.import_module(module.name)
    import numpy, xxhash, zstandard

answers = []
for words in commands:
    child = os.fork()
    if child == 0:
        os.dup2(os.open("out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(os.open("err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.argv[1:] = words
        main()
        os._exit(99)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    answers.append([code, open("out").read(), open("err").read()])
print(json.dumps(answers))
"""
# What another Unix lacks: calls, flags and constants, symbols of the C library, /proc and /sys.
ANOTHER_UNIX = """
import builtins, ctypes, io, multiprocessing, os, posix, sys, sysconfig, tempfile
sysconfig.get_config_vars()
gone = {
    "sched_getaffinity", "sched_setaffinity", "process_cpu_count", "posix_fadvise",
    "posix_fallocate", "copy_file_range", "memfd_create", "pidfd_open", "splice", "eventfd",
    "O_TMPFILE", "O_DIRECT", "O_PATH", "O_NOATIME", "getxattr", "setxattr", "listxattr", "unshare",
    "setns", *(name for name in dir(os) if name.startswith(("POSIX_FADV", "RWF_"))),
}
for name in gone:
    for module in (os, posix):
        if hasattr(module, name):
            delattr(module, name)
tempfile._O_TMPFILE_WORKS = False
symbols = {
    "renameat2", "sync_file_range", "prctl", "mallopt", "malloc_trim", "syscall", "mount",
    "sysv_signal", "unshare",
}

class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in symbols:
            raise AttributeError(f"dlsym: symbol not found: {name}")
        return super().__getattr__(name)

ctypes.CDLL = Library

def without_proc(function):
    def opened(file, *arguments, **settings):
        if isinstance(file, (str, bytes)) and os.fsdecode(file).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", file)
        return function(file, *arguments, **settings)
    return opened

builtins.open = io.open = without_proc(open)
os.open = without_proc(os.open)
plain = os.preadv

def preadv(fd, buffers, offset, flags=0):
    if flags:
        raise NotImplementedError("preadv2 is not available on this platform")
    return plain(fd, buffers, offset)

os.preadv = preadv
sys.platform = "another"
"""
RUN, STEP, PACKED, THERE = "run", "run/step-1", "packed", "there"
# What runs without torch, in this order, and the code of each.
WITHOUT_TORCH: Mapping[str, int] = {
    f"inspect {STEP}": 0,
    f"inspect {RUN}": 0,
    f"verify {STEP} --level values": 0,
    f"verify {RUN} --all": 0,
    f"seal {STEP}": 0,
    f"latest {RUN} --level content": 0,
    f"promote {RUN}/step-2": 0,
    f"restart {RUN} --world 2 --scratch scratch": 0,
    f"convert {STEP} weights --to safetensors": 0,
    "convert weights store --to dcp --dtype bf16": 0,
    "convert store one.pt --to torchsave --dtype fp16": 0,
    "convert weights one.safetensors --to safetensors --dtype fp32 --only model": 0,
    f"convert {STEP} by-auto --to safetensors --device auto": 0,
    f"reshard {STEP} two-ranks --dp 2": 0,
    f"diff {STEP} weights": 0,
    f"diff {STEP} store": 3,
    f"delta pack {STEP} {RUN}/step-2 {PACKED}": 0,
    f"delta info {PACKED}": 0,
    f"delta unpack {PACKED} unpacked": 0,
    f"delta rebase {PACKED} whole --onto none": 0,
    f"copy {RUN}/step-2 {THERE}/step-2": 0,
    f"repair {RUN}/step-2 --from {THERE}/step-2": 0,
    f"sync {RUN} {THERE}": 0,
    f"pin {RUN} step-2 --reason paper": 0,
    f"pin {RUN} step-2 --remove": 0,
    f"tag {RUN} step-2 milestone": 0,
    f"tag {RUN} step-2 milestone --remove": 0,
    f"gc {RUN} --keep-last 1": 0,
    f"gc purge {RUN}": 0,
    f"status {RUN} --json": 0,
    "plan --gpus 64 --mtbf 10h --save 60s --simulate": 0,
    "plan sweep --over save=1s..10m --mtbf 3h": 0,
    f"replay audit {STEP}": 0,
}


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def without(
    absent: Sequence[str], commands: Sequence[str], place: Path, prelude: str = ""
) -> list[Ended]:
    """Run command lines where packages, and what `prelude` takes away, are absent."""
    words = json.dumps([list(absent), prelude, [line.split() for line in commands]])
    if absent == ["torch"] and not prelude:  # which the server of forks has not imported either
        done = forked.run([words], os.environ, place, program=PROGRAM)
    else:
        line = [sys.executable, "-c", PROGRAM, words]
        done = forked.start(line, os.environ, place)
    assert done.returncode == 0, done.stderr
    return [Ended(*one) for one in json.loads(done.stdout)]


@pytest.mark.parametrize("prelude", ["", ANOTHER_UNIX], ids=["linux", "another unix"])
def test_what_needs_no_torch_runs_without_it(prelude: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / "run", tmp_path / RUN)
    (tmp_path / THERE).mkdir()
    found = without(["torch"], list(WITHOUT_TORCH), tmp_path, prelude)
    wrong = {
        line: (one.code, one.err)
        for (line, code), one in zip(WITHOUT_TORCH.items(), found, strict=True)
        if one.code != code or "No module" in one.err
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("absent", "line", "says", "pip"),
    [
        ("torch", "demo new", "the demo, which trains a model", "torch"),
        (
            "torch", f"convert {DATA}/run/step-1 new --to safetensors --device cuda",
            "the device cuda", "torch, or take --device cpu",
        ),
        ("s3fs", "verify s3://bucket/run --json", "s3:// needs", "s3fs"),
        ("aiobotocore", "latest s3://bucket/run", "s3:// needs", "s3fs"),
        ("fsspec", "latest gs://bucket/run", "gs:// needs", "fsspec"),
        ("gcsfs", "latest gs://bucket/run", "gs:// needs", "gcsfs"),
        ("matplotlib", "plan --gpus 8 --mtbf 9h --save 1m --plot x.png", "a picture", "matplotlib"),
        ("numpy", f"verify {DATA}/run/step-1 --level values --json", "this needs", "numpy"),
        ("xxhash", f"convert {DATA}/run/step-1 new --to safetensors", "this needs", "xxhash"),
        ("click", "latest run --json", "this needs", "click"),
        ("typer", "--help", "this needs", "typer"),
    ],
)  # fmt: skip
def test_what_needs_a_package_says_how_to_install_it(
    absent: str, line: str, says: str, pip: str, tmp_path: Path
) -> None:
    (ended,) = without([absent], [line], tmp_path)
    assert ended.code == 13
    assert says in ended.err
    assert f"is not installed\nhint: pip install {pip}" in ended.err
    assert "bug" not in ended.err
    assert not (tmp_path / "new").exists()
    if "--json" in line:
        result = json.loads(ended.out)["result"]
        assert (result["code"], result["name"]) == (13, "UNSUPPORTED")


def test_what_only_makes_it_faster_or_prettier_is_not_missed(tmp_path: Path) -> None:
    step = DATA / "run" / "step-1"
    lines = [f"verify {step} --level values", f"inspect {step}", f"diff {step} {step}"]
    absent = ["isal", "lz4", "rich", "matplotlib", "s3fs", "fsspec", "torch", "safetensors"]
    assert [one.code for one in without(absent, lines, tmp_path)] == [0, 0, 0]


def test_a_compressed_file_is_read_without_what_linux_alone_has(tmp_path: Path) -> None:
    lines = [f"verify {DATA / 'by_hand' / name} --json" for name in ("compressed", "packed")]
    assert [one.code for one in without([], lines, tmp_path, ANOTHER_UNIX)] == [0, 0]
