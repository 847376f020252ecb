"""`ftckpt delta rebase`: the same checkpoint against another base, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ftckpt.commands.cli.bounds import bound_memory
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.target import open_checkpoint, open_other
from ftckpt.errors import ExitCode, UsageError
from ftckpt.operations.definition import argument, option, switch

from .packing import CODES as PACKING_CODES
from .packing import PackingOptions, pack_out

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint

EXAMPLES = (
    (
        "ftckpt delta rebase run/step-1090 short/step-1090",
        "against the full one that its chain ends in",
    ),
    ("ftckpt delta rebase run/step-1090 full/step-1090 --full", "against none: compressed whole"),
    ("ftckpt delta rebase run/step-1090 new/step-1090 --onto run/step-1050", "against another"),
)
CODES = dict(PACKING_CODES) | {
    ExitCode.NOT_FOUND: "DELTA, a base of its chain, or the directory around OUT is not there",
}
OPTIONS = (PackingOptions,)


def command(
    invocation: Invocation,
    delta: Annotated[str, argument("DELTA", "The delta: path, URL or ROOT@STEP.")],
    out: Annotated[str, argument("OUT", "Where the result goes; it must not exist yet.")],
    onto: Annotated[str, option("BASE", "New base of the result.")] = "",
    full: Annotated[bool, switch("--full", "Make the result independent of any base.")] = False,
    base: Annotated[
        list[str] | None, option("PATH", "Where a base of the chain lies now. Repeatable.")
    ] = None,
) -> Result:
    """Rewrite a delta against another base, or none; every bit stays.

    Without --onto and --full the result depends on the full checkpoint that the chain ends in, so
    that the deltas between are not needed any more. It is packed, proven and shown as by
    `ftckpt delta pack`; DELTA itself and its bases are never written.
    """
    from ftckpt.api.deltas import end_of_chain, require_delta

    if onto and full:
        raise UsageError("--onto names a base and --full wants none")
    bound_memory(invocation.options(PackingOptions).max_memory)
    opened = require_delta(
        open_checkpoint(invocation, delta, newest=False, bases=base or ()),
        "ftckpt delta pack packs any checkpoint",
    )
    new_base: Checkpoint | None = None
    if onto:
        new_base = invocation.keep(open_other(invocation, onto))
    elif not full:
        new_base = end_of_chain(opened)
    return pack_out(invocation, opened, new_base, out)
