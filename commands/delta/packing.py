"""What the verbs that make deltas share: their flags, and the way to the answer."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from ftckpt import amounts
from ftckpt.commands.cli.bounds import JobsOption, MemoryOption, RateOption, bound_memory
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.errors import ExitCode, UsageError
from ftckpt.operations.definition import option, switch
from ftckpt.operations.many import Machines

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftckpt.api.deltas import PackingFlags
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.delta.pack.report import PackReport
    from ftckpt.formats.delta.pack import PackJob
    from ftckpt.verification import VerifyReport
    from ftckpt.workers import Work

CODES: Mapping[ExitCode, str] = {
    ExitCode.OK: "written, proven and visible",
    ExitCode.CORRUPT: "a checkpoint is damaged, a base is another, or the proof failed",
    ExitCode.INCOMPLETE: "a checkpoint is not committed, or changed meanwhile; parts missing",
    ExitCode.UNSAFE: "hostile or ambiguous content; nothing was executed",
    ExitCode.REFUSED: "OUT exists or lies in a checkpoint, or another run is writing it",
    ExitCode.NOT_FOUND: "a checkpoint, a base, or the directory around OUT is not there",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "disk full or memory budget too small; run it again to go on",
    ExitCode.UNSUPPORTED: "a delta cannot hold it",
}


@dataclass(frozen=True, kw_only=True)
class PackingOptions:
    """How a delta is made."""

    TITLE: ClassVar[str] = "How it is packed"

    level: Annotated[int, option("N", "1 fast, 2, 3 small.", min=1, max=3)] = 2
    no_proof: Annotated[
        bool, switch("--no-proof", "Skip the checks of the sources and of the result.")
    ] = False
    restart: Annotated[bool, switch("--restart", "Discard what another run to OUT left.")] = False
    jobs: JobsOption = 0
    limit_rate: RateOption = ""
    max_memory: MemoryOption = "1GiB"
    storage_rate: Annotated[
        str, option("RATE", "Write rate of the storage, for the advice: 2GB/s.")
    ] = ""


def pack_out(
    invocation: Invocation,
    target: Checkpoint,
    base: Checkpoint | None,
    out: str,
    renamed: Mapping[str, str] | None = None,
) -> Result:
    """Pack a checkpoint and show what became of it.

    Args:
        invocation: told of everything; it has `PackingOptions`.
        target: what is packed.
        base: what it is packed against; None packs it whole.
        out: where the delta goes.
        renamed: key in the target -> key in the base, where they differ.
    """
    from ftckpt.api.deltas import pack

    from .answer import show

    run = invocation.options(PackingOptions)
    bound_memory(run.max_memory)
    storage = amounts.rate(run.storage_rate)

    def told(checkpoint: Checkpoint, found: VerifyReport) -> None:
        if found.code is ExitCode.OK:
            invocation.say(f"{checkpoint.source.url}: {found.message}")
            return
        invocation.report(findings=found.findings)
        for one in found.findings:
            invocation.found(one)

    flags: PackingFlags = {
        "level": run.level,
        "no_proof": run.no_proof,
        "restart": run.restart,
        "jobs": run.jobs,
        "limit_rate": run.limit_rate,
    }

    def ended(report: PackReport) -> Result:
        if base is not None:
            _say_what_keeps(invocation, base, out)
        return show(invocation, report, storage)

    many = invocation.groups.get(Machines)
    if many is not None and many.asked:
        return _divided(invocation, target, base, out, renamed or {}, flags, told, ended)
    report = pack(
        target, base, out, renamed or {}, flags,
        stores=invocation.stores, counter=invocation.counter, told=told,
    )  # fmt: skip
    return ended(report)


def _divided(
    invocation: Invocation,
    target: Checkpoint,
    base: Checkpoint | None,
    out: str,
    renamed: Mapping[str, str],
    flags: PackingFlags,
    told: Callable[[Checkpoint, VerifyReport], None],
    show: Callable[[PackReport], Result],
) -> Result:
    """Do a part of the packing, or finish it."""
    from ftckpt.api.deltas import packing, packing_work
    from ftckpt.commands.cli.parts import session_of, shown
    from ftckpt.operations.many.packing import DividedPack
    from ftckpt.verification import verify

    if flags["restart"]:
        raise UsageError(
            "--restart would forget what other parts have built",
            hint="remove the records and the staging place of the parts instead",
        )
    stores = invocation.stores
    work = packing_work(target, base, out, flags, stores, invocation.counter)

    def job(check: Callable[[Checkpoint], VerifyReport]) -> PackJob:
        return packing(target, base, out, renamed, flags, stores=stores, work=work, check=check)

    def check(source: Checkpoint, work: Work) -> VerifyReport:
        return verify(source, work=replace(work, processes=work.threads))

    decided = {"level": flags["level"], "renamed": dict(renamed)}
    return shown(
        invocation,
        DividedPack(
            session_of(invocation),
            work,
            not flags["no_proof"],
            out,
            target,
            base,
            decided,
            job,
            check,
            told,
            show,
        ).run(),
    )


def _say_what_keeps(invocation: Invocation, base: Checkpoint, out: str) -> None:
    """Say how the base stays where gc of its root does not look among what depends on it."""
    from ftckpt.storage import open_store
    from ftckpt.storage.remotes import split
    from ftckpt.transfer.places import absolute, place_of

    store = open_store(out, invocation.stores)
    delta = absolute(store) if store.traits.local else store.url.rstrip("/")
    root, name = split(place_of(base.source))
    if root != split(delta)[0]:
        pin = shlex.join(["ftckpt", "pin", root, name, "--reason", "base of a delta"])
        invocation.say(f"gc of {root} alone does not see what depends on {name}: {pin} keeps it")
