"""What keeps a checkpoint: `pin`, `unpin`, `pins`, `tag`, `untag`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.errors import NotFoundError, UsageError
from ftckpt.storage import StoreOptions

from .opening import STORES, runs_at

if TYPE_CHECKING:
    from ftckpt.discovery.roots import Root
    from ftckpt.retention.policy.select import Chosen
    from ftckpt.retention.scan.entries import Pin


class Pinned(NamedTuple):
    """A pin and what it keeps.

    Attributes:
        pin: its entry, owner, reason and time.
        path: of the checkpoint.
        present: whether that is there.
    """

    pin: Pin
    path: str
    present: bool


class Tagged(NamedTuple):
    """Tags of one checkpoint.

    Attributes:
        entry: its name in the root.
        tags: the words.
        path: of the checkpoint.
        present: whether that is there.
    """

    entry: str
    tags: tuple[str, ...]
    path: str
    present: bool


class Marks(NamedTuple):
    """The pins and tags of a root."""

    pins: tuple[Pinned, ...]
    tags: tuple[Tagged, ...]


def pin(
    root: str, step: int | str, reason: str, *, owner: str = "", stores: StoreOptions = STORES
) -> tuple[Pinned, ...]:
    """Keep a checkpoint until it is unpinned, against all retention rules.

    Args:
        root: directory or URL that holds the checkpoints.
        step: a step, a name in the root, or `latest`.
        reason: why.
        owner: who wants it kept; "" for the login name. Pinning again replaces the reason.
        stores: how to reach object stores.

    Returns:
        A pin for each checkpoint of the step.

    Raises:
        NotFoundError: no such root or checkpoint.
        UsageError: several runs have one, or the reason is empty.
        DeniedError: the root cannot be written.
    """
    from ftckpt.retention.policy.select import choose_entries
    from ftckpt.retention.records import pins as records
    from ftckpt.retention.records.who import login_name

    chosen = choose_entries(runs_at(root, stores), str(step))
    who = owner or login_name()
    made = [records.pin(c.root, c.name, owner=who, reason=reason, now=time.time()) for c in chosen]
    _log(chosen, "pinned", owner=who, reason=reason, by=login_name())
    return tuple(_pinned(c.root, one) for c, one in zip(chosen, made, strict=True))


def unpin(
    root: str,
    step: int | str,
    *,
    owner: str = "",
    everybody: bool = False,
    stores: StoreOptions = STORES,
) -> tuple[Pinned, ...]:
    """Unpin a checkpoint, which need not be there any more; return the pins that were taken away.

    Args:
        root: directory or URL that holds the checkpoints.
        step: a step, a name in the root, or `latest`.
        owner: whose pin; "" for the login name's.
        everybody: take away the pins of all owners.
        stores: how to reach object stores.

    Raises:
        NotFoundError: no such root or pin.
        UsageError: `owner` and `everybody`, or several runs have one.
        DeniedError: the root cannot be written.
    """
    from ftckpt.retention.policy.select import Chosen, choose_marked
    from ftckpt.retention.records import pins as records
    from ftckpt.retention.records.who import login_name

    if owner and everybody:
        raise UsageError("--owner and --everybody contradict each other")
    roots = runs_at(root, stores)
    all_pins = [(Chosen(r, p.entry), p) for r in roots for p in records.pins(r)]
    chosen = choose_marked(roots, str(step), [where for where, _ in all_pins])
    who = None if everybody else owner or login_name()
    owners: dict[str, set[str]] = {c.path: set() for c in chosen}
    for where, one in all_pins:
        owners.get(where.path, set()).add(one.owner)
    theirs = set().union(*owners.values())
    if not theirs or (who is not None and who not in theirs):
        hint = f"pinned by {', '.join(sorted(theirs))}: --owner says whose" if theirs else ""
        by = "" if who is None else f" by {who}"
        raise NotFoundError(f"{chosen[0].url} is not pinned{by}", hint=hint)
    held = [c for c in chosen if (owners[c.path] if who is None else who in owners[c.path])]
    gone = [(c, p) for c in held for p in records.unpin(c.root, c.name, owner=who)]
    for where, one in gone:
        _log([where], "unpinned", owner=one.owner, reason=one.reason, by=login_name())
    return tuple(_pinned(c.root, one) for c, one in gone)


def pins(root: str, *, stores: StoreOptions = STORES) -> Marks:
    """Return the pins and tags of a root, also of checkpoints that are not there any more.

    Args:
        root: directory or URL that holds the checkpoints.
        stores: how to reach object stores.

    Raises:
        NotFoundError: no such root.
    """
    from ftckpt.retention.records import pins as pin_records
    from ftckpt.retention.records import tags as tag_records

    roots = runs_at(root, stores)
    return Marks(
        tuple(_pinned(one, each) for one in roots for each in pin_records.pins(one)),
        tuple(
            _tagged(one, entry, words)
            for one in roots
            for entry, words in tag_records.tags(one).items()
        ),
    )


def tag(
    root: str, step: int | str, words: Sequence[str], *, stores: StoreOptions = STORES
) -> tuple[Tagged, ...]:
    """Tag a checkpoint, for `gc(keep_tag=...)`.

    Args:
        root: directory or URL that holds the checkpoints.
        step: a step, a name in the root, or `latest`.
        words: the tags; one may be given as it is.
        stores: how to reach object stores.

    Raises:
        NotFoundError: no such root or checkpoint.
        UsageError: an empty tag, or several runs have one.
        DeniedError: the root cannot be written.
    """
    from ftckpt.retention.policy.select import choose_entries
    from ftckpt.retention.records import tags as records
    from ftckpt.retention.records.who import login_name

    chosen = choose_entries(runs_at(root, stores), str(step))
    who, given = login_name(), _several(words)
    for one in chosen:
        for word in given:
            records.tag(one.root, one.name, word, owner=who, now=time.time())
            _log([one], "tagged", tag=word, by=who)
    return tuple(_tagged(one.root, one.name, given) for one in chosen)


def untag(
    root: str, step: int | str, words: Sequence[str], *, stores: StoreOptions = STORES
) -> tuple[Tagged, ...]:
    """Remove tags from a checkpoint, which need not be there any more; return what was removed.

    Args:
        root: directory or URL that holds the checkpoints.
        step: a step, a name in the root, or `latest`.
        words: the tags; one may be given as it is.
        stores: how to reach object stores.

    Raises:
        NotFoundError: no such root or tag.
        UsageError: several runs have one.
        DeniedError: the root cannot be written.
    """
    from ftckpt.retention.policy.select import Chosen, choose_marked
    from ftckpt.retention.records import tags as records
    from ftckpt.retention.records.who import login_name

    roots, given = runs_at(root, stores), _several(words)
    known = [(Chosen(r, entry), has) for r in roots for entry, has in records.tags(r).items()]
    chosen = choose_marked(roots, str(step), [where for where, _ in known])
    has = {where.path: set(tagged) for where, tagged in known}
    taken = [(one, [w for w in given if w in has.get(one.path, ())]) for one in chosen]
    absent = set(given) - {word for _, found in taken for word in found}
    if absent:
        raise NotFoundError(f"{chosen[0].url} is not tagged {' or '.join(sorted(absent))}")
    for one, found in taken:
        for word in found:
            records.untag(one.root, one.name, word)
            _log([one], "untagged", tag=word, by=login_name())
    return tuple(_tagged(one.root, one.name, found) for one, found in taken if found)


def _several(words: Sequence[str]) -> tuple[str, ...]:
    return (words,) if isinstance(words, str) else tuple(words)


def _pinned(root: Root, one: Pin) -> Pinned:
    return Pinned(one, *_place(root, one.entry))


def _tagged(root: Root, entry: str, words: Sequence[str]) -> Tagged:
    return Tagged(entry, tuple(words), *_place(root, entry))


def _place(root: Root, entry: str) -> tuple[str, bool]:
    """Return the path of an entry, and whether it is there."""
    from ftckpt.retention.policy.select import Chosen

    return Chosen(root, entry).url, any(c.path == entry for c in root.candidates)


def _log(chosen: Sequence[Chosen], event: str, **fields: str) -> None:
    """Append an event about entries to the log of their root."""
    from ftckpt.retention.records import log

    for entry in chosen:
        log.append(entry.root, event, time.time(), {"entry": entry.name, **fields})
