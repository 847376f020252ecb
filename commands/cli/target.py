"""A PATH or URL becomes an open checkpoint; the one file of the verbs that knows formats.

Reading verbs that get a root take its newest checkpoint and say so; others refuse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ftckpt.commands.cli.parameters import argument, option
from ftckpt.discovery import resolve as opening
from ftckpt.errors import UsageError

from .render import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftckpt.checkpoint import Checkpoint
    from ftckpt.checkpoint.rules import Rules
    from ftckpt.discovery.resolve import Target
    from ftckpt.discovery.roots import Root

    from .invocation import Invocation

PathArgument = Annotated[
    str,
    argument(
        "PATH",
        "A checkpoint or root: local path, s3:// or other URL, REMOTE:path, ROOT@STEP, "
        "ROOT@latest.",
    ),
]

AlsoOption = Annotated[
    list[str] | None,
    option(
        "DIR",
        "Another place with files of the same checkpoint: another node's disk. Repeatable.",
        "--also",
    ),
]

# How many candidates an error message lists.
_LISTED = 8


def open_target(
    invocation: Invocation,
    path: str,
    *,
    rules: Rules | None = None,
    bases: Sequence[str] = (),
    also: Sequence[str] | None = (),
) -> Target:
    """Find out what lies at a path and report it as `target` and `format`.

    Args:
        invocation: told what it is.
        path: as typed.
        rules: the user's table of how tensors are cut over ranks.
        bases: where the user says that bases of deltas lie.
        also: further places with files of the same checkpoint or root.

    Raises:
        NotFoundError, UnsupportedError, UnsafeError: see `ftckpt.discovery.resolve.open_target`.
    """
    from ftckpt.discovery.parent_checkpoint import enclosing
    from ftckpt.formats.catalog import formats
    from ftckpt.storage.store import EntryKind

    invocation.report(target=path, **({"also": list(also)} if also else {}))
    known = formats(rules, bases)
    target = opening.open_target(path, known, invocation.stores, also or ())
    invocation.report(format=target.format)
    # A remark is worth a look at the directory, but no request for what else may lie there.
    place = target.place
    if place.store.traits.local and target.part is not None:
        if target.part.entry.kind is EntryKind.FILE:
            what, whole = "file", opening.checkpoint_around(place, known)
        else:
            what, whole = "part", enclosing(place.url, place.store, known)
        if whole:
            told = f"{path} is one {what} of the checkpoint {whole}: this is about it alone"
            invocation.say(told)
    return target


def open_checkpoint(
    invocation: Invocation,
    path: str,
    *,
    newest: bool = True,
    rules: Rules | None = None,
    bases: Sequence[str] = (),
    also: Sequence[str] | None = (),
) -> Checkpoint:
    """Open the one checkpoint that a path means.

    Args:
        invocation: told which checkpoint and format it is.
        path: as typed.
        newest: whether a root without a selector means its newest checkpoint; otherwise the verb
            is refused, with the candidates in the hint.
        rules: the user's table of how tensors are cut over ranks.
        bases: where the user says that bases of deltas lie.
        also: further places with files of the same checkpoint or root.

    Raises:
        UsageError: a root, and `newest` is False.
        NotFoundError: the selected step is not there.
        IncompleteError, CorruptError, UnsafeError, UnsupportedError: it cannot be opened.
    """
    target = open_target(invocation, path, rules=rules, bases=bases, also=also)
    return open_from(invocation, target, newest=newest)


def open_from(invocation: Invocation, target: Target, *, newest: bool = True) -> Checkpoint:
    """Open the one checkpoint that a target means (see `open_checkpoint`)."""
    from ftckpt.workers.memory import no_gc

    if target.root is None:
        with no_gc():  # it lives until the end, and is large: no garbage to look for
            return invocation.keep(target.open())
    if not target.place.which and not newest:
        raise UsageError(
            f"{target.place.url} is a root, not one checkpoint",
            hint=f"name one of its checkpoints: {_names(target.root)}",
        )
    from ftckpt.discovery.candidates import choose_child
    from ftckpt.discovery.fewer_files import open_child

    child = choose_child(target.root, target.place.which, invocation.warn)
    url = target.root.url_of(child.candidate)
    if not target.place.which:
        invocation.say(f"{printable(target.place.url)} is a root; taking {printable(url)}")
    invocation.report(target=url, format=child.part.format.name)
    with no_gc():
        return invocation.keep(open_child(target.root, child))


def _names(root: Root) -> str:
    from ftckpt.discovery.roots import Child, newest_names_first

    named = [c for c in newest_names_first(root.candidates) if not c.staging]
    names = [root.url_of(c) for c in named if c.step is not None]
    if not names:  # then the names say nothing, and what is there has to be asked
        found = root.recognise_all(named[: 2 * _LISTED])
        names = [root.url_of(one.candidate) for one in found if isinstance(one, Child)]
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return printable(", ".join(names[:_LISTED])) + more


def open_other(invocation: Invocation, path: str, *, rules: Rules | None = None) -> Checkpoint:
    """Open a second checkpoint, to compare with or to learn from; it is not reported as the target.

    Args:
        invocation: says how to reach object stores.
        path: as typed.
        rules: the user's table of how tensors are cut over ranks.

    Raises:
        UsageError: a root without a selector.
    """
    from ftckpt.formats.catalog import formats

    target = opening.open_target(path, formats(rules), invocation.stores)
    if target.root is None:
        return target.open()
    if not target.place.which:
        raise UsageError(
            f"{path} is a root, not one checkpoint",
            hint=f"name one of its checkpoints: {_names(target.root)}",
        )
    from ftckpt.discovery.candidates import choose_child
    from ftckpt.discovery.fewer_files import open_child

    return open_child(target.root, choose_child(target.root, target.place.which))
