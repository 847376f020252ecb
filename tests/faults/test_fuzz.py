"""Small real checkpoints of every format, mutated: a verdict each time, in time and in memory."""

from __future__ import annotations

import json
import pickle
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.builders.megatron_files import write
from tests.builders.megatron_model import Job
from tests.campaign import examples
from tests.commands.golden import DATA, RUN
from tests.faults.cli import here

SECONDS = 60
MEMORY_KIB = 600 << 10
# What a mutated checkpoint may be: whole, damaged, unfinished, hostile, absent, not ours.
DEEPSPEED = ("z1", "autotp", "z3", "pipe", "moe_z1", "moe_off", "autoep_z1")
CODED = ("adamw8bit", "float8_cuda")
ORBAX = (
    "everything", "edges", "edges_zarr3", "processes", "manager/30", "codecs", "codecs_zarr3",
    "older/everything_zarr3",
)  # fmt: skip
VERDICTS = {0, 4, 5, 7, 9, 12, 13}


class Corpus(dict[str, dict[str, bytes]]):
    """Name -> files of one checkpoint.

    It prints short: Hypothesis shows what a failing example was given, and its warning of megabytes
    would stand in place of the failure.
    """

    def __repr__(self) -> str:
        return f"<{len(self)} checkpoints>"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Checkpoints that torch or safetensors saves here, or that are kept."""
    import torch
    from safetensors.torch import save_file

    root = tmp_path_factory.mktemp("corpus")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    weights = model.state_dict()
    whole = {"model": weights, "optimizer": optimizer.state_dict(), "step": 5}
    halves = [dict(list(weights.items())[:2]), dict(list(weights.items())[2:])]
    for zipped in (True, False):
        folder = root / f"torchsave-{zipped}"
        folder.mkdir()
        torch.save(whole, folder / "step-5.pt", _use_new_zipfile_serialization=zipped)
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
    for name, state, protocol in (
        ("pickle-tensors", whole, 4),
        ("pickle-arrays-3", {"model": arrays, "step": 5, "rng": b"x" * 40}, 3),
        ("pickle-arrays-5", {"model": arrays, "step": 5}, 5),
    ):
        (root / name).mkdir()
        (root / name / "latest.pkl").write_bytes(pickle.dumps(state, protocol))
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        folder = root / f"sharded-{suffix}"
        folder.mkdir()
        where: dict[str, str] = {}
        for number, half in enumerate(halves, 1):
            name = f"{stem}-{number:05d}-of-00002.{suffix}"
            if suffix == "bin":
                torch.save(half, folder / name)
            else:
                save_file(half, folder / name)
            where |= dict.fromkeys(half, name)
        index = {"metadata": {}, "weight_map": where}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    folder = root / "shards"
    folder.mkdir()
    for rank in range(2):
        torch.save({"model": weights, "step": 5}, folder / f"shard_{rank:05d}.pt")
    for rank in range(2):
        tree = {"common": {"iteration": 5, "args": {"world_size": 2}}, "state_dict": weights}
        (root / "nvrx" / str(rank)).mkdir(parents=True)
        torch.save(tree, root / "nvrx" / str(rank) / f"iter_0000005_{rank}_local.pt")
    for name, job in {
        "megatron": Job(tp=2, pp=2, layers=2, optimizer="masters"),
        "megatron-buffers": Job(dp=2, layers=2, tied=True, optimizer="distributed"),
    }.items():
        shutil.copytree(write(root / "whole", job).path, root / name)
        shutil.rmtree(root / "whole")
    for name, kept in {
        "dcp": RUN / "step-2",
        "dcp-ranks": DATA / "dcp" / "fsdp2" / "step-3",
        "root": RUN,
        **{f"deepspeed-{n}": DATA / "deepspeed" / n / "global_step2" for n in DEEPSPEED},
        **{f"orbax-{n.replace('/', '-')}": DATA / "orbax" / n for n in ORBAX},
        "universal": DATA / "deepspeed" / "universal_z1" / "global_step2_universal",
        **{f"verl-{p.parent.name}": p for p in sorted((DATA / "ranks").glob("*/actor"))},
        **{f"coded-{n}": DATA / "ranks" / "coded" / n / "dcp" for n in CODED},
    }.items():
        shutil.copytree(kept, root / name)
    return Corpus(
        {
            place.name: {
                path.relative_to(place).as_posix(): path.read_bytes()
                for path in sorted(place.rglob("*"))
                if path.is_file()
            }
            for place in sorted(root.iterdir())
        }
    )


class Mutation(NamedTuple):
    """One change of one file. What is drawn never depends on the files: numbers wrap around."""

    file: int
    does: str
    near: int
    far: int
    place: str
    raw: bytes
    other: int
    new: str


MUTATIONS = st.builds(
    Mutation,
    file=st.integers(0, 99),
    does=st.sampled_from(["flip", "flip", "set", "cut", "insert", "delete", "swap", "move"]),
    near=st.integers(0, 399),
    far=st.integers(0, 1 << 20),
    place=st.sampled_from(["near the start", "near the end", "anywhere"]),
    raw=st.binary(min_size=1, max_size=40),
    other=st.integers(0, 99),
    new=st.sampled_from(["latest", ".metadata", "model.safetensors", "shard_00009.pt"]),
)


def spot(change: Mutation, length: int) -> int:
    """A byte's place: more often near either end, where headers and directories are."""
    near = change.near % length
    places = {"near the start": near, "near the end": length - 1 - near}
    return places.get(change.place, change.far % length)


def mutate(change: Mutation, files: dict[str, bytes]) -> dict[str, bytes]:
    """Change one file: its bytes, its length, its name, its place."""
    names = sorted(files)
    name, other = names[change.file % len(names)], names[change.other % len(names)]
    data, rest = files[name], {k: v for k, v in files.items() if k != name}
    if change.does == "delete":
        return rest
    if change.does == "swap":
        return files | {name: files[other], other: data}
    if change.does == "move":
        return rest | {change.new: data}
    if not data:
        return files
    at = spot(change, len(data))
    if change.does == "flip":
        data = data[:at] + bytes([data[at] ^ 1 << change.raw[0] % 8]) + data[at + 1 :]
    elif change.does == "set":
        raw = change.raw[:8]
        data = data[:at] + raw + data[at + len(raw) :]
    elif change.does == "cut":
        data = data[:at]
    else:
        data = data[:at] + change.raw + data[at:]
    return files | {name: data}


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"no verdict within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@settings(
    max_examples=examples(120, 2000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    checkpoint=st.integers(0, 99),
    mutations=st.lists(MUTATIONS, min_size=1, max_size=3),
    verb=st.sampled_from(["inspect", "verify", "verify-values"]),
)
def test_a_mutated_checkpoint_has_a_verdict(
    corpus: Corpus,
    tmp_path: Path,
    checkpoint: int,
    mutations: list[Mutation],
    verb: str,
) -> None:
    name, files = sorted(corpus.items())[checkpoint % len(corpus)]
    note(name)
    for change in mutations:
        if files:
            files = mutate(change, files)
    place = tmp_path / "mutated"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for path, content in files.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(content)
    flags = ["--level", "values"] if verb == "verify-values" else []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.alarm(SECONDS)
    try:
        done = here(verb.partition("-")[0], place, *flags)
    finally:  # or it rings in the next example, and Hypothesis speaks of inconsistent data
        signal.alarm(0)
    assert done.code in VERDICTS, done.stderr
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < MEMORY_KIB
