"""Hash what the workers of Megatron's and NVRx's asynchronous writers write.

`FileSystemWriterAsync` writes in another process, which opens its files with `open`, or with the
`open_file` that it was given. Both are replaced by `RecordingOpen`, which leaves the digest of each
file in a temporary directory; the rank takes them from there when the workers are done. A worker
that dies leaves none.
"""

from __future__ import annotations

import builtins
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from .files import HashingStream, Path, WrittenFile


class RecordingOpen:
    """An `open` that leaves the digest of each file which it wrote in a directory.

    It is sent to workers, so it can be pickled.

    Args:
        place: the directory.
        inner: what opens.
    """

    def __init__(self, place: str, inner: Callable[..., Any] = builtins.open) -> None:
        self.place = place
        self._open = inner

    def __call__(self, path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file as `open` does; one that is written from its beginning is hashed."""
        stream = self._open(path, mode, *args, **kwargs)
        if mode != "wb":
            return stream
        return _RecordedFile(stream, os.fspath(path), self._record_of(path))

    def _record_of(self, path: Path) -> str:
        import xxhash

        # The last one to write a file speaks for it, and no name is too long.
        name = xxhash.xxh3_128_hexdigest(os.fspath(path).encode("utf-8", "surrogateescape"))
        return os.path.join(self.place, f"{name}.json")


class _RecordedFile(HashingStream):
    """A file whose digest is kept when it has been closed and nothing has failed."""

    def __init__(self, stream: Any, path: str, record: str) -> None:
        super().__init__(stream)
        self._path = path
        self._record = record
        self._failed = False
        with suppress(OSError):
            os.remove(record)

    def __enter__(self) -> _RecordedFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._failed = self._failed or kind is not None
        self.close()

    def close(self) -> None:
        """Close the file, and keep its digest."""
        self.end()
        if self._stream.closed:
            return
        self._stream.close()
        file = None if self._failed else self.file()
        if file is not None:
            with suppress(OSError):  # an unknown file is read once more
                _write(self._record, self._path, file)


class WorkersRecords:
    """The digests that the workers of one save leave, in a directory of its own."""

    def __init__(self) -> None:
        self._place = tempfile.mkdtemp(prefix="ftckpt-seal-")

    def opens(self, inner: Callable[..., Any] = builtins.open) -> RecordingOpen:
        """Return the `open` for the workers."""
        return RecordingOpen(self._place, inner)

    def take(self) -> dict[str, WrittenFile]:
        """Return what was left, by path."""
        found: dict[str, WrittenFile] = {}
        try:
            names = os.listdir(self._place)
        except OSError:  # something cleaned up: the files are read once more
            return found
        for name in names:
            with suppress(OSError, ValueError, KeyError, TypeError):
                with open(os.path.join(self._place, name), encoding="utf-8") as file:
                    said = json.load(file)
                blocks = bytes.fromhex(said["blocks"])
                found[str(said["path"])] = WrittenFile(int(said["size"]), blocks)
        return found

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self._place, ignore_errors=True)


def recorded(save: Callable[..., Any], opens: RecordingOpen) -> Callable[..., Any]:
    """Return a writer's save function which keeps digests of what it writes; it can be pickled."""
    inner = save
    while isinstance(inner, partial):
        inner = inner.func
    # Decorated functions name the module in which they were written.
    return partial(_run, save, inner.__module__, opens)


def _run(
    save: Callable[..., Any], module: str, opens: RecordingOpen, *given: Any, **more: Any
) -> Any:
    """Save with another `open`: the module's own name for it, in this process and its children."""
    space = vars(sys.modules[module])
    before = space.get("open")
    space["open"] = opens
    try:
        return save(*given, **more)
    finally:
        if before is None:
            del space["open"]
        else:
            space["open"] = before


def _write(record: str, path: str, file: WrittenFile) -> None:
    said = {"path": path, "size": file.size, "blocks": file.blocks.hex()}
    with open(f"{record}.tmp", "w", encoding="utf-8") as out:
        json.dump(said, out)
    os.replace(f"{record}.tmp", record)
