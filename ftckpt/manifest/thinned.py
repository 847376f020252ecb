"""Tell a checkpoint that gc has thinned: it holds the weights alone, and no run goes on from it.

Its manifest says so, wherever it was copied to and whatever it is called. A directory that has the
name of such a checkpoint (`ftckpt.own_files.WEIGHTS`) counts as one without its manifest, too.
"""

from __future__ import annotations

from ftckpt.errors import CorruptError, NotFoundError, UnsafeError, UnsupportedError
from ftckpt.manifest import SCHEMA_THINNED, Manifest, ThinnedFrom
from ftckpt.manifest.locate import beside, find
from ftckpt.own_files import MANIFEST, weights_of
from ftckpt.storage.source import Source

_HEAD = 64
WEIGHTS_ALONE = "holds the weights alone: gc has thinned it"


def is_thinned(source: Source) -> bool:
    """Say whether a checkpoint holds the weights alone; reads the head of its manifest at most.

    Raises:
        UnavailableError, DeniedError: its manifest could not be read.
    """
    if not source.single and weights_of(source.name):
        return True
    if not source.single and MANIFEST not in source.entries:
        return False
    try:
        head = source.store.read(beside(source), 0, _HEAD)  # no manifest is shorter
    except (NotFoundError, CorruptError, UnsafeError):
        return False  # who checks it says what is wrong with it
    return f'"schema": "{SCHEMA_THINNED}"'.encode() in head


def thinned_manifest(source: Source) -> Manifest | None:
    """Return its manifest, if that records of which checkpoint it holds the weights; or None.

    Raises:
        UnavailableError, DeniedError: its manifest could not be read.
    """
    try:
        manifest = find(source) if is_thinned(source) else None
    except (CorruptError, UnsafeError, UnsupportedError):
        return None
    return None if manifest is None or manifest.thinned is None else manifest


def thinned_from(source: Source) -> ThinnedFrom | None:
    """Return what its manifest records of the checkpoint that was thinned; None without a record.

    Raises:
        UnavailableError, DeniedError: its manifest could not be read.
    """
    manifest = thinned_manifest(source)
    return None if manifest is None else manifest.thinned
