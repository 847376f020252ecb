"""`ftckpt replay audit`: what a restart would lack, seen from the checkpoint alone."""

from __future__ import annotations

from typing import Annotated

from ftckpt.commands.cli.bounds import MemoryOption, bound_memory
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import pairs, table
from ftckpt.commands.cli.target import PathArgument, open_checkpoint, open_other
from ftckpt.errors import ExitCode
from ftckpt.findings import counted
from ftckpt.inspection.resume import Presence
from ftckpt.operations.definition import option, switch
from ftckpt.replay.audit import RemarkWeight

EXAMPLES = (
    ("ftckpt replay audit /ckpt/run7/step-1000", "what it lacks, and where it contradicts itself"),
    (
        "ftckpt replay audit /ckpt/run7@1000 --against /ckpt/run7@1100",
        "and whether the next save wrote anything new",
    ),
    ("ftckpt replay audit /ckpt/run7@1000 --strict", "absent components too make it exit 3"),
)
CODES = {
    ExitCode.OK: "nothing contradicts an exact restart; absent components are listed",
    ExitCode.DIFFERENT: "the checkpoint contradicts itself, or --strict and something is absent",
    ExitCode.CORRUPT: "the checkpoint is damaged",
    ExitCode.INCOMPLETE: "not committed, or still being written",
    ExitCode.UNSAFE: "its headers or metadata are hostile or ambiguous; nothing was executed",
    ExitCode.NOT_FOUND: "no checkpoint there",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "the metadata needs more than --max-memory",
    ExitCode.UNSUPPORTED: "",
}


def command(
    invocation: Invocation,
    path: PathArgument,
    against: Annotated[str, option("NEXT", "The next checkpoint of the same run.")] = "",
    strict: Annotated[bool, switch("--strict", "Treat an absent component as a verdict.")] = False,
    max_memory: MemoryOption = "1GiB",
) -> Result:
    """Report what a restart from a checkpoint would lack, without running it.

    Presence of each component, random streams against ranks, optimizer and schedule against the
    step, the environment of this shell, and with --against whether the next save was stale.
    Presence is judged by names and by content; "cannot tell" names what is not understood.
    `ftckpt replay run` is the proof.
    """
    from ftckpt.api.replaying import replay_audit

    bound_memory(max_memory)
    checkpoint = open_checkpoint(invocation, path)
    following = open_other(invocation, against) if against else ""
    done = replay_audit(checkpoint, against=following, counter=invocation.counter)
    absent = [i for i in done.resume if i.presence is Presence.ABSENT and i.needed]
    contradictions = [r for r in done.remarks if r.weight is RemarkWeight.CONTRADICTION]
    invocation.report(step=checkpoint.step, resume=done.resume, remarks=done.remarks)
    rows = [[item.title, item.presence, item.reason] for item in done.resume]
    invocation.print(table(["component", "is", "because"], rows))
    if done.remarks:
        invocation.print()
        invocation.print(pairs([(r.weight, r.message) for r in done.remarks]))
    for item in absent:
        invocation.say(f"warning: absent: {item.title}. {item.consequence}")
    said = f"{counted(len(absent), 'component')} absent, " + (
        contradictions[0].message if contradictions else "no contradiction"
    )
    if contradictions or (strict and absent):
        return Result(ExitCode.DIFFERENT, said, "docs/replay.md says what each needs")
    return Result(ExitCode.OK, said)
