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

from ftckpt.formats.catalog import FORMATS
from ftckpt.formats.unsupported import Recognised

DATA = Path(__file__).parent / "data"

# The module that opens each format.
READERS = {
    "bundle": "trainer_dirs.reader",
    "dcp": "dcp.reader",
    "deepspeed": "deepspeed.reader",
    "deepspeed-universal": "deepspeed.universal.reader",
    "delta": "delta.reader",
    "megatron": "megatron.reader",
    "megatron-dist": "megatron.torch_dist.reader",
    "megatron-fsdp": "megatron.fsdp.reader",
    "nvrx-local": "nvrx.reader",
    "orbax": "orbax.reader",
    "ranks": "ranks.reader",
    "safetensors": "safetensors.reader",
    "torch-checkpointing": "torch_checkpointing.reader",
    "torchsave": "torchsave.reader",
}
# The most modules of this project that a command may load: raise one only with the reason.
MOST = {
    # All: the format that is asked last, of what no other knows (a folder of parts), what holds a
    # trainer to two signs, and what keeps a password out of every answer. inspect: what reads other
    # state by its content. verify: what neighbours have. latest, gc: that, the order of a series
    # and the ledger.
    # Folders of safetensors: what tells codes from numbers, and the files of ranks. All: how an
    # operation is defined and observed, and the command line that is made of it, instead of typer,
    # and what the steps beside one have of files that nothing in it counts. convert: the sums that
    # prove what is written by one reading of the source.
    # All: what other packages add, what one piece of a save is, and the series that it is of.
    "inspect": 160, "structure": 160, "content": 172, "values": 184, "to safetensors": 257,
    "to dcp": 257, "pack": 270, "latest": 173, "gc": 211,
}  # fmt: skip
ALONE = """
import sys
from ftckpt.commands.cli.app import main

try:
    main(sys.argv[1:])
except SystemExit as end:
    own = sorted(name for name in sys.modules if name.split(".")[0] == "ftckpt")
    print(end.code, *own, file=sys.stderr)
"""
# Each command in a fork of a process that has imported what all share.
PROGRAM = """
import json, os, sys
from ftckpt.commands.cli.app import main
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


# What `inspect` is shown, by format; None for weights that are made here.
PLACES = {
    "dcp": DATA / "run" / "step-1",
    "deepspeed": DATA / "deepspeed" / "z1" / "global_step2",
    "deepspeed-universal": DATA / "deepspeed" / "universal_z1" / "global_step2_universal",
    "delta": DATA / "delta",
    "ranks": DATA / "ranks" / "fsdp1" / "actor",
    "safetensors": None,
}
COMMANDS = {
    "latest": ("latest", str(DATA / "run")),
    "gc": ("gc", str(DATA / "run"), "--keep-last", "2", "--keep-tag", "a", "--keep-tag", "b"),
    "verify": ("verify", str(PLACES["dcp"]), "--level", "structure", "--jobs", "1", "--json"),
    "help": ("verify", "--help"),
    "diff": ("diff", str(PLACES["dcp"]), str(PLACES["dcp"])),
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The modules of each command when it has ended well, and "" for those that all share."""
    folder = tmp_path_factory.mktemp("weights")
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (folder / "model.safetensors").write_bytes(data)
    commands = COMMANDS | {name: ("inspect", str(path or folder)) for name, path in PLACES.items()}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(list(commands.values()))],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    shared, answers = json.loads(done.stdout)
    assert [code for code, _ in answers] == [0] * len(commands), done.stderr
    found = {name: set(modules) for name, (_, modules) in zip(commands, answers, strict=True)}
    return {"": set(shared), **found}


def readers(modules: set[str]) -> set[str]:
    return {name for name, module in READERS.items() if f"ftckpt.formats.{module}" in modules}


@pytest.mark.parametrize("name", PLACES)
def test_a_checkpoint_is_read_without_the_readers_of_other_formats(
    name: str, imported: dict[str, set[str]]
) -> None:
    assert readers(imported[name]) == {name}


def test_recognising_parses_nothing(imported: dict[str, set[str]]) -> None:
    """A root's children are known by names, so that `latest` and `gc` import one reader."""
    assert readers(imported[""]) == set()
    assert readers(imported["latest"]) == readers(imported["gc"]) == {"dcp"}
    names = ("pickles.unpickle", "torch_files.zip_directory", "torch_files.stream")
    parsers = {f"ftckpt.formats.{name}" for name in names}
    assert not (imported[""] | imported["safetensors"]) & parsers


@pytest.mark.parametrize("command", ["safetensors", "latest", "gc"])
def test_what_few_commands_need_the_others_do_not_import(
    command: str, imported: dict[str, set[str]]
) -> None:
    few = {
        "ftckpt.delta",
        "ftckpt.transfer",
        "secrets",
        "tomllib",
    }
    assert not imported[command] & few


@pytest.mark.parametrize("command", [*PLACES, "latest", "gc", "help"])
def test_what_headers_say_needs_no_numpy(command: str, imported: dict[str, set[str]]) -> None:
    """To import it takes longer than `inspect` of a small checkpoint."""
    assert "numpy" not in imported[command]


def test_what_is_compared_needs_nothing_of_deltas(imported: dict[str, set[str]]) -> None:
    assert "ftckpt.delta" not in imported["diff"]


def test_a_command_line_is_read_without_pydantic(imported: dict[str, set[str]]) -> None:
    """typer converts by it, and to import it takes longer than the verb does."""
    assert [name for name, modules in imported.items() if "pydantic" in modules] == []


def loaded_alone(*words: str) -> list[str]:
    """Return the modules of this project that a command has loaded at its end."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    code, *modules = done.stderr.splitlines()[-1].split(" ")
    assert code == "0", done.stderr
    return modules


def test_a_verb_loads_no_more_modules_than_it_did(tmp_path: Path) -> None:
    run, step = str(DATA / "run"), str(PLACES["dcp"])
    folder, store = str(tmp_path / "folder"), str(tmp_path / "store")
    commands = {
        "inspect": ("inspect", step),
        **{
            level: ("verify", step, "--level", level)
            for level in ("structure", "content", "values")
        },
        "to safetensors": ("convert", step, folder, "--to", "safetensors"),
        "to dcp": ("convert", folder, store, "--to", "dcp"),
        "pack": ("delta", "pack", step, str(tmp_path / "packed")),
        "latest": ("latest", run),
        "gc": ("gc", run, "--keep-last", "2"),
    }
    loaded = {name: loaded_alone(*words) for name, words in commands.items()}
    counts = {name: len(modules) for name, modules in loaded.items()}
    assert {name: n for name, n in counts.items() if n > MOST[name]} == {}, counts
    for name in ("pack", "latest", "gc"):
        assert not [one for one in loaded[name] if one.startswith("ftckpt.planning")], name
    # A checkpoint alone needs nothing that reads roots, and reading nothing that writes files.
    for name in ("inspect", "structure", "content"):
        unused = {"ftckpt.discovery.roots", "ftckpt.storage.local.atomic"} & set(loaded[name])
        assert not unused, name


def test_every_reader_is_named_here() -> None:
    named = {one.name for one in FORMATS if not isinstance(one, Recognised)}
    assert named - {"pieces"} == set(READERS)  # refuses what it knows
    for module in READERS.values():
        path = Path(__file__).parents[1].joinpath("formats", *module.split("."))
        assert path.with_suffix(".py").exists()
