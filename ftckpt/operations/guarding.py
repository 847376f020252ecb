"""A training job below a guard: `guard`."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from ftckpt import amounts
from ftckpt.errors import ExitCode, UsageError
from ftckpt.findings import CheckLevel
from ftckpt.observer import SILENT, Observer
from ftckpt.reports import UNSAID
from ftckpt.storage import StoreOptions

from .choosing import ChoiceFlags
from .definition import argument, assumption, operation, option, switch
from .opening import STORES, chosen

if TYPE_CHECKING:
    from ftckpt.guard.journal import GuardJournal
    from ftckpt.guard.terms import Ended

_WORLD, _AGAIN = "Another number of ranks", "Restarts"
_NOTICES, _WATCH = "Preemption", "While it runs"


class HangPolicy(StrEnum):
    """What is done when saves stop coming."""

    WARN = "warn"
    KILL = "kill"
    EXIT = "exit"


@dataclass(frozen=True, kw_only=True)
class GuardReport:
    """What a guard did.

    Attributes:
        target: the root.
        path: what the command was last started from; None for a fresh start.
        step: of it.
        restarts: how often the command was restarted.
        command: as it was given.
        decisions: the events of the log that are this guard's.
        ended: how it ended.
    """

    target: str
    path: str | None
    step: int | None
    restarts: int
    command: Sequence[str]
    decisions: Sequence[Mapping[str, object]]
    ended: Ended = field(metadata=UNSAID)

    @property
    def code(self) -> int:
        """The exit code: a verdict of the guard's, or the command's own."""
        return self.ended.code


@operation(
    examples=(
        (
            "ftckpt guard /ckpt/run7 -- torchrun --nproc-per-node 8 train.py --resume {}",
            "from the newest checkpoint whose every byte was checked; restarted three times",
        ),
        (
            "ftckpt guard /nvme/run7 --tier s3://run7/ckpt -- ./train.sh",
            "damage is mended from a second tier; the path is in FTCKPT_RESUME",
        ),
        (
            "ftckpt guard /ckpt/run7 --max-age 30m --on-hang kill -- ./train.sh",
            "a training that has not saved for 30 minutes is restarted",
        ),
        (
            "srun ftckpt guard /ckpt/run7 --notice-signal USR1@300s -- torchrun ... train.py"
            " --resume {}",
            "with #SBATCH --signal=USR1@300: the trainer saves, and the job ends with 75",
        ),
        (
            "ftckpt guard /ckpt/run7 --notice aws --on-hang kill --max-age 30m -- ./train.sh",
            "on a spot instance; a training that has not saved for 30 minutes is restarted",
        ),
    ),
    codes={
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
        ExitCode.MISSING: "no such root, or an unmarked one without a checkpoint: never a first "
        "start",
        ExitCode.REQUEUE: "preempted, or hung with --on-hang exit: start the job again",
    },
    everyday=(
        "--tier",
        "--world",
        "--max-restarts",
        "--notice-signal",
        "--on-hang",
        "--max-age",
    ),
)
def guard(
    root: Annotated[str, argument("ROOT", "Directory or URL that holds the checkpoints.")],
    words: Annotated[
        Sequence[str], argument("-- COMMAND...", "The training; {} is the checkpoint's path.")
    ],
    *,
    tier: Annotated[
        Sequence[str], option("URL", "Another place of the run: damage is mended from there.")
    ] = (),
    level: Annotated[
        CheckLevel | str, option("", "How deep each checkpoint is checked.")
    ] = CheckLevel.CONTENT,
    timeout: Annotated[
        amounts.Duration, option("T", "Wait for a save in flight, or for a store.")
    ] = "10m",
    allow_missing_tier: Annotated[
        bool, switch("--allow-missing-tier", "Choose although a tier cannot be read.")
    ] = False,
    skip_unverified: Annotated[
        bool, switch("--skip-unverified", "Walk back over those without evidence.")
    ] = False,
    wait_lock: Annotated[
        amounts.Duration, assumption("T", "Wait for another guard of ROOT to end.")
    ] = "200s",
    nodes: Annotated[
        int | None, option("N", "Guards of this job, where no launcher says it.", min=1)
    ] = None,
    job: Annotated[str, option("NAME", "What names this start of the job on every node.")] = "",
    no_lock: Annotated[bool, switch("--no-lock", "Do not exclude a second guard of ROOT.")] = False,
    world: Annotated[
        int | None,
        option("N", "Ranks of the job: reshard for them if it must be.", min=1, under=_WORLD),
    ] = None,
    scratch: Annotated[str, option("DIR", "Where to.", under=_WORLD)] = "",
    reader: Annotated[
        bool,
        switch(
            "--reader", "The job loads with ftckpt.torch.Reader: reshard nothing.", under=_WORLD
        ),
    ] = False,
    batch: Annotated[
        int | None, option("N", "Global batch so far, for advice.", min=1, under=_WORLD)
    ] = None,
    lr: Annotated[
        float | None, option("X", "Learning rate so far, for advice.", under=_WORLD)
    ] = None,
    accumulation: Annotated[
        int, option("N", "Passes that make one step, so far.", min=1, under=_WORLD)
    ] = 1,
    max_restarts: Annotated[
        int, option("N", "Restart a command that fails at most N times.", min=0, under=_AGAIN)
    ] = 3,
    backoff: Annotated[
        amounts.Duration,
        assumption("T", "Before the first restart; doubled without a new save.", under=_AGAIN),
    ] = "10s",
    max_backoff: Annotated[
        amounts.Duration, assumption("T", "Wait no longer than this.", under=_AGAIN)
    ] = "10m",
    grace: Annotated[
        amounts.Duration,
        assumption("T", "Between SIGTERM to the command and SIGKILL.", under=_AGAIN),
    ] = "30s",
    signal_group: Annotated[
        bool,
        switch("--signal-group", "Pass signals on to the whole process group.", under=_AGAIN),
    ] = False,
    zero_is_done: Annotated[
        bool,
        switch(
            "--zero-is-done", "0 after a notice is the end of the training, not 75.", under=_AGAIN
        ),
    ] = False,
    retry_suspected: Annotated[
        bool,
        switch("--retry-suspected", "Forget which checkpoints failed twice before.", under=_AGAIN),
    ] = False,
    save_signal: Annotated[
        str, option("NAME", "What asks the trainer to save.", under=_NOTICES)
    ] = "USR1",
    notice_signal: Annotated[
        Sequence[str],
        option(
            "NAME[@T]",
            "A signal that announces a preemption, T before it: USR1@300s. Repeatable.",
            under=_NOTICES,
        ),
    ] = (),
    notice: Annotated[
        Sequence[str],
        option(
            "WHERE",
            "Ask aws, gcp or azure, or a COMMAND that ends with 0 if there is a notice. "
            "Repeatable.",
            under=_NOTICES,
        ),
    ] = (),
    notice_every: Annotated[
        amounts.Duration, assumption("T", "How often both are asked.", under=_NOTICES)
    ] = "5s",
    metadata_url: Annotated[str, option("URL", "", hidden=True, under=_NOTICES)] = "",
    every: Annotated[
        amounts.Duration, option("T", "How often new saves are looked for.", under=_WATCH)
    ] = "15s",
    settled: Annotated[
        amounts.Duration,
        assumption("T", "Verify a save that does not pass again after T.", under=_WATCH),
    ] = "30s",
    limit_rate: Annotated[
        amounts.Rate, option("RATE", "Read no faster: 200MiB/s.", under=_WATCH)
    ] = "",
    max_age: Annotated[
        amounts.Duration,
        option("T", "A newest save of this age is a hang (3 intervals).", under=_WATCH),
    ] = "",
    on_hang: Annotated[
        HangPolicy | str, option("", "Warn; kill and restart; or end with 75.", under=_WATCH)
    ] = HangPolicy.WARN,
    on_alert: Annotated[
        str, option("COMMAND", "Run for hangs, damage, restarts, notices.", under=_WATCH)
    ] = "",
    alert_url: Annotated[
        str, option("URL", "Post each alert to this webhook as JSON.", under=_WATCH)
    ] = "",
    prometheus: Annotated[
        str, option("FILE", "Write metrics for node_exporter.", under=_WATCH)
    ] = "",
    iteration_file: Annotated[
        str, option("FILE", "Step of the newest save, for ft_launcher.", under=_WATCH)
    ] = "",
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
    **flags: Unpack[ChoiceFlags],
) -> GuardReport:
    """Start a job from its newest good checkpoint, and restart it.

    The newest checkpoint that passes is chosen as `latest --level content --wait` does it; its
    path replaces {} and is in FTCKPT_RESUME. A fresh start (without the words that hold {}) follows
    only if a marked root holds no checkpoint. While the command runs, signals are passed on, each
    new save is verified at low priority, and the last good one is pinned. A command that fails is
    restarted; a checkpoint that failed twice without a newer save is passed over. The command and
    everything that it starts end with the guard. ROOT/.ftckpt/guard.jsonl is the log.

    Returns:
        What was decided. Signals of this process are caught, so it runs in its main thread.

    Raises:
        MissingError: the root is not there, or not known to be one.
        RefusedError: another guard holds the root.
        UnavailableError, DeniedError: the root could not be read.
    """
    from ftckpt.alerting import AlertHook
    from ftckpt.guard.decisions import Limits, OnHang
    from ftckpt.guard.nodes import node_place
    from ftckpt.guard.notices import sources
    from ftckpt.guard.terms import GuardSettings
    from ftckpt.storage.local.writable import check_file

    from .guarded import GuardChoice, guarded

    on.report(target=root, path=None, step=None, restarts=0, command=words, decisions=[])
    for flag, file in (("--prometheus", prometheus), ("--iteration-file", iteration_file)):
        if file:
            check_file(flag, file)
    AlertHook(url=alert_url).require()
    patience = amounts.seconds(timeout, "--timeout")
    choice = GuardChoice(
        root=root, tiers=tuple(tier), level=chosen(CheckLevel, level, "--level"),
        timeout=patience, allow_missing_tier=allow_missing_tier, skip_unverified=skip_unverified,
        world=world, scratch=scratch, reader=reader, batch=batch, lr=lr,
        accumulation=accumulation, limit_rate=amounts.rate(limit_rate), flags=flags,
    )  # fmt: skip
    told_before = [
        amounts.seconds(left, "--notice-signal")
        for one in notice_signal
        if (left := one.partition("@")[2])
    ]
    settings = GuardSettings(
        limits=Limits(
            max_restarts,
            amounts.seconds(backoff, "--set backoff"),
            amounts.seconds(max_backoff, "--set max-backoff"),
            OnHang(chosen(HangPolicy, on_hang, "--on-hang").value),
        ),
        grace=amounts.seconds(grace, "--set grace"),
        patience=patience,
        every=amounts.seconds(every, "--every"),
        settled=amounts.seconds(settled, "--set settled"),
        max_age=None if max_age == "" else amounts.seconds(max_age, "--max-age"),
        save_signal=_signal_number(save_signal, "--save-signal"),
        notice_signals=[
            _signal_number(one.partition("@")[0], "--notice-signal") for one in notice_signal
        ],
        notice_seconds=min(told_before, default=None),
        sources=sources(notice, metadata_url),
        notice_every=amounts.seconds(notice_every, "--set notice-every"),
        to_group=signal_group,
        zero_is_done=zero_is_done,
        iteration_file=iteration_file,
        on_alert=on_alert,
        alert_url=alert_url,
        metrics=prometheus,
        output=on.output,
    )
    logs: list[GuardJournal] = []
    ended: Ended | None = None
    try:
        ended = guarded(
            words, choice, settings, wait_lock=amounts.seconds(wait_lock, "--set wait-lock"),
            no_lock=no_lock, node=node_place(os.environ, nodes, job),
            retry_suspected=retry_suspected, stores=stores, on=on, told=logs.append,
        )  # fmt: skip
    finally:
        events: list[dict[str, Any]] = [dict(event) for log in logs for event in log.own]
        starts = [event for event in events if event["event"] == "start"]
        last = starts[-1] if starts else {"path": None, "step": None}
        told: dict[str, Any] = {
            "path": last["path"],
            "step": last["step"],
            "restarts": ended.restarts if ended else max(0, len(starts) - 1),
            "decisions": events,
        }
        on.report(**told)
    return GuardReport(target=root, command=words, ended=ended, **told)


def _signal_number(name: str, flag: str) -> int:
    """Return the number of a signal: `USR1`, `SIGUSR1` or `10`.

    Raises:
        UsageError: there is none of that name.
    """
    text = name.strip().upper()
    try:
        if text.isdecimal():
            return int(signal.Signals(int(text)))
        return int(signal.Signals[text if text.startswith("SIG") else f"SIG{text}"])
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"{flag} {name!r} is not a signal", hint="USR1, USR2, TERM, HUP"
        ) from error
