"""`ftckpt replay run`: run a training and its restart, and say whether they are the same."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import human_bytes
from ftckpt.commands.cli.target import open_checkpoint
from ftckpt.errors import ExitCode, UnsupportedError
from ftckpt.operations.definition import argument, option
from ftckpt.replay.run.one_run import PINNED
from ftckpt.replay.run.trial import Tried, remove_left_copies
from ftckpt.storage.local.writable import check_file

from .answer import record, result, text
from .page import write_page

STORAGE = False
EXAMPLES = (
    (
        "ftckpt replay run -- python train.py",
        "a script that saves and resumes by itself: run, killed after its first save, restarted",
    ),
    (
        "ftckpt replay run --at 100 --steps 50 -- torchrun --nproc-per-node 2 train.py "
        "--ckpt {checkpoint} --steps {steps}",
        "two ranks, killed after step 100, 50 steps compared",
    ),
    (
        "ftckpt replay run --checkpoint /ckpt/run7/step-1000 --reference logs/run7 "
        "-- ./train.sh --resume {checkpoint}",
        "restarts from a checkpoint of a real run, against the log that the run left",
    ),
)
CODES = {
    ExitCode.OK: "the restart is exact for the steps that were compared",
    ExitCode.DIFFERENT: "it is not, or the training does not repeat itself; the verdict says which",
    ExitCode.CORRUPT: "a log is damaged",
    ExitCode.UNVERIFIED: "nothing could be compared: a run crashed, hung, or logged too little",
    ExitCode.REFUSED: "--dir holds something else, or another run is at work there",
    ExitCode.NOT_FOUND: "the command, the checkpoint or the log is not there",
    ExitCode.DENIED: "--dir cannot be made or written",
    ExitCode.UNSAFE: "the checkpoint holds a device, a fifo or a circle of links",
    ExitCode.NO_RESOURCE: "no room for a restart's own copy of --checkpoint, or for logs",
    ExitCode.UNSUPPORTED: "the filesystem of --dir has no locks",
}


def command(
    invocation: Invocation,
    words: Annotated[
        list[str],
        argument("-- COMMAND...", "The training; {checkpoint}, {steps}, {log} are filled in."),
    ],
    steps: Annotated[int, option("K", "Steps to compare after the checkpoint.", min=1)] = 20,
    at: Annotated[
        int,
        option(
            "N", "Kill it after step N, not its first save; with --checkpoint, its step.", min=0
        ),
    ] = 0,
    runs: Annotated[int, option("N", "Repetitions of each run; 1 proves less.", min=1)] = 2,
    checkpoint: Annotated[
        str, option("DIR", "Restart from copies of this one, never from it.")
    ] = "",
    baseline: Annotated[
        str, option("COMMAND", "With --checkpoint: the uninterrupted training.")
    ] = "",
    baseline_at: Annotated[int, option("N", "Steps that --baseline begins with.", min=0)] = 0,
    reference: Annotated[str, option("LOG", "Instead of --baseline: the log of such a run.")] = "",
    every: Annotated[int, option("N", "Read whole tensors every N steps.", min=1)] = 1,
    timeout: Annotated[str, option("T", "Time limit of each run.")] = "1h",
    directory: Annotated[
        str, option("DIR", "Keep logs and output here; a repeated command continues.", "--dir")
    ] = "",
    html: Annotated[str, option("FILE", "Write the timeline as a page.")] = "",
) -> Result:
    """Run a training and its restart, and compare them bit by bit.

    Runs the command without interruption, again, and twice from a checkpoint, each in fresh
    processes with the same environment, and compares state, batches, losses and gradients bit by
    bit. Nothing in the training has to change: torch is instrumented as Python starts.
    """
    from ftckpt.api.replaying import replay_run

    if checkpoint and not at:
        at = _step_of(invocation, checkpoint)
    folder = Path(directory or f"ftckpt-replay-{datetime.now(UTC):%Y%m%d-%H%M%S}")
    if html:
        check_file("--html", html)
    if not directory:
        for place in remove_left_copies(Path()):
            invocation.say(f"removed the copy of a checkpoint that a killed run left in {place}")
    tried = replay_run(
        words,
        directory=folder,
        steps=steps,
        at=at,
        runs=runs,
        checkpoint=checkpoint,
        baseline=shlex.split(baseline),
        baseline_at=baseline_at,
        reference=reference,
        every=every,
        timeout=timeout,
        say=invocation.say,
    )
    judgement = tried.judgement
    invocation.report(
        target=str(folder),
        directory=str(folder.absolute()),
        at=tried.at,
        pinned={name: os.environ.get(name, value) for name, value in PINNED.items()},
        runs=[{"name": name, **asdict(outcome)} for name, outcome in tried.outcomes.items()],
        copies=[asdict(copy) for copy in tried.copies],
        read_only=tried.read_only,
        **record(judgement),
    )
    invocation.print(text(judgement))
    if tried.copies:
        invocation.print()
        invocation.print(_copies_text(checkpoint, tried))
    invocation.print()
    invocation.print(f"logs and output: {folder}")
    if html:
        write_page(html, judgement)
        invocation.report(html=html)
    return result(judgement)


def _copies_text(checkpoint: str, tried: Tried) -> str:
    """Say how the restarts got their copies, what these cost, and how the original was kept."""
    copies = tried.copies
    method = {"reflink": "cloned (its blocks are shared)", "copy": "copied", "mixed": "copied"}
    kept = "was read-only to every run" if tried.read_only else "was checked after every run"
    return (
        f"{checkpoint} {kept}; each restart had its own copy, {method[copies[0].method]}: "
        f"{human_bytes(sum(copy.written for copy in copies))} written in "
        f"{sum(copy.seconds for copy in copies):.1f} s, removed since"
    )


def _step_of(invocation: Invocation, checkpoint: str) -> int:
    """Return the step that the user's checkpoint shows; 0 where it shows none.

    Raises:
        NotFoundError: the checkpoint does not exist.
    """
    try:
        step = open_checkpoint(invocation, checkpoint, newest=False).step
    except UnsupportedError:
        step = None
    return step or 0
