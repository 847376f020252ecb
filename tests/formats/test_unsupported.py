"""What is known by name and refused: named rightly, told from what is read, searched for harm."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftckpt.discovery.recognise import recognise
from ftckpt.errors import ExitCode, UnsupportedError
from ftckpt.formats.unsupported import RECOGNISED, hostile
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from tests.conformance.formats import listing_of_path

# Format -> trees of files (a path ending in "/" is an empty directory); the content decides where
# a magic does.
DIRECTORIES: dict[str, list[dict[str, bytes]]] = {
    "megatron-zarr": [
        {"metadata.json": b'{"sharded_backend": "zarr", "sharded_backend_version": 1}',
         "decoder.weight/.zarray": b"{}"},
    ],
    "verl-megatron": [{"ckpt_contents.json": b"{}"}],
    "bytecheckpoint": [
        {"model/.metadata": b"", "optimizer/.metadata": b"",
         "extra_state/extra_state_rank_0.pt": b""},
    ],
    "paddle": [
        {"0_0.distcp": b"", "1_0.distcp": b"", "0.metadata": b""},
        {"model.pdparams": b"", "model.pdopt": b""},
    ],
    "nemo": [{"model.nemo": b""}],
    "gguf": [{"model-00001-of-00002.gguf": b"GGUF\3\0\0\0"}],
    "tensorflow": [
        {"checkpoint": b"", "model.ckpt-7.index": b"", "model.ckpt-7.data-00000-of-00001": b""},
        {"saved_model.pb": b"", "variables/": b""},
    ],
    "hdf5": [{"tf_model.h5": b"\x89HDF\r\n\x1a\n"}],
    "flax": [{"flax_model.msgpack": b"", "config.json": b"{}"}],
    "onnx": [{"model.onnx": b""}],
}  # fmt: skip
USTAR = bytes(257) + b"ustar" + bytes(250)
FILES: dict[str, list[tuple[str, bytes]]] = {
    "torchscript": [("model.pt", b"PK\3\4" + bytes(26) + b"model/data/0")],
    "torch-tar": [("old.pt", USTAR), ("old", b"sys_info" + bytes(249) + b"ustar")],
    "nemo": [("model.nemo", USTAR)],
    "gguf": [("model.bin", b"GGUF\3\0\0\0")],
    "hdf5": [("weights.bin", b"\x89HDF\r\n\x1a\n"), ("model.keras", b"PK\3\4")],
    "flax": [("flax_model.msgpack", b"\x82")],
    "onnx": [("model.onnx", b"\x08\x07")],
    "paddle": [("model.pdparams", b"\x80\x04")],
}
# What other formats read, and what is nothing at all.
NOT_OURS: list[dict[str, bytes]] = [
    {},
    {"notes.txt": b"hello"},
    {".metadata": b"\x80\x04", "__0_0.distcp": b"", "metadata.json": b'{"sharded_backend":'
     b' "torch_dist"}', "common.pt": b""},
    {"model.safetensors": b"", "config.json": b"{}"},
    {"pytorch_model.bin": b"", "optimizer.pt": b"", "trainer_state.json": b"{}"},
    {"metadata.json": b"{}", "shard_00000.pt": b""},
    {"step-1/.metadata": b"", "step-2/.metadata": b""},
    {"model.gguf": b"not that"},
    {"state/notes": b"", "model/x": b"", "extra_state/x": b""},
]  # fmt: skip


def write(root: Path, files: dict[str, bytes]) -> Path:
    root.mkdir(exist_ok=True)
    for name, data in files.items():
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return root


def name_of(path: Path) -> str | None:
    found = recognise(RECOGNISED, listing_of_path(path))
    if found is None:
        return None
    form, recognition = found
    assert recognition.format == form.name
    assert not recognition.supported
    return form.name


def test_every_format_has_a_case_and_an_advice() -> None:
    assert {r.name for r in RECOGNISED} == set(DIRECTORIES) | set(FILES)
    assert len({r.name for r in RECOGNISED}) == len(RECOGNISED)
    assert all(r.title and r.advice and r.signs for r in RECOGNISED)


@pytest.mark.parametrize("name", DIRECTORIES)
def test_directories_are_named(name: str, tmp_path: Path) -> None:
    for number, files in enumerate(DIRECTORIES[name]):
        assert name_of(write(tmp_path / str(number), files)) == name, files


@pytest.mark.parametrize("name", FILES)
def test_single_files_are_named(name: str, tmp_path: Path) -> None:
    for file, data in FILES[name]:
        (tmp_path / file).write_bytes(data)
        assert name_of(tmp_path / file) == name


@pytest.mark.parametrize("number", range(len(NOT_OURS)))
def test_others_are_left_alone(number: int, tmp_path: Path) -> None:
    assert name_of(write(tmp_path / "x", NOT_OURS[number])) is None


def test_a_program_is_told_from_a_state_dict(tmp_path: Path) -> None:
    import torch

    torch.save({"w": torch.ones(3)}, tmp_path / "state.pt")
    assert name_of(tmp_path / "state.pt") is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "program.pt")
    assert name_of(tmp_path / "program.pt") == "torchscript"


def test_opening_says_what_it_is_and_what_to_do(tmp_path: Path) -> None:
    place = write(tmp_path / "iter_0000003", {"mp_rank_00_model_states.pt": b""})
    source = Source.directory(open_store(str(place)))
    for form in RECOGNISED:
        with pytest.raises(UnsupportedError) as caught:
            form.open(source)
        assert caught.value.exit_code is ExitCode.UNSUPPORTED
        assert form.title in caught.value.message
        assert "iter_0000003" in caught.value.message
        assert caught.value.hint == form.advice


class Touch:
    """Touches a file when it is unpickled by pickle itself."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        import os

        return os.system, (f"touch {self.path}",)


class TestHostile:
    @pytest.fixture
    def canary(self, tmp_path: Path) -> Path:
        return tmp_path / "canary"

    def evil(self, canary: Path, how: str, path: Path) -> None:
        import torch

        if how == "zip":
            torch.save({"module": Touch(canary)}, path)
        elif how == "legacy":
            torch.save(Touch(canary), path, _use_new_zipfile_serialization=False)
        else:
            protocol = {"text pickle": 0, "pickle": 4}[how]
            path.write_bytes(pickle.dumps(Touch(canary), protocol))

    @pytest.mark.parametrize("how", ["zip", "legacy", "pickle", "text pickle"])
    def test_a_hostile_file_among_good_ones(self, how: str, canary: Path, tmp_path: Path) -> None:
        import torch

        place = write(tmp_path / "verl", {"ckpt_contents.json": b"{}"})
        for rank in range(2):
            torch.save({"x": torch.ones(2)}, place / f"rank_{rank}.pt")
        self.evil(canary, how, place / "evil.pt")
        assert name_of(place) == "verl-megatron"
        (found,) = hostile(Source.directory(open_store(str(place))))
        assert (found.kind, found.code) == ("unsafe-pickle", ExitCode.UNSAFE)
        assert found.file == "evil.pt"
        assert not canary.exists()

    def test_the_payload_is_live(self, canary: Path) -> None:
        pickle.loads(pickle.dumps(Touch(canary)))
        assert canary.exists()

    def test_damage_is_not_its_business(self, tmp_path: Path) -> None:
        place = write(
            tmp_path / "x", {"a.pt": b"", "b.pt": b"PK\3\4cut", "c.pt": b"\x80\x04", "d": b"text"}
        )
        assert list(hostile(Source.directory(open_store(str(place))))) == []

    def test_a_fifo_is_refused_unopened(self, tmp_path: Path) -> None:
        import os

        place = write(tmp_path / "x", {"mp_rank_00/ok": b""})
        os.mkfifo(place / "mp_rank_00" / "model_optim_rng.pt")
        (found,) = hostile(Source.directory(open_store(str(place))))
        assert (found.kind, found.code) == ("special-file", ExitCode.UNSAFE)
