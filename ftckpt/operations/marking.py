"""What keeps a checkpoint: `pin`, `unpin`, `pins`, `tag`, `untag`."""

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
    ExitCode.NOT_FOUND: "no such root or checkpoint",
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


class Marks(NamedTuple):
    """The pins and tags of a root."""

    pins: tuple[Pinned, ...]
    tags: tuple[Tagged, ...]


@operation(
    examples=(
        (
            'ftckpt pin /ckpt/run7 120000 --reason "paper, figure 3"',
            "gc keeps it until unpinned",
        ),
        ("ftckpt pin /ckpt/run7 latest --reason baseline", "the newest, whatever its step"),
        ("ftckpt pin s3://run7/ckpt latest --reason release --owner team-x", "for somebody else"),
    ),
    codes={ExitCode.OK: "pinned", **_CODES},
)
def pin(
    root: _Root,
    step: _Step,
    reason: Annotated[str, option("TEXT", "Why; shown to anyone who finds a full disk.")],
    *,
    owner: Annotated[str, option("NAME", "Who wants it kept; by default the login name.")] = "",
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> tuple[Pinned, ...]:
    """Keep a checkpoint until it is unpinned, against all rules.

    Each owner has a pin of their own, and pinning again replaces the reason. What a pinned delta is
    built on is kept with it.

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

    on.report(target=root)
    chosen = choose_entries(runs_at(root, stores), str(step))
    who = owner or login_name()
    made = [records.pin(c.root, c.name, owner=who, reason=reason, now=time.time()) for c in chosen]
    _log(chosen, "pinned", owner=who, reason=reason, by=login_name())
    found = tuple(_pinned(c.root, one) for c, one in zip(chosen, made, strict=True))
    on.report(pins=[one.pin._asdict() | {"path": one.path} for one in found])
    return found


@operation(
    examples=(
        ("ftckpt unpin /ckpt/run7 120000", "take your own pin away"),
        ("ftckpt unpin /ckpt/run7 120000 --owner alice", "take away the pin of somebody else"),
        ("ftckpt unpin /ckpt/run7 120000 --everybody", "take away all pins"),
    ),
    codes={ExitCode.OK: "unpinned", **_CODES, ExitCode.NOT_FOUND: "no such root or pin"},
)
def unpin(
    root: _Root,
    step: _Step,
    *,
    owner: Annotated[str, option("NAME", "Whose pin; by default the login name's.")] = "",
    everybody: Annotated[bool, switch("--everybody", "Take away the pins of all owners.")] = False,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> tuple[Pinned, ...]:
    """Unpin a checkpoint, so that retention rules apply to it again.

    The checkpoint need not be there any more.

    Raises:
        NotFoundError: no such root or pin.
        UsageError: `owner` and `everybody`, or several runs have one.
        DeniedError: the root cannot be written.
    """
    from ftckpt.retention.policy.select import Chosen, choose_marked
    from ftckpt.retention.records import pins as records
    from ftckpt.retention.records.who import login_name

    on.report(target=root)
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
    found = tuple(_pinned(c.root, one) for c, one in gone)
    on.report(pins=[one.pin._asdict() | {"path": one.path} for one in found])
    return found


@operation(
    examples=(
        ("ftckpt pins /ckpt/run7", "every pin and tag, with owner and reason"),
        ("ftckpt pins s3://run7/ckpt", "the same on object storage"),
        ("ftckpt pins /ckpt/run7 --json | jq -r '.pins[].path'", "only the checkpoints"),
    ),
    codes={
        ExitCode.OK: "listed, also where there is none",
        **_CODES,
        ExitCode.NOT_FOUND: "no such root",
        ExitCode.DENIED: "",
    },
)
def pins(root: _Root, *, stores: StoreOptions = STORES, on: Observer = SILENT) -> Marks:
    """List the pins and tags of a root.

    Those of checkpoints that are not there any more are listed too.

    Raises:
        NotFoundError: no such root.
    """
    from ftckpt.retention.records import pins as pin_records
    from ftckpt.retention.records import tags as tag_records

    on.report(target=root)
    roots = runs_at(root, stores)
    marks = Marks(
        tuple(_pinned(one, each) for one in roots for each in pin_records.pins(one)),
        tuple(
            _tagged(one, entry, words)
            for one in roots
            for entry, words in tag_records.tags(one).items()
        ),
    )
    on.report(
        pins=[p.pin._asdict() | {"path": p.path, "present": p.present} for p in marks.pins],
        tags=marks.tags,
    )
    return marks


@operation(
    examples=(
        ("ftckpt tag /ckpt/run7 120000 milestone", "gc --keep-tag milestone keeps it"),
        ("ftckpt tag /ckpt/run7 latest baseline", "the newest, whatever its step"),
        ("ftckpt tag s3://run7/ckpt latest before-annealing released", "several at once"),
    ),
    codes={ExitCode.OK: "tagged", **_CODES},
)
def tag(
    root: _Root,
    step: _Step,
    words: _Words,
    *,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> tuple[Tagged, ...]:
    """Tag a checkpoint, for example to keep it with gc --keep-tag.

    A pin keeps a checkpoint whatever the policy says. A tag keeps it where a policy asks for it, so
    that one tier can keep its milestones and another need not.

    Raises:
        NotFoundError: no such root or checkpoint.
        UsageError: an empty tag, or several runs have one.
        DeniedError: the root cannot be written.
    """
    from ftckpt.retention.policy.select import choose_entries
    from ftckpt.retention.records import tags as records
    from ftckpt.retention.records.who import login_name

    on.report(target=root)
    chosen = choose_entries(runs_at(root, stores), str(step))
    who, given = login_name(), tuple(words)
    for one in chosen:
        for word in given:
            records.tag(one.root, one.name, word, owner=who, now=time.time())
            _log([one], "tagged", tag=word, by=who)
    found = tuple(_tagged(one.root, one.name, given) for one in chosen)
    on.report(tags=[{"entry": t.entry, "path": t.path, "tags": t.tags} for t in found])
    return found


@operation(
    examples=(
        ("ftckpt untag /ckpt/run7 120000 milestone", "gc --keep-tag milestone lets it go"),
        ("ftckpt untag /ckpt/run7 step-120000 milestone released", "several at once"),
        ("ftckpt untag s3://run7/ckpt 120000 milestone", "the same on object storage"),
    ),
    codes={ExitCode.OK: "untagged", **_CODES, ExitCode.NOT_FOUND: "no such root or tag"},
)
def untag(
    root: _Root,
    step: _Step,
    words: _Words,
    *,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> tuple[Tagged, ...]:
    """Remove tags from a checkpoint.

    The checkpoint need not be there any more.

    Raises:
        NotFoundError: no such root or tag.
        UsageError: several runs have one.
        DeniedError: the root cannot be written.
    """
    from ftckpt.retention.policy.select import Chosen, choose_marked
    from ftckpt.retention.records import tags as records
    from ftckpt.retention.records.who import login_name

    on.report(target=root)
    roots, given = runs_at(root, stores), tuple(words)
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
    gone = tuple(_tagged(one.root, one.name, found) for one, found in taken if found)
    on.report(
        tags=[{"entry": t.entry, "path": t.path, "tag": word} for t in gone for word in t.tags]
    )
    return gone


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
