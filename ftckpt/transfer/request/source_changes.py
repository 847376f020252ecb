"""Detect that a source changed while it was read; then no result holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ftckpt.errors import FtckptError, IncompleteError, NotFoundError
from ftckpt.storage.source import Source


@contextmanager
def blamed(source: Source, names: Iterable[str]) -> Iterator[None]:
    """Say of a failure that the source is still being written, where it has changed meanwhile.

    Args:
        source: as it was listed.
        names: of its files that are read.

    Raises:
        IncompleteError: it has; whatever else was found in it is not known to be so.
    """
    try:
        yield
    except IncompleteError:
        raise
    except FtckptError as error:
        require_unchanged(source, names, error)
        raise


def require_unchanged(
    source: Source, names: Iterable[str], because: FtckptError | None = None
) -> None:
    """Raise IncompleteError where a source is another than it was when it was listed.

    Args:
        source: as it was listed.
        names: of the files that count.
        because: what failed; it stands where the source cannot even be listed.
    """
    wanted = sorted(set(names))
    try:
        changed = source.changed(wanted)
    except FtckptError:
        if because is None:
            raise
        return
    if isinstance(because, NotFoundError):
        # A stale listing still shows what was listed before and can no longer be read.
        listed = (name for name in wanted if name in source.entries)
        changed += (name for name in listed if source.path(name) == because.file)
    for name in changed:
        raise IncompleteError(
            f"{name} changed while it was being read: the source is still being written",
            hint="run it again when the save has finished",
            kind="changed-file",
            file=name,
        ) from because
