"""Find a checkpoint's step from the counters in its content.

A name (`step-1000`) is a hint, and a modification time is not even that, because copies reset it.
Counters in the content are evidence. There are three clocks: the trainer's iteration, the
optimizer's own step count, the scheduler's. Equal clocks are compared. The iteration and the
optimizer's count may drift apart (steps that a loss scale skipped, a new optimizer, several updates
an iteration), so that where they differ, a note says so. Only the trainer's iteration is the step
of a save: a new optimizer counts from 0, and its count would make an old save the newest. Where a
trainer records none, the name may say the step (`ftckpt.discovery.siblings`); else it is unknown.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from ftckpt.findings import Finding, finding, listed
from ftckpt.storage.state_files import numbers_in


class StepRole(StrEnum):
    """The clock of a step-like scalar; only equal clocks are compared."""

    ITERATION = "iteration"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    NAMED = "named"  # the trainer's, or a setting of the run: the name of the save decides


# Of a file's counters the first few are read: an optimizer has one a parameter.
READ_FIRST = {
    role: place
    for place, role in enumerate(
        (StepRole.ITERATION, StepRole.NAMED, StepRole.SCHEDULER, StepRole.OPTIMIZER)
    )
}


class Scalar(NamedTuple):
    """A step-like number found in a file: evidence of which save wrote that file."""

    file: str
    name: str
    value: float
    role: StepRole


# Objects inside objects of a trainer's record: OneTrainer's `train_progress.global_step`.
_DEPTH = 3
# Counters read per file: enough for two to be independent, few enough to be cheap.
SCALARS_A_FILE = 8


class Allowance:
    """Limits the counters that are read of each file."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: Counter[str] = Counter()

    def take(self, file: str) -> bool:
        """Count one of a file; return False if its share is used up."""
        self._taken[file] += 1
        return self._taken[file] <= self._limit


_ITERATION = re.compile(
    r"(?:^|[./:])(?:global_steps?|iteration|iter_num|current_step|num_updates)$"
    # DeePMD-kit `training.py` (`train_infos`); ai-toolkit `BaseSDTrainProcess.py` (`training_info`)
    r"|(?:^|[./:])(?:train_state|trainer_state|train_status|train_infos|training_info|state"
    r"|progress)[./:]step$"
    # icefall `checkpoint.py`; torchtune `recipe_state`; MMF
    r"|(?:^|[./:])(?:batch_idx_train|steps_run|current_iteration)$"
    r"|(?:^|[./:])meta[./:]iter$"  # mmengine `runner.py`
    r"|(?:^|[./:])timestamp[./:](?:Timestamp[./:])?batch$"  # composer `core/time.py`
    # many trainers; HiFi-GAN (`steps`), BasicSR (`iter`), StyleTTS2 (`iters`)
    r"|^(?:step|steps|global_step|iteration|iter|iters|cur_step|training_step)$"
)
# Counts of the trainer's at the top, under words that it may also use for a setting, or for what
# another clock counts: Sample Factory `learner.py` (`train_step`, `env_steps`), metta
# (`agent_step`), Stable-Baselines (`num_timesteps`). The own one of a trainer comes first.
_OF_TRAINING = re.compile(r"(?:global_)?train(?:ing)?_steps?|completed_steps|update_steps?|itr")
_OF_ANYTHING = re.compile(
    r"(?:total_)?(?:env|agent|policy|gradient|learner)_steps?|(?:total_|num_)?(?:time)?steps?"
    r"|n_steps|n_iter|num_iters|updates?"
)
# What composer calls an iteration is a part of the training that the user defines.
_NO_ITERATION = re.compile(r"(?:^|[./:])timestamp[./:](?:Timestamp[./:])?iteration$")
_OPTIMIZER = re.compile(r"(?:^|[./:])(?:step|common_step)$")
# What differs in the names of the files that the ranks of one job write.
_RANK = re.compile(r"rank[_-]?\d+(?:[_-]\d+)*(?!\d)", re.ASCII)
# What the name of a counter begins with where its file is one of several of a checkpoint.
_LABEL = re.compile(r"^(?:\w+[_-])?rank[_-]?\d+[./:]", re.ASCII)
_SCHEDULER = re.compile(r"(?:sched|^scheduler).*[./:]last_epoch$")
# Counters that a trainer keeps at the top of a rank's file: one number for all ranks.
_OF_ALL_RANKS = (
    r"(?:(?:extra_state|train(?:er)?_state|train_status)[./:])?"
    r"(?:global_steps?|iteration|iter_num|current_step|num_updates|step)"
    r"|\w*sched\w*(?:[./:]\d+)?[./:](?:last_epoch|num_steps)"
)
# What each rank counts for itself.
_OF_ONE_RANK = r"(?i)data|loader|sampler|iterator|buffer|replay|rollout|(?<![a-z])envs?(?![a-z])"


def role_of(name: str, *, optimizer: bool = False) -> StepRole | None:
    """Return the clock of a scalar with this name, or None if it is not a step counter.

    `name` is a dotted path in the trainer's state; `optimizer` says that it lies in the
    optimizer's.
    """
    if optimizer:
        return StepRole.OPTIMIZER if _OPTIMIZER.search(name) else None
    if _SCHEDULER.search(name):
        return StepRole.SCHEDULER
    if _ITERATION.search(name) and not _NO_ITERATION.search(name):
        return StepRole.ITERATION
    if _OF_TRAINING.fullmatch(name) or _OF_ANYTHING.fullmatch(name):
        return StepRole.NAMED
    return None


def counters_in(record: Any) -> Iterator[tuple[str, int]]:
    """Yield the trainer's counters in a small record that was read, the outermost first.

    Args:
        record: objects of JSON, as deep as `_DEPTH`; lists hold logs, and no counters.
    """
    level: list[tuple[str, Any]] = [("", record)]
    for _ in range(_DEPTH):
        inner = [
            (f"{at}.{key}" if at else str(key), value)
            for at, held in level
            if isinstance(held, Mapping)
            for key, value in held.items()
        ]
        for name, value in inner:
            whole = type(value) is int and is_counter(value)
            if whole and role_of(name) is StepRole.ITERATION:
                yield name, value
        level = inner


def is_counter(value: Any) -> bool:
    """Whether a stored value can be a count of steps.

    NaN and numbers beyond any training are damage or hostile, and would break arithmetic.
    """
    return type(value) in (int, float) and 0 <= value < 1 << 53


def step_of(scalars: Iterable[Scalar]) -> int | None:
    """Return the step that most of the trainer's own counters show; None without one."""
    return _most_shown(scalars, StepRole.ITERATION)


def step_of_save(scalars: Collection[Scalar], name: str) -> int | None:
    """Return the step of a save, by the trainer's counters in it (see `step_of`).

    Without one, a counter of an unsure name shows it where the name of the save bears it out. A
    trainer's own count is believed under a name without a number, too (`latest.pth`).

    Args:
        scalars: of the checkpoint.
        name: of its folder or file.
    """
    sure = step_of(scalars)
    if sure is not None:
        return sure
    told = [scalar for scalar in scalars if scalar.role is StepRole.NAMED]
    numbers = set(numbers_in(name)) if told else set[int]()
    for known in (_OF_TRAINING, _OF_ANYTHING):
        values = {int(one.value) for one in told if known.fullmatch(one.name)}
        borne_out = values & numbers
        if len(borne_out) == 1:
            return borne_out.pop()
        if len(values) == 1 and not numbers and known is _OF_TRAINING:
            return values.pop()
    return None


def optimizer_count(scalars: Iterable[Scalar]) -> int | None:
    """Return the updates that the optimizer counts for itself; a save has no step by it."""
    return _most_shown(scalars, StepRole.OPTIMIZER)


def _most_shown(scalars: Iterable[Scalar], role: StepRole) -> int | None:
    values = Counter(scalar.value for scalar in scalars if scalar.role is role)
    return int(_majority(values)) if values else None


def mixed_steps(scalars: Iterable[Scalar], files: Iterable[str]) -> Iterator[Finding]:
    """Yield a finding for each file whose counters disagree with the other files.

    Two independent counters of one file with one value, and no counter of the same clock that
    agrees with the rest, are a verdict (`mixed-steps`). Less is a note (`step-disagrees`):
    parameters that were frozen for a while and unused experts have counts of their own. The
    trainer's and the scheduler's counts are one for all ranks: files that differ in nothing but the
    rank in their names and contradict each other in one of them are of two saves, unless another
    iteration agrees. What a rank counts for itself (data, environments) is left out there. Files
    (`files` are all data files) without a counter share one note.
    """
    by_file: dict[str, list[Scalar]] = defaultdict(list)
    for scalar in scalars:
        if scalar.role is not StepRole.NAMED:
            by_file[scalar.file].append(scalar)
    torn = dict(_torn_series(by_file))
    yield from torn.values()
    # One vote per file and clock, so that a file with many counters cannot outvote the rest.
    votes: dict[StepRole, Counter[float]] = defaultdict(Counter)
    for own in (own for file, own in by_file.items() if file not in torn):
        for role, value in {(s.role, s.value) for s in own}:
            votes[role][value] += 1
    for file, own in sorted(by_file.items()):
        odd = [s for s in own if file not in torn and _outvoted(s, own, votes[s.role])]
        if not odd:
            continue
        first = odd[0]
        majority = _majority(_elsewhere(first, own, votes[first.role]))
        said = f"{file} holds {first.name} = {first.value:g}, the other files say {majority:g}"
        if _is_verdict(odd, own):
            yield finding(
                "mixed-steps",
                f"{said}; {len(odd)} counters agree: the file is of another save",
                file=file,
                tensor=first.name,
            )
        else:
            yield finding(
                "step-disagrees",
                f"{said}; one counter alone is not a verdict",
                file=file,
                tensor=first.name,
            )
    yield from _apart(votes, by_file)
    silent = sorted(set(files) - set(by_file))
    if silent:
        yield finding(
            "step-unknown",
            f"cannot tell which step {listed(silent, 3)} {'are' if silent[1:] else 'is'} of: "
            "nothing inside is known as a step counter",
            file=silent[0] if len(silent) == 1 else None,
        )


def _torn_series(by_file: Mapping[str, Sequence[Scalar]]) -> Iterator[tuple[str, Finding]]:
    """Yield the files of ranks whose trainer or scheduler is at another step than most ranks'.

    Where as many files say one step as another, none of them is accused alone.
    """
    series: dict[tuple[str, str], dict[float, list[str]]] = defaultdict(lambda: defaultdict(list))
    for file, own in by_file.items():
        alike, ranks = _RANK.subn("*", file)
        for scalar in own if ranks else ():
            if _is_of_all_ranks(scalar):
                series[alike, _unlabelled(scalar.name)][scalar.value].append(file)
    for (_, name), values in series.items():
        if len(values) == 1:
            continue
        most = max(values, key=lambda value: (len(values[value]), value))
        shared = _iterations(by_file, values[most])
        even = sum(len(held) == len(values[most]) for held in values.values()) > 1
        for value, held in values.items():
            for file in held if value != most else ():
                if shared & _iterations(by_file, [file]):
                    continue  # so it is of the same save, and counts this one for itself
                others = sorted(values[most])
                what = (
                    f"{file} holds {name} = {value:g}, {listed(others, 3)}"
                    f" {'say' if others[1:] else 'says'} {most:g}: all ranks count the same, so"
                    " they are of two saves"
                )
                where = None if even else file
                yield file, finding("mixed-steps", what, file=where, tensor=name)


def _unlabelled(name: str) -> str:
    """Return a counter's name without the rank of its file: `rank0.global_step`."""
    return _LABEL.sub("", name)


def _is_of_all_ranks(scalar: Scalar) -> bool:
    """Whether the trainer counts the same in every rank's file of this kind."""
    return (
        scalar.role is not StepRole.OPTIMIZER
        and re.fullmatch(_OF_ALL_RANKS, _unlabelled(scalar.name)) is not None
        and re.search(_OF_ONE_RANK, f"{scalar.file}/{scalar.name}") is None
    )


def _iterations(
    by_file: Mapping[str, Sequence[Scalar]], files: Sequence[str]
) -> set[tuple[str, float]]:
    """Return the iterations that most of these files hold, with their names."""
    held = Counter(
        one
        for file in files
        for one in {
            (_unlabelled(s.name), s.value) for s in by_file[file] if s.role is StepRole.ITERATION
        }
    )
    return {one for one, count in held.items() if 2 * count > len(files)}


def _apart(
    votes: Mapping[StepRole, Counter[float]], by_file: Mapping[str, Sequence[Scalar]]
) -> Iterator[Finding]:
    """Yield a note where the optimizer's count is another one than the trainer's."""
    if not votes[StepRole.ITERATION] or not votes[StepRole.OPTIMIZER]:
        return
    said = {role: _majority(votes[role]) for role in (StepRole.ITERATION, StepRole.OPTIMIZER)}
    if len(set(said.values())) == 1:
        return
    shown = {
        role: min(f for f, own in by_file.items() if any(s[2:] == (value, role) for s in own))
        for role, value in said.items()
    }
    iteration, optimizer = shown.values()
    if iteration != optimizer:
        yield finding(
            "step-disagrees",
            f"{iteration} is at step {said[StepRole.ITERATION]:g}, the optimizer in {optimizer} has"
            f" made {said[StepRole.OPTIMIZER]:g}: skipped steps, a new optimizer, several updates a"
            " step, or files of two saves",
            file=iteration,
        )


def _is_verdict(odd: list[Scalar], own: list[Scalar]) -> bool:
    """Whether the disagreeing counters of one file can only come from another save."""
    if len({s.name for s in odd}) < 2:
        return False
    for role in {s.role for s in odd}:
        if len({s.value for s in odd if s.role is role}) > 1:
            return False
        if any(s.role is role and s not in odd for s in own):
            return False
    return True


def _majority(votes: Counter[float]) -> float:
    return max(votes.items(), key=lambda item: (item[1], item[0]))[0]


def _elsewhere(scalar: Scalar, own: Iterable[Scalar], votes: Counter[float]) -> Counter[float]:
    """Return the votes of the other files for the clock of a scalar; `own` is of its file."""
    others = votes.copy()
    for value in {s.value for s in own if s.role is scalar.role}:
        others[value] -= 1
    return +others


def _outvoted(scalar: Scalar, own: Iterable[Scalar], votes: Counter[float]) -> bool:
    """Whether the other files with this clock mostly show another value."""
    others = _elsewhere(scalar, own, votes)
    if not others:
        return False
    best = _majority(others)
    return best != scalar.value and others[best] > others[scalar.value]
