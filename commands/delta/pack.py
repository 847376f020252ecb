"""`ftckpt delta pack`: a checkpoint as its difference from another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from ftckpt.commands.cli.bounds import bound_memory
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.target import open_checkpoint, open_other
from ftckpt.errors import UsageError
from ftckpt.findings import counted
from ftckpt.operations.definition import argument, option
from ftckpt.operations.many import Machines

from .packing import CODES as CODES
from .packing import PackingOptions, pack_out

EXAMPLES = (
    ("ftckpt delta pack run/step-1000 run/step-1010 deltas/step-1010", "what ten steps changed"),
    ("srun ftckpt delta pack A B out --part auto --finish-last", "by all nodes of a job"),
    ("ftckpt delta pack run/step-1000 archive/step-1000", "compressed whole, without a base"),
    ("ftckpt delta pack s3://b/run/step-1000 run/step-1010 s3://b/run/step-1010", "on S3"),
)
OPTIONS = (PackingOptions, Machines)


def command(
    invocation: Invocation,
    paths: Annotated[
        list[str],
        argument(
            "[BASE] TARGET OUT",
            "Three places: store TARGET against BASE. Two: compress TARGET whole.",
        ),
    ],
    rename: Annotated[str, option("FILE.toml", "Other names for the parameters of BASE.")] = "",
) -> Result:
    """Write a checkpoint as its difference from another one, or compressed whole.

    Nothing is lost. BASE and TARGET may be of any formats and topologies, and deltas themselves.
    OUT reads like any checkpoint, as long as its base is there. It is read back and compared with
    TARGET bit for bit before it becomes visible; a killed run goes on where it was. The sources
    are never written.
    """
    from ftckpt.api.deltas import renamed_keys

    before, path, out = _places(paths)
    if rename and not before:
        raise UsageError("--rename gives names to the parameters of BASE, and there is none")
    bound_memory(invocation.options(PackingOptions).max_memory)
    target = open_checkpoint(invocation, path, newest=False)
    base = invocation.keep(open_other(invocation, before)) if before else None
    renamed = renamed_keys(base, rename) if base is not None and rename else {}
    return pack_out(invocation, target, base, out, renamed)


def _places(paths: Sequence[str]) -> tuple[str, str, str]:
    """Return base, target and destination; "" for no base.

    Raises:
        UsageError: not two places and not three.
    """
    if len(paths) == 2:
        return "", paths[0], paths[1]
    if len(paths) != 3:
        raise UsageError(
            f"{counted(len(paths), 'place')} given: BASE TARGET OUT are three, TARGET OUT two",
            hint="ftckpt delta pack BASE TARGET OUT packs TARGET as what it adds to BASE",
        )
    return paths[0], paths[1], paths[2]
