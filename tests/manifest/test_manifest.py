"""The manifest's format: what is written is read back, and nothing else is read."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt import manifest as module
from ftckpt.checkpoint import Topology
from ftckpt.digests.blocks import block_count, blocks_of_bytes, file_digest
from ftckpt.errors import (
    CorruptError,
    NewerWriterError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.extents import BLOCK
from ftckpt.manifest import FileDigest, Manifest, PassedCheck, locate
from ftckpt.manifest.parse import parse_manifest
from ftckpt.own_files import MANIFEST, is_own
from ftckpt.storage import open_store
from ftckpt.storage.source import Source

EXAMPLE = Manifest(
    format="dcp",
    step=1000,
    topology=Topology(world_size=2),
    files=(
        FileDigest(".metadata", 5, blocks_of_bytes(b"hello")),
        FileDigest("__0_0.distcp", 0, b""),
    ),
    unmanaged=("notes.txt",),
    checks=(PassedCheck("content", "crc32", "2026-01-31T12:00:00Z"),),
    tool="ftckpt 0.1.0",
    created="2026-01-31T12:00:01Z",
)


def signed(text: str) -> bytes:
    """Return manifest text with the right digest at its end, whatever it says."""
    body = text.encode()
    return body + f'"digest": "{file_digest(body).hex()}"\n}}\n'.encode()


def edited(edit: Callable[[dict[str, Any]], object]) -> bytes:
    members = json.loads(EXAMPLE.dump())
    del members["digest"]
    edit(members)
    return signed(json.dumps(members)[:-1] + ",\n")


def test_the_documented_example() -> None:
    page = (Path(__file__).parents[2] / "docs" / "manifest.md").read_text()
    example = re.search(r"```json\n(.*?)```", page, re.DOTALL)
    assert example is not None
    assert example[1].encode() == EXAMPLE.dump()
    assert parse_manifest(example[1].encode()) == EXAMPLE


def test_an_edit_that_changes_nothing_is_read() -> None:
    assert parse_manifest(edited(lambda members: None)) == EXAMPLE


names = st.text(
    st.characters(exclude_characters="/\\\0", exclude_categories=()), min_size=1, max_size=8
).filter(lambda name: name not in (".", "..") and not name.startswith("~") and name[1:2] != ":")
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
sizes = st.one_of(st.integers(0, 100), st.integers(0, 4 * BLOCK))
files = st.dictionaries(paths, sizes, max_size=5)
counts = st.none() | st.integers(0, 2**63 - 1)


@given(
    files=files,
    unmanaged=st.sets(paths, max_size=3),
    step=counts,
    topology=st.builds(Topology, counts, counts, counts, counts, counts),
    checks=st.lists(st.builds(PassedCheck, st.text(), st.text(), st.text()), max_size=2),
)
def test_what_is_written_is_read(
    files: dict[str, int],
    unmanaged: set[str],
    step: int | None,
    topology: Topology,
    checks: list[PassedCheck],
) -> None:
    written = Manifest(
        format="dcp",
        step=step,
        topology=topology,
        files=[
            FileDigest(path, size, bytes(range(16)) * block_count(size))
            for path, size in sorted(files.items())
        ],
        unmanaged=sorted(unmanaged),
        checks=checks,
    )
    data = written.dump()
    assert data.isascii()
    again = parse_manifest(data)
    assert again == written
    assert again.dump() == data


def test_any_damaged_byte_is_found() -> None:
    data = EXAMPLE.dump()
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1
        with pytest.raises(CorruptError) as caught:
            parse_manifest(bytes(damaged))
        assert caught.value.kind == "bad-manifest"


def test_any_cut_is_found() -> None:
    data = EXAMPLE.dump()
    for end in range(len(data)):
        with pytest.raises(CorruptError):
            parse_manifest(data[:end])
    with pytest.raises(CorruptError):
        parse_manifest(data + b"\n")


def first_file(members: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = members["files"][0]
    return row


CONTRADICTIONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "too few block digests": lambda m: first_file(m).update(size=BLOCK + 1),
    "a size that asks for much": lambda m: first_file(m).update(size=2**62),
    "a size beyond 63 bits": lambda m: first_file(m).update(size=2**63),
    "negative size": lambda m: first_file(m).update(size=-1),
    "a size that is no integer": lambda m: first_file(m).update(size=5.0),
    "a size that is a truth value": lambda m: first_file(m).update(size=True),
    "file digest of other blocks": lambda m: first_file(m).update(digest="0" * 32),
    "blocks not hexadecimal": lambda m: first_file(m).update(blocks="zz" * 16),
    "blocks in capitals": lambda m: first_file(m).update(blocks="AB" * 16),
    "blocks with spaces": lambda m: first_file(m).update(blocks=" " + "00" * 16),
    "unsorted": lambda m: m["files"].reverse(),
    "a file twice": lambda m: m["files"].append(m["files"][-1]),
    "unmanaged twice": lambda m: m.update(unmanaged=["a", "a"]),
    "unmanaged no names": lambda m: m.update(unmanaged=[1]),
    "files no list": lambda m: m.update(files={}),
    "a file no object": lambda m: m.update(files=["a"]),
    "topology no object": lambda m: m.update(topology=[]),
    "topology of text": lambda m: m["topology"].update(tp="2"),
    "step of text": lambda m: m.update(step="1000"),
    "format no text": lambda m: m.update(format=None),
    "check of numbers": lambda m: m["checks"][0].update(level=1),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_found(name: str) -> None:
    with pytest.raises(CorruptError) as caught:
        parse_manifest(edited(CONTRADICTIONS[name]))
    assert caught.value.kind == "bad-manifest"


NEWER: dict[str, Callable[[dict[str, Any]], object]] = {
    "member missing": lambda m: m.pop("note"),
    "member unknown": lambda m: m.update(extra=1),
    "member unknown in a file": lambda m: first_file(m).update(mtime=0),
    "other block size": lambda m: m.update(block_size=1 << 20),
    "schema": lambda m: m.update(schema="ftckpt.manifest/9"),
}


@pytest.mark.parametrize("name", NEWER)
def test_what_a_later_version_wrote_is_no_damage(name: str) -> None:
    with pytest.raises(NewerWriterError, match=r"expected .*, found"):
        parse_manifest(edited(NEWER[name]))


def test_a_schema_whose_digest_is_another() -> None:
    data = edited(lambda m: m.update(schema="ftckpt.manifest/9"))
    with pytest.raises(NewerWriterError, match="manifest/9"):
        parse_manifest(data.replace(b'"digest": "', b'"sha512": "'))
    known = edited(lambda m: None)
    with pytest.raises(CorruptError):  # one bit: with the known schema its digest is right
        parse_manifest(known.replace(b"manifest/1", b"manifest/3", 1))


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../b", "", "a//b", "c:x", "a\\b", 7])
def test_unsafe_names_are_refused(path: object) -> None:
    def name_a_file(members: dict[str, Any]) -> None:
        members["files"] = [{**first_file(members), "path": path}]

    def name_a_stray(members: dict[str, Any]) -> None:
        members["unmanaged"] = [path]

    with pytest.raises(UnsafeError):
        parse_manifest(edited(name_a_file))
    with pytest.raises(CorruptError if path == 7 else UnsafeError):
        parse_manifest(edited(name_a_stray))


def test_duplicate_keys_are_refused() -> None:
    text = EXAMPLE.dump().decode()
    text = text[: text.index('"digest": "', text.index('"unmanaged"'))]
    with pytest.raises(CorruptError, match="twice"):
        parse_manifest(signed(text.replace('"step": 1000', '"step": 1000, "step": 1001')))


@pytest.mark.parametrize(
    "text",
    [
        '{"a": ' + "[" * 100_000,
        '{"a": NaN,\n',
        '{"a": ' + "9" * 10_000 + ",\n",
        '{"a": Infinity,\n',
        "[\n",
        '{"a": "\x01",\n',
    ],
)
def test_json_that_abuses_the_parser_is_refused(text: str) -> None:
    with pytest.raises(CorruptError):
        parse_manifest(signed(text))


def test_a_newer_schema_is_unsupported() -> None:
    with pytest.raises(UnsupportedError, match="manifest/3"):
        parse_manifest(edited(lambda m: m.update(schema="ftckpt.manifest/3", new=1)))


def test_a_size_makes_no_memory() -> None:
    data = edited(lambda m: first_file(m).update(size=2**62))
    tracemalloc.start()
    with pytest.raises(CorruptError):
        parse_manifest(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / MANIFEST).open("wb") as file:
        file.truncate(module.MAX_BYTES + 1)
    with pytest.raises(CorruptError, match="most"):
        locate.find(Source.directory(open_store(str(tmp_path))))


def test_found_beside_a_directory(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"")
    assert locate.find(Source.directory(open_store(str(tmp_path)))) is None
    (tmp_path / MANIFEST).write_bytes(EXAMPLE.dump())
    assert locate.find(Source.directory(open_store(str(tmp_path)))) == EXAMPLE


def test_found_beside_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"x")
    store = open_store(str(tmp_path))
    source = Source.file(store, store.stat("model.pt"))
    assert locate.find(source) is None
    (tmp_path / "model.pt.ftckpt.json").write_bytes(EXAMPLE.dump())
    assert locate.find(source) == EXAMPLE


def test_a_directory_of_its_name_is_no_manifest(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(NotFoundError):
        locate.read(open_store(str(tmp_path)), MANIFEST)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("ftckpt.manifest.json", True),
        ("model.pt.ftckpt.json", True),
        (".ftckpt/log.jsonl", True),
        ("sub/ftckpt.manifest.json", False),
        (".ftckpt-notes", False),
        ("model.json", False),
    ],
)
def test_own_names(name: str, own: bool) -> None:
    assert is_own(name) is own
