"""Files that Git LFS has not fetched: a clone without it leaves a small text in each one's place.

    version https://git-lfs.github.com/spec/v1
    oid sha256:<64 hexadecimal digits>
    size <bytes>

Source: `docs/spec.md` of git-lfs, which keeps pointers under 1024 bytes.
"""

from __future__ import annotations

import re

from ftckpt.errors import IncompleteError

_LONGEST = 1024  # bytes of a pointer
FETCH = "`git lfs pull` in the clone fetches it"
_SIZE = rb"^size ([0-9]{1,18})$"
_DIGEST = rb"^oid sha256:([0-9a-f]{64})$"


def never_fetched(name: str, data: bytes) -> IncompleteError:
    """Return the error about a file whose content was never fetched.

    Args:
        name: of the file.
        data: the pointer.
    """
    said = []
    if size := re.search(_SIZE, data[:_LONGEST], re.MULTILINE):
        said.append(f"{int(size[1])} bytes")
    if digest := re.search(_DIGEST, data[:_LONGEST], re.MULTILINE):
        said.append(f"SHA-256 {digest[1].decode()}")
    return IncompleteError(
        f"{name} is a Git LFS pointer: the content was never fetched"
        + (f" ({', '.join(said)})" if said else ""),
        hint=FETCH,
        kind="unfetched-file",
        file=name,
    )
