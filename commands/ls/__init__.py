"""`ftckpt ls`: the checkpoints of a root."""

from __future__ import annotations

import time
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import brief_duration, human_bytes, table
from ftckpt.errors import ExitCode
from ftckpt.findings import counted
from ftckpt.operations.definition import argument, switch

if TYPE_CHECKING:
    from ftckpt.api.surveying import ListedCheckpoint

EXAMPLES = (
    ("ftckpt ls", "what the working directory holds"),
    ("ftckpt ls /ckpt/run7", "steps, ages, sizes, classes, and what keeps each"),
    ("ftckpt ls s3://run7/ckpt --all", "the trash and foreign names too"),
    ("ftckpt ls /ckpt/run7@latest", "one checkpoint"),
)
CODES = {
    ExitCode.OK: "listed; no content was checked",
    ExitCode.NOT_FOUND: "no such root, or nothing in it that a format knows",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "",
}


def command(
    invocation: Invocation,
    path: Annotated[str, argument("[PATH]", "Directory or URL that holds the checkpoints.")] = ".",
    all_: Annotated[bool, switch("--all", "Foreign names and the trash, too.")] = False,
) -> Result:
    """List the checkpoints of a root: step, age, size, class, verified or not, pins.

    Told by listings and manifests; no checkpoint is opened, except for a step that its name does
    not show. The newest comes first; several runs below PATH are listed apart. Of one checkpoint,
    ROOT@STEP too, the row of it alone is shown.
    """
    from ftckpt.api.surveying import ls

    invocation.report(target=path)
    found = ls(path, all_=all_, stores=invocation.stores, counter=invocation.counter)
    invocation.report(
        checkpoints=[
            {("class" if name == "entry_class" else name): value for name, value in row}
            for row in (one._asdict().items() for one in found)
        ]
    )
    runs = [(root, list(rows)) for root, rows in groupby(found, key=lambda one: one.root)]
    for number, (root, rows) in enumerate(runs):
        if len(runs) > 1:
            if number:
                invocation.print()
            invocation.print(f"{root}:")
        invocation.print(_table(root, rows))
    total = sum(one.bytes or 0 for one in found)
    message = f"{counted(len(found), 'checkpoint' if not all_ else 'name')}, {human_bytes(total)}"
    invocation.print()
    invocation.print(message)
    return Result(ExitCode.OK, message)


def _table(root: str, rows: list[ListedCheckpoint]) -> str:
    head = ["step>", "name", "age>", "size>", "files>", "format", "class", "verified", "verdict"]
    head += ["kept by"]
    cells = [
        [
            "-" if one.step is None else one.step,
            one.path.removeprefix(root.rstrip("/") + "/"),
            "-" if one.age_s is None else brief_duration(max(0.0, one.age_s)),
            "-" if one.bytes is None else human_bytes(one.bytes),
            "-" if one.files is None else one.files,
            one.format or "-",
            one.entry_class,
            "yes" if one.verified else "sealed" if one.sealed else "no",
            _verdict(one),
            ", ".join(
                [
                    *(f"{name} points here" for name in one.pointers),
                    *(f"tag {word}" for word in one.tags),
                    *(f"pin of {pin.owner}: {pin.reason}" for pin in one.pins),
                ]
            ),
        ]
        for one in rows
    ]
    return table(head, cells)


def _verdict(one: ListedCheckpoint) -> str:
    """Return the last known verdict on the content: `content`, `values`, or what is wrong."""
    if one.verdict is None:
        return "-"
    said = one.verdict
    ago = brief_duration(round(max(0.0, time.time() - said.checked)))
    found = said.level if said.code == ExitCode.OK else ExitCode(said.code).name
    return f"{found}, {ago} ago"
