"""What the pointers of a root say: `promote`."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.discovery import resolve as opening
from ftckpt.errors import ExitCode, RefusedError, UsageError
from ftckpt.formats.catalog import FORMATS
from ftckpt.progress import NULL, Counter
from ftckpt.storage import StoreOptions
from ftckpt.verification import Level, VerifyOptions, VerifyReport
from ftckpt.verification import verify as check_one
from ftckpt.workers import Work

from .opening import STORES, chosen

if TYPE_CHECKING:
    from ftckpt.discovery.promotion import PointerMove
    from ftckpt.discovery.roots import Child, Root


class Promotion(NamedTuple):
    """What pointers say.

    Attributes:
        url: the checkpoint that they point to.
        step: its step; None where nothing shows it.
        moves: each pointer, with what it said and says; moved where it `changes`.
        reports: of its check; none for a dry run.
        dry_run: whether nothing was moved.
    """

    url: str
    step: int | None
    moves: Sequence[PointerMove]
    reports: Sequence[VerifyReport]
    dry_run: bool


def checkpoint_of_root(path: str, stores: StoreOptions) -> tuple[Root, Child]:
    """Return the root around a checkpoint, and the checkpoint as the root has it.

    Raises:
        UsageError: a root without a selector, or a place that lies in no root.
        NotFoundError: no such checkpoint.
    """
    from ftckpt.discovery.candidates import choose_child
    from ftckpt.discovery.promotion import find_in_root
    from ftckpt.storage.remotes import split

    target = opening.open_target(path, FORMATS, stores)
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
    around = opening.locate(parent, stores)
    root = opening.open_root(around, FORMATS)
    if root.base:
        raise UsageError(f"{path} does not lie in a root", hint="name ROOT@STEP")
    return root, find_in_root(root, name)


def promote(
    checkpoint: str,
    *,
    pointer: Sequence[str] = (),
    verify: str = "content",
    backwards: bool = False,
    dry_run: bool = False,
    jobs: int = 0,
    limit_rate: float | str = "",
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
    found: Callable[[str, str], None] = lambda *_: None,
) -> Promotion:
    """Point a root at a checkpoint, after verifying it.

    A checkpoint that does not pass moves no pointer: the last of the `reports` says why, and no
    move is told.

    Args:
        checkpoint: a checkpoint, `ROOT@STEP` or `ROOT@latest`.
        pointer: `latest`, a tracker, `last-known-good`, or a link that is there; none for all.
        verify: how deep it is checked: `structure`, `content` or `values`.
        backwards: move a pointer that says a later step.
        dry_run: say what would be moved; read and write no more.
        jobs: threads; 0 for one a processor.
        limit_rate: bytes a second, or a text such as "200MiB/s".
        stores: how to reach object stores.
        counter: is told of the work.
        found: is told the checkpoint's URL and format, before anything is read.

    Raises:
        UsageError: a root without a selector, or a place that lies in no root.
        NotFoundError: no such checkpoint.
        RefusedError: it holds weights alone, a pointer says a later step, or was changed meanwhile.
        DeniedError: the root cannot be written.
    """
    from ftckpt.discovery.open_part import open_part
    from ftckpt.discovery.promotion import find_in_root, held, move, moves
    from ftckpt.retention.locks.claim import leased
    from ftckpt.retention.records.who import actor

    depth = chosen(Level, verify, "--verify")
    root, child = checkpoint_of_root(checkpoint, stores)
    _require_whole(root, child)
    name, url = child.candidate.path, root.url_of(child.candidate)
    step = child.candidate.step
    found(url, child.part.format.name)
    # Before terabytes are read: by the name, which the content has to confirm.
    wanted = moves(root, name, step, tuple(pointer), backwards=backwards)
    if dry_run:
        return Promotion(url, step, wanted, (), dry_run=True)
    work = Work.of(jobs, limit_rate, counter)
    with leased(root, name, actor()):
        opened = open_part(root.store, child.part)
        reports = (check_one(opened, VerifyOptions(depth), work=work),)
        if reports[0].code is not ExitCode.OK:
            return Promotion(url, step, (), reports, dry_run=False)
        step = opened.step if opened.step is not None else step
        with held(root, actor()) as now:
            find_in_root(now, name)
            wanted = moves(now, name, step, tuple(pointer), backwards=backwards)
            for to_move in wanted:
                if to_move.changes:
                    fields = {"entry": name, "step": step, "verified": depth.value}
                    move(now, to_move, actor=actor(), now=time.time(), fields=fields)
    return Promotion(url, step, wanted, reports, dry_run=False)


def _require_whole(root: Root, child: Child) -> None:
    """Refuse weights alone: a job that follows its pointer would begin without an optimizer.

    Raises:
        RefusedError: gc has thinned the checkpoint.
    """
    from ftckpt.discovery.open_part import files_of
    from ftckpt.manifest.thinned import WEIGHTS_ALONE, is_thinned
    from ftckpt.own_files import weights_of

    if is_thinned(files_of(root.store, child.part.entry)):
        name = child.candidate.path
        whole = weights_of(name) or name
        raise RefusedError(
            f"{name} {WEIGHTS_ALONE}, and no run goes on from it",
            hint="while the trash has the whole one, this has it back: "
            + shlex.join(["ftckpt", "gc", "undelete", root.url, whole]),
        )
