"""Read a manifest and believe nothing in it: sizes, counts, names and digests must agree.

What a number promises is checked before anything of that size is made, so a small file cannot ask
for much memory. Duplicate keys, unknown members and unsorted names are refused: two readers must
never see two different manifests in the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from ftckpt.checkpoint import Topology
from ftckpt.digests.blocks import WIDTH, block_count, file_digest
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.extents import BLOCK
from ftckpt.manifest import MAX_BYTES, SCHEMA, TOPOLOGY, FileDigest, Manifest, PassedCheck
from ftckpt.own_files import MANIFEST
from ftckpt.storage.source import safe_name

_TAIL = len('"digest": ""\n}\n') + 2 * WIDTH
_MEMBERS = "schema note tool created format step topology checks block_size files unmanaged digest"


def parse_manifest(data: bytes, file: str = MANIFEST) -> Manifest:
    """Return the manifest in `data`, every rule of its format checked.

    Args:
        data: the whole file.
        file: its name, for messages.

    Raises:
        CorruptError: damaged, or it contradicts itself (`bad-manifest`).
        UnsupportedError: whole, but of a schema that this version does not know.
        UnsafeError: a name in it leads out of the checkpoint.
    """
    return ManifestParser(file).manifest(data)


class ManifestParser:
    """Reads one manifest.

    Args:
        file: its name, for messages.
    """

    def __init__(self, file: str) -> None:
        self.file = file

    def _bad(self, why: str) -> CorruptError:
        return CorruptError(
            f"{self.file} is not a valid manifest: {why}", kind="bad-manifest", file=self.file
        )

    def manifest(self, data: bytes) -> Manifest:
        """Return the manifest in `data`; see `parse_manifest`."""
        members = self._members(data)
        schema = members.get("schema")
        if schema != SCHEMA:
            raise UnsupportedError(
                f"{self.file} has the schema {schema!r}; this version reads {SCHEMA}",
                hint="use a newer ftckpt",
                file=self.file,
            )
        self._keys(members, _MEMBERS, "the manifest")
        if members["block_size"] != BLOCK:
            raise self._bad(f"its block_size is not {BLOCK}")
        step = members["step"]
        unmanaged = self._list(members, "unmanaged")
        files = [self._file(row) for row in self._list(members, "files")]
        for names in ([f.path for f in files], unmanaged):
            if any(a >= b for a, b in pairwise(names)):
                raise self._bad("its names are not sorted, or one stands twice")
        return Manifest(
            format=self._str(members, "format"),
            step=None if step is None else self._count(members, "step"),
            topology=self._topology(members["topology"]),
            files=files,
            unmanaged=[safe_name(name, named_by=self.file) for name in unmanaged],
            checks=[self._check(row) for row in self._list(members, "checks")],
            tool=self._str(members, "tool"),
            created=self._str(members, "created"),
        )

    def _members(self, data: bytes) -> dict[str, Any]:
        """Check the manifest's own digest and return the JSON object."""
        import json

        if len(data) > MAX_BYTES:
            raise self._bad(f"it has {len(data)} bytes and {MAX_BYTES} is most")
        if len(data) < _TAIL:
            raise self._bad("it ends early")
        body, tail = data[:-_TAIL], data[-_TAIL:]
        if tail != f'"digest": "{file_digest(body).hex()}"\n}}\n'.encode():
            raise self._bad("its bytes do not match the digest at its end")
        try:
            members = json.loads(data, object_pairs_hook=self._pairs, parse_constant=self._constant)
        except (ValueError, RecursionError) as error:
            raise self._bad(str(error)) from None
        if not isinstance(members, dict):
            raise self._bad("it is not a JSON object")
        return members

    def _pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            raise self._bad("a key stands twice in one object")
        return members

    def _constant(self, name: str) -> Any:
        raise self._bad(f"{name} is not JSON")

    def _keys(self, members: Mapping[str, Any], names: str, where: str) -> None:
        if set(members) != set(names.split()):
            odd = sorted(set(members) ^ set(names.split()))
            raise self._bad(f"members missing from {where}, or unknown: {', '.join(odd)[:200]}")

    def _object(self, value: object, names: str, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._bad(f"{where} is not an object")
        self._keys(value, names, where)
        return value

    def _str(self, members: Mapping[str, Any], key: str) -> str:
        value = members[key]
        if not isinstance(value, str):
            raise self._bad(f"{key} is not a string")
        return value

    def _count(self, members: Mapping[str, Any], key: str) -> int:
        value = members[key]
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise self._bad(f"{key} is not a count")
        return value

    def _list(self, members: Mapping[str, Any], key: str) -> list[Any]:
        value = members[key]
        if not isinstance(value, list):
            raise self._bad(f"{key} is not a list")
        if key == "unmanaged" and not all(isinstance(name, str) for name in value):
            raise self._bad(f"{key} holds something that is not a name")
        return value

    def _file(self, row: object) -> FileDigest:
        members = self._object(row, "path size digest blocks", "an entry of files")
        path = safe_name(members["path"], named_by=self.file)
        size = self._count(members, "size")
        digest, blocks = self._hex(members, "digest"), self._hex(members, "blocks")
        if len(blocks) != WIDTH * block_count(size):
            raise self._bad(f"{path} has {size} bytes and {len(blocks) / WIDTH:g} block digests")
        if digest != file_digest(blocks):
            raise self._bad(f"the digest of {path} is not that of its blocks")
        return FileDigest(path, size, blocks)

    def _hex(self, members: Mapping[str, Any], key: str) -> bytes:
        text = self._str(members, key)
        try:
            value = bytes.fromhex(text)
        except ValueError:
            raise self._bad(f"{key} is not hexadecimal") from None
        if value.hex() != text:
            raise self._bad(f"{key} is not in lower-case hexadecimal digits")
        return value

    def _topology(self, value: object) -> Topology:
        members = self._object(value, " ".join(TOPOLOGY), "topology")
        tp, pp, dp, ep, world = (
            None if members[key] is None else self._count(members, key)
            for key in ("tp", "pp", "dp", "ep", "world_size")
        )
        return Topology(world_size=world, tp=tp, pp=pp, dp=dp, ep=ep)

    def _check(self, row: object) -> PassedCheck:
        members = self._object(row, "level evidence time", "an entry of checks")
        return PassedCheck(*(self._str(members, key) for key in ("level", "evidence", "time")))
