"""The manifest: every file of a checkpoint with its size and the digests of its blocks.

It stands beside the data as `ftckpt.manifest.json`, or as `NAME.ftckpt.json` beside a one-file
checkpoint. `docs/manifest.md` has the format byte by byte. It detects accidents, not attackers, who
can change the manifest too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ftckpt.checkpoint import Topology
from ftckpt.digests.blocks import WIDTH, file_digest
from ftckpt.errors import UnsupportedError
from ftckpt.extents import BLOCK

SCHEMA = "ftckpt.manifest/1"
# Of a checkpoint that holds only the weights of another one: it has the member `thinned` too.
SCHEMA_THINNED = "ftckpt.manifest/2"
# The first bytes of every version.
HEAD = b'{\n"schema": "ftckpt.manifest/'
NOTE = "detects accidents, not attackers"
TOPOLOGY = ("world_size", "tp", "pp", "dp", "ep")

# 32 hex digits for each 64 MiB: this is the manifest of a checkpoint of 400 TiB.
MAX_BYTES = 256 << 20


class FileDigest(NamedTuple):
    """One file of the checkpoint.

    Attributes:
        path: relative to the checkpoint, POSIX.
        size: bytes.
        blocks: digests of its 64 MiB blocks, concatenated, 16 bytes each.
    """

    path: str
    size: int
    blocks: bytes

    @property
    def digest(self) -> bytes:
        """XXH3-128 over `blocks`."""
        return file_digest(self.blocks)

    def block(self, number: int) -> bytes:
        """Return the digest of one block, counted from 0."""
        return self.blocks[number * WIDTH : (number + 1) * WIDTH]


class PassedCheck(NamedTuple):
    """A check that had passed before the checkpoint was sealed.

    Attributes:
        level: `structure`, `content` or `values`.
        evidence: `crc32`, `manifest` or `none`.
        time: UTC, `2026-01-31T12:00:00Z`.
    """

    level: str
    evidence: str
    time: str


class ThinnedFrom(NamedTuple):
    """The checkpoint whose weights another one holds, because gc has thinned it.

    Attributes:
        name: relative to its root.
        step: of the training.
        format: its format.
        saved: when it was saved, in seconds since the epoch; None if nothing says it.
        files: number of its files.
        nbytes: bytes of them.
        fingerprint: of its data files (`ftckpt.retention.scan.entry.identity_of`): names, sizes,
            and what the store says of their content, or their times.
        left: what was left out, in words.
        metrics: of an evaluation, by name.
    """

    name: str
    step: int
    format: str
    saved: float | None
    files: int
    nbytes: int
    fingerprint: str
    left: Sequence[str]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Manifest:
    """The content of a sealed checkpoint.

    Attributes:
        format: name of the checkpoint's format.
        step: by its content; None without one.
        topology: known sizes of the job.
        files: sorted by path.
        unmanaged: names beside the checkpoint that do not belong to it, sorted.
        checks: passed before sealing; sealing itself proves nothing about the content.
        tool: the program that wrote it, with its version.
        created: UTC, `2026-01-31T12:00:00Z`.
        thinned: of what it holds the weights alone; None for a checkpoint as it was saved.
    """

    format: str
    step: int | None
    topology: Topology
    files: Sequence[FileDigest]
    unmanaged: Sequence[str] = ()
    checks: Sequence[PassedCheck] = ()
    tool: str = ""
    created: str = ""
    thinned: ThinnedFrom | None = None
    by_path: Mapping[str, FileDigest] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("files", "unmanaged", "checks"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "by_path", {f.path: f for f in self.files})

    @property
    def nbytes(self) -> int:
        """Sum of the sizes of its files."""
        return sum(f.size for f in self.files)

    def same_content(self, other: Manifest) -> bool:
        """Whether both describe the same files with the same bytes."""
        return self.files == other.files

    def dump(self) -> bytes:
        """Return the manifest's bytes; equal manifests give equal bytes.

        Raises:
            UnsupportedError: it would be larger than a reader accepts.
        """
        import json

        def line(value: object) -> str:
            return json.dumps(value, ensure_ascii=True)

        head = {
            "schema": SCHEMA if self.thinned is None else SCHEMA_THINNED,
            "note": NOTE,
            "tool": self.tool,
            "created": self.created,
            "format": self.format,
            "step": self.step,
            "topology": {name: getattr(self.topology, name) for name in TOPOLOGY},
            "checks": [check._asdict() for check in self.checks],
            **({} if self.thinned is None else {"thinned": self.thinned._asdict()}),
            "block_size": BLOCK,
        }
        lines = [f"{line(key)}: {line(value)},\n" for key, value in head.items()]
        rows = [
            line(
                {"path": f.path, "size": f.size, "digest": f.digest.hex(), "blocks": f.blocks.hex()}
            )
            for f in sorted(self.files, key=lambda f: f.path)
        ]
        body = "{\n" + "".join(lines) + '"files": [' + _rows(rows) + "],\n"
        body += '"unmanaged": [' + _rows([line(name) for name in sorted(self.unmanaged)]) + "],\n"
        data = body.encode("ascii")
        data += f'"digest": "{file_digest(data).hex()}"\n}}\n'.encode()
        if len(data) > MAX_BYTES:
            raise UnsupportedError(
                f"the manifest would have {len(data)} bytes; {MAX_BYTES} is most"
            )
        return data


def _rows(rows: list[str]) -> str:
    return "\n" + ",\n".join(rows) + "\n" if rows else ""
