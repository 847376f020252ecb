"""What `latest` and `restart` share: the flags that choose a checkpoint, and how it is reported."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, cast

from ftckpt.operations.choosing import CheckLevel as CheckLevel
from ftckpt.operations.choosing import ChoiceFlags, remembered
from ftckpt.operations.definition import option, switch

from .invocation import Invocation

if TYPE_CHECKING:
    from ftckpt.discovery.checks import Checks
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
    def flags(self) -> ChoiceFlags:
        """The same as keywords."""
        return cast(ChoiceFlags, asdict(self))


def report_choice(invocation: Invocation, checks: Checks, found: Selection) -> None:
    """Report what was chosen and what was passed over; the verb names the field of the path."""
    invocation.report(
        format=found.format,
        step=found.step,
        skipped=found.skipped,
        pointers=found.pointers,
        findings=found.findings,
        foreign=found.foreign,
    )
    taken = remembered(checks, found)
    if taken is not None:
        invocation.report(remembered=taken)
