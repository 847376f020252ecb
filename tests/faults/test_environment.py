"""A poor or strange place to run in (rows F23 and F24)."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests import campaign
from tests.faults.cli import apart, command
from tests.faults.place import VERBS, Place
from tests.servers.s3 import upload_tree

FILES = 300
# Far below what the interpreter maps with torch in it or with a heap a thread (64 MiB each), and
# below what many open files need.
LIMITS = 'ulimit -v 393216 && ulimit -n 64 && exec "$@"'


def many_files(directory: Path, count: int = FILES) -> Path:
    """Write a sharded safetensors checkpoint of many small files, as its specification says."""
    directory.mkdir()
    where = {}
    for number in range(1, count + 1):
        name, file = f"layers.{number}.weight", f"model-{number:05d}-of-{count:05d}.safetensors"
        header = json.dumps({name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}})
        data = struct.pack("<Q", len(header)) + header.encode() + bytes(16)
        (directory / file).write_bytes(data)
        where[name] = file
    index = {"metadata": {"total_size": 16 * count}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.mark.parametrize("verb", ["seal", "verify", "inspect"])
def test_f23_little_memory_and_few_handles(tmp_path: Path, verb: str) -> None:
    path = many_files(tmp_path / "many")
    done = apart(verb, path, before=["bash", "-c", LIMITS, "limited"])
    assert done.code == 0, done.stderr
    if verb == "seal":
        sealed = apart("verify", path, before=["bash", "-c", LIMITS, "limited"])
        assert sealed.document["evidence"] == "manifest"


@pytest.mark.s3
def test_f23_little_memory_and_few_handles_on_s3(tmp_path: Path, s3_url: str) -> None:
    # Still more than there are handles; each is a request or two of a real service.
    upload_tree(many_files(tmp_path / "many", campaign.examples(100, FILES)), s3_url)
    done = apart("verify", s3_url, before=["bash", "-c", LIMITS, "limited"])
    assert done.code == 0, done.stderr


def test_f23_too_little_memory_is_a_sentence(local: Place) -> None:
    limit = 'ulimit -v 90000 && exec "$@"'
    for verb in ("verify", "inspect"):
        done = subprocess.run(
            ["bash", "-c", limit, "limited", *command(verb, local.newest)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode in (0, 12), (verb, done.returncode, done.stderr[-500:])
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kib", [100_000, 120_000, 160_000])
def test_f23_a_library_without_room_does_not_end_the_process(kib: int) -> None:
    """OpenBLAS calls exit(1) where it finds no memory, which is for defects of ours."""
    steps = Path(__file__).parents[1] / "data" / "dcp" / "fsdp2"
    words = command("diff", str(steps / "step-3"), str(steps / "step-4"), "--max-memory", "50MiB")
    done = subprocess.run(
        ["bash", "-c", f'ulimit -v {kib} && exec "$@"', "limited", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (3, 12), done.stderr[-500:]
    assert "OpenBLAS" not in done.stderr


def test_f23_what_spares_addresses_is_not_passed_on() -> None:
    script = (
        "import os\nfrom ftckpt.workers.memory import spare_addresses\nspare_addresses()\n"
        "assert 'OPENBLAS_NUM_THREADS' not in os.environ\nimport numpy\n"
        "assert len(os.listdir('/proc/self/task')) == 1"
    )
    subprocess.run(
        ["bash", "-c", 'ulimit -v 8000000 && exec "$@"', "limited", sys.executable, "-c", script],
        env={k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"},
        check=True,
    )


POOR = {
    "no-home": {"HOME": ""},
    "c-locale": {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "no-terminal": {"TERM": ""},
    "no-path": {"PATH": "/nonexistent"},
}


@pytest.mark.parametrize("verb", VERBS)
def test_f24_a_poor_environment_changes_nothing(place: Place, verb: str) -> None:
    environment = {k: v for changes in POOR.values() for k, v in changes.items()}
    done = apart(*place.words(verb), cwd=Path("/"), **environment)
    assert done.code == 0, done.stderr
    assert done.document["format"] == "dcp"


@pytest.mark.parametrize("verb", VERBS)
def test_f24_names_of_another_alphabet_in_the_c_locale(local: Place, verb: str) -> None:
    Path(local.newest, "\u6a21\u578b\x1b[31m\n").write_bytes(b"")
    Path(os.fsdecode(os.fsencode(local.newest) + b"/\xff\xfe")).write_bytes(b"")
    done = apart(*local.words(verb), cwd=Path("/"), **POOR["c-locale"])
    assert done.code == 0, done.stderr


@pytest.mark.parametrize(
    "words", [["verify"], ["verify", "--all"], ["inspect", "--files"], ["seal"], ["seal@2"]]
)
def test_f24_a_name_moves_no_cursor(local: Place, words: list[str]) -> None:
    root = Path(local.root).rename(Path(local.root).with_name("run\x1b[2J\u202e"))
    verb, _, step = words[0].partition("@")
    path = f"{root}@{step}" if step else str(root)
    done = subprocess.run(
        command(verb, path, *words[1:]), capture_output=True, timeout=60, check=False
    )
    assert done.returncode == (2 if words == ["seal"] else 0), done.stderr
    assert b"\x1b" not in done.stdout + done.stderr
    assert "\u202e".encode() not in done.stdout + done.stderr
    assert b"\\x1b[2J" in done.stdout + done.stderr


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_f24_a_closed_pipe(place: Place, verb: str, flags: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        command(*place.words(verb), *flags),
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write_end)
    assert done.returncode == 141, done.stderr
    assert "Traceback" not in done.stderr
    assert "Broken pipe" not in done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_f24_nobody_reads_the_remarks(local: Place, verb: str) -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" 2>&-', "sh", *command(*local.words(verb), "--json")],
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert json.loads(done.stdout)["result"]["code"] == 0
