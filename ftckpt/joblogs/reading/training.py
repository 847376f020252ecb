"""The lines of trainers' logs that show progress: steps, saves, starts and ends.

Megatron-LM, Megatron-DeepSpeed   iteration 10/ 1000 | ... per iteration (ms): 9.6 |
torchtitan                        step: 530  loss:  5.9866 ... tps: 829
DeepSpeed                         step=10, skipped=0, lr=[...]
tqdm (Trainer, Lightning)         7/50 [1:14:33<7:38:27, 639.71s/it]
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ftckpt.joblogs.entries import LogEntryKind

_ANSI = re.compile(r"\x1b\[[0-9;]{0,16}m")
_MEGATRON = re.compile(
    r"iteration\s+(?P<step>\d{1,12})/\s*(?:\d+|infinity) \|(?:.{0,400}?elapsed time per iteration"
    r" \(ms\): (?P<ms>\d{1,12}(?:\.\d{1,6})?))?"
)
_TITAN = re.compile(r"(?<!\w )\bstep:\s*(?P<step>\d{1,12})\s+loss:")
_DEEPSPEED = re.compile(r"\bstep=(?P<step>\d{1,12}), skipped=")
_TQDM = re.compile(
    r"\b(?P<step>\d{1,12})/\d{1,12} \[[\d:]{4,12}<[\d:?]{1,12}, +(?P<each>\d{1,9}(?:\.\d{1,4})?)"
    r"(?P<unit>s/it|it/s)"
)
_SAVED = re.compile(
    r"successfully saved checkpoint from iteration\s+(?P<step>\d{1,12})|[Ss]aved checkpoint"
    r"|Finished saving the checkpoint.{0,60}?in (?P<seconds>\d{1,7}(?:\.\d{1,6})?) seconds"
)
_LOADED = re.compile(
    r"successfully loaded checkpoint from .{0,400}?at iteration (?P<step>\d{1,12})"
)
_STARTED = re.compile(
    r"Rendezvous complete for workers|\[before the start of training step\]"
    r"|Training starts at step (?P<step>\d{1,12})"
)
_ENDED = re.compile(
    r"\[after training is done\]|[Tt]raining completed|\[exiting program (?:at|after)"
)


class TrainingLine(NamedTuple):
    """What a line of a trainer's log shows.

    Attributes:
        kind: STEP, SAVE, START or END.
        step: its number.
        seconds: of a step, or of a save.
        average: whether `seconds` is the mean of all steps since the last such line.
        bar: whether it is a progress bar, whose count begins anew with each epoch or evaluation.
    """

    kind: LogEntryKind
    step: int | None = None
    seconds: float | None = None
    average: bool = False
    bar: bool = False


def may_show(line: bytes) -> bool:
    """Return whether a line has a word of those that show progress; far cheaper than to know."""
    return (
        b"tep" in line
        or b"teration" in line
        or b"heckpoint" in line
        or b"s/it" in line
        or b"it/s" in line
        or b"raining" in line
        or b"endezvous" in line
        or b"exiting program" in line
    )


def training_line(text: str) -> TrainingLine | None:
    """Return what a line shows of the training; None if it shows nothing."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "iteration" in text and (match := _MEGATRON.search(text)):
        seconds = float(match["ms"]) / 1000 if match["ms"] else None
        return TrainingLine(LogEntryKind.STEP, int(match["step"]), seconds, average=True)
    if "step:" in text and (match := _TITAN.search(text)):
        return TrainingLine(LogEntryKind.STEP, int(match["step"]))
    if "step=" in text and (match := _DEEPSPEED.search(text)):
        return TrainingLine(LogEntryKind.STEP, int(match["step"]))
    if match := _STARTED.search(text) or _LOADED.search(text):
        step = match.groupdict().get("step")
        return TrainingLine(LogEntryKind.START, None if step is None else int(step))
    if "heckpoint" in text and (match := _SAVED.search(text)):
        step, seconds_of = match["step"], match["seconds"]
        return TrainingLine(
            LogEntryKind.SAVE,
            None if step is None else int(step),
            None if seconds_of is None else float(seconds_of),
        )
    if _ENDED.search(text):
        return TrainingLine(LogEntryKind.END)
    if ("s/it" in text or "it/s" in text) and (match := _TQDM.search(text)):
        each = float(match["each"])
        if match["unit"] == "it/s":
            each = 1 / each if each else 0.0
        return TrainingLine(LogEntryKind.STEP, int(match["step"]), each or None, bar=True)
    return None
