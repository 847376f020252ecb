"""Inspect what a destination holds already; keep everything but the same checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace

from ftckpt.digests.files import hash_files
from ftckpt.errors import CorruptError, ExistsError, NotFoundError, UnsafeError, UnsupportedError
from ftckpt.findings import Finding, Severity, as_error
from ftckpt.manifest import Manifest
from ftckpt.manifest.locate import find
from ftckpt.own_files import MANIFEST, is_own
from ftckpt.storage import StoreOptions
from ftckpt.storage.source import Source
from ftckpt.transfer.places import identity_of
from ftckpt.verification.blocks import check_manifest

from .options import ReplicationOptions
from .places import standing_at


def renamed(manifest: Manifest, name: str) -> Manifest:
    """Return the manifest of a single file under another name."""
    return replace(manifest, files=[file._replace(path=name) for file in manifest.files])


def require_other(source: Source, destination: str, stores: StoreOptions) -> None:
    """Refuse to write a checkpoint onto itself, however it is spelled.

    Raises:
        ExistsError: what stands at the destination is the source.
    """
    with suppress(NotFoundError):
        if identity_of(standing_at(destination, stores)) == identity_of(source):
            raise ExistsError(
                f"{destination} is the source itself", hint="choose another destination"
            )


def require_same(
    source: Source,
    manifest: Manifest | None,
    destination: str,
    stores: StoreOptions,
    options: ReplicationOptions,
    taken: ExistsError,
) -> None:
    """Let pass a destination that holds the source's very bytes already, by its manifest.

    Args:
        source: what was to be copied.
        manifest: its own, where it is sealed; else it is read and compared with what stands there.
        destination: where something stands.
        stores: how to reach it.
        options: threads; whether what stands there is read too.
        taken: what is said otherwise.

    Raises:
        ExistsError: it holds something else, or has no manifest that would say it.
        CorruptError: it is the same checkpoint and damaged.
    """
    there = standing_at(destination, stores)
    try:
        standing = find(there)
    except (CorruptError, UnsafeError, UnsupportedError):
        standing = None
    if standing is None or there.single != source.single:
        raise taken
    if manifest is not None and not manifest.same_content(standing):
        raise taken

    def differs(found: Finding) -> None:
        if found.severity is Severity.ERROR:
            raise taken

    if manifest is None:
        theirs = standing if not source.single else renamed(standing, next(iter(source.entries)))
        check_manifest(
            source,
            theirs,
            emit=differs,
            work=options.work,
        )
    if options.proof:
        check_manifest(
            there,
            standing,
            emit=_raise_damage,
            work=options.work,
        )


def require_beside(
    source: Source,
    names: Collection[str],
    destination: str,
    stores: StoreOptions,
    options: ReplicationOptions,
) -> None:
    """Demand that files which lie beside a checkpoint, and were to be carried too, are there.

    Raises:
        ExistsError: one is not, or is another one.
    """
    there = standing_at(destination, stores)
    sizes = {name: source.size(name) for name in names}
    other = [n for n in names if n not in there.entries or there.size(n) != sizes[n]]
    if not other and options.proof:
        ours, theirs = (hash_files(one, sizes, work=options.work) for one in (source, there))
        other = [name for name in names if ours[name] != theirs[name]]
    if other:
        raise ExistsError(
            f"{destination} holds the same checkpoint already, and not the same {other[0]} beside "
            "it",
            hint="nothing is overwritten: choose another name, or carry that file by itself",
        )


def require_as_sealed(
    source: Source, manifest: Manifest | None, options: ReplicationOptions
) -> None:
    """Demand that a source still is what its manifest says, where files are younger than that.

    A replica is compared by the two manifests: it is that of a save before, where a trainer has
    saved again into the sealed directory.

    Raises:
        CorruptError: it is not.
    """
    if manifest is None or not options.proof or not written_since(source):
        return
    ours = renamed(manifest, next(iter(source.entries))) if source.single else manifest
    check_manifest(source, ours, emit=_raise_changed, work=options.work)


def written_since(source: Source) -> bool:
    """Say whether a file was written after the source was sealed, or nobody can tell."""
    seal = source.entries.get(MANIFEST)
    if seal is None or seal.mtime is None:  # beside a single file; or the store keeps no times
        return True
    times = [e.mtime for name, e in source.entries.items() if not is_own(name)]
    return any(time is None or time > seal.mtime for time in times)


def _raise_changed(found: Finding) -> None:
    if found.severity is Severity.ERROR:
        raise as_error(
            found,
            "what was sealed is there already; if the source was saved again since, seal it "
            "(ftckpt seal --force) and copy it to another name",
        )


def _raise_damage(found: Finding) -> None:
    if found.severity is Severity.ERROR:
        damaged = replace(found, message=f"it is there already, and damaged: {found.message}")
        raise as_error(damaged, "ftckpt repair DST --from SRC mends it")
