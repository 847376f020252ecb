"""What a plan was made from: remarks for its reader, numbers for JSON, measurements to fill in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ftckpt.errors import UsageError
from ftckpt.planning import Remedy, quantities


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of a run, for whatever the options leave out; None for what was not.

    Attributes:
        source: what was measured.
        save: seconds that training waited, or at least waited, for a save.
        snapshot: seconds that it waited for a snapshot.
        flush: seconds that writing took in the background.
        nbytes: size of a checkpoint.
        detect: seconds until a failure was noticed.
        restart: seconds until training went on.
        step: seconds of a training step.
        failures: that were counted.
        exposed: whether their time is only that in which the job could fail, not the wall clock's.
        interval: seconds of work between two saves, as it is now.
        components: the counted failures by what failed; empty where the source does not say it.
        lemons: nodes that fail more often than chance explains: their failures, and those of a mean
            node.
        whole_recovery: whether `restart` was measured from the failure, detection included.
        dispersion: by how much the failures scatter more than independent ones would; >= 1.
    """

    source: str
    save: float | None = None
    snapshot: float | None = None
    flush: float | None = None
    nbytes: float | None = None
    detect: float | None = None
    restart: float | None = None
    step: float | None = None
    failures: quantities.ObservedFailures | None = None
    exposed: bool = False
    interval: float | None = None
    components: Mapping[str, int] = field(default_factory=dict)
    lemons: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    whole_recovery: bool = False
    dispersion: float = 1.0


@dataclass
class Notes:
    """Collected while options are read.

    Attributes:
        measured: of a run; empty where nothing was.
        remarks: sentences about what was taken from where.
        inputs: every number that the plan rests on, in seconds, bytes and fractions.
        remedies: further improvements to be planned.
    """

    measured: Measured = field(default_factory=lambda: Measured(source=""))
    remarks: list[str] = field(default_factory=list)
    inputs: dict[str, Any] = field(default_factory=dict)
    remedies: list[Remedy] = field(default_factory=list)


def positive(text: str, flag: str) -> float:
    """Return a duration above zero in seconds.

    Raises:
        UsageError: it is none.
    """
    seconds = quantities.duration(text, flag)
    if not seconds > 0:
        raise UsageError(f"{flag} {text}: this must be above zero")
    return seconds
