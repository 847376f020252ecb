"""What `status`, `gc`, `sync` and a scrub share: who is told when something is to be looked at."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from ftckpt.errors import ExitCode
from ftckpt.operations.definition import option

if TYPE_CHECKING:
    from ftckpt.alerting import AlertHook, Condition
    from ftckpt.commands.cli.invocation import Invocation, Result


@dataclass(frozen=True, kw_only=True)
class AlertOptions:
    """Who is told."""

    TITLE: ClassVar[str] = "Alerts (each once, and again after it was over)"
    RARE: ClassVar[bool] = True

    on_alert: Annotated[str, option("COMMAND", "Run it for each alert, as JSON on its stdin.")] = ""
    alert_url: Annotated[str, option("URL", "Post each alert to this webhook as JSON.")] = ""
    alert_state: Annotated[
        str, option("FILE", "Where it is remembered what was told; else below HOME.")
    ] = ""

    def begin(self, invocation: Invocation, verb: str, *targets: str) -> Alerts:
        """Tell of what this run finds, and of its failure, when it has ended.

        Args:
            invocation: of the verb.
            verb: as alerts name it.
            targets: what it is about, as typed.

        Raises:
            UsageError: the webhook is not a URL; a place to remember in without a hook.
        """
        from ftckpt.errors import UsageError

        alerts = Alerts()
        if not (self.on_alert or self.alert_url):
            if self.alert_state:
                raise UsageError("--alert-state needs --on-alert or --alert-url")
            return alerts
        from ftckpt.alerting import AlertHook, state_file

        hook = AlertHook(self.on_alert, self.alert_url)
        hook.require()
        absolute = [t if "://" in t else os.path.abspath(t) for t in targets]
        state = self.alert_state or state_file(verb, " ".join(absolute))
        target = " ".join(targets)
        invocation.on_end = lambda result: alerts.conclude(
            invocation, result, hook, state, verb, target
        )
        return alerts


@dataclass
class Alerts:
    """What a run has found that somebody should look at.

    Attributes:
        looked: whether the run got as far as to look at all.
        ends: whether what was told before and is not found now is over.
    """

    looked: bool = False
    ends: bool = False
    _found: list[Condition] = field(default_factory=list)

    def add(self, kind: str, message: str, hint: str = "", about: Sequence[str] = ()) -> None:
        """Note something to look at."""
        from ftckpt.alerting import Condition

        self._found.append(Condition(kind, message, hint, tuple(about)))

    def complete(self, *, acted: bool = True) -> None:
        """Note that all was looked at: what was told before and is not found now is over.

        Args:
            acted: whether the run has tried what may fail. A dry run ends nothing.
        """
        self.looked, self.ends = True, acted

    def conclude(
        self,
        invocation: Invocation,
        result: Result,
        hook: AlertHook,
        state: str,
        verb: str,
        target: str,
    ) -> None:
        """Tell what is news; nothing of it changes how the run ends."""
        from ftckpt.alerting import AlertMemory, AlertSource, Condition, tell

        conditions = list(self._found)
        if not self.looked:
            if result.code >= ExitCode.INTERRUPTED or result.code is ExitCode.CLOSED_PIPE:
                return  # somebody has ended it
            kind = result.code.name.lower().replace("_", "-")
            conditions.append(Condition(kind, result.message, result.hint))
        tell(
            conditions,
            hook,
            AlertMemory(state, invocation.warn),
            AlertSource(verb, target, time.time()),
            complete=self.ends,
            warn=invocation.warn,
        )
