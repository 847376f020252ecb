"""Databases that lie: every node of a real one changed, and nodes made by hand."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import ftckpt
from ftckpt.errors import ExitCode, FtckptError, NoResourceError
from ftckpt.formats.orbax import ocdbt
from ftckpt.formats.orbax.ocdbt import _of_lanes, _update, crc32c
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from ftckpt.workers import budget
from tests.campaign import examples

DATA = Path(__file__).parents[2] / "data" / "orbax"
MANIFEST, NODE = 0x0CDB3A2A, 0x0CDB20DE


def test_crc32c_of_rfc_3720() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes(range(32))) == 0x46DD794E
    data = bytes(range(251)) * 700
    assert _of_lanes(memoryview(data)) == _update(0xFFFFFFFF, data)
    assert crc32c(data) == _of_lanes(memoryview(data)) ^ 0xFFFFFFFF


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def wrapped(magic: int, body: bytes, *, version: int = 0, compression: int = 0) -> bytes:
    """Return a manifest or node, with the right length and CRC."""
    rest = varint(version) + varint(compression) + body
    head = magic.to_bytes(4, "big") + (12 + len(rest) + 4).to_bytes(8, "little")
    return head + rest + crc32c(head + rest).to_bytes(4, "little")


def table(*paths: bytes) -> bytes:
    """Return a table of files without shared prefixes."""
    return b"".join(
        (
            varint(len(paths)),
            bytes(max(0, len(paths) - 1)),
            *(varint(len(path)) for path in paths),
            bytes(len(paths)),
            *paths,
        )
    )


def manifest(
    length: int, *, offset: int = 0, height: int = 0, path: bytes = b"d/node", kind: int = 0
) -> bytes:
    config = bytes(16) + bytes([kind]) + varint(1024) + varint(1 << 20) + bytes([4]) + varint(0)
    root = varint(1) + varint(1) + bytes([height, 0]) + varint(offset) + varint(length)
    return wrapped(MANIFEST, config + table(path) + root + bytes(3 + 8) + varint(0))


def leaf(*entries: tuple[bytes, bytes], height: int = 0) -> bytes:
    keys, values = [key for key, _ in entries], [value for _, value in entries]
    return b"".join(
        (
            bytes([height]),
            table(),
            varint(len(entries)),
            bytes(max(0, len(entries) - 1)),
            *(varint(len(key)) for key in keys),
            *keys,
            *(varint(len(value)) for value in values),
            bytes(len(entries)),
            *values,
        )
    )


def interior(height: int, *children: tuple[bytes, int, int]) -> bytes:
    """Return a node above others in the same file: (key, offset, length) of each."""
    count = len(children)
    return b"".join(
        (
            bytes([height]),
            table(b"d/node"),
            varint(count),
            bytes(count - 1),
            *(varint(len(key)) for key, _, _ in children),
            bytes(count),
            *(key for key, _, _ in children),
            bytes(count),
            *(varint(offset) for _, offset, _ in children),
            *(varint(length) for _, _, length in children),
            bytes(3 * count),
        )
    )


def read(path: Path, head: bytes, data: bytes) -> ocdbt.Database:
    (path / "d").mkdir(parents=True)
    (path / "manifest.ocdbt").write_bytes(head)
    (path / "d" / "node").write_bytes(data)
    return ocdbt.read_database(Source.directory(open_store(str(path))), "")


def test_a_tree_made_by_hand(tmp_path: Path) -> None:
    one, two = wrapped(NODE, leaf((b"a", b"1"), (b"b", b"2"))), wrapped(NODE, leaf((b"c", b"3")))
    above = interior(1, (b"a", 0, len(one)), (b"c", len(one), len(two)))
    root = wrapped(NODE, zstandard.compress(above), compression=1)
    start = len(one) + len(two)
    found = read(tmp_path, manifest(len(root), offset=start, height=1), one + two + root)
    assert {key: value.inline for key, value in found.values.items()} == {
        "a": b"1", "b": b"2", "c": b"3",
    }  # fmt: skip
    assert len(found.nodes) == 4


GOOD = wrapped(NODE, leaf((b"a", b"1")))
_LOOP = wrapped(NODE, interior(1, (b"a", 0, len(wrapped(NODE, interior(1, (b"a", 0, 60)))))))
_DOUBLED = wrapped(
    NODE, interior(1, (b"a", 0, len(GOOD)), (b"b", 0, len(GOOD)), (b"c", 0, len(GOOD)))
)
_CUT = zstandard.compress(leaf((b"a", b"1")))[:-3]
_BOMB = zstandard.compress(bytes(400 << 20))
HOSTILE = {
    "a version of the future": (manifest(len(n := wrapped(NODE, b"", version=1))), n, 13),
    "a compression of the future": (manifest(len(n := wrapped(NODE, b"", compression=2))), n, 13),
    "numbered manifests": (manifest(len(GOOD), kind=1), GOOD, 13),
    "a manifest of the future": (wrapped(MANIFEST, b"", version=9), GOOD, 13),
    "a climbing name": (manifest(len(GOOD), path=b"../node"), GOOD, 7),
    "an absolute name": (manifest(len(GOOD), path=b"/etc/passwd"), GOOD, 7),
    "a name that is no text": (manifest(len(GOOD), path=b"d/\xff"), GOOD, 7),
    "a length beyond the file": (manifest(len(GOOD) + 1), GOOD, 4),
    "a length beyond all": (manifest((1 << 64) - 2), GOOD, 4),
    "a node inside itself": (manifest(len(_LOOP), height=1), _LOOP, 4),
    "a node of many parents": (
        manifest(len(_DOUBLED), offset=len(GOOD), height=1), GOOD + _DOUBLED, 4,
    ),
    "another height": (manifest(len(GOOD), height=3), GOOD, 4),
    "keys out of order": (manifest(len(n := wrapped(NODE, leaf((b"b", b""), (b"a", b""))))), n, 4),
    "a key twice": (manifest(len(n := wrapped(NODE, leaf((b"a", b""), (b"a", b""))))), n, 4),
    "more entries than bytes": (
        manifest(len(n := wrapped(NODE, b"\0" + table() + varint(1 << 20)))), n, 4,
    ),
    "entries beyond all": (
        manifest(len(n := wrapped(NODE, b"\0" + table() + varint(1 << 40)))), n, 4,
    ),
    "no entries": (manifest(len(n := wrapped(NODE, leaf()))), n, 4),
    "bytes after its end": (manifest(len(n := wrapped(NODE, leaf((b"a", b"")) + b"x"))), n, 4),
    "a bomb": (manifest(len(n := wrapped(NODE, _BOMB, compression=1))), n, 12),
    "a frame that ends early": (
        manifest(len(n := wrapped(NODE, _CUT, compression=1))),
        n, 4,
    ),
    "a number without an end": (
        manifest(len(n := wrapped(NODE, b"\0" + b"\xff" * 12))), n, 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_nodes(name: str, tmp_path: Path) -> None:
    head, data, code = HOSTILE[name]
    with pytest.raises(FtckptError) as caught:
        read(tmp_path, head, data)
    assert int(caught.value.exit_code) == code, caught.value.message


def shared_prefixes(count: int, length: int) -> bytes:
    """Return a table of sizes: the first key is long, each other is it with two bytes changed."""
    return b"".join(
        (
            varint(length) * (count - 1), varint(length + 2), varint(2) * (count - 1),
        )
    )  # fmt: skip


def long_keys(count: int, length: int = 60_000) -> tuple[bytes, bytes]:
    """Return prefixes and suffixes, and the bytes, of keys that share a long prefix."""
    last = b"".join(n.to_bytes(2, "big") for n in range(count))
    return shared_prefixes(count, length), b"a" * length + last


def bomb_of_keys(count: int) -> bytes:
    sizes, keys = long_keys(count)
    return b"".join((b"\0", table(), varint(count), sizes, keys, bytes(count), bytes(count)))


def bomb_of_paths(count: int) -> bytes:
    sizes, paths = long_keys(count)
    own = bytes(count)
    return b"".join((b"\0", varint(count), sizes, own, paths, varint(1)))


def bomb_of_children(count: int) -> bytes:
    """Return a node whose children all have a long path, and prefixes of a long key."""
    length = 60_000
    files = b"".join((varint(1), varint(length), varint(0), b"d" * length))
    sizes, keys = long_keys(count)
    shared = varint(length + 2) * count
    places = bytes(count) + b"".join(map(varint, range(count))) + varint(20) * count
    return b"".join((b"\1", files, varint(count), sizes, shared, keys, places, bytes(3 * count)))


@pytest.mark.parametrize(
    ("bomb", "height"), [(bomb_of_keys, 0), (bomb_of_paths, 0), (bomb_of_children, 1)]
)
def test_what_shares_a_prefix_is_counted_as_it_unfolds(
    bomb: Callable[[int], bytes], height: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some 100 KB unfolded to gigabytes of keys, or of paths, past `--max-memory`."""
    monkeypatch.setattr(budget, "_budget", 32 << 20)
    node = wrapped(NODE, bomb(4000))
    tracemalloc.start()
    try:
        with pytest.raises(NoResourceError):
            read(tmp_path, manifest(len(node), height=height), node)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """Return a copy of a real database, and the bodies of its manifest and of one node."""
    copy = tmp_path_factory.mktemp("real") / "step-30"
    shutil.copytree(DATA / "sharded", copy)
    node = next((copy / "d").iterdir())
    bodies = {}
    for file in (copy / "manifest.ocdbt", node):
        raw = file.read_bytes()
        assert raw[12] == 0
        body = raw[14:-4]
        bodies[file.relative_to(copy).as_posix()] = (
            zstandard.ZstdDecompressor().decompressobj().decompress(body) if raw[13] else body
        )
    return copy, bodies


@settings(max_examples=examples(60, 3000), deadline=None)
@given(data=st.data())
def test_a_mutated_node_with_its_crc_has_a_verdict(
    real: tuple[Path, dict[str, bytes]], data: st.DataObject
) -> None:
    """A mutation that a CRC catches never reaches what parses; these do."""
    copy, bodies = real
    name = data.draw(st.sampled_from(sorted(bodies)))
    body = bytearray(bodies[name])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        new = data.draw(st.binary(min_size=0, max_size=6))
        body[at : at + data.draw(st.integers(0, 6))] = new
        if not body:
            body = bytearray(b"\0")
    kept = (copy / name).read_bytes()
    magic = MANIFEST if name == "manifest.ocdbt" else NODE
    (copy / name).write_bytes(wrapped(magic, bytes(body)))
    try:
        assert int(ftckpt.verify(str(copy)).code) in (0, 4, 7, 12, 13)
    finally:
        (copy / name).write_bytes(kept)


@pytest.mark.parametrize("name", ["manifest.ocdbt", "d"])
def test_every_bit_of_a_node_is_covered(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "step-30"
    shutil.copytree(DATA / "sharded", copy)
    file = copy / name if name != "d" else next((copy / "d").iterdir())
    data = file.read_bytes()
    for at in range(0, len(data), max(1, len(data) // 60)):
        file.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        found = ftckpt.verify(str(copy))
        assert found.code is ExitCode.CORRUPT, (at, found.message)
