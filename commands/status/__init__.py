"""`ftckpt status`: a run's checkpoint health, for a person and for a monitor."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from ftckpt.commands.cli.invocation import Invocation, Result, invoked
from ftckpt.commands.cli.option_values import parse_duration, require_folder
from ftckpt.errors import ExitCode, FtckptError, UsageError
from ftckpt.findings import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.discovery.resolve import Place
    from ftckpt.status import Status, Survey

EXAMPLES = (
    ("ftckpt status /ckpt/run7", "the newest save, its age, how regular and how slow saves are"),
    (
        "ftckpt status /ckpt/run7 --expect-interval 22m -q || page-somebody",
        "exit 14 where the newest is older than two intervals, or something else is wrong",
    ),
    (
        "ftckpt status /nvme/run7 --tier s3://bucket/run7",
        "which saves are not on the second tier yet",
    ),
    (
        "ftckpt status /ckpt/run7 --prometheus /var/lib/node_exporter/ftckpt.prom",
        "for node_exporter, from cron",
    ),
    (
        "ftckpt status /ckpt/run7 --policy retention.toml --plot saves.png",
        "a timeline of saves, and which of them the policy keeps",
    ),
)
CODES = {
    ExitCode.OK: "nothing that somebody should look at",
    ExitCode.PARTIAL: "something that somebody should look at: it is listed",
    ExitCode.UNSAFE: "the root's .ftckpt is a link",
    ExitCode.REFUSED: "another file stands where the picture's numbers would go",
    ExitCode.NOT_FOUND: "no such root, or nothing in it that a format knows",
    ExitCode.UNAVAILABLE: "a listing failed; nothing is concluded",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "the metrics or the picture could not be written",
    ExitCode.UNSUPPORTED: "--plot needs matplotlib",
}


def command(
    ctx: typer.Context,
    root: Annotated[
        str, typer.Argument(metavar="ROOT", help="Directory or URL that holds the checkpoints.")
    ],
    expect_interval: Annotated[
        str, typer.Option(metavar="T", help="How often a save is due: 22m; else as measured.")
    ] = "",
    late: Annotated[
        float, typer.Option(metavar="N", min=1, help="Alert above N intervals without a save.")
    ] = 2.0,
    slower: Annotated[
        float, typer.Option(metavar="N", min=1, help="Alert when saves take N times as long.")
    ] = 1.5,
    tier: Annotated[
        str, typer.Option(metavar="ROOT", help="The second tier: what is not there is counted.")
    ] = "",
    policy: Annotated[
        str, typer.Option(metavar="FILE.toml", help="Show what a retention policy keeps.")
    ] = "",
    prometheus: Annotated[
        str, typer.Option(metavar="FILE", help="Write metrics for node_exporter, atomically.")
    ] = "",
    plot: Annotated[
        str, typer.Option(metavar="FILE", help="Draw saves over time: .png, .svg or .html.")
    ] = "",
) -> Result:
    """Show a run's checkpoint health: newest saves, age, cadence, size, alerts.

    Everything is told by listings: what is finished by its names, when by modification times. No
    checkpoint is opened, so a damaged one shows only where its commit marker is gone: `ftckpt
    verify` looks inside. Several runs under one root are told one by one.
    """
    from ftckpt.commands.cli import picture
    from ftckpt.status import Thresholds, metrics, status
    from ftckpt.status.prometheus import unreadable

    from .text import show

    invocation = invoked(ctx)
    invocation.report(target=root)
    if plot:
        picture.check_path(plot, terminal=False)
    if prometheus:
        require_folder("--prometheus", prometheus)
    expected = parse_duration(expect_interval, "--expect-interval") if expect_interval else None
    if expected is not None and expected <= 0:
        raise UsageError("--expect-interval must be more than nothing")
    now = time.time()
    try:
        place, surveys = _surveys(invocation, root, now)
        second = _second(invocation, tier, [one.url for one in surveys], now) if tier else {}
    except FtckptError:
        if prometheus:  # a monitor must not go on with what was true once
            _write(prometheus, unreadable(root, now))
        raise
    found = status(root, surveys, now, Thresholds(expected, late, slower), second)
    if prometheus:  # before anything else can fail, or nobody reads the answer
        _write(prometheus, metrics(found))
    kept = _kept(invocation, root, place, surveys, policy, now) if policy else None
    _report(invocation, found, kept)
    show(invocation, found, kept)
    if plot:
        from .timeline import draw

        numbers = draw(found, kept, plot)
        invocation.report(plot=plot, numbers=numbers)
        invocation.say(f"drawn to {plot}, the numbers to {numbers}")
    if found.alerts:
        first, *rest = found.alerts
        more = f" (and {len(rest)} more)" if rest else ""
        return Result(ExitCode.PARTIAL, f"{first.kind}: {first.message}{more}", first.hint)
    return Result(ExitCode.OK, f"{counted(len(found.runs), 'run')}, nothing to look at")


def _surveys(invocation: Invocation, root: str, now: float) -> tuple[Place, list[Survey]]:
    """List a place, every run of it.

    Raises:
        NotFoundError: there is nothing that a format knows.
        UsageError: it is one checkpoint, or one step of a root.
    """
    from ftckpt.discovery import resolve as opening
    from ftckpt.discovery.candidates import nothing_known
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.retention import EntryClass
    from ftckpt.retention.scan.entry import ScanOptions, no_bases
    from ftckpt.status.survey import survey

    place = opening.locate(root, invocation.stores)
    if place.which:
        raise UsageError(f"status wants the root, not one step of it: {root}")
    # Nothing is dropped by what is read here, so that a delta need not be opened for its base.
    how = ScanOptions(FORMATS, now, bases=no_bases)
    runs = opening.open_runs(place, FORMATS)
    found = [survey(one, how, counter=invocation.counter) for one in runs]
    invocation.close()
    others = (EntryClass.FOREIGN, EntryClass.TRASH)
    if all(held.entry.entry_class in others for one in found for held in one.held):
        raise nothing_known(runs[0], "name the directory whose children are the checkpoints")
    return place, found


def _second(invocation: Invocation, tier: str, urls: list[str], now: float) -> Mapping[str, Survey]:
    """Return the second tier of each run: of one run the place itself, of several by their names.

    Raises:
        UsageError: the tiers do not hold the same runs.
    """
    from ftckpt.errors import NotFoundError
    from ftckpt.status import Survey

    try:
        _, there = _surveys(invocation, tier, now)
    except NotFoundError:
        # That nothing was copied yet is what is asked about. That the place is not there at all
        # may be a slip of the pen, or a mount that is gone: that is not an answer.
        from ftckpt.discovery import resolve as opening

        url = opening.locate(tier, invocation.stores).store.describe("")
        there = [Survey(url, (), None, (), None)]
    if len(urls) == len(there) == 1:
        return {urls[0]: there[0]}
    by_name = {one.url.rstrip("/").rpartition("/")[2]: one for one in there}
    empty = Survey(tier, (), None, (), None)
    return {url: by_name.get(url.rstrip("/").rpartition("/")[2], empty) for url in urls}


def _kept(
    invocation: Invocation,
    root: str,
    place: Place,
    surveys: list[Survey],
    policy: str,
    now: float,
) -> Mapping[str, bool]:
    """Return by name which entries a policy keeps, as `ftckpt gc` would plan it now."""
    from ftckpt.commands.gc.options import policy_of_file
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.retention import prepare

    chosen = policy_of_file(policy, root)
    runs = [one.run for one in surveys if one.run is not None]
    prepared = prepare(place, FORMATS, chosen, now, runs=runs, counter=invocation.counter)
    invocation.close()
    return {d.entry.name: d.keep for d in prepared.plan.decisions}


def _write(path: str, text: str) -> None:
    from ftckpt.storage.local.atomic import write_over

    write_over(path, text.encode())


def _report(invocation: Invocation, found: Status, kept: Mapping[str, bool] | None) -> None:
    from .document import document

    invocation.report(**document(found, kept))
