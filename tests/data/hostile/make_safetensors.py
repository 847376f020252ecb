"""Write the hostile safetensors files and indexes that lie beside this script, and their tables.

    python tests/data/hostile/make_safetensors.py

Each case is one way to be wrong. The tables in safetensors/README.md and index/README.md come from
here too, and a test holds files, tables and this script together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent


class Case(NamedTuple):
    """One hostile file.

    Attributes:
        content: its bytes.
        kind: finding kind that it must lead to.
        code: exit code that it must lead to.
        tries: what it tries.
        accepted: whether the reference reader accepts it and only ftckpt is stricter.
    """

    content: bytes
    kind: str
    code: int
    tries: str
    accepted: bool = False


def built(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a file of `header` (JSON value or text) and `data`."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(
    begin: Any, end: Any, shape: Any = (1,), dtype: Any = "F32", **more: Any
) -> dict[str, Any]:
    """Return one tensor's entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


def one(text: bytes, data: bytes = b"\0" * 4) -> bytes:
    """Return a file whose one tensor has the JSON `text` as its entry."""
    return built(b'{"a":' + text + b"}", data)


def shaped(text: bytes, data: bytes = b"\0" * 4) -> bytes:
    """Return a file whose one tensor has the JSON `text` as its shape."""
    end = str(len(data)).encode()
    return one(b'{"dtype":"F32","shape":' + text + b',"data_offsets":[0,' + end + b"]}", data)


GOOD = built({"a": entry(0, 4), "b": entry(4, 8)}, b"\0" * 8)
_A = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
_FOUR = b"\0" * 4
_BAD, _UNSAFE, _SHORT = "bad-header", "unsafe-header", "truncated-file"
_NEWER = "newer-writer"

HEADERS: dict[str, Case] = {
    # A broken copy.
    "empty": Case(b"", _SHORT, 4, "a file of no bytes"),
    "three-bytes": Case(b"\x08\0\0", _SHORT, 4, "ends inside the length"),
    "length-only": Case(b"\x10" + b"\0" * 7, _SHORT, 4, "ends after the length"),
    "cut-in-header": Case(GOOD[:40], _SHORT, 4, "ends inside the header"),
    "cut-before-data": Case(GOOD[:-8], _SHORT, 4, "ends after the header"),
    "cut-in-data": Case(GOOD[:-1], _SHORT, 4, "ends one byte early"),
    "trailing-byte": Case(GOOD + b"\0", "trailing-bytes", 4, "one byte after the last tensor"),
    "trailing-zip": Case(
        GOOD + b"PK\x05\x06" + b"\0" * 18, "trailing-bytes", 4, "also an (empty) zip archive"
    ),
    "length-zero": Case(built(b"", length=0) + GOOD, _BAD, 4, "a header of no bytes"),
    "length-one": Case(built(b"{", length=1), _BAD, 4, "a header of one byte"),
    "length-short": Case(built({"a": entry(0, 4)}, _FOUR, 20), _BAD, 4, "the length cuts the JSON"),
    "zeros": Case(built(b"\0" * 64), _BAD, 4, "a header of zeros, as a lost block leaves it"),
    "hole-first": Case(built({"a": entry(4, 8)}, b"\0" * 8), _BAD, 4, "hidden bytes at the start"),
    "hole-between": Case(
        built({"a": entry(0, 4), "b": entry(8, 12)}, b"\0" * 12), _BAD, 4, "hidden bytes between"
    ),
    "hole-before-empty": Case(
        built({"a": entry(0, 4), "b": entry(6, 6, [0])}, b"\0" * 6),
        _BAD,
        4,
        "an empty tensor that jumps over bytes",
    ),
    "range-too-long": Case(built({"a": entry(0, 8)}, b"\0" * 8), _BAD, 4, "more bytes than shape"),
    "range-too-short": Case(
        built({"a": entry(0, 2)}, b"\0" * 2), _BAD, 4, "fewer bytes than shape"
    ),
    "range-backwards": Case(built({"a": entry(4, 0)}, _FOUR), _BAD, 4, "ends before it begins"),
    "half-a-byte": Case(
        built({"a": entry(0, 1, [3], "F4")}, b"\0"), _BAD, 4, "three elements of four bits"
    ),
    # Not the JSON that it should be.
    "text": Case(built(b"not a header at all"), _BAD, 4, "no JSON"),
    "array": Case(built(b"[]"), _BAD, 4, "an array instead of an object"),
    "byte-order-mark": Case(built(b"\xef\xbb\xbf{}"), _BAD, 4, "a mark before the object"),
    "leading-space": Case(
        built(b" {" + _A + b"}", _FOUR), _BAD, 4, "does not begin with {", accepted=True
    ),
    "two-objects": Case(built(b"{" + _A + b"}{}", _FOUR), _BAD, 4, "a second object after it"),
    "trailing-nul": Case(built(b"{" + _A + b"}\0", _FOUR), _BAD, 4, "padded with NUL"),
    "trailing-comma": Case(built(b"{" + _A + b",}", _FOUR), _BAD, 4, "a comma too many"),
    "comment": Case(built(b"{/**/" + _A + b"}", _FOUR), _BAD, 4, "a comment"),
    "open-string": Case(built(b'{"a'), _BAD, 4, "a string that never ends"),
    "open-object": Case(built(b"{" + _A, _FOUR), _BAD, 4, "an object that never ends"),
    "control-character": Case(
        built(b"{" + _A.replace(b"a", b"\n", 1) + b"}", _FOUR), _BAD, 4, "a raw newline in a name"
    ),
    "not-utf-8": Case(
        built(b"{" + _A.replace(b"a", b"\xff", 1) + b"}", _FOUR), _BAD, 4, "a name that is no text"
    ),
    "half-a-surrogate": Case(
        built(b"{" + _A.replace(b"a", b"\\ud800", 1) + b"}", _FOUR),
        _BAD,
        4,
        "a name that Python takes and UTF-8 cannot write",
    ),
    # Entries of the wrong kind.
    "entry-number": Case(one(b"1"), _BAD, 4, "a number instead of an entry"),
    "entry-null": Case(one(b"null"), _BAD, 4, "null instead of an entry"),
    "entry-array": Case(
        one(b'["F32",[1],[0,4]]'), _BAD, 4, "an array instead of an entry", accepted=True
    ),
    "no-dtype": Case(one(b'{"shape":[1],"data_offsets":[0,4]}'), _BAD, 4, "no dtype"),
    "no-shape": Case(one(b'{"dtype":"F32","data_offsets":[0,4]}'), _BAD, 4, "no shape"),
    "no-offsets": Case(one(b'{"dtype":"F32","shape":[1]}'), _BAD, 4, "no data_offsets"),
    "one-offset": Case(
        one(b'{"dtype":"F32","shape":[1],"data_offsets":[4]}'), _BAD, 4, "one offset"
    ),
    "three-offsets": Case(
        one(b'{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}'), _BAD, 4, "three offsets"
    ),
    "offset-text": Case(
        one(b'{"dtype":"F32","shape":[1],"data_offsets":["0","4"]}'), _BAD, 4, "offsets as text"
    ),
    "dtype-unknown": Case(built({"a": entry(0, 16, [1], "C128")}, b"\0" * 16), _NEWER, 13, "C128"),
    "dtype-lowercase": Case(built({"a": entry(0, 4, [1], "f32")}, _FOUR), _BAD, 4, "f32"),
    "dtype-empty": Case(built({"a": entry(0, 4, [1], "")}, _FOUR), _BAD, 4, "an empty dtype"),
    "dtype-null": Case(built({"a": entry(0, 4, [1], None)}, _FOUR), _BAD, 4, "null as dtype"),
    "dtype-list": Case(built({"a": entry(0, 4, [1], ["F32"])}, _FOUR), _BAD, 4, "a list as dtype"),
    "shape-number": Case(shaped(b"1"), _BAD, 4, "a number as shape"),
    "dim-negative": Case(shaped(b"[-1]"), _BAD, 4, "a negative size"),
    "dim-two-negatives": Case(shaped(b"[-1,-1]"), _BAD, 4, "two whose product is positive"),
    "dim-minus-zero": Case(shaped(b"[-0]", b""), _BAD, 4, "-0, which Python reads as 0"),
    "dim-float": Case(shaped(b"[1.0]"), _BAD, 4, "1.0"),
    "dim-true": Case(shaped(b"[true]"), _BAD, 4, "true, which Python counts as 1"),
    "dim-text": Case(shaped(b'["1"]'), _BAD, 4, "a size as text"),
    "dim-infinite": Case(shaped(b"[1e400]"), _BAD, 4, "1e400, which Python reads as infinity"),
    "dim-nan": Case(shaped(b"[NaN]"), _BAD, 4, "NaN, which Python reads as a number"),
    "metadata-list": Case(built({"__metadata__": []}), _BAD, 4, "__metadata__ as a list"),
    "metadata-number": Case(built({"__metadata__": {"a": 1}}), _BAD, 4, "a number as its value"),
    "metadata-nested": Case(built({"__metadata__": {"a": {}}}), _BAD, 4, "an object as its value"),
    # Abuse: two readers would see two contents, or one of them would die.
    "length-over-limit": Case(
        built(b"{}", length=100_000_001), _UNSAFE, 7, "a header of 100,000,001 bytes"
    ),
    "length-63-bits": Case(built(b"{}", length=2**63), _UNSAFE, 7, "a length that turns negative"),
    "length-64-bits": Case(
        built(b"{}", length=2**64 - 1), _UNSAFE, 7, "a length that overflows when 8 is added"
    ),
    "equal-keys": Case(
        built(b"{" + _A + b"," + _A.replace(b"0,4", b"4,8") + b"}", b"\0" * 8),
        _UNSAFE,
        7,
        "one name, two tensors",
    ),
    "equal-keys-one-range": Case(
        built(b"{" + _A + b"," + _A.replace(b"F32", b"I32") + b"}", _FOUR),
        _UNSAFE,
        7,
        "one name, one range, two dtypes: the last wins",
        accepted=True,
    ),
    "equal-keys-escaped": Case(
        built(b"{" + _A + b"," + _A.replace(b'"a"', b'"\\u0061"') + b"}", _FOUR),
        _UNSAFE,
        7,
        "one name, spelled in two ways",
        accepted=True,
    ),
    "equal-fields": Case(
        one(b'{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}'),
        _UNSAFE,
        7,
        "one entry, two shapes",
    ),
    "equal-metadata": Case(
        built(b'{"__metadata__":{},"__metadata__":{"format":"pt"}}'), _UNSAFE, 7, "two __metadata__"
    ),
    "equal-metadata-keys": Case(
        built(b'{"__metadata__":{"format":"pt","format":"np"}}'),
        _UNSAFE,
        7,
        "two values of one metadata key",
        accepted=True,
    ),
    "overlap-whole": Case(
        built({"a": entry(0, 4), "b": entry(0, 4)}, _FOUR), _UNSAFE, 7, "two tensors on one range"
    ),
    "overlap-part": Case(
        built({"a": entry(0, 4), "b": entry(2, 6)}, b"\0" * 6),
        _UNSAFE,
        7,
        "two tensors share bytes",
    ),
    "expansion": Case(
        built({f"t{n}": entry(0, 400, [100]) for n in range(300)}, b"\0" * 400),
        _UNSAFE,
        7,
        "300 tensors on one range: a small file that grows when loaded",
    ),
    "volume-overflow": Case(
        built({"a": entry(0, 4, [2**32, 2**32, 1])}, _FOUR), _UNSAFE, 7, "a volume of 2**64"
    ),
    "volume-overflow-zero": Case(
        built({"a": entry(0, 0, [2**40, 2**40, 0])}), _UNSAFE, 7, "an overflow before a zero"
    ),
    "bits-overflow": Case(
        built({"a": entry(0, 0, [2**61], "F64")}), _UNSAFE, 7, "a size that overflows in bits"
    ),
    "dim-63-bits": Case(
        built({"a": entry(0, 0, [0, 2**63])}),
        _UNSAFE,
        7,
        "a size that turns negative in numpy",
        accepted=True,
    ),
    "dim-64-bits": Case(shaped(b"[18446744073709551616]"), _UNSAFE, 7, "a size of 2**64"),
    "dim-5000-digits": Case(shaped(b"[" + b"9" * 5000 + b"]"), _UNSAFE, 7, "5,000 digits"),
    "offset-64-bits": Case(
        built({"a": entry(0, 2**64 - 1)}, _FOUR), _UNSAFE, 7, "an end that overflows with the start"
    ),
    "deep-arrays": Case(one(b"[" * 5000 + b"]" * 5000), _UNSAFE, 7, "5,000 nested arrays"),
    "deep-objects": Case(one(b'{"a":' * 2000 + b"1" + b"}" * 2000), _UNSAFE, 7, "2,000 objects"),
    "deep-never-closed": Case(one(b"[" * 5000), _UNSAFE, 7, "5,000 arrays that never end"),
    "deep-extra": Case(
        built({"a": entry(0, 4, extra=[[[1]]])}, _FOUR),
        _UNSAFE,
        7,
        "an unknown field, nested",
        accepted=True,
    ),
}

SHARDS = {
    "model-00001-of-00002.safetensors": built({"a": entry(0, 4)}, _FOUR),
    "model-00002-of-00002.safetensors": built({"b": entry(0, 4)}, _FOUR),
}
_FIRST, _SECOND = SHARDS


def mapped(**weights: Any) -> bytes:
    """Return an index with this weight_map."""
    return json.dumps({"metadata": {"total_size": 8}, "weight_map": weights}).encode()


def naming(shard: Any) -> bytes:
    """Return an index that sends tensor b to `shard`."""
    return mapped(a=_FIRST, b=shard)


_GOOD_INDEX = naming(_SECOND)
_WRONG, _ABUSE, _PATH = "bad-index", "unsafe-index", "unsafe-path"

INDEXES: dict[str, Case] = {
    "empty": Case(b"", _WRONG, 4, "a file of no bytes"),
    "text": Case(b"weight_map", _WRONG, 4, "no JSON"),
    "cut": Case(_GOOD_INDEX[:-20], _WRONG, 4, "ends early"),
    "zeros": Case(b"\0" * 64, _WRONG, 4, "zeros, as a lost block leaves them"),
    "two-objects": Case(_GOOD_INDEX + b"{}", _WRONG, 4, "a second object after it"),
    "not-utf-8": Case(_GOOD_INDEX.replace(b'"b"', b'"\xff"'), _WRONG, 4, "a name that is no text"),
    "half-a-surrogate": Case(
        _GOOD_INDEX.replace(b'"b"', b'"\\udc00"'), _WRONG, 4, "a name that UTF-8 cannot write"
    ),
    "array": Case(b"[]", _WRONG, 4, "an array"),
    "number": Case(b"1", _WRONG, 4, "a number"),
    "no-map": Case(b'{"metadata":{}}', _WRONG, 4, "no weight_map"),
    "map-list": Case(b'{"weight_map":["a"]}', _WRONG, 4, "a list as weight_map"),
    "shard-number": Case(naming(2), _WRONG, 4, "a number as shard"),
    "shard-null": Case(naming(None), _WRONG, 4, "null as shard"),
    "shard-list": Case(naming([_SECOND]), _WRONG, 4, "a list as shard"),
    "nan": Case(b'{"metadata":{"x":NaN},"weight_map":{}}', _WRONG, 4, "NaN"),
    "infinite": Case(b'{"metadata":{"x":1e400},"weight_map":{}}', _WRONG, 4, "1e400"),
    # Well formed, and not what lies beside it.
    "missing-shard": Case(
        naming("model-00003-of-00003.safetensors"), "missing-file", 4, "a shard that is not there"
    ),
    "subfolder": Case(naming("x/model.safetensors"), "missing-file", 4, "into a folder, not there"),
    "missing-tensor": Case(
        mapped(a=_FIRST, b=_SECOND, c=_SECOND), "missing-tensor", 4, "a tensor that no shard holds"
    ),
    "swapped-shards": Case(mapped(a=_SECOND, b=_FIRST), "wrong-shard", 4, "shards swapped"),
    "unindexed-tensor": Case(
        mapped(a=_FIRST, c=_SECOND), "unindexed-tensor", 4, "a tensor that the index leaves out"
    ),
    "fewer-shards": Case(mapped(a=_FIRST), "shard-count", 4, "one of two shards"),
    "mixed-sets": Case(
        mapped(a=_FIRST, b="model-00002-of-00003.safetensors"),
        "shard-count",
        4,
        "shards of two sets",
    ),
    # Abuse.
    "absolute": Case(naming("/etc/passwd"), _PATH, 7, "an absolute path"),
    "climbs": Case(naming("../secret.safetensors"), _PATH, 7, "out of the folder"),
    "climbs-later": Case(naming("x/../../secret.safetensors"), _PATH, 7, "out by a detour"),
    "dot": Case(naming("."), _PATH, 7, "the folder itself"),
    "dot-dot": Case(naming(".."), _PATH, 7, "the folder above"),
    "no-name": Case(naming(""), _PATH, 7, "an empty name"),
    "home": Case(naming("~root"), _PATH, 7, "somebody's home"),
    "backslash": Case(naming("..\\secret.safetensors"), _PATH, 7, "out of the folder on Windows"),
    "drive": Case(naming("C:secret.safetensors"), _PATH, 7, "a drive on Windows"),
    "nul": Case(naming(_SECOND + "\0.txt"), _PATH, 7, "a name that ends early in C"),
    "url": Case(naming("s3://bucket/model.safetensors"), _PATH, 7, "another store"),
    "equal-tensors": Case(
        _GOOD_INDEX.replace(b'"a"', b'"b"'), _ABUSE, 7, "one tensor, two shards: the last wins"
    ),
    "equal-maps": Case(
        b'{"weight_map":{},' + _GOOD_INDEX[1:], _ABUSE, 7, "two maps: the last wins"
    ),
    "deep": Case(
        b'{"metadata":' + b"[" * 5000 + b"]" * 5000 + b',"weight_map":{}}',
        _ABUSE,
        7,
        "5,000 nested arrays",
    ),
    "long-number": Case(
        b'{"metadata":{"total_size":' + b"9" * 5000 + b'},"weight_map":{}}',
        _ABUSE,
        7,
        "5,000 digits",
    ),
}


def table(cases: dict[str, Case], suffix: str, intro: str) -> str:
    """Return the README of a folder of cases."""
    lines = [intro, "", "| file | tries | finding | exit code |", "|---|---|---|---|"]
    for name, case in cases.items():
        tries = case.tries + (" (the reference reader accepts it)" if case.accepted else "")
        lines.append(f"| {name}{suffix} | {tries} | `{case.kind}` | {case.code} |")
    return "\n".join(lines) + "\n"


def files() -> dict[str, bytes]:
    """Return every file that this script writes, by path relative to itself."""
    made = {f"safetensors/{name}.safetensors": case.content for name, case in HEADERS.items()}
    made |= {f"index/{name}.json": case.content for name, case in INDEXES.items()}
    made["safetensors/README.md"] = table(
        HEADERS,
        ".safetensors",
        "# Hostile safetensors files\n\nEach must be refused with the finding and the exit code "
        "in its row.\nWritten by `../make_safetensors.py`.",
    ).encode()
    made["index/README.md"] = table(
        INDEXES,
        ".json",
        "# Hostile indexes\n\nEach stands as `model.safetensors.index.json` beside two good shards"
        " (tensor a in the first,\nb in the second) and must lead to the finding and the exit code"
        " in its row.\nWritten by `../make_safetensors.py`.",
    ).encode()
    return made


if __name__ == "__main__":
    for name, content in files().items():
        (HERE / name).parent.mkdir(exist_ok=True)
        (HERE / name).write_bytes(content)
