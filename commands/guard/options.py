"""The options of `guard`, in groups, and what they mean for the core."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar

from ftckpt.amounts import duration
from ftckpt.commands.cli.bounds import RateOption
from ftckpt.commands.cli.choose_checkpoint import CheckLevel
from ftckpt.commands.cli.invocation import Invocation
from ftckpt.operations.definition import option, switch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftckpt.api.guarding import GuardChoice
    from ftckpt.guard.terms import GuardSettings


class HangPolicy(StrEnum):
    """What is done when saves stop coming; spelled here so that help needs no core."""

    WARN = "warn"
    KILL = "kill"
    EXIT = "exit"


@dataclass(frozen=True, kw_only=True)
class RestartOptions:
    """How the command is restarted."""

    TITLE: ClassVar[str] = "Restarts"

    max_restarts: Annotated[
        int, option("N", "Restart a command that fails at most N times.", min=0)
    ] = 3
    backoff: Annotated[
        str, option("T", "Before the first restart; doubled without a new save.")
    ] = "10s"
    max_backoff: Annotated[str, option("T", "Wait no longer than this.")] = "10m"
    grace: Annotated[str, option("T", "Between SIGTERM to the command and SIGKILL.")] = "30s"
    signal_group: Annotated[
        bool, switch("--signal-group", "Pass signals on to the whole process group.")
    ] = False
    zero_is_done: Annotated[
        bool, switch("--zero-is-done", "0 after a notice is the end of the training, not 75.")
    ] = False
    retry_suspected: Annotated[
        bool, switch("--retry-suspected", "Forget which checkpoints failed twice before.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class NoticeOptions:
    """How the guard hears of a preemption, and what it does."""

    TITLE: ClassVar[str] = "Preemption"

    save_signal: Annotated[str, option("NAME", "What asks the trainer to save.")] = "USR1"
    notice_signal: Annotated[
        list[str] | None, option("NAME", "A signal that announces a preemption (repeatable).")
    ] = None
    notice_time: Annotated[
        str, option("T", "How long such a signal leaves: --signal=USR1@300.")
    ] = ""
    notices: Annotated[str, option("CLOUDS", "Ask metadata services: aws,gcp,azure.")] = ""
    notice: Annotated[str, option("COMMAND", "Ask this: it ends with 0 if there is a notice.")] = ""
    notice_every: Annotated[str, option("T", "How often both are asked.")] = "5s"
    metadata_url: Annotated[str, option("URL", "", hidden=True)] = ""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """How the running command is watched."""

    TITLE: ClassVar[str] = "While it runs"

    every: Annotated[str, option("T", "How often new saves are looked for.")] = "15s"
    settled: Annotated[str, option("T", "Verify a save that does not pass again after T.")] = "30s"
    limit_rate: RateOption = ""
    max_age: Annotated[str, option("T", "A newest save of this age is a hang (3 intervals).")] = ""
    on_hang: Annotated[HangPolicy, option("", "Warn; kill and restart; or end with 75.")] = (
        HangPolicy.WARN
    )
    on_alert: Annotated[str, option("COMMAND", "Run for hangs, damage, restarts, notices.")] = ""
    alert_url: Annotated[str, option("URL", "Post each alert to this webhook as JSON.")] = ""
    prometheus: Annotated[str, option("FILE", "Write metrics for node_exporter.")] = ""
    iteration_file: Annotated[str, option("FILE", "Step of the newest save, for ft_launcher.")] = ""


@dataclass(frozen=True, kw_only=True)
class WorldOptions:
    """Which job the checkpoint is for."""

    TITLE: ClassVar[str] = "Another number of ranks"

    reshard_to_world: Annotated[
        int | None, option("N", "Reshard for N ranks if it must be.", min=1)
    ] = None
    scratch: Annotated[str, option("DIR", "Where to.")] = ""
    reader: Annotated[
        bool, switch("--reader", "The job loads with ftckpt.torch.Reader: reshard nothing.")
    ] = False
    batch: Annotated[int | None, option("N", "Global batch so far, for advice.", min=1)] = None
    lr: Annotated[float | None, option("X", "Learning rate so far, for advice.")] = None
    accumulation: Annotated[int, option("N", "Passes that make one step, so far.", min=1)] = 1


def choice_of(
    invocation: Invocation,
    root: str,
    tiers: Sequence[str],
    verify: CheckLevel,
    timeout: str,
) -> GuardChoice:
    """Return which checkpoint is taken."""
    from ftckpt.api.guarding import GuardChoice
    from ftckpt.verification import Level

    world = invocation.options(WorldOptions)
    return GuardChoice(
        root=root,
        tiers=tuple(tiers),
        verify=Level(verify.value),
        timeout=duration(timeout, "--timeout"),
        world=world.reshard_to_world,
        scratch=world.scratch,
        reader=world.reader,
        batch=world.batch,
        lr=world.lr,
        accumulation=world.accumulation,
        limit_rate=invocation.options(WatchOptions).limit_rate,
    )


def settings_of(invocation: Invocation, patience: float) -> GuardSettings:
    """Return how the command is watched and restarted; `patience`: seconds for a store."""
    from ftckpt.api.guarding import signal_number
    from ftckpt.guard.decisions import Limits, OnHang
    from ftckpt.guard.notices import sources
    from ftckpt.guard.terms import GuardSettings

    again = invocation.options(RestartOptions)
    notice = invocation.options(NoticeOptions)
    watch = invocation.options(WatchOptions)
    clouds = [name.strip() for name in notice.notices.split(",") if name.strip()]
    limits = Limits(
        again.max_restarts,
        duration(again.backoff, "--backoff"),
        duration(again.max_backoff, "--max-backoff"),
        OnHang(watch.on_hang.value),
    )
    return GuardSettings(
        limits=limits,
        grace=duration(again.grace, "--grace"),
        patience=patience,
        every=duration(watch.every, "--every"),
        settled=duration(watch.settled, "--settled"),
        max_age=duration(watch.max_age, "--max-age") if watch.max_age else None,
        save_signal=signal_number(notice.save_signal, "--save-signal"),
        notice_signals=[
            signal_number(name, "--notice-signal") for name in notice.notice_signal or ()
        ],
        notice_seconds=(
            duration(notice.notice_time, "--notice-time") if notice.notice_time else None
        ),
        sources=sources(clouds, notice.notice, notice.metadata_url),
        notice_every=duration(notice.notice_every, "--notice-every"),
        to_group=again.signal_group,
        zero_is_done=again.zero_is_done,
        iteration_file=watch.iteration_file,
        on_alert=watch.on_alert,
        alert_url=_webhook(watch.alert_url),
        metrics=watch.prometheus,
        # Under --json stdout holds one document and nothing of the command's.
        output=sys.stderr.fileno() if invocation.json else None,
    )


def _webhook(url: str) -> str:
    from ftckpt.alerting import AlertHook

    AlertHook(url=url).require()
    return url
