"""What a command imports: the reader of the format at hand, and nothing of the others.

Start-up is most of what a small checkpoint costs, and importing is most of start-up. Times differ
from machine to machine, so what is held here is the modules.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"

# The module that opens each format.
READERS = {
    "bundle": "bundle_opening",
    "dcp": "dcp_checkpoint",
    "deepspeed": "deepspeed_reading",
    "deepspeed-universal": "deepspeed_universal_reading",
    "delta": "delta_opening",
    "megatron": "megatron_opening",
    "megatron-dist": "megatron_dist_checkpoint",
    "ranks": "rank_opening",
    "safetensors": "safetensors_checkpoint",
    "torchsave": "torchsave_checkpoint",
}
# A store of Megatron's is one of DCP, read further.
ALSO = {"megatron-dist": {"dcp"}}

# Each command in a fork of a process that has imported what all share.
PROGRAM = """
import json, os, sys
from ftckpt.commands.app import main
from ftckpt.formats import catalog

shared = sorted(sys.modules)
out = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
answers = []
for words in json.loads(sys.argv[1]):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            main(words)
        except SystemExit as end:
            with os.fdopen(write, "w") as stream:
                json.dump([end.code, sorted(sys.modules)], stream)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        answers.append(json.load(stream))
    os.waitpid(child, 0)
os.write(out, json.dumps([shared, answers]).encode())
"""


def imports(*commands: tuple[str, ...]) -> tuple[set[str], list[set[str]]]:
    """Return the modules that all commands share, and those of each when it has ended well."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    shared, answers = json.loads(done.stdout)
    assert [code for code, _ in answers] == [0] * len(commands), done.stderr
    return set(shared), [set(modules) for _, modules in answers]


def readers(modules: set[str]) -> set[str]:
    return {name for name, module in READERS.items() if f"ftckpt.formats.{module}" in modules}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small checkpoint of each format that can be had without a framework."""
    folder = tmp_path_factory.mktemp("weights")
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (folder / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + b"\0" * 4
    )
    return {
        "dcp": DATA / "run" / "step-1",
        "deepspeed": DATA / "deepspeed" / "z1" / "global_step2",
        "deepspeed-universal": DATA / "deepspeed" / "universal_z1" / "global_step2_universal",
        "delta": DATA / "delta",
        "ranks": DATA / "ranks" / "fsdp1" / "actor",
        "safetensors": folder,
    }


def test_a_checkpoint_is_read_without_the_readers_of_other_formats(
    places: dict[str, Path],
) -> None:
    shared, found = imports(*(("inspect", str(path)) for path in places.values()))
    assert readers(shared) == set()
    for name, modules in zip(places, found, strict=True):
        assert readers(modules) == {name} | ALSO.get(name, set())


def test_recognising_parses_nothing(places: dict[str, Path]) -> None:
    """A root's children are known by names, so that `latest` and `gc` import one reader."""
    shared, (latest, plan, weights) = imports(
        ("latest", str(DATA / "run")),
        ("gc", str(DATA / "run"), "--keep-last", "2"),
        ("inspect", str(places["safetensors"])),
    )
    parsers = {f"ftckpt.formats.{name}" for name in ("unpickle", "archive", "torch_stream")}
    assert not (shared | weights) & parsers
    assert readers(latest) == readers(plan) == {"dcp"}


def test_a_command_line_is_read_without_pydantic() -> None:
    """typer converts by it, and to import it takes longer than the verb does."""
    _, found = imports(
        ("gc", str(DATA / "run"), "--keep-last", "2", "--keep-tag", "a", "--keep-tag", "b"),
        ("verify", str(DATA / "run" / "step-1"), "--level", "structure", "--jobs", "1", "--json"),
        ("verify", "--help"),
    )
    assert not any("pydantic" in modules for modules in found)


def test_every_reader_is_named_here() -> None:
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.formats.recognised import Recognised

    assert {one.name for one in FORMATS if not isinstance(one, Recognised)} == set(READERS)
    for module in READERS.values():
        assert (Path(__file__).parents[1] / "formats" / f"{module}.py").exists()
