"""A PATH or URL becomes an open checkpoint, for the verbs that are not derived yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, get_args

from ftckpt.operations import opening

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftckpt.checkpoint import Checkpoint
    from ftckpt.checkpoint.rules import Rules
    from ftckpt.discovery.resolve import Target

    from .invocation import Invocation

PathArgument = Annotated[str, get_args(opening.Opened)[1]]
AlsoOption = Annotated[list[str] | None, get_args(opening.Also)[1]]


def open_target(invocation: Invocation, path: str, *, also: Sequence[str] | None = ()) -> Target:
    """See `opening.open_target`."""
    return opening.open_target(path, invocation.stores, invocation, also=also or ())


def open_checkpoint(
    invocation: Invocation,
    path: str,
    *,
    newest: bool = True,
    rules: Rules | None = None,
    bases: Sequence[str] = (),
    also: Sequence[str] | None = (),
) -> Checkpoint:
    """See `opening.opened`."""
    return opening.opened(
        path, invocation.stores, invocation, newest=newest, rules=rules, bases=bases,
        also=also or (),
    )  # fmt: skip


def open_other(invocation: Invocation, path: str, *, rules: Rules | None = None) -> Checkpoint:
    """Open a second checkpoint, which is not reported as the target."""
    return opening.opened(path, invocation.stores, rules=rules)
