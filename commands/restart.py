"""`ftckpt restart`: one path that a job of N ranks can load."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

from ftckpt.commands.cli.bounds import JobsOption, MemoryOption, RateOption, bound_memory
from ftckpt.commands.cli.choose_checkpoint import (
    CheckLevel,
    ChoiceOptions,
    report_choice,
)
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import printable
from ftckpt.commands.cli.target import open_checkpoint
from ftckpt.commands.cli.terminal import write_bytes
from ftckpt.commands.cli.transfer_options import (
    LayoutOptions,
    RulesOption,
    RunOptions,
    carry_out,
    read_rules,
)
from ftckpt.errors import ExitCode, NotFoundError, RefusedError, UsageError
from ftckpt.operations.definition import argument, option, switch

if TYPE_CHECKING:
    from collections.abc import Mapping

EXAMPLES = (
    (
        'CKPT=$(ftckpt restart "$ROOT" --world 64 --scratch /nvme/restart) || exit $?',
        "in a job script: the newest good checkpoint, resharded if it was written by others",
    ),
    (
        "ftckpt restart /ckpt/run7 --world 16 --tp 4 --pp 1 --scratch /nvme/restart",
        "on another grid",
    ),
    (
        'CKPT=$(ftckpt restart "$ROOT" --world 64 --reader) || exit $?',
        "the job loads with ftckpt.torch.Reader, which needs no files for its ranks",
    ),
    (
        "ftckpt restart s3://run7/ckpt --gpus 64 --scratch /nvme/restart --reuse 24h",
        "what was checked in the last day is not read again, unless a file has changed",
    ),
)
CODES = {
    ExitCode.OK: "one path on stdout: a checkpoint that N ranks load",
    ExitCode.CORRUPT: "all checkpoints are damaged or gone, or the proof of the resharding failed",
    ExitCode.INCOMPLETE: "there are checkpoints, and none is committed",
    ExitCode.UNVERIFIED: "the newest has no evidence for its content, or each lacks a part",
    ExitCode.UNSAFE: "the newest is hostile or ambiguous",
    ExitCode.REFUSED: "another run is resharding it now, or it went meanwhile",
    ExitCode.NOT_FOUND: "a root made by `latest --create-root` without a checkpoint: a first start",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "the scratch place is full; run it again to go on",
    ExitCode.UNSUPPORTED: "a format that is not read, or cannot be resharded",
    ExitCode.MISSING: "no such root, or an unmarked one without a checkpoint: never a first start",
}
OPTIONS = (ChoiceOptions, LayoutOptions)


class _Job(NamedTuple):
    """The job that is to load the checkpoint.

    Attributes:
        world_size: its ranks.
        sizes: what the user chose of its `tp`, `pp` and `dp`.
        layout: the flags about the layout.
        scratch: where a resharded checkpoint goes; "" for nowhere.
        rules: file of split rules; "" for none.
        run: how it is carried out.
        reader: whether it loads with `ftckpt.torch.Reader`.
    """

    world_size: int
    sizes: Mapping[str, int]
    layout: LayoutOptions
    scratch: str
    rules: str
    run: RunOptions
    reader: bool


def command(
    invocation: Invocation,
    root: Annotated[str, argument("ROOT", "Directory or URL that holds the checkpoints.")],
    world: Annotated[int, option("N", "Ranks of the job to restart.", "--world", "--gpus", min=1)],
    scratch: Annotated[
        str, option("DIR", "Where a checkpoint is resharded to, if it must be.")
    ] = "",
    verify: Annotated[
        CheckLevel, option("", "How deep each checkpoint is checked.")
    ] = CheckLevel.CONTENT,
    rules: RulesOption = "",
    reader: Annotated[
        bool, switch("--reader", "The job loads with ftckpt.torch.Reader: reshard nothing.")
    ] = False,
    jobs: JobsOption = 0,
    limit_rate: RateOption = "",
    max_memory: MemoryOption = "1GiB",
) -> Result:
    """Print a checkpoint that a job of N ranks loads: find, check, reshard if needed.

    The newest that passes is chosen as `latest` does it. If N ranks load it as it is, its path is
    printed; DCP and safetensors load at any N. Otherwise it is resharded below --scratch, proven,
    and the path of the result is printed. tp and pp stay unless flags say otherwise, dp changes.
    Killed and run again, it goes on; what an earlier run has made of the same files is checked and
    taken. A job that loads with ftckpt.torch.Reader takes any checkpoint as it is: --reader. The
    code is that of the step that failed; 9 is a first start and nothing else.
    """
    from ftckpt.discovery.select import select
    from ftckpt.operations import choosing

    invocation.aside = True  # stdout takes one path or nothing
    layout = invocation.options(LayoutOptions)
    choice = invocation.options(ChoiceOptions)
    invocation.report(target=root, path=None, step=None, source=None, level=verify, grid={})
    invocation.report(world_size=world, skipped=[], pointers=[], findings=[])
    sizes = {n: size for n in ("tp", "pp", "dp") if (size := getattr(layout, n)) is not None}
    bound_memory(max_memory)
    run = RunOptions(jobs=jobs, limit_rate=limit_rate, max_memory=max_memory)
    job = _Job(world, sizes, layout, scratch, rules, run, reader)
    checks = choosing.checks_of(verify, choice.flags, invocation.stores, invocation)
    found = select(
        choosing.read_root(root, invocation.stores),
        checks,
        choosing.selection_rules(choice.flags, choosing.condition_of(choice.flags, invocation)),
        invocation.warn,
    )
    invocation.report(source=found.path)
    report_choice(invocation, checks, found)
    choosing.warn_of(found, invocation)
    if found.path is None:
        return invocation.fail(found.code, printable(found.message), printable(found.hint))
    try:
        path = _made_loadable(invocation, found.path, job)
    except NotFoundError as error:  # 9 would start the run from scratch
        raise RefusedError(f"{found.path} went while it was read: {error.message}") from error
    invocation.report(target=root, path=path, step=found.step, format=found.format)
    invocation.close()
    if not invocation.json:
        write_bytes(sys.stdout, os.fsencode(path) + b"\n")
    return Result(ExitCode.OK, f"{path} loads with {world} ranks")


def _made_loadable(invocation: Invocation, path: str, job: _Job) -> str:
    """Return the path of what the job loads: the checkpoint itself, or what is made of it.

    Raises:
        UsageError: the grid does not make up the world, or the scratch place is missing.
        FtckptError: the resharding failed.
    """
    from ftckpt.api.restarting import by_reader, made_before, scratch_place
    from ftckpt.discovery.conditions import grid_of, not_at_grid
    from ftckpt.transfer.content import Content

    checkpoint = open_checkpoint(invocation, path, newest=False, rules=read_rules(job.rules))
    reason = not_at_grid(checkpoint, job.world_size, job.sizes)
    if not reason:
        return path
    if job.reader:
        invocation.say(by_reader(path, reason))
        return path
    grid = {} if job.layout.like else grid_of(checkpoint.topology, job.world_size, job.sizes)
    shown = " ".join(f"--{name} {size}" for name, size in grid.items())
    if not job.scratch:
        raise UsageError(f"{path} {reason}", hint=f"--scratch DIR: it is resharded there ({shown})")
    destination = scratch_place(
        checkpoint, job.world_size, grid, asdict(job.layout), job.scratch, invocation.stores
    )
    invocation.report(grid=grid)
    invocation.say(f"{path} {reason}: resharding to {destination} ({shown})")
    earlier = made_before(destination, invocation.stores, invocation.counter)
    if earlier is not None:
        invocation.say(f"an earlier run has made {destination}: {earlier.message}")
    else:
        layout = replace(
            job.layout,
            tp=grid.get("tp", job.layout.tp),
            pp=grid.get("pp", job.layout.pp),
            dp=grid.get("dp", job.layout.dp),
        )
        request = layout.request(invocation, job.rules)
        name = checkpoint.source_format
        content = Content.of(checkpoint)
        result = carry_out(invocation, checkpoint, content, name, request, destination, job.run)
        assert result.code is ExitCode.OK
    return destination
