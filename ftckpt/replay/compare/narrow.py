"""Narrow down the first difference of a restart by repeating the runs.

If tensors were read every few steps, a difference may have begun between two readings: both runs
are repeated with tensors read in every step between. If the first difference is a tensor, both keep
its values at that step, so the answer names the element.
"""

from __future__ import annotations

from dataclasses import replace

from ftckpt.replay.processes import Settings
from ftckpt.replay.record.log import BY_KEY
from ftckpt.replay.run.folders import FailedRunError, Runs

from .logs import Comparison
from .verdict import Judgement, Verdict, judge, look

# Number of tensors whose values are kept: the first that differ, in the order of the log.
_TENSORS = 4


def look_closer(runs: Runs, judgement: Judgement, at: int, passes: int = 0) -> Judgement:
    """Return the judgement of a differing restart with the results of a closer look.

    Args:
        runs: of the trial.
        judgement: that state is missing.
        at: number of steps that the checkpoint has.
        passes: backward passes of the next step that it has too.
    """
    across = judgement.comparisons[-1]
    if across.equal:  # a counter alone is wrong
        return judgement
    if runs.trial.every > 1:
        judgement, across = _each_step(runs, judgement, across, at, passes)
    return _each_element(runs, judgement, across, at, passes)


def _each_step(
    runs: Runs, judgement: Judgement, across: Comparison, at: int, passes: int
) -> tuple[Judgement, Comparison]:
    """Read every step's tensors from the last equal step to the first that differs."""
    step = across.differences[0].step
    equal = [s for s, event, _ in across.grid if BY_KEY[event].heavy and s < step]
    if step == at + 1 or (equal and max(equal) == step - 1):
        return judgement, across
    since = max(equal, default=at + 1)
    try:
        logs = runs.closer("closer", at, Settings(last=step, every=1, dense_from=since),
                           passes)  # fmt: skip
    except FailedRunError as failure:
        return _noted(judgement, f"not looked at closer: {failure}"), across
    closer = judge(logs[:1], logs[1:], at + 1, step, idle=judgement.idle)
    if closer.verdict is not Verdict.STATE:
        note = "the run that looked closer did not show the difference again"
        return _noted(judgement, note), across
    seen = replace(
        judgement, sentence=closer.sentence, causes=closer.causes,
        comparisons=(*judgement.comparisons[:-1], *closer.comparisons, across),
    )  # fmt: skip
    return seen, closer.comparisons[-1]


def _each_element(
    runs: Runs, judgement: Judgement, across: Comparison, at: int, passes: int
) -> Judgement:
    """Find the first differing element, if the first difference is a tensor."""
    first = across.differences[0]
    items = tuple(
        i.name for i in first.items if _is_tensor(i.reference) and _is_tensor(i.other)
    )[:_TENSORS]  # fmt: skip
    if not items:
        return judgement
    settings = Settings(
        last=first.step, every=1, dense_from=first.step,
        look_step=first.step, look_event=first.event, look_items="\n".join(items),
    )  # fmt: skip
    try:
        runs.closer("closeup", at, settings, passes)
    except FailedRunError as failure:
        return _noted(judgement, f"no element was looked at: {failure}")
    logs = [runs.folder(f"{name}-closeup") / "log" for name in ("baseline", "restart")]
    return replace(
        judgement,
        closeups=look(logs[0], logs[1], first.step, first.rank, first.event, items),
    )


def _is_tensor(value: object) -> bool:
    """Whether an item is the digest of a tensor: `float32[3,2]:` and its sums."""
    return isinstance(value, str) and "]:" in value and not value.endswith(":not read")


def _noted(judgement: Judgement, note: str) -> Judgement:
    return replace(judgement, notes=(*judgement.notes, note))
