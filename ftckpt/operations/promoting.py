"""What the pointers of a root say: `promote`."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, NamedTuple

from ftckpt.errors import ExitCode, RefusedError, UsageError
from ftckpt.findings import CheckLevel, Level
from ftckpt.observer import SILENT, Observer
from ftckpt.reports import UNSAID
from ftckpt.storage import StoreOptions
from ftckpt.workers import Work

from .definition import argument, operation, option, switch
from .opening import STORES, Jobs, Memory, Rate, chosen

if TYPE_CHECKING:
    from ftckpt.discovery.promotion import PointerMove
    from ftckpt.discovery.roots import Child, Root
    from ftckpt.verification import VerifyReport


class PointerSaid(NamedTuple):
    """A pointer of a root.

    Attributes:
        name: in the root.
        before: what it said; None where it was not there.
        after: what it says, or would say.
        moved: whether it was moved now.
    """

    name: str
    before: str | None
    after: str
    moved: bool


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """What pointers say.

    Attributes:
        url: the checkpoint that they point to.
        step: its step; None where nothing shows it.
        moves: each pointer, with what it said and says; moved where it `changes`.
        reports: of its check; none for a dry run.
        dry_run: whether nothing was moved.
    """

    SAID = ("pointers",)

    url: str = field(metadata=UNSAID)
    step: int | None
    moves: Sequence[PointerMove] = field(metadata=UNSAID)
    reports: Sequence[VerifyReport] = field(metadata=UNSAID)
    dry_run: bool

    @property
    def pointers(self) -> list[PointerSaid]:
        """What each pointer said and says."""
        return [
            PointerSaid(one.name, one.before, one.after, one.changes and not self.dry_run)
            for one in self.moves
        ]

    @property
    def code(self) -> ExitCode:
        """Of the check."""
        return self.reports[-1].code if self.reports else ExitCode.OK

    @property
    def message(self) -> str:
        """Why no pointer was moved, or ""."""
        failed = self.code is not ExitCode.OK
        return f"{self.url} does not pass: {self.reports[-1].message}" if failed else ""

    @property
    def reported(self) -> bool:
        """Whether the document has all of it: no pointer is told where the check failed."""
        return self.code is not ExitCode.OK


@operation(
    examples=(
        (
            "ftckpt promote /ckpt/run7/step-1000",
            "verify every byte, then move the root's pointers",
        ),
        (
            "ftckpt promote /ckpt/run7@latest --pointer last-known-good --dry-run",
            "show what would be moved",
        ),
        (
            'ftckpt promote "$ROOT@latest" --pointer last-known-good && '
            'ftckpt latest "$ROOT" --pointer last-known-good',
            "a pointer of ftckpt's own, which no trainer moves",
        ),
        (
            "ftckpt promote s3://run7/ckpt@900 --pointer latest --backwards",
            "go back to before a loss spike, by one conditional PUT",
        ),
    ),
    codes={
        ExitCode.OK: "every pointer says the checkpoint, which passed",
        ExitCode.CORRUPT: "the checkpoint is damaged; no pointer was moved",
        ExitCode.INCOMPLETE: "the checkpoint is not committed; no pointer was moved",
        ExitCode.UNVERIFIED: "it has no evidence for --level content: ftckpt seal it after the"
        " save",
        ExitCode.UNSAFE: "the checkpoint is hostile or ambiguous; no pointer was moved",
        ExitCode.REFUSED: "a pointer says a later step (--backwards), or was changed meanwhile",
        ExitCode.NOT_FOUND: "no such checkpoint",
        ExitCode.UNAVAILABLE: "",
        ExitCode.DENIED: "the root cannot be written",
        ExitCode.NO_RESOURCE: "",
        ExitCode.UNSUPPORTED: "",
    },
    everyday=("--pointer", "--level", "--backwards", "--dry-run"),
)
def promote(
    checkpoint: Annotated[str, argument("CHECKPOINT", "A checkpoint, ROOT@STEP or ROOT@latest.")],
    *,
    pointer: Annotated[
        Sequence[str],
        option("NAME", "latest, a tracker, last-known-good, or a link that is there. Repeatable."),
    ] = (),
    level: Annotated[
        CheckLevel | str, option("", "Check names and sizes, every byte, or the numbers too.")
    ] = CheckLevel.CONTENT,
    backwards: Annotated[
        bool, switch("--backwards", "Also move a pointer that names a later step.")
    ] = False,
    dry_run: Annotated[
        bool, switch("--dry-run", "Show what would be moved, without verifying; write nothing.")
    ] = False,
    jobs: Jobs = 0,
    limit_rate: Rate = "",
    max_memory: Memory = "1GiB",
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> Promotion:
    """Point a root at a checkpoint, after verifying it.

    Without --pointer all pointers that the root has are moved, and where it has none,
    last-known-good is made. Each is written in the form that its framework reads, by one act. What
    it said before is in the root's log. gc keeps what a pointer names.

    Returns:
        A checkpoint that does not pass moves no pointer: the last of the `reports` says why, and no
        move is told.

    Raises:
        UsageError: a root without a selector, or a place that lies in no root.
        NotFoundError: no such checkpoint.
        RefusedError: it holds weights alone, a pointer says a later step, or was changed meanwhile.
        DeniedError: the root cannot be written.
    """
    from ftckpt import verification
    from ftckpt.discovery.listing import open_part
    from ftckpt.discovery.promotion import find_in_root, held, move, moves
    from ftckpt.retention.locks.remote import leased
    from ftckpt.retention.records.who import actor

    on.report(target=checkpoint)
    depth = Level(chosen(CheckLevel, level, "--level").value)
    root, child = _checkpoint_of_root(checkpoint, stores)
    _require_whole(root, child)
    name, url = child.candidate.path, root.url_of(child.candidate)
    step = child.candidate.step
    on.report(target=url, format=child.part.format.name, dry_run=dry_run)
    # Before terabytes are read: by the name, which the content has to confirm.
    wanted = moves(root, name, step, tuple(pointer), backwards=backwards)
    if dry_run:
        return Promotion(url=url, step=step, moves=wanted, reports=(), dry_run=True)
    work = Work.of(jobs, limit_rate, on.counter)
    with leased(root, name, actor()):
        opened = open_part(root.store, child.part)
        report = verification.verify(opened, verification.VerifyOptions(depth), work=work)
        on.report(findings=report.findings, level=depth, evidence=[report.evidence])
        if report.code is not ExitCode.OK:
            return Promotion(url=url, step=step, moves=(), reports=(report,), dry_run=False)
        step = opened.step if opened.step is not None else step
        with held(root, actor()) as now:
            find_in_root(now, name)
            wanted = moves(now, name, step, tuple(pointer), backwards=backwards)
            for to_move in wanted:
                if to_move.changes:
                    fields = {"entry": name, "step": step, "verified": depth.value}
                    move(now, to_move, actor=actor(), now=time.time(), fields=fields)
    return Promotion(url=url, step=step, moves=wanted, reports=(report,), dry_run=False)


def _checkpoint_of_root(path: str, stores: StoreOptions) -> tuple[Root, Child]:
    """Return the root around a checkpoint, and the checkpoint as the root has it.

    Raises:
        UsageError: a root without a selector, or a place that lies in no root.
        NotFoundError: no such checkpoint.
    """
    from ftckpt.discovery import resolve
    from ftckpt.discovery.candidates import choose_child
    from ftckpt.discovery.promotion import find_in_root
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.storage.remotes import split

    target = resolve.open_target(path, FORMATS, stores)
    place = target.place
    if target.root is not None:
        if not place.which:
            raise UsageError(
                f"{path} is a root, not one checkpoint",
                hint=f"{place.url.rstrip('/')}@latest is its newest; ftckpt inspect lists them",
            )
        return target.root, choose_child(target.root, place.which)
    local = place.store.local_path(place.entry.path)
    whole = place.url.rstrip("/") if local is None else os.path.realpath(local)
    parent, name = split(whole)
    around = resolve.locate(parent, stores)
    root = resolve.open_root(around, FORMATS)
    if root.base:
        raise UsageError(f"{path} does not lie in a root", hint="name ROOT@STEP")
    return root, find_in_root(root, name)


def _require_whole(root: Root, child: Child) -> None:
    """Refuse weights alone: a job that follows its pointer would begin without an optimizer.

    Raises:
        RefusedError: gc has thinned the checkpoint.
    """
    from ftckpt.discovery.listing import files_of
    from ftckpt.manifest.locate import WEIGHTS_ALONE, is_thinned
    from ftckpt.own_files import weights_of

    if is_thinned(files_of(root.store, child.part.entry)):
        name = child.candidate.path
        whole = weights_of(name) or name
        raise RefusedError(
            f"{name} {WEIGHTS_ALONE}, and no run goes on from it",
            hint="while the trash has the whole one, this has it back: "
            + shlex.join(["ftckpt", "gc", "undelete", root.url, whole]),
        )
