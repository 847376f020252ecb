"""Divide one command line over a cluster: an engine runs its shares, and this process finishes.

What each share leaves is the record of a part. So a run whose cluster is gone goes on by `--part`
or on another cluster, and nothing is believed that an engine says: the records are what counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Protocol

from ftckpt.errors import ExitCode, FtckptError, RefusedError, UnavailableError, UsageError
from ftckpt.findings import counted
from ftckpt.parts import as_array
from ftckpt.parts.shared_folder import PROOF, PartsPlace

from . import Session, Whole
from .share_process import ShareEnd, ShareTask

# Shares for each worker: one that is lost costs little, and slow workers get fewer.
A_WORKER = 4
# A share that reads less than this many bytes takes longer to begin than to do.
WORTH = 1 << 30
# Options of the line that are not for a share, with the number of words after each.
_NOT_FOR_A_SHARE = {
    "--cluster": 1, "--shares": 1, "--json": 0, "--progress": 1, "--quiet": 0, "-q": 0,
}  # fmt: skip
_JOBS = ("--jobs", "-j")


class Engine(Protocol):
    """Runs shares on machines.

    Attributes:
        name: what the user calls it.
        dashboard: URL where it can be watched; "" without one.
    """

    name: str
    dashboard: str

    def slots(self) -> int:
        """Return how many shares run at once, when the first worker is there."""

    def run(self, tasks: Sequence[ShareTask]) -> Iterator[ShareEnd]:
        """Yield what became of the shares as they end; those of lost workers are done again.

        Raises:
            UnavailableError: the cluster is gone, or a share fails wherever it is tried.
        """

    def close(self) -> None:
        """Let go of the cluster; end what was started for this run."""


def open_engine(text: str) -> Engine:
    """Return the engine that `--cluster` names.

    Raises:
        UsageError: it names none.
        MissingPackageError: what it needs is not installed.
        UnavailableError: it does not answer.
    """
    if text.startswith(("ray://", "ray:")):
        from .ray_engine import RayEngine

        return RayEngine(text)
    from .dask_engine import DaskEngine

    return DaskEngine(text)


def on_cluster(
    session: Session,
    place: PartsPlace,
    nbytes: int,
    stages: Sequence[str],
    finish: Callable[[int], Whole],
) -> Whole:
    """Have all shares done by a cluster, and finish.

    Args:
        session: of the operation.
        place: of the records.
        nbytes: that are read, roughly.
        stages: of which each share leaves a record, in order.
        finish: gives the answer of the whole from the records of a number of parts.

    Raises:
        UsageError: options contradict each other.
        RefusedError: a worker makes another plan.
        UnavailableError: the cluster is gone, or a share fails wherever it is tried.
        FtckptError: what ended a share.
    """
    many = session.division
    if many.part or many.finish or many.finish_last:
        raise UsageError("--cluster does all parts and finishes: without --part and --finish")
    with closing(open_engine(many.cluster)) as engine:
        watched = f", watch it at {engine.dashboard}" if engine.dashboard else ""
        session.on.note(f"cluster {engine.name}{watched}")
        number = _shares(place, many.shares, nbytes, engine)
        session.on.report(cluster={"name": engine.name, "shares": number})
        for stage in stages:
            missing = _missing(place, number, stage)
            if missing:
                _carry_out(session, place, engine, number, stage, missing)
    return finish(number)


def _shares(place: PartsPlace, wanted: int, nbytes: int, engine: Engine) -> int:
    """Return how many shares there are: as many as a run before this one had."""
    begun = sorted({one.part.of for one in place.listed()})
    if len(begun) > 1 or (begun and wanted and begun != [wanted]):
        said = " and ".join(map(str, begun))
        raise RefusedError(
            f"{place.url} holds records of a division into {said} parts",
            hint=f"--shares {begun[0]} goes on with it; or remove that directory",
        )
    if begun or wanted:
        return begun[0] if begun else wanted
    slots = max(1, engine.slots())
    return max(slots, min(A_WORKER * slots, nbytes // WORTH))


def _missing(place: PartsPlace, number: int, stage: str) -> list[int]:
    """Return the numbers of the parts without a record of a stage."""
    what = f".{stage}" if stage else ""
    done = {one.part.number for one in place.listed() if one.what == what}
    missing = set(range(number)) - done
    if stage == PROOF:  # which another one makes
        missing = {(one + 1) % number for one in missing}
    return sorted(missing)


def _carry_out(
    session: Session,
    place: PartsPlace,
    engine: Engine,
    number: int,
    stage: str,
    missing: Sequence[int],
) -> None:
    words, environment = line_of_share(session.division.line), _variables()
    tasks = [
        ShareTask(one, number, _with_part(words, one, number), environment, os.getcwd())
        for one in missing
    ]
    if len(missing) < number and stage != PROOF:
        session.on.note(f"{number - len(missing)} of {counted(number, 'part')} were done before")
    session.on.counter.start("proving" if stage == PROOF else "sharing out", number, "shares")
    session.on.counter.add(number - len(missing))
    left = set(missing)
    try:
        for end in engine.run(tasks):
            _require_good(end, place, number)
            left.discard(end.number)
            session.on.counter.add(1)
    except UnavailableError as error:
        array = as_array(sorted(left))
        error.hint = (
            f"nothing is lost: the same line goes on, or --part auto/{number} as --array={array}"
        )
        raise


def _require_good(end: ShareEnd, place: PartsPlace, number: int) -> None:
    """Refuse what did not become a record of this plan."""
    if not end.plan:
        kinds = {kind.exit_code: kind for kind in FtckptError.__subclasses__()}
        kind = kinds.get(ExitCode(end.code), UnavailableError)
        raise kind(f"share {end.number}/{number} on {end.host}: {end.message}", hint=end.hint)
    if end.plan != place.plan.digest:
        raise RefusedError(
            f"{end.host} makes another plan of this line",
            hint="the same version of ftckpt, the same paths and the same files everywhere",
        )


def line_of_share(words: Sequence[str]) -> list[str]:
    """Return a command line without what is not for a share."""
    end = words.index("--") if "--" in words else len(words)
    kept, skip = [], 0
    for word in words[:end]:
        if skip:
            skip -= 1
            continue
        name, valued, _ = word.partition("=")
        if name in _NOT_FOR_A_SHARE:
            skip = 0 if valued else _NOT_FOR_A_SHARE[name]
            continue
        kept.append(word)
    more = ["--json", "--quiet"]
    if not any(one == name or one.startswith(f"{name}=") or (name == "-j" and one[:2] == "-j")
               for one in kept for name in _JOBS):  # fmt: skip
        more += ["--jobs", "1"]  # an engine counts processors, and a share takes one
    return [*kept, *more, *words[end:]]


def _with_part(words: Sequence[str], number: int, of: int) -> list[str]:
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], "--part", f"{number}/{of}", *words[end:]]


def _variables() -> Mapping[str, str]:
    """Return the variables that set flags here, but for those of this module."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("FTCKPT_")
        and not name.endswith(("_CLUSTER", "_SHARES", "_JSON", "_QUIET", "_PROGRESS"))
    }
