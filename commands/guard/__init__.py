"""`ftckpt guard`: one training job, from its newest good checkpoint to its end."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from ftckpt.amounts import duration
from ftckpt.commands.cli.choose_checkpoint import CheckLevel, ChoiceOptions
from ftckpt.commands.cli.codes import CommandCode
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import printable
from ftckpt.errors import ExitCode
from ftckpt.operations.definition import argument, option, switch
from ftckpt.storage.local.writable import check_file

from .options import (
    NoticeOptions,
    RestartOptions,
    WatchOptions,
    WorldOptions,
    choice_of,
    settings_of,
)

if TYPE_CHECKING:
    from ftckpt.guard.journal import GuardJournal

EXAMPLES = (
    (
        "ftckpt guard /ckpt/run7 -- torchrun --nproc-per-node 8 train.py --resume {}",
        "from the newest checkpoint whose every byte was checked; restarted three times",
    ),
    (
        "ftckpt guard /nvme/run7 --tier s3://run7/ckpt -- ./train.sh",
        "damage is mended from a second tier; the path is in FTCKPT_RESUME",
    ),
    (
        "srun ftckpt guard /ckpt/run7 --notice-signal USR1 -- torchrun ... train.py --resume {}",
        "with #SBATCH --signal=USR1@300: the trainer saves, and the job ends with 75",
    ),
    (
        "ftckpt guard /ckpt/run7 --notices aws --on-hang kill --max-age 30m -- ./train.sh",
        "on a spot instance; a training that has not saved for 30 minutes is restarted",
    ),
)
CODES = {
    ExitCode.OK: "the command ended with 0 (its other codes are passed on)",
    ExitCode.CORRUPT: "all checkpoints are damaged; or there were some, and none is left",
    ExitCode.INCOMPLETE: "there are checkpoints, and none is committed",
    ExitCode.UNVERIFIED: "the newest has no evidence for its content, or each lacks a part",
    ExitCode.UNSAFE: "the newest is hostile or ambiguous",
    ExitCode.REFUSED: "another guard holds ROOT; or every good checkpoint failed twice",
    ExitCode.UNAVAILABLE: "storage failed for --timeout; nothing older was taken instead",
    ExitCode.DENIED: "credentials or permissions; nothing older was taken instead",
    ExitCode.NO_RESOURCE: "",
    ExitCode.UNSUPPORTED: "a format that is not read, or a filesystem without locks",
    ExitCode.MISSING: "no such root, or an unmarked one without a checkpoint: never a first start",
    ExitCode.REQUEUE: "preempted, or hung with --on-hang exit: start the job again",
}
# It passes signals on to the command, and ends after it.
WATCHED = False


OPTIONS = (ChoiceOptions, WorldOptions, RestartOptions, NoticeOptions, WatchOptions)


def command(
    invocation: Invocation,
    root: Annotated[str, argument("ROOT", "Directory or URL that holds the checkpoints.")],
    words: Annotated[
        list[str], argument("-- COMMAND...", "The training; {} is the checkpoint's path.")
    ],
    tier: Annotated[
        list[str] | None, option("URL", "Another place of the run: damage is mended from there.")
    ] = None,
    verify: Annotated[
        CheckLevel, option("", "How deep each checkpoint is checked.")
    ] = CheckLevel.CONTENT,
    timeout: Annotated[str, option("T", "Wait for a save in flight, or for a store.")] = "10m",
    allow_missing_tier: Annotated[
        bool, switch("--allow-missing-tier", "Choose although a tier cannot be read.")
    ] = False,
    skip_unverified: Annotated[
        bool, switch("--skip-unverified", "Walk back over those without evidence.")
    ] = False,
    wait_lock: Annotated[str, option("T", "Wait for another guard of ROOT to end.")] = "200s",
    nodes: Annotated[
        int | None, option("N", "Guards of this job, where no launcher says it.", min=1)
    ] = None,
    job: Annotated[str, option("NAME", "What names this start of the job on every node.")] = "",
    no_lock: Annotated[bool, switch("--no-lock", "Do not exclude a second guard of ROOT.")] = False,
) -> Result:
    """Start a job from its newest good checkpoint, watch it, and restart it.

    The newest checkpoint that passes is chosen as `latest --verify content --wait` does it; its
    path replaces {} and is in FTCKPT_RESUME. A fresh start (without the words that hold {}) follows
    only if a marked root holds no checkpoint. While the command runs, signals are passed on, each
    new save is verified at low priority, and the last good one is pinned. A command that fails is
    restarted; a checkpoint that failed twice without a newer save is passed over. The command and
    everything that it starts end with the guard. ROOT/.ftckpt/guard.jsonl is the log.
    """
    from ftckpt.api.guarding import guard
    from ftckpt.guard.nodes import node_place

    choice = invocation.options(ChoiceOptions)
    watch = invocation.options(WatchOptions)
    invocation.report(target=root, path=None, step=None, restarts=0, command=words, decisions=[])
    for flag, path in (
        ("--prometheus", watch.prometheus),
        ("--iteration-file", watch.iteration_file),
    ):
        if path:
            check_file(flag, path)
    logs: list[GuardJournal] = []
    ended = None
    try:
        ended = guard(
            words,
            replace(
                choice_of(invocation, root, tier or (), verify, timeout),
                allow_missing_tier=allow_missing_tier,
                skip_unverified=skip_unverified,
            ),
            settings_of(invocation, duration(timeout, "--timeout")),
            wait_lock=duration(wait_lock, "--wait-lock"),
            no_lock=no_lock,
            node=node_place(os.environ, nodes, job),
            retry_suspected=invocation.options(RestartOptions).retry_suspected,
            stores=invocation.stores,
            counter=invocation.counter,
            say=lambda text: invocation.say(printable(text)),
            warn=lambda text: invocation.warn(printable(text)),
            told=logs.append,
            require=choice.require,
            step_at_most=choice.step_at_most,
            max_fallback=choice.max_fallback,
            reuse=choice.reuse,
            ledger=choice.ledger,
            stop_at_unsafe=choice.stop_at_unsafe,
        )
    finally:
        events = [dict(event) for log in logs for event in log.own]
        starts = [event for event in events if event["event"] == "start"]
        if starts:
            invocation.report(path=starts[-1]["path"], step=starts[-1]["step"])
        invocation.report(
            decisions=events, restarts=ended.restarts if ended else max(0, len(starts) - 1)
        )
        invocation.close()
    if ended.own is ExitCode.OK:
        return Result(ExitCode.OK, ended.message)
    code = ended.own if ended.own is not None else CommandCode(ended.code)
    return invocation.fail(code, printable(ended.message), printable(ended.hint))
