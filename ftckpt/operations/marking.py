"""What keeps a checkpoint: `pin` and `tag`; `ls` lists them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

from ftckpt.errors import ExitCode, NotFoundError, UsageError
from ftckpt.observer import SILENT, Observer
from ftckpt.storage import StoreOptions

from .definition import argument, operation, option, switch
from .opening import STORES, runs_at

if TYPE_CHECKING:
    from ftckpt.discovery.roots import Root
    from ftckpt.retention.policy.select import Chosen
    from ftckpt.retention.scan.entries import Pin


_Root = Annotated[str, argument("ROOT", "Directory or URL that holds the checkpoints.")]
_Step = Annotated["int | str", argument("STEP", "A step, a name in the root, or latest.")]
_Words = Annotated[Sequence[str], argument("TAG...", "The words.")]

_CODES = {
    ExitCode.UNSAFE: "the root's .ftckpt is a link",
    ExitCode.NOT_FOUND: "no such root or checkpoint; with --remove, nothing to take away",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "the root cannot be written",
    ExitCode.NO_RESOURCE: "",
}


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


@operation(
    examples=(
        (
            'ftckpt pin /ckpt/run7 120000 --reason "paper, figure 3"',
            "gc keeps it until the pin is taken away",
        ),
        ("ftckpt pin /ckpt/run7 latest --reason baseline", "the newest, whatever its step"),
        ("ftckpt pin s3://run7/ckpt latest --reason release --owner team-x", "for somebody else"),
        ("ftckpt pin /ckpt/run7 120000 --remove", "take your own pin away"),
        ("ftckpt ls /ckpt/run7", "who has pinned what, since when and why"),
    ),
    codes={ExitCode.OK: "pinned, or no longer", **_CODES},
)
def pin(
    root: _Root,
    step: _Step,
    *,
    reason: Annotated[str, option("TEXT", "Why; shown to anyone who finds a full disk.")] = "",
    owner: Annotated[str, option("NAME", "Whose pin it is; by default the login name's.")] = "",
    remove: Annotated[bool, switch("--remove", "Take the pin away.")] = False,
    all_: Annotated[bool, switch("--all", "With --remove: the pins of all owners.")] = False,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> tuple[Pinned, ...]:
    """Keep a checkpoint against all rules, until its pin is removed.

    Each owner has a pin of their own, and pinning again replaces the reason. What a pinned delta is
    built on is kept with it. A checkpoint whose pin is taken away need not be there any more.

    Returns:
        A pin for each checkpoint of the step; with `remove`, those that were taken away.

    Raises:
        NotFoundError: no such root, checkpoint or pin.
        UsageError: several runs have one, or arguments contradict each other.
        DeniedError: the root cannot be written.
    """
    on.report(target=root, removed=remove)
    if all_ and (owner or not remove):
        raise UsageError("--all takes away the pins of all owners: with --remove, without --owner")
    if remove:
        if reason:
            raise UsageError("--reason is of a new pin, and --remove takes one away")
        found = _unpin(root, str(step), owner, stores, everybody=all_)
    else:
        found = _pin(root, str(step), owner, reason.strip(), stores)
    on.report(pins=[one.pin._asdict() | {"path": one.path} for one in found])
    return found


def _pin(root: str, step: str, owner: str, reason: str, stores: StoreOptions) -> tuple[Pinned, ...]:
    from ftckpt.retention.policy.select import choose_entries
    from ftckpt.retention.records import pins as records
    from ftckpt.retention.records.who import login_name

    chosen = choose_entries(runs_at(root, stores), step)
    who = owner or login_name()
    made = [records.pin(c.root, c.name, owner=who, reason=reason, now=time.time()) for c in chosen]
    _log(chosen, "pinned", owner=who, reason=reason, by=login_name())
    return tuple(_pinned(c.root, one) for c, one in zip(chosen, made, strict=True))


def _unpin(
    root: str, step: str, owner: str, stores: StoreOptions, *, everybody: bool
) -> tuple[Pinned, ...]:
    from ftckpt.retention.policy.select import Chosen, choose_marked
    from ftckpt.retention.records import pins as records
    from ftckpt.retention.records.who import login_name

    roots = runs_at(root, stores)
    all_pins = [(Chosen(r, p.entry), p) for r in roots for p in records.pins(r)]
    chosen = choose_marked(roots, step, [where for where, _ in all_pins])
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


@operation(
    examples=(
        ("ftckpt tag /ckpt/run7 120000 milestone", "gc --keep-tag milestone keeps it"),
        ("ftckpt tag /ckpt/run7 latest baseline", "the newest, whatever its step"),
        ("ftckpt tag s3://run7/ckpt latest before-annealing released", "several at once"),
        ("ftckpt tag /ckpt/run7 120000 milestone --remove", "gc --keep-tag milestone lets it go"),
    ),
    codes={ExitCode.OK: "tagged, or no longer", **_CODES},
)
def tag(
    root: _Root,
    step: _Step,
    words: _Words,
    *,
    remove: Annotated[bool, switch("--remove", "Take the tags away.")] = False,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> tuple[Tagged, ...]:
    """Tag a checkpoint, for example to keep it with gc --keep-tag.

    A pin keeps a checkpoint whatever the policy says. A tag keeps it where a policy asks for it, so
    that one tier can keep its milestones and another need not. A checkpoint whose tag is taken away
    need not be there any more.

    Returns:
        The tags that each checkpoint of the step got; with `remove`, those that were taken away.

    Raises:
        NotFoundError: no such root, checkpoint or tag.
        UsageError: an empty tag, or several runs have one.
        DeniedError: the root cannot be written.
    """
    on.report(target=root, removed=remove)
    change = _untag if remove else _tag
    found = change(root, str(step), tuple(words), stores)
    on.report(tags=[{"entry": t.entry, "path": t.path, "tags": t.tags} for t in found])
    return found


def _tag(root: str, step: str, given: Sequence[str], stores: StoreOptions) -> tuple[Tagged, ...]:
    from ftckpt.retention.policy.select import choose_entries
    from ftckpt.retention.records import tags as records
    from ftckpt.retention.records.who import login_name

    chosen = choose_entries(runs_at(root, stores), step)
    who = login_name()
    for one in chosen:
        for word in given:
            records.tag(one.root, one.name, word, owner=who, now=time.time())
            _log([one], "tagged", tag=word, by=who)
    return tuple(_tagged(one.root, one.name, given) for one in chosen)


def _untag(root: str, step: str, given: Sequence[str], stores: StoreOptions) -> tuple[Tagged, ...]:
    from ftckpt.retention.policy.select import Chosen, choose_marked
    from ftckpt.retention.records import tags as records
    from ftckpt.retention.records.who import login_name

    roots = runs_at(root, stores)
    known = [(Chosen(r, entry), has) for r in roots for entry, has in records.tags(r).items()]
    chosen = choose_marked(roots, step, [where for where, _ in known])
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
