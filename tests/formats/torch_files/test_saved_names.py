"""The name in an archive says which file was saved, wherever it was put since."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch

from ftckpt.errors import ExitCode
from ftckpt.findings import Finding
from ftckpt.formats.torch_files.parse_files import check_saved_names, parse_files
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.storage import open_store
from ftckpt.storage.source import Source


def told(folder: Path, moves: dict[str, str], of_ranks: dict[str, int]) -> list[Finding]:
    """Save each file under the first name, call it the second, and return what is found."""
    for number, name in enumerate(moves):
        torch.save({"w": torch.full((3,), number)}, folder / name)
    held = {new: (folder / old).read_bytes() for old, new in moves.items()}
    for old in moves:
        (folder / old).unlink()
    for new, data in held.items():
        (folder / new).write_bytes(data)
    streams = parse_files(Source.directory(open_store(str(folder))), sorted(held))
    sound = {name: s for name, s in streams.items() if isinstance(s, TorchStream)}
    return list(check_saved_names(sound, of_ranks))


RANKS = {f"rank_{n}.pt": n for n in range(12)}


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ({"rank_0.pt": "rank_0.pt", "rank_1.pt": "rank_1.pt"}, {}),
        ({"rank_0.pt": "rank_1.pt", "rank_1.pt": "rank_0.pt"},
         {"rank_0.pt": "wrong-rank", "rank_1.pt": "wrong-rank"}),
        # All are numbered anew, in their order: from 1 instead of 0, by tens.
        ({"rank_0.pt": "rank_1.pt", "rank_1.pt": "rank_2.pt", "rank_2.pt": "rank_3.pt"}, {}),
        ({f"rank_{n}.pt": f"rank_{n + 1}.pt" for n in range(11)}, {}),
        ({"rank_0.pt": "rank_1.pt", "rank_1.pt": "rank_3.pt", "rank_3.pt": "rank_0.pt"},
         dict.fromkeys(("rank_0.pt", "rank_1.pt", "rank_3.pt"), "wrong-rank")),
        # A name that is not there says nothing: what was renamed may be this file.
        ({"rank_0.pt.tmp": "rank_0.pt", "rank_7.pt": "rank_1.pt"}, {}),
        # Layers may be copied on purpose; one kind of state in another's place may not.
        ({"layer_0.pt": "layer_1.pt", "layer_1.pt": "layer_0.pt"},
         {"layer_0.pt": "renamed-file", "layer_1.pt": "renamed-file"}),
        ({"exp_avg.pt": "exp_avg_sq.pt", "exp_avg_sq.pt": "exp_avg.pt"},
         {"exp_avg.pt": "renamed-file", "exp_avg_sq.pt": "renamed-file"}),
    ],
)  # fmt: skip
def test_whose_file_it_is(moves: dict[str, str], expected: dict[str, str], tmp_path: Path) -> None:
    found = told(tmp_path, moves, RANKS)
    assert {f.file: f.kind for f in found} == expected
    passes = all(name.startswith("layer") for name in expected)
    assert all((f.code is ExitCode.OK) is passes for f in found)


def test_one_file_twice(tmp_path: Path) -> None:
    for rank in range(3):
        torch.save({"w": torch.full((3,), rank)}, tmp_path / f"rank_{rank}.pt")
    (tmp_path / "rank_2.pt").write_bytes((tmp_path / "rank_0.pt").read_bytes())
    names = [f"rank_{n}.pt" for n in range(3)]
    streams = parse_files(Source.directory(open_store(str(tmp_path))), names)
    sound = {name: s for name, s in streams.items() if isinstance(s, TorchStream)}
    (found,) = check_saved_names(sound, RANKS)
    assert (found.kind, found.file) == ("wrong-rank", "rank_2.pt")
    assert "rank_0.pt" in found.message


def test_numbers_of_thousands_of_digits_are_compared(tmp_path: Path) -> None:
    names = [f"rank_{n}.pt" for n in range(2)]
    for name, digits in zip(names, ("1" * 5_000, "2" * 5_000), strict=True):
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_STORED) as archive:
            for entry, data in archived({"w": torch.ones(3)}).items():
                archive.writestr(f"rank_{digits}/{entry}", data)
    streams = parse_files(Source.directory(open_store(str(tmp_path))), names)
    sound = {name: s for name, s in streams.items() if isinstance(s, TorchStream)}
    assert list(check_saved_names(sound, RANKS)) == []


def archived(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """Return the files in torch's archive of a state, without the folder's name."""
    held = io.BytesIO()
    torch.save(state, held)
    with zipfile.ZipFile(held) as archive:
        return {n.partition("/")[2]: archive.read(n) for n in archive.namelist()}


def test_a_copy_with_another_ending_is_the_same_ranks(tmp_path: Path) -> None:
    names = ["rank_0.pt", "rank_0.pth", "rank_1.pt"]
    for rank in range(2):
        torch.save({"w": torch.full((3,), rank)}, tmp_path / f"rank_{rank}.pt")
    (tmp_path / "rank_0.pth").write_bytes((tmp_path / "rank_0.pt").read_bytes())
    streams = parse_files(Source.directory(open_store(str(tmp_path))), names)
    sound = {name: s for name, s in streams.items() if isinstance(s, TorchStream)}
    assert list(check_saved_names(sound, dict.fromkeys(names, 0))) == []
