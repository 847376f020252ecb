"""Choose the newest checkpoint of a root that passes, and explain why newer ones do not.

Newest means the step in the content. A name only decides which headers to read first in a large
root, and counts if the content shows no step. An older checkpoint is chosen only past damaged and
unfinished ones: an unreachable one might be good, so it stops the search. One with unsafe content
is passed over, too: a flipped bit can look hostile, and nothing of it was executed.

Resolve a pointer to its checkpoint, and to no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, Kind
from ftckpt.errors import (
    CorruptError,
    ExitCode,
    FtckptError,
    MissingError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
    UsageError,
    worst,
)
from ftckpt.findings import Finding, finding
from ftckpt.manifest.locate import WEIGHTS_ALONE, is_thinned
from ftckpt.reports import CODED, IF_ANY, IF_SOME, UNSAID
from ftckpt.storage.source import Source
from ftckpt.storage.suggestions import hint_for_name

from .candidates import WALKED_OVER, Walk, gone
from .fewer_files import lacking_files, warned
from .listing import open_part
from .neighbours import lacking
from .pointers import Pointer
from .roots import Candidate, Root
from .siblings import Looked
from .step_names import is_put_aside, says_other_step

Check = Callable[[Checkpoint, Root], tuple[ExitCode, str]]
Note = Callable[[str], None]


# Reasons that have a line each: a root may hold thousands of damaged checkpoints.
_MOST_NOTED = 50


@dataclass(frozen=True)
class Skipped:
    """A skipped newer checkpoint.

    Attributes:
        path: as a user would type it.
        step: by content, else by name; None without either.
        code: the reason, as an exit code.
        message: the reason, in words.
    """

    path: str
    step: int | None
    code: ExitCode = field(metadata=CODED)
    message: str


class PointerReport(NamedTuple):
    """A pointer compared with the root's content.

    Attributes:
        name: the file or link.
        says: its text.
        target: the path that it means, None if that does not exist.
        step: the step that it means, None if unknown.
        agrees: whether it means the chosen checkpoint; None if none was chosen.
    """

    name: str
    says: str
    target: str | None
    step: int | None
    agrees: bool | None


@dataclass(frozen=True)
class Selection:
    """The chosen checkpoint, or the reason for none.

    Attributes:
        code: OK, or the exit code of `latest`.
        message: one sentence.
        hint: the next action, or "".
        path: the chosen checkpoint as a user would type it.
        step: its step; None if unknown.
        skipped: the skipped newer ones, newest first; the last may have stopped the search.
        pointers: every pointer of the root.
        findings: names and pointers that disagree with the content.
        foreign: names in the root that are not checkpoints.
        pending: the skipped ones that are not committed: `--wait` waits for them.
    """

    code: ExitCode = field(metadata=UNSAID)
    message: str = field(metadata=UNSAID)
    hint: str = field(default="", metadata=UNSAID)
    path: str | None = None
    step: int | None = None
    format: str | None = None
    skipped: tuple[Skipped, ...] = ()
    pointers: tuple[PointerReport, ...] = ()
    findings: tuple[Finding, ...] = ()
    foreign: tuple[str, ...] = ()
    pending: tuple[Candidate, ...] = field(default=(), metadata=UNSAID)


@dataclass(frozen=True)
class TierReport:
    """What a tier had to give.

    Attributes:
        tier: as typed.
        away: whether it could not be read, so that it may hold a newer step.
        step: the newest step that its names and headers show; None where nothing does.
        code: why it is away or empty, as an exit code; OK for neither.
        message: why, in words.
    """

    tier: str
    away: bool
    step: int | None
    code: ExitCode = field(metadata=CODED)
    message: str


@dataclass(frozen=True, kw_only=True)
class LatestReport(Selection):
    """What `latest` answers.

    Attributes:
        target: the root, or the nearest tier.
        tiers: what each of several tiers had to give.
        remembered: the verdicts that stood for a check of what was chosen; None where none may.
    """

    target: str
    tiers: tuple[TierReport, ...] = field(default=(), metadata=IF_SOME)
    remembered: Sequence[Mapping[str, object]] | None = field(default=None, metadata=IF_ANY)


@dataclass(frozen=True)
class SelectionRules:
    """Limits of `select`.

    Attributes:
        step_at_most: the largest step that may be chosen.
        max_fallback: how many checkpoints may be skipped; None for any number.
        skip_unverified: skip those without the required evidence.
        stop_at_unsafe: choose none past one that is hostile or cannot be told from it.
        condition: returns what an open checkpoint lacks, or ""; those that lack something are
            skipped.
        passed_over: returns why an open checkpoint is not to be taken although it may be good,
            or ""; it is skipped as REFUSED.
        weights: whether one that gc has thinned will do: it holds the weights alone.
    """

    step_at_most: int | None = None
    max_fallback: int | None = None
    skip_unverified: bool = False
    stop_at_unsafe: bool = False
    condition: Callable[[Checkpoint], str] | None = None
    weights: bool = False
    passed_over: Callable[[Checkpoint], str] | None = None

    def lacking(self, checkpoint: Checkpoint) -> str:
        """Return what an open checkpoint lacks, or ""."""
        if not self.weights and is_thinned(checkpoint.source):
            return f"{WEIGHTS_ALONE} (latest --weights takes it)"
        return "" if self.condition is None else self.condition(checkpoint)

    def walks_over(self, code: ExitCode) -> bool:
        """Whether an older checkpoint may be chosen instead of one that ends with `code`."""
        return (
            code in WALKED_OVER
            or (code is ExitCode.UNVERIFIED and self.skip_unverified)
            or (code is ExitCode.UNSAFE and not self.stop_at_unsafe)
        )


def select(
    root: Root,
    check: Check,
    rules: SelectionRules,
    note: Note = lambda _: None,
    *,
    every: Sequence[Candidate] = (),
) -> Selection:
    """Choose the newest checkpoint of a root that passes.

    Args:
        root: to search.
        check: verifies an open checkpoint of the root; returns its exit code and a sentence. It may
            raise any FtckptError instead.
        rules: limits of the fallback.
        note: called with the reason for each skipped newer one.
        every: all candidates, where the root shows some of them alone.

    Returns:
        The choice, or the code and sentence of the failure; failures of single checkpoints and of
            their storage are part of the answer, not raised.
    """
    walk = Walk(root)
    skipped: list[Skipped] = []
    pending: list[Candidate] = []
    remarks: list[Finding] = []
    chosen: Looked | None = None
    end: tuple[ExitCode, str, str] | None = None
    more: Counter[ExitCode] = Counter()
    for looked in walk.newest_first(rules.step_at_most):
        path = root.url_of(looked.candidate)
        if is_put_aside(looked.candidate.path):  # these come last, and are no fallback
            if not skipped:
                aside = f"{path} is put aside, as its name says"
                skipped.append(Skipped(path, looked.known_step, ExitCode.UNVERIFIED, aside))
                note(f"skipped ({ExitCode.UNVERIFIED.name}): {aside}")
            continue
        remarks.clear()  # those on the chosen one count
        code, message, hint, lacks = _try(
            root, looked, check, rules, every or root.candidates, remarks
        )
        if code is ExitCode.OK:
            chosen = looked
            end = (code, message, hint)
            break
        skipped.append(Skipped(path, looked.known_step, code, message))
        if not (looked.unknown or lacks or rules.walks_over(code)):
            end = (code, _placed(path, message), hint or _flag(code))
            break
        if len(skipped) <= _MOST_NOTED:
            note(f"skipped ({code.name}): {_placed(path, message)}")
        else:
            more[code] += 1
        # Files of unknown layout are a save in flight only if no save was begun after them.
        if code is ExitCode.INCOMPLETE or (looked.unknown and len(skipped) == 1):
            pending.append(looked.candidate)
        if rules.max_fallback is not None and len(skipped) > rules.max_fallback:
            tried = f"newest {len(skipped)} do" if len(skipped) > 1 else "newest does"
            end = (
                worst(s.code for s in skipped),
                f"the {tried} not pass, and --max-fallback allows {rules.max_fallback}; "
                f"the last: {_placed(path, message)}",
                "",
            )
            break
    for code, number in more.items():
        note(f"skipped ({code.name}): {number} more (--json has them all)")
    if end is None:
        end = _nothing(root, walk, skipped, rules)
    pointers = tuple(_pointers(root, walk.looked, chosen))
    return Selection(
        *end,
        path=None if chosen is None else root.url_of(chosen.candidate),
        step=None if chosen is None else chosen.known_step,
        format=None if chosen is None or not chosen.child else chosen.child.part.format.name,
        skipped=tuple(skipped),
        pointers=pointers,
        findings=(*remarks, *_names(root, walk.looked), *_disagreements(root, pointers, chosen)),
        foreign=tuple(sorted([*root.foreign, *walk.foreign])),
        pending=tuple(pending),
    )


def _try(
    root: Root,
    looked: Looked,
    check: Check,
    rules: SelectionRules,
    every: Sequence[Candidate],
    remarks: list[Finding],
) -> tuple[ExitCode, str, str, bool]:
    """Check one candidate; the last item says whether it lacks what the user requires."""
    if looked.error is not None:
        return looked.error.exit_code, looked.error.message, looked.error.hint, False
    assert looked.child is not None
    source: Source | None = None
    try:
        torn = lacking(root, looked.child, looked.known_step, every)
        if torn is not None and torn.certain:
            return ExitCode.INCOMPLETE, torn.message, "", False
        # Opened again instead of kept: the headers of 64 checkpoints do not fit in memory.
        checkpoint = open_part(root.store, looked.child.part)
        source = checkpoint.source
        why = "" if rules.passed_over is None else rules.passed_over(checkpoint)
        if why:
            return ExitCode.REFUSED, f"{source.url} {why}", "", True
        torn = torn and torn.of(checkpoint)
        if torn is not None and torn.certain:
            return ExitCode.INCOMPLETE, torn.message, "", False
        remarks += [torn.finding] if torn is not None else []
        fewer = lacking_files(root, looked.child, looked.known_step, every, checkpoint)
        if fewer is not None and fewer.certain:
            return ExitCode.INCOMPLETE, fewer.message, "", False
        remarks += warned(checkpoint) if fewer is None else [fewer.finding]
        # Headers show what is lacking, before every byte is read.
        wanted = rules.lacking(checkpoint)
        if wanted:
            return ExitCode.UNVERIFIED, f"{source.url} {wanted}", "", True
        code, message = check(checkpoint, root)
        kinds = {info.kind for info in checkpoint.tensors.values()}
        moments = kinds & {Kind.EXP_AVG, Kind.EXP_AVG_SQ}
        if code is ExitCode.OK and moments and not kinds & {Kind.PARAM, Kind.MASTER}:
            alone = f"{source.url} holds an optimizer's state and no weights"
            return ExitCode.UNVERIFIED, alone, "", True
        return code, message, "", False
    except NotFoundError as absent:
        error = gone(root, looked.candidate, absent)
        return error.exit_code, error.message, error.hint, False
    except UnsafeError as refused:
        from ftckpt.manifest.altered import as_damage  # only after a failure

        found = as_damage(refused, source) if source is not None else refused
        return found.exit_code, found.message, found.hint, False
    except FtckptError as error:
        return error.exit_code, error.message, error.hint, False


def _flag(code: ExitCode) -> str:
    if code is ExitCode.UNVERIFIED:
        return "ftckpt seal records evidence; --skip-unverified walks over this one"
    if code is ExitCode.UNSAFE:
        return "look at it with ftckpt verify; without --stop-at-unsafe it is walked over"
    return "an older checkpoint is not taken while a newer one may be good"


def _nothing(
    root: Root, walk: Walk, skipped: Sequence[Skipped], rules: SelectionRules
) -> tuple[ExitCode, str, str]:
    """Return why nothing was chosen; NOT_FOUND only for a root that never held a checkpoint."""
    if not skipped:
        return _empty(root, walk, rules)
    code = worst(s.code for s in skipped)
    if code is ExitCode.NOT_FOUND:
        gone = skipped[0]
        hint = "ftckpt gc undelete restores what was dropped"
        return ExitCode.REFUSED, f"no checkpoint of {root.url} is left: {gone.message}", hint
    first = next(s for s in skipped if s.code is code)
    hint = _WAYS_OUT.get(code, "")
    return code, f"no checkpoint of {root.url} passes: {_placed(first.path, first.message)}", hint


def _empty(root: Root, walk: Walk, rules: SelectionRules) -> tuple[ExitCode, str, str]:
    """Explain a root without a checkpoint to try."""
    from .root_marker import absence, lost, not_understood

    limit = rules.step_at_most
    newer = [one.known_step for one in walk.looked if one.child is not None or one.error]
    newer += [c.step for c in root.candidates if limit is not None and (c.step or 0) > limit]
    if newer:  # 9 would start the run afresh beside them
        return (
            ExitCode.REFUSED,
            f"{root.url} holds no checkpoint of step {limit} or before, and newer ones",
            "raise --step-at-most; if a start from scratch is meant, use another root",
        )
    if walk.unsupported:
        one = walk.unsupported[0]
        reason = one.part.recognition.reason
        return (
            ExitCode.UNSUPPORTED,
            f"{root.url} holds no checkpoint that this version reads: "
            f"{root.url_of(one.candidate)} is {reason}",
            "ftckpt inspect shows what is known of it",
        )
    strange = not_understood(root)
    if strange is not None:  # 9 would start the run afresh beside it
        return strange.exit_code, strange.message, strange.hint
    evidence = lost(root)
    if evidence:
        return (
            ExitCode.CORRUPT,
            f"{root.url} holds no checkpoint any more: {evidence}",
            "find out what removed them; if a start from scratch is meant, use another root",
        )
    known, message, hint = absence(root)
    return (ExitCode.NOT_FOUND if known else ExitCode.MISSING), message, hint


_WAYS_OUT = {
    ExitCode.CORRUPT: "ftckpt repair mends one from a replica; ftckpt verify ROOT --all names the "
    "damage of each",
    ExitCode.INCOMPLETE: "--wait waits for a save in flight",
}


def _placed(path: str, message: str) -> str:
    """Add the path to a sentence unless it is already there."""
    return message if path in message else f"{path}: {message}"


def _names(root: Root, looked: Sequence[Looked]) -> Iterator[Finding]:
    for one in looked:
        said = one.candidate.step
        if one.step is not None and says_other_step(one.candidate.path, one.step):
            yield finding(
                "step-name",
                f"{root.url_of(one.candidate)} holds step {one.step}, not {said}",
                file=one.candidate.path,
            )


def _pointers(
    root: Root, looked: Sequence[Looked], chosen: Looked | None
) -> Iterator[PointerReport]:
    steps = {one.candidate.path: one.known_step for one in looked}
    for pointer in root.pointers:
        step = steps.get(pointer.target or "", pointer.step)
        agrees = None
        if chosen is not None:
            same = step is not None and step == chosen.known_step
            agrees = not pointer.dangling and (same or pointer.target == chosen.candidate.path)
        yield PointerReport(pointer.name, pointer.says, pointer.target, step, agrees)


def _disagreements(
    root: Root, pointers: Sequence[PointerReport], chosen: Looked | None
) -> Iterator[Finding]:
    dangling = {pointer.name for pointer in root.pointers if pointer.dangling}
    for pointer in pointers:
        says = f"{pointer.name} says {pointer.says!r}"
        if pointer.name in dangling:
            yield finding("pointer-dangling", f"{says}, which is not there", file=pointer.name)
        elif pointer.agrees is False and chosen is not None:
            yield finding(
                "pointer-disagrees",
                f"{says}, the newest that passes is {chosen.candidate.path}",
                file=pointer.name,
            )


def follow(root: Root, name: str, rules: SelectionRules) -> Root:
    """Return a root with only a pointer's target, and allowed fallbacks.

    With a `max_fallback` in `rules`, checkpoints older than the pointer's remain.

    Raises:
        MissingError: the root has no such pointer; that is not a first start.
        CorruptError: its target does not exist (`pointer-dangling`).
        UnsupportedError: its target is there, under a name that no checkpoint has.
        UsageError: older ones are allowed, and nothing shows which are.
    """
    pointer = next((one for one in root.pointers if one.name == name), None)
    if pointer is None:
        names = [one.name for one in root.pointers]
        hint = hint_for_name(name, names) or "ftckpt promote CHECKPOINT --pointer NAME makes one"
        raise MissingError(f"{root.url} has no pointer {name}", hint=hint)
    meant = tuple(c for c in root.candidates if _means(pointer, c))
    if not meant and pointer.no_candidate:
        raise UnsupportedError(
            f"{name} of {root.url} says {pointer.says!r}, which is there, and whose name is not a "
            "checkpoint's",
            hint="name it itself",
        )
    if not meant:
        raise CorruptError(
            f"{name} of {root.url} says {pointer.says!r}, which is not there",
            kind="pointer-dangling",
            file=name,
            hint="ftckpt promote points it at a checkpoint that passes",
        )
    if rules.max_fallback is None:
        return replace(root, candidates=meant)
    step = pointer.step
    if step is None:
        raise UsageError(
            f"{name} of {root.url} shows no step, so nothing says what is older than it",
            hint="leave --max-fallback out",
        )
    older = tuple(
        c for c in root.candidates if c not in meant and c.step is not None and c.step < step
    )
    return replace(root, candidates=meant + older)


def _means(pointer: Pointer, candidate: Candidate) -> bool:
    if candidate.path == pointer.target:
        return True
    same = candidate.step is not None and candidate.step == pointer.step
    return pointer.means_step and same and not candidate.staging
