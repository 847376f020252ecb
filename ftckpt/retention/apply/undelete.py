"""Restore dropped checkpoints from the trash."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from ftckpt.discovery.recognise import Format
from ftckpt.discovery.resolve import Place, open_runs
from ftckpt.discovery.roots import Root, read_again
from ftckpt.errors import FtckptError, NotFoundError, UsageError
from ftckpt.retention.locks.hold import hold
from ftckpt.retention.records import log
from ftckpt.retention.scan.entry import Bases, recorded_bases
from ftckpt.retention.trash import Trashed, parse_trash_name
from ftckpt.retention.trash.open import open_trash

from .outcome import Undeleted


def trashed(place: Place, formats: Sequence[Format]) -> list[Trashed]:
    """Return the trash of every root of a place, the earliest first.

    Raises:
        UnavailableError, DeniedError: it could not be listed.
        UnsupportedError: the store keeps no trash.
    """
    found = [t for root in open_runs(place, formats) for t in open_trash(root).listed()]
    return sorted(found, key=lambda t: (t.time, t.entry))


def undelete(
    place: Place,
    formats: Sequence[Format],
    names: Sequence[str],
    *,
    actor: str,
    now: Callable[[], float],
    bases: Bases = recorded_bases,
) -> Undeleted:
    """Restore things from the trash under their old names.

    Of several with one name, the last dropped is restored. Existing names are never replaced; a
    thing that was restored before is not a failure.

    Args:
        place: a root, or a directory of several.
        formats: in the order in which they are tried.
        names: each a name from a plan, its last part, a step, or a `Trashed.id`.
        actor: for the log.
        now: returns seconds since the epoch.
        bases: returns a checkpoint's bases; notes name those that are still in the trash.

    Raises:
        UsageError: a name means things of several runs.
        RefusedError: another gc is running.
        UnavailableError, DeniedError: the trash could not be listed.
        UnsupportedError: the store keeps no trash.
    """
    roots = {root.base: root for root in open_runs(place, formats)}
    filled = [root for root in roots.values() if open_trash(root).listed()]
    restored: list[Trashed] = []
    failed: dict[str, FtckptError] = {}
    notes: list[str] = []
    with hold(filled, actor, now()) as trashes:
        things = [t for trash in trashes.values() for t in trash.listed()]
        meant = {name: _meant(name, things) for name in names}
        for name, thing in meant.items():
            if thing is None and any(_stands(name, read_again(r)) for r in roots.values()):
                notes.append(f"{name} is not in the trash: it stands in its place")
                continue
            try:
                if thing is None:
                    raise NotFoundError(f"the trash of {place.url} holds no {name}")
                trashes[thing.group].restore(thing)
                restored.append(thing)
            except FtckptError as error:
                failed[name] = error
        for group in trashes:
            ids = [t.id for t in restored if t.group == group]
            if ids:
                fields = {"actor": actor, "restored": ids}
                log.append_if_room(roots[group], log.UNDELETED, now(), fields)
        if restored:
            lying = [t for trash in trashes.values() for t in trash.listed()]
            notes += _left_behind(roots, restored, lying, bases)
    if restored:
        notes.append("the next gc by the same rules drops what came back again: pin it")
    return Undeleted(restored=tuple(restored), failed=failed, notes=tuple(notes))


def _left_behind(
    roots: Mapping[str, Root], restored: Sequence[Trashed], lying: Sequence[Trashed], bases: Bases
) -> Iterator[str]:
    """Yield notes on bases of restored entries that are still in the trash."""
    fresh = {group: read_again(roots[group]) for group in {t.group for t in (*restored, *lying)}}
    live = {c.entry.path for r in fresh.values() for c in r.candidates if not r.is_dropped(c)}
    missed = {t.entry for t in lying} - live
    back = {t.entry for t in restored}
    for root in fresh.values():
        for candidate in root.candidates:
            if not missed or candidate.entry.path not in back:
                continue
            with suppress(FtckptError):  # restored all the same; a reader reports the error
                child = root.recognise(candidate)
                for base in missed.intersection(bases(root, child) if child else ()):
                    yield (
                        f"{candidate.entry.path} is a delta based on {base}, which lies in the "
                        "trash too: have it back as well"
                    )


def _stands(name: str, root: Root) -> bool:
    """Whether a name means a thing that has left the trash, as after a killed run."""
    was = parse_trash_name(name)
    name = was[0] if was else name
    return any(
        name in (c.path, c.entry.path) or (name.isdecimal() and c.step == int(name))
        for c in root.candidates
        if not root.is_dropped(c)
    )


def _meant(name: str, things: Sequence[Trashed]) -> Trashed | None:
    """Return the thing that a name means; None if it means none.

    Raises:
        UsageError: it means things of several runs.
    """
    for same in (
        [t for t in things if name in (t.id, t.entry)],
        [t for t in things if t.name == name],
        [t for t in things if name.isascii() and name.isdecimal() and t.step == int(name)],
    ):
        if len({t.group for t in same}) > 1:
            raise UsageError(
                f"{name} was dropped from several runs",
                hint="name one: " + ", ".join(sorted({t.entry for t in same})),
            )
        if same:
            return max(same, key=lambda t: (not t.erasing, t.time))
    return None
