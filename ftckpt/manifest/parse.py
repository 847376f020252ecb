"""Parse a manifest without trusting it: sizes, counts, names and digests must agree.

Every number is checked before anything of that size is allocated, so a small file cannot claim much
memory. Duplicate keys, unknown members and unsorted names are refused: two readers must never see
two different manifests in the same bytes.
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import pairwise
from math import isfinite

from ftckpt.checkpoint import Topology
from ftckpt.digests.blocks import WIDTH, block_count, file_digest
from ftckpt.errors import CorruptError, NewerWriterError
from ftckpt.extents import BLOCK
from ftckpt.manifest import (
    MAX_BYTES,
    SCHEMA,
    SCHEMA_THINNED,
    TOPOLOGY,
    FileDigest,
    Manifest,
    PassedCheck,
    ThinnedFrom,
)
from ftckpt.own_files import MANIFEST
from ftckpt.storage.source import safe_name
from ftckpt.strict_json import (
    JsonError,
    MembersError,
    count,
    decode,
    hexadecimal,
    items,
    members,
    optional_count,
    shown,
    text,
)

_TAIL = len('"digest": ""\n}\n') + 2 * WIDTH
_MEMBERS = "schema note tool created format step topology checks block_size files unmanaged digest"


def parse_manifest(data: bytes, file: str = MANIFEST) -> Manifest:
    """Parse the whole file `data` and check every rule of the format; `file` is for messages.

    Raises:
        CorruptError: damaged, or it contradicts itself (`bad-manifest`).
        NewerWriterError: of a schema that this version does not know, or whole with other members.
        UnsafeError: a name in it leads out of the checkpoint.
    """
    try:
        return _manifest(data, file)
    except MembersError as error:  # its digest is right: so it was written
        raise NewerWriterError.of(
            file, expected=f"the members of {SCHEMA}", found=str(error), file=file
        ) from None
    except JsonError as error:
        other = _other_schema(data)
        if other:
            raise _unknown_schema(other, file) from None
        message = f"{file} is not a valid manifest: {error}"
        raise CorruptError(message, kind="bad-manifest", file=file) from None


def _manifest(data: bytes, file: str) -> Manifest:
    found = _checked(data)
    if not isinstance(found, dict):
        raise JsonError("it is not a JSON object")
    schema = found.get("schema")
    if schema not in (SCHEMA, SCHEMA_THINNED):
        raise _unknown_schema(shown(schema), file)
    more = ["thinned"] if schema == SCHEMA_THINNED else []
    body = members(found, [*_MEMBERS.split(), *more], "the manifest")
    if body["block_size"] != BLOCK:
        raise NewerWriterError.of(
            f"block_size of {file}", expected=str(BLOCK), found=shown(body["block_size"]), file=file
        )
    unmanaged = [
        text(name, "a name in unmanaged") for name in items(body["unmanaged"], "unmanaged")
    ]
    files = [_file(row, file) for row in items(body["files"], "files")]
    for names in ([f.path for f in files], unmanaged):
        if any(a >= b for a, b in pairwise(names)):
            raise JsonError("its names are not sorted, or one stands twice")
    return Manifest(
        format=text(body["format"], "format"),
        step=optional_count(body["step"], "step"),
        topology=parse_topology(body["topology"]),
        files=files,
        unmanaged=[safe_name(name, named_by=file) for name in unmanaged],
        checks=[_check(row) for row in items(body["checks"], "checks")],
        tool=text(body["tool"], "tool"),
        created=text(body["created"], "created"),
        thinned=_thinned(body["thinned"]) if more else None,
    )


def _unknown_schema(schema: str, file: str) -> NewerWriterError:
    return NewerWriterError.of(
        f"the schema of {file}", expected=f"{SCHEMA} or {SCHEMA_THINNED}", found=schema, file=file
    )


def _other_schema(data: bytes) -> str:
    """Return the schema of a later version, whose digest may be another; "" for a known one.

    A schema that is one bit from a known one, in a file that is right with that, is damage.
    """
    found = re.match(rb'\{\s*"schema": "(ftckpt\.manifest/\d+)"', data)
    if found is None or found[1].decode() in (SCHEMA, SCHEMA_THINNED):
        return ""
    for known in (SCHEMA, SCHEMA_THINNED):
        with suppress(JsonError):
            _checked(data[: found.start(1)] + known.encode() + data[found.end(1) :])
            return ""
    return found[1].decode()


def _checked(data: bytes) -> object:
    """Check the manifest's own digest and return the JSON value."""
    if len(data) > MAX_BYTES:
        raise JsonError(f"it has {len(data)} bytes and {MAX_BYTES} is most")
    if len(data) < _TAIL:
        raise JsonError("it ends early")
    body, tail = data[:-_TAIL], data[-_TAIL:]
    if tail != f'"digest": "{file_digest(body).hex()}"\n}}\n'.encode():
        raise JsonError("its bytes do not match the digest at its end")
    try:
        return decode(data)
    except JsonError as error:
        raise JsonError(f"it {error}") from None


def _file(row: object, file: str) -> FileDigest:
    entry = members(row, ("path", "size", "digest", "blocks"), "an entry of files")
    path = safe_name(entry["path"], named_by=file)
    size = count(entry["size"], "size")
    digest, blocks = (hexadecimal(entry[name], name) for name in ("digest", "blocks"))
    if len(blocks) != WIDTH * block_count(size):
        raise JsonError(f"{path} has {size} bytes and {len(blocks) / WIDTH:g} block digests")
    if digest != file_digest(blocks):
        raise JsonError(f"the digest of {path} is not that of its blocks")
    return FileDigest(path, size, blocks)


def parse_topology(value: object) -> Topology:
    """Return the grid of ranks that a manifest, or the index of a delta, records.

    Raises:
        JsonError: it is none.
    """
    said = members(value, TOPOLOGY, "topology")
    world, tp, pp, dp, ep = (optional_count(said[name], name) for name in TOPOLOGY)
    return Topology(world_size=world, tp=tp, pp=pp, dp=dp, ep=ep)


def _check(row: object) -> PassedCheck:
    names = ("level", "evidence", "time")
    entry = members(row, names, "an entry of checks")
    return PassedCheck(*(text(entry[name], name) for name in names))


_THINNED = ("name", "step", "format", "saved", "files", "nbytes", "fingerprint", "left", "metrics")


def _thinned(row: object) -> ThinnedFrom:
    entry = members(row, _THINNED, "thinned")
    metrics = entry["metrics"]
    if not isinstance(metrics, dict):
        raise JsonError("its metrics are no object")
    return ThinnedFrom(
        name=text(entry["name"], "name"),
        step=count(entry["step"], "step"),
        format=text(entry["format"], "format"),
        saved=None if entry["saved"] is None else _number(entry["saved"], "saved"),
        files=count(entry["files"], "files"),
        nbytes=count(entry["nbytes"], "nbytes"),
        fingerprint=text(entry["fingerprint"], "fingerprint"),
        left=tuple(text(one, "an entry of left") for one in items(entry["left"], "left")),
        metrics={name: _number(value, name) for name, value in metrics.items()},
    )


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        raise JsonError(f"its {what} is not a number")
    return value
