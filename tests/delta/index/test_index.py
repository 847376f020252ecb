"""The index: what it says comes back, and nothing in it is believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.delta import BLOCK, DataFile, DeltaIndex, DeltaTensor, FitSettings, content_digest
from ftckpt.delta.index import HEAD, MAGIC, ROW
from ftckpt.delta.index import rows as index_rows
from ftckpt.delta.index.parse import parse_index
from ftckpt.errors import CorruptError, FtckptError, NoResourceError, UnsafeError, UnsupportedError
from ftckpt.workers.budget import set_budget
from tests.campaign import examples
from tests.delta.packing import Packed, pack, trained

GOLDEN = Path(__file__).parents[2] / "data" / "delta"
SETTINGS = FitSettings(0.9, 0.95, 1e-8, 1e-3, 0.1, 2, 1)


def small() -> Packed:
    base, target = trained(size=(60, 9))
    return pack(target, base, settings=SETTINGS, objects={"lr": b"\0\1"})


SMALL = small()
WHOLE = SMALL.index.dump()


def sealed(header: bytes, rows: bytes, *, version: int = 1, magic: bytes = MAGIC) -> bytes:
    """Return an index with these sections and a digest that fits."""
    body = HEAD.pack(magic, version, 0, len(header), len(rows) // ROW.size) + header + rows
    return body + bytes(xxhash.xxh3_128_digest(body))


def document() -> dict[str, Any]:
    size = HEAD.unpack_from(WHOLE)[3]
    parsed: dict[str, Any] = json.loads(WHOLE[HEAD.size : HEAD.size + size])
    return parsed


def with_document(change: Callable[[dict[str, Any]], object]) -> bytes:
    members = document()
    change(members)
    return sealed(json.dumps(members).encode(), SMALL.index.rows)


def with_row(number: int, **fields: Any) -> bytes:
    names = ("file", "reference", "form", "zero", "offset", "length", "stored", "digest")
    rows = bytearray(SMALL.index.rows)
    values = dict(zip(names, ROW.unpack_from(rows, number * ROW.size), strict=True)) | fields
    rows[number * ROW.size : (number + 1) * ROW.size] = ROW.pack(*values.values())
    return sealed(json.dumps(document()).encode(), bytes(rows))


def with_copy(**fields: Any) -> DeltaIndex:
    """Return an index with a tied copy of its first tensor, some of its fields as given."""
    owner = SMALL.index.tensors[0]
    first = len(SMALL.index.rows) // ROW.size
    copy = replace(owner, name="copy", first=first, **fields)
    rows = SMALL.index.rows[owner.first * ROW.size :][: owner.blocks * ROW.size]
    return replace(
        SMALL.index,
        tensors=[*SMALL.index.tensors, copy],
        rows=SMALL.index.rows + rows,
        aliases={copy.key: owner.key},
    )


@pytest.mark.usefixtures("rows")
def test_what_is_written_is_read() -> None:
    index = replace(with_copy(), files=[*SMALL.index.files, DataFile("b/1", 9)])
    data = index.dump()
    assert parse_index(data) == index
    assert parse_index(data).dump() == data
    nested = replace(
        index,
        tensors=[replace(t, path=("optimizer", 0, t.name)) for t in index.tensors],
        objects=[o._replace(path=("a.b", 1)) for o in index.objects],
    )
    assert nested.objects
    assert parse_index(nested.dump()) == nested
    numbered = [replace(t, stored_name=f"optimizer.state.0.{t.name}") for t in index.tensors]
    spelt = replace(index, tensors=numbered)
    assert parse_index(spelt.dump()) == spelt
    assert nested.content() == index.content()
    assert index.content() == content_digest(
        {t.key: t.digest for t in index.tensors if t.key != "copy"}
    )


def test_every_cut_and_every_flipped_byte_is_found() -> None:
    for end in range(len(WHOLE)):
        with pytest.raises(CorruptError):
            parse_index(WHOLE[:end])
    for place in range(len(WHOLE)):
        data = bytearray(WHOLE)
        data[place] ^= 1 << place % 8
        with pytest.raises(CorruptError):
            parse_index(bytes(data))
    with pytest.raises(CorruptError):
        parse_index(WHOLE + b"\0")


def set_member(*path: Any) -> Callable[[dict[str, Any]], object]:
    *where, last, value = path

    def change(members: dict[str, Any]) -> None:
        place: Any = members
        for step in where:
            place = place[step]
        place[last] = value

    return change


@pytest.fixture(params=["one by one", "at once"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the rows checked in either way: as those of a small and of a large delta."""
    if request.param == "at once":
        monkeypatch.setattr(index_rows, "FEW", 0)


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "step": set_member("step", -1),
    "float step": set_member("step", 1.5),
    "topology": set_member("topology", "tp", "2"),
    "file size": set_member("files", 0, 1, 1 << 63),
    "file twice": lambda d: d["files"].append(d["files"][0]),
    "short file": set_member("files", 0, 1, 3),
    "tensor twice": lambda d: d["tensors"].append(d["tensors"][0]),
    "tensor more": lambda d: d["tensors"].append({**d["tensors"][0], "name": "other"}),
    "tensor less": lambda d: d["tensors"].pop(),
    "huge shape": set_member("tensors", 1, "shape", [1 << 62]),
    "many huge axes": set_member("tensors", 1, "shape", [1 << 62] * 60),
    "large shape": set_member("tensors", 1, "shape", [1 << 50, 0, 3]),
    "more blocks": set_member("tensors", 1, "shape", [1 << 40]),
    "other shape": set_member("tensors", 1, "shape", [61, 9]),
    "axes": set_member("tensors", 1, "shape", [1] * 65),
    "digest": set_member("tensors", 1, "digest", "0" * 31),
    "upper case": set_member("tensors", 1, "digest", "A" * 32),
    "half a rule": lambda d: d["tensors"][1].pop("helpers"),
    "no base": set_member("base", None),
    "rule of another type": set_member("tensors", 1, "dtype", "int32"),
    "helper far": set_member("tensors", 1, "helpers", [99, 3]),
    "helper of another kind": set_member("tensors", 1, "helpers", [3, 2]),
    "helper missing": set_member("tensors", 1, "helpers", [2]),
    "itself": set_member("tensors", 2, {**document()["tensors"][1], "name": "x"}),
    "own base missing": lambda d: d["tensors"][1].pop("base"),
    "helper's base missing": lambda d: d["tensors"][2].pop("base"),
    "coefficients": set_member("tensors", 1, "coefficients", ["0x1p0"]),
    "infinite": set_member("tensors", 1, "coefficients", ["inf", "0x1p0", "0x1p0", "0x1p0"]),
    "overflow": set_member("tensors", 1, "coefficients", ["0x1p99999", "0x0", "0x0", "0x0"]),
    "alias of nothing": set_member("aliases", {"x": "w"}),
    "alias of itself": set_member("aliases", {"w": "w"}),
    "empty path": set_member("tensors", 1, "path", []),
    "stored name of another type": set_member("tensors", 1, "stored_name", 3),
    "negative step of a path": set_member("tensors", 1, "path", ["a", -1]),
    "endless path": set_member("objects", 0, "path", ["a"] * 65),
    "path of another type": set_member("objects", 0, "path", "a"),
    "object outside": set_member("objects", 0, "length", 1 << 40),
    "object twice": lambda d: d["objects"].append(d["objects"][0]),
    "base without end": set_member("base", "path", "x" * 5000),
    "base with a zero": set_member("base", "path", "../a\0b"),
    "base of no bytes": set_member("base", "path", "../\ud800"),
    "object in no file": set_member("objects", 0, "file", 9),
}


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("name", LIES)
def test_a_lie_with_a_digest_that_fits(name: str) -> None:
    with pytest.raises(CorruptError) as caught:
        parse_index(with_document(LIES[name]))
    assert caught.value.kind == "bad-delta"


NEWER: dict[str, bytes] = {
    "version": sealed(b"anything", b"", version=2),
    "block": with_document(set_member("block", 1 << 21)),
    "rule": with_document(set_member("tensors", 1, "rule", "oracle")),
    "dtype": with_document(set_member("tensors", 0, "dtype", "float5")),
    "kind": with_document(set_member("tensors", 0, "kind", "gradient")),
    "form": with_row(0, form=8),
    "reference": with_row(0, reference=3),
    "zero": with_row(0, zero=1),
    "unknown member": with_document(set_member("more", 1)),
    "missing member": with_document(lambda d: d.pop("aliases")),
    "member of a tensor": with_document(set_member("tensors", 0, "more", 1)),
}


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("name", NEWER)
def test_what_another_version_knows_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError):
        parse_index(NEWER[name])


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    "fields",
    [
        {"file": 1},
        {"offset": (1 << 64) - 1},
        {"offset": 1 << 40},
        {"length": 0},
        {"length": 1 << 30},
        {"form": 0},
        {"form": 1},
        {"reference": 1},
    ],
    ids=str,
)
def test_a_row_that_cannot_be(fields: dict[str, int]) -> None:
    with pytest.raises(CorruptError):
        parse_index(with_row(2, **fields))  # the first moment: against its base, or scaled


def test_an_alias_is_a_copy() -> None:
    """Who verifies an owner does not read its copies again, so nothing else may be called one."""
    index = with_copy()
    assert parse_index(index.dump()) == index
    key, owner = next(iter(index.aliases.items()))
    rows = bytearray(index.rows)
    rows[-1] ^= 1
    for lie in (
        with_copy(digest="0" * 32),
        replace(index, rows=bytes(rows)),
        replace(index, aliases={key: owner, owner: key}),
        replace(index, aliases={"m:exp_avg": owner} | dict(index.aliases)),
        replace(SMALL.index, aliases={SMALL.index.tensors[1].key: SMALL.index.tensors[2].key}),
    ):
        with pytest.raises(CorruptError) as caught:
            parse_index(lie.dump())
        assert caught.value.kind == "bad-delta"


def test_a_name_that_leads_out() -> None:
    for name in ("/etc/passwd", "../x", ""):
        with pytest.raises(UnsafeError):
            parse_index(with_document(set_member("files", 0, 0, name)))


@pytest.mark.parametrize(
    "header", [b"", b"[]", b"{", b"[" * 5000, b'{"a":1,"a":2}', b"NaN", b"\xff", b"9" * 5000]
)
def test_a_header_that_is_none(header: bytes) -> None:
    with pytest.raises(CorruptError):
        parse_index(sealed(header, b""))


def test_other_bytes_at_the_begin() -> None:
    with pytest.raises(CorruptError, match="begin"):
        parse_index(sealed(b"{}", b"", magic=b"SOMETHIN"))


def test_a_header_larger_than_memory_is_not_parsed() -> None:
    set_budget(1 << 20)
    try:
        with pytest.raises(NoResourceError):
            parse_index(sealed(b"[" + b"0," * (1 << 20) + b"0]", b""))
    finally:
        set_budget(1 << 30)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(max_examples=examples(75, 1200), deadline=None)
@given(st.data())
def test_any_member_may_be_anything(data: st.DataObject) -> None:
    members = document()
    place: Any = members
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        place[key] = data.draw(JSON)
        break
    try:
        index = parse_index(sealed(json.dumps(members).encode(), SMALL.index.rows))
    except FtckptError:
        return
    index.dump()


def test_a_tensor_counts_its_blocks() -> None:
    def blocks(dtype: str, *shape: int) -> int:
        return DeltaTensor("model", "w", Kind.PARAM, shape, DTYPES[dtype], "0" * 32).blocks

    assert [blocks("float32", n) for n in (0, 1, BLOCK, BLOCK + 1)] == [0, 1, 1, 2]
    assert blocks("float32") == 1
    assert blocks("complex64", BLOCK) == 1
    assert blocks("complex128", BLOCK, 2) == 2
    assert blocks("float4_e2m1", 2 * BLOCK) == 1


def test_the_golden_delta_is_still_read() -> None:
    """`tests/data/delta` was written by the first version; later ones read it as it is."""
    data = (GOLDEN / "ftckpt.delta").read_bytes()
    index = parse_index(data)
    files = {file.name: (GOLDEN / file.name).read_bytes() for file in index.files}
    golden = Packed(index, files, [])
    base = Packed(parse_index((GOLDEN / "base" / "ftckpt.delta").read_bytes()), {}, [])
    base.files = {f.name: (GOLDEN / "base" / f.name).read_bytes() for f in base.index.files}
    assert index.base is not None
    assert base.index.content() == index.base.content
    whole = golden.unpack(base.decoder().fill)
    assert {key: xxhash.xxh3_128_hexdigest(data) for key, data in whole.items()} == json.loads(
        (GOLDEN / "elements.json").read_text()
    )
    assert index.dump() == data
