"""The promises of every format: `class TestX(FormatTests)` in tests/formats holds X to them.

A subclass gives the format and `make`, which lets the real library write checkpoints and says what
they must read back as. Damage is done to copies, with the operating system's own calls.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from ftckpt.checkpoint import Checkpoint, Piece
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.discovery.recognise import Format, Listing, listing_of, recognise
from ftckpt.errors import ExitCode, FtckptError, worst
from ftckpt.findings import Finding, finding, from_error
from ftckpt.formats.catalog import FORMATS
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from ftckpt.storage.store import Store
from tests import campaign


class Truth(NamedTuple):
    """What one tensor must read back as; `data` is little-endian in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Made(NamedTuple):
    """A checkpoint that the real library wrote, and every tensor in it by `tensor_key`."""

    path: Path
    truth: Mapping[str, Truth]


def source_of(store: Store, name: str = "") -> Source:
    """Return the source of a directory store, or of its one file `name`."""
    return Source.file(store, store.stat(name)) if name else Source.directory(store)


def open_path(form: Format, path: Path) -> Checkpoint:
    if path.is_file():
        return form.open(source_of(open_store(str(path.parent)), path.name))
    return form.open(source_of(open_store(str(path))))


def listing_at(store: Store, base: str = "", single: str = "") -> Listing:
    """Return what recognition sees of a place."""
    entries = [store.stat(single)] if single else store.children(base)
    files, directories = listing_of(entries, base)

    def head(name: str, length: int) -> bytes:
        key = f"{base}/{name}" if base else name
        with store.open(key) as reader:
            return reader.read(0, min(length, files[name].size))

    def inside(name: str) -> Listing:
        return listing_at(store, f"{base}/{name}" if base else name)

    return Listing(files, directories, head, inside, single)


def listing_of_path(path: Path) -> Listing:
    if path.is_file():
        return listing_at(open_store(str(path.parent)), single=path.name)
    return listing_at(open_store(str(path)))


def findings_of(form: Format, path: Path) -> list[Finding]:
    """Open and check; what the core checks for every format is done here by independent means."""
    try:
        checkpoint = open_path(form, path)
        found = [*checkpoint.notes, *checkpoint.check(), *_files(checkpoint)]
    except FtckptError as error:
        return [from_error(error)]
    return found


def _files(checkpoint: Checkpoint) -> Iterator[Finding]:
    entries = checkpoint.source.entries
    members = set(checkpoint.members())
    for name in sorted(members - entries.keys()):
        yield finding("missing-file", f"{name} is missing", file=name)
    for name in sorted(entries.keys() - members):
        yield finding("stray-file", f"{name} belongs to nothing", file=name)
    for key, tensor in checkpoint.tensors.items():
        for piece in tensor.pieces:
            file = piece.extent.file
            if file not in entries:
                yield finding("missing-file", f"{file} is missing", file=file, tensor=key)
            elif piece.extent.end > entries[file].size:
                yield finding("truncated-file", f"{file} is short", file=file, tensor=key)
        if sum(_count(p) for p in tensor.pieces if p.replica == 0) < tensor.numel:
            yield finding("hole", f"{key} has a hole", tensor=key)


def _count(piece: Piece) -> int:
    return piece.box.volume if piece.flat is None else piece.flat[1] - piece.flat[0]


def elements(piece: Piece, shape: tuple[int, ...]) -> Any:
    """Return the C-order index in the global tensor of each element of `piece`."""
    inside = tuple(slice(o, o + s) for o, s in zip(*piece.box, strict=True))
    found = np.arange(prod(shape)).reshape(shape)[inside].reshape(-1)
    return found if piece.flat is None else found[piece.flat[0] : piece.flat[1]]


def state_of(path: Path) -> dict[str, tuple[int, int, str]]:
    """Return size, modification time and digest of every file below `path`."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return {
        str(p): (p.stat().st_size, p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest())
        for p in files
    }


@contextmanager
def restored(file: Path) -> Iterator[bytes]:
    """Give the bytes of a file that is damaged in the block, and put it back after it."""
    status, data = file.stat(), file.read_bytes()
    yield data
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


_HEAVY = frozenset({"torch", "numpy", "safetensors", "s3fs", "fsspec", "rich"})

_made: dict[type, list[Made]] = {}


class FormatTests:
    """Inherit, set `format`, write `make`."""

    format: Format
    # Python text that leaves the format in `form`, where a bare call of its class does not.
    construct = ""
    # What opening may import all the same.
    imports: frozenset[str] = frozenset()
    # Kinds of finding, one of which damage must lead to; all of them must end in exit 4.
    truncated = frozenset({"truncated-file"})
    missing = frozenset({"missing-file"})
    empty = frozenset({"truncated-file"})

    def make(self, root: Path) -> list[Made]:
        """Let the real library write checkpoints below `root`."""
        raise NotImplementedError

    def victims(self, path: Path) -> list[str]:
        """Return the files of a checkpoint that cannot be lost without a finding."""
        tensors = open_path(self.format, path).tensors.values()
        return sorted({p.extent.file for t in tensors for p in t.pieces})

    def some_victims(self, path: Path) -> list[str]:
        """Return the first, the last and some between, as many as the campaign takes."""
        found = self.victims(path)
        step = campaign.examples(4, 1)
        return found[::step] + ([found[-1]] if (len(found) - 1) % step else [])

    @pytest.fixture
    def made(self, tmp_path_factory: pytest.TempPathFactory) -> list[Made]:
        if type(self) not in _made:
            _made[type(self)] = self.make(tmp_path_factory.mktemp("made"))
        return _made[type(self)]

    def test_it_is_recognised(self, made: list[Made]) -> None:
        for path, _ in made:
            # No format that is asked earlier may take it.
            winner = recognise((*FORMATS, self.format), listing_of_path(path))
            assert winner is not None, path
            found = winner[1]
            assert found.format == self.format.name
            assert found.supported
            assert found.reason

    def test_an_empty_directory_is_not_recognised(self, tmp_path: Path) -> None:
        assert self.format.recognise(listing_of_path(tmp_path)) is None

    def test_a_good_checkpoint_has_no_errors(self, made: list[Made]) -> None:
        for path, _ in made:
            assert [f for f in findings_of(self.format, path) if f.code is not ExitCode.OK] == []

    def test_every_tensor_reads_back_bit_for_bit(self, made: list[Made]) -> None:
        for path, truth in made:
            checkpoint = open_path(self.format, path)
            assert checkpoint.format == self.format.name
            assert set(checkpoint.tensors) == set(truth), path
            for key, (dtype, shape, data) in truth.items():
                tensor = checkpoint.tensors[key]
                assert (tensor.key, tensor.dtype.name, tensor.shape) == (key, dtype, shape)
                assert read_tensor(checkpoint, key) == data, key

    def test_it_is_a_mapping_and_says_what_it_is_in_five_lines(self, made: list[Made]) -> None:
        for path, truth in made:
            checkpoint = open_path(self.format, path)
            shown = {key: (view.dtype, view.shape) for key, view in checkpoint.items()}
            assert shown == {key: (one.dtype, one.shape) for key, one in truth.items()}
            lines = repr(checkpoint).splitlines()
            names = ["format", "step", "tensors", "bytes", "topology"]
            assert [line.split()[0] for line in lines] == names
            assert lines[0].split()[1] == f"{self.format.name}:"

    def test_main_pieces_tile_every_tensor(self, made: list[Made]) -> None:
        for path, _ in made:
            for key, tensor in open_path(self.format, path).tensors.items():
                seen = np.zeros(tensor.numel, int)
                for piece in tensor.pieces:
                    if piece.replica == 0:
                        at = elements(piece, tensor.shape)
                        assert at.size == _count(piece), key  # none lies outside
                        seen += np.bincount(at, minlength=tensor.numel)
                assert (seen == 1).all(), key

    def test_members_are_all_files(self, made: list[Made]) -> None:
        for path, _ in made:
            checkpoint = open_path(self.format, path)
            assert set(checkpoint.members()) == set(checkpoint.source.entries)

    def test_opening_imports_no_framework(self, made: list[Made]) -> None:
        form = type(self.format)
        construct = self.construct or (
            f"from {form.__module__} import {form.__name__}; form = {form.__name__}()"
        )
        program = (
            "import sys\n"
            f"{construct}\n"
            "from ftckpt.storage.source import Source\n"
            "from ftckpt.storage import open_store\n"
            "for where, name in zip(sys.argv[1::2], sys.argv[2::2]):\n"
            "    store = open_store(where)\n"
            "    one = name and Source.file(store, store.stat(name))\n"
            "    list(form.open(one or Source.directory(store)).check())\n"
            f"heavy = {_HEAVY - self.imports!r}\n"
            "print(sorted(heavy & set(sys.modules)))\n"
        )
        places: list[str] = []
        for path, _ in made:
            places += [str(path.parent), path.name] if path.is_file() else [str(path), ""]
        done = subprocess.run(
            [sys.executable, "-c", program, *places], capture_output=True, text=True, check=False
        )
        assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr

    def test_reading_writes_nothing(self, made: list[Made]) -> None:
        for path, _ in made:
            before = state_of(path)
            names = sorted(str(p) for p in path.parent.rglob("*"))
            checkpoint = open_path(self.format, path)
            findings_of(self.format, path)
            for key in checkpoint.tensors:
                read_tensor(checkpoint, key)
            assert state_of(path) == before
            assert sorted(str(p) for p in path.parent.rglob("*")) == names

    def test_any_store_gives_the_same_checkpoint(self, made: list[Made]) -> None:
        for number, (path, _) in enumerate(made):
            memory = open_store(f"memory://{type(self).__module__}-{type(self).__name__}-{number}")
            files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
            base = path.parent if path.is_file() else path
            for file in files:
                memory.put(file.relative_to(base).as_posix(), file.read_bytes())
            there = self.format.open(source_of(memory, path.name if path.is_file() else ""))
            here = open_path(self.format, path)
            assert there.tensors == here.tensors
            assert there.objects == here.objects
            assert there.aliases == here.aliases
            assert there.topology == here.topology
            assert there.commit == here.commit
            assert there.step == here.step
            assert list(there.members()) == list(here.members())

    def test_a_truncated_file_is_corrupt(self, made: list[Made], tmp_path: Path) -> None:
        number = 0
        for path, _ in made:
            copy = self._copy(path, tmp_path)
            victims = self.some_victims(path)
            both = campaign.examples(0, 1) or len(made) * len(victims) < 4
            for file in victims:
                target = copy if copy.is_file() else copy / file
                number += 1
                for keep in (0.5, 1.0) if both else ((0.5, 1.0)[number % 2],):
                    with restored(target) as data:
                        target.write_bytes(data[: min(int(len(data) * keep), len(data) - 1)])
                        self._expect(copy, self.truncated, file)

    def test_an_empty_file_is_corrupt(self, made: list[Made], tmp_path: Path) -> None:
        for path, _ in made:
            copy = self._copy(path, tmp_path)
            for file in self.some_victims(path):
                target = copy if copy.is_file() else copy / file
                with restored(target):
                    target.write_bytes(b"")
                    self._expect(copy, self.empty, file)

    def test_a_missing_file_is_corrupt(self, made: list[Made], tmp_path: Path) -> None:
        folders = [path for path, _ in made if path.is_dir()]
        if not folders:
            pytest.skip("every checkpoint of this format is one file")
        for path in folders:
            victims = self.victims(path)
            if len(victims) < 2:
                continue  # without its only data file it is no checkpoint
            copy = self._copy(path, tmp_path)
            for file in self.some_victims(path):
                with restored(copy / file):
                    (copy / file).unlink()
                    self._expect(copy, self.missing, file)

    def test_a_stray_file_is_noted(self, made: list[Made], tmp_path: Path) -> None:
        for path, _ in made:
            if path.is_file():
                continue
            copy = self._copy(path, tmp_path)
            (copy / "core.12345").write_bytes(b"left by a crash")
            found = findings_of(self.format, copy)
            assert "stray-file" in {f.kind for f in found if f.file == "core.12345"}
            assert worst(f.code for f in found) is ExitCode.OK

    def _copy(self, path: Path, tmp_path: Path) -> Path:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        target = tmp_path / "copy" / path.name
        if path.is_dir():
            return Path(shutil.copytree(path, target))
        target.parent.mkdir()
        return Path(shutil.copy(path, target))

    def _expect(self, path: Path, kinds: frozenset[str], file: str) -> None:
        found = findings_of(self.format, path)
        errors = [f for f in found if f.code is not ExitCode.OK]
        assert kinds & {f.kind for f in errors}, (file, found)
        assert worst(f.code for f in found) is ExitCode.CORRUPT, (file, found)
        assert any(f.file is not None and f.file.endswith(file) for f in errors), (file, found)
