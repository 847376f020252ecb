"""What the verbs that keep and drop share: the root and the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ftckpt.errors import ExitCode
from ftckpt.operations.definition import argument

if TYPE_CHECKING:
    from ftckpt.discovery.resolve import Place

    from .invocation import Invocation

RootArgument = Annotated[str, argument("ROOT", "Directory or URL that holds the checkpoints.")]
StepArgument = Annotated[str, argument("STEP", "A step, a name in the root, or latest.")]

CODES = {
    ExitCode.UNSAFE: "the root's .ftckpt is a link",
    ExitCode.NOT_FOUND: "no such root or checkpoint",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "the root cannot be written",
    ExitCode.NO_RESOURCE: "",
}


def open_place(invocation: Invocation, path: str) -> Place:
    """Return the place of a root, and report it as the target.

    Raises:
        NotFoundError: nothing is there.
        UsageError: one checkpoint of a root is selected.
    """
    from ftckpt.api.opening import root_at

    invocation.report(target=path)
    return root_at(path, invocation.stores)
