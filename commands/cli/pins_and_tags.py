"""What the verbs that drop share: the root."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ftckpt.operations.definition import argument

if TYPE_CHECKING:
    from ftckpt.discovery.resolve import Place

    from .invocation import Invocation

RootArgument = Annotated[str, argument("ROOT", "Directory or URL that holds the checkpoints.")]


def open_place(invocation: Invocation, path: str) -> Place:
    """Return the place of a root, and report it as the target.

    Raises:
        NotFoundError: nothing is there.
        UsageError: one checkpoint of a root is selected.
    """
    from ftckpt.api.opening import root_at

    invocation.report(target=path)
    return root_at(path, invocation.stores)
