"""Files that Git LFS has not fetched: a clone without it leaves a small text in each one's place.

    version https://git-lfs.github.com/spec/v1
    oid sha256:<64 hexadecimal digits>
    size <bytes>

Source: `docs/spec.md` of git-lfs, which keeps pointers under 1024 bytes.
"""

from __future__ import annotations

import re

from ftckpt.errors import IncompleteError

MAX_POINTER = 1024  # bytes
FETCH = "`git lfs pull` in the clone fetches it"
_BEGIN = b"version https://git-lfs.github.com/spec/"
_SIZE = rb"^size ([0-9]{1,18})$"
_DIGEST = rb"^oid sha256:([0-9a-f]{64})$"


def lfs_pointer(name: str, data: bytes) -> IncompleteError | None:
    """Return the error about a file whose content was never fetched; None for any other file.

    Args:
        name: of the file.
        data: what it begins with.
    """
    if not data.startswith(_BEGIN):
        return None
    said = []
    if size := re.search(_SIZE, data[:MAX_POINTER], re.MULTILINE):
        said.append(f"{int(size[1])} bytes")
    if digest := re.search(_DIGEST, data[:MAX_POINTER], re.MULTILINE):
        said.append(f"SHA-256 {digest[1].decode()}")
    return IncompleteError(
        f"{name} is a Git LFS pointer: the content was never fetched"
        + (f" ({', '.join(said)})" if said else ""),
        hint=FETCH,
        kind="unfetched-file",
        file=name,
    )
