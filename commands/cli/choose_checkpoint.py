"""What `latest` and `restart` share: the flags that choose a checkpoint, and how it is reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from ftckpt.amounts import duration
from ftckpt.findings import CheckLevel as CheckLevel
from ftckpt.operations.definition import option, switch

from .invocation import Invocation
from .render import finding_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftckpt.discovery.checks import Checks
    from ftckpt.discovery.conditions import Part
    from ftckpt.discovery.roots import Root
    from ftckpt.discovery.select import Selection


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions:
    """Which checkpoint is taken, and which checks count."""

    TITLE: ClassVar[str] = "Which checkpoint is taken"

    require: Annotated[
        str,
        option(
            "PARTS",
            "Skip checkpoints without these parts of the training state: "
            "model,optimizer,scheduler,rng,dataloader,step,scaler.",
        ),
    ] = ""
    step_at_most: Annotated[int | None, option("STEP", "Take no step above this one.", min=0)] = (
        None
    )
    max_fallback: Annotated[
        int | None, option("N", "Walk back over at most N checkpoints.", min=0)
    ] = None
    reuse: Annotated[
        str, option("T", "Accept a content check of the last T if no file has changed.")
    ] = ""
    ledger: Annotated[
        str, option("DIR", "Where verdicts are remembered; else .ftckpt/ in the root.")
    ] = ""
    stop_at_unsafe: Annotated[
        bool, switch("--stop-at-unsafe", "Take nothing older than a hostile or ambiguous one.")
    ] = False

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the training state that `--require` names.

        Raises:
            UsageError: the part does not exist.
        """
        from ftckpt.discovery.conditions import parse_parts

        return parse_parts(self.require) if self.require else ()


def read_root(
    invocation: Invocation, path: str, *, create: bool = False, also: Sequence[str] | None = ()
) -> Root:
    """Read the root; with `create`, one without checkpoints is made or marked first.

    `also` are further places with files of its checkpoints.

    Raises:
        MissingError: it is not there.
        UsageError: it is a checkpoint, or one step of a root.
    """
    from ftckpt.api import choosing

    return choosing.read_root(path, invocation.stores, create=create, also=also or ())


def checks_of(invocation: Invocation, level: CheckLevel, choice: ChoiceOptions) -> Checks:
    """Return the check of each checkpoint.

    Raises:
        UsageError: `--reuse` is not a duration, or there is nothing that it could save.
    """
    from ftckpt import verification
    from ftckpt.api import choosing

    reuse = duration(choice.reuse, "--reuse") if choice.reuse else ""
    return choosing.checks_of(
        verification.Level(level.value), reuse, choice.ledger, invocation.stores,
        invocation.counter, invocation.warn,
    )  # fmt: skip


def report_choice(invocation: Invocation, found: Selection) -> None:
    """Report what was chosen and what was passed over; the verb names the field of the path."""
    invocation.report(
        format=found.format,
        step=found.step,
        skipped=[s._asdict() | {"code": int(s.code), "name": s.code.name} for s in found.skipped],
        pointers=found.pointers,
        findings=found.findings,
        foreign=found.foreign,
    )


def report_remembered(invocation: Invocation, checks: Checks, found: Selection) -> None:
    """Report which remembered verdicts stand for a check of the chosen checkpoint."""
    taken = [
        {"url": url, "verdict": one.url, "checked": one.verdict.checked, "by": one.verdict.by}
        | {"level": one.verdict.level, "evidence": one.verdict.evidence}
        for url, one in checks.taken.items()
        if found.path is not None and (url + "/").startswith(found.path + "/")
    ]
    if checks.reuse is not None:
        invocation.report(remembered=taken)


def warn_about(invocation: Invocation, found: Selection) -> None:
    """Print what disagrees; of names that say another step, only the chosen one's.

    Some trainers number saves or epochs, so that every name of a root disagrees.
    """
    names = 0
    for one in found.findings:
        chosen = found.path is not None and found.path.endswith("/" + (one.file or ""))
        if one.kind == "step-name" and not chosen:
            names += 1
        else:
            invocation.warn(finding_line(one))
    if names:
        invocation.say(f"note: {names} other names say another step than their content (--json)")
