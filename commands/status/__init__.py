"""`ftckpt status`: a run's checkpoint health, for a person and for a monitor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ftckpt.amounts import duration
from ftckpt.commands.cli.alerts import AlertOptions
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.errors import ExitCode, FtckptError, UsageError
from ftckpt.findings import counted
from ftckpt.operations.definition import argument, option
from ftckpt.storage.local.writable import check_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.commands.config.defaults import RootPolicy
    from ftckpt.health import Status

OPTIONS = (AlertOptions,)
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
        "ftckpt status /ckpt/run7 --expect-interval 22m --alert-url https://hooks.example.com/ops",
        "tell somebody, once for each thing",
    ),
    (
        "ftckpt status /ckpt/run7 --policy retention.toml --plot saves.png",
        "a timeline of saves, and which of them the policy keeps",
    ),
    ("ftckpt status --parts /ckpt/run7", "how far parts of a check or a copy are, node by node"),
)
CODES = {
    ExitCode.OK: "nothing that somebody should look at",
    ExitCode.PARTIAL: "something that somebody should look at: it is listed",
    ExitCode.UNVERIFIED: "nothing says which save is the newest",
    ExitCode.UNSAFE: "the root's .ftckpt is a link",
    ExitCode.REFUSED: "another file stands where the picture's numbers would go",
    ExitCode.NOT_FOUND: "no such root, or nothing in it that a format knows",
    ExitCode.UNAVAILABLE: "a listing failed; nothing is concluded",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "the metrics or the picture could not be written",
    ExitCode.UNSUPPORTED: "--plot needs matplotlib",
}


def command(
    invocation: Invocation,
    root: Annotated[str, argument("ROOT", "Directory or URL that holds the checkpoints.")] = "",
    parts: Annotated[
        str,
        option(
            "PLACE",
            "Show instead how far the parts are that leave their records in PLACE.",
        ),
    ] = "",
    expect_interval: Annotated[
        str, option("T", "How often a save is due: 22m; else as measured.")
    ] = "",
    late: Annotated[float, option("N", "Alert above N intervals without a save.", min=1)] = 2.0,
    slower: Annotated[float, option("N", "Alert when saves take N times as long.", min=1)] = 1.5,
    tier: Annotated[str, option("ROOT", "The second tier: counts the saves that it lacks.")] = "",
    policy: Annotated[str, option("FILE.toml", "Show what a retention policy keeps.")] = "",
    scrub_every: Annotated[
        str, option("T", "Alert on a save that no scrub has read for T: 30d.")
    ] = "",
    ledger: Annotated[
        str, option("DIR", "Where verdicts are remembered; else .ftckpt/ in the root.")
    ] = "",
    prometheus: Annotated[str, option("FILE", "Write metrics for node_exporter, atomically.")] = "",
    plot: Annotated[str, option("FILE", "Draw saves over time: .png, .svg or .html.")] = "",
) -> Result:
    """Show a run's checkpoint health: newest saves, age, cadence, size, alerts.

    What is finished is told by names, when by modification times. Of the newest save the headers
    are read and its structure is checked; what is known of the content of any comes from the
    ledger of the root, which `ftckpt verify --remember` and others write. Several runs under one
    root are told one by one.
    """
    from ftckpt.api.surveying import status
    from ftckpt.commands.pictures import drawing

    from .json_document import document
    from .text import show

    if parts:
        from .divided import show_parts

        return show_parts(invocation, parts)
    if not root:
        raise UsageError("no ROOT was given", hint="or --parts PLACE for the parts of a check")
    invocation.report(target=root)
    alerts = invocation.options(AlertOptions).begin(invocation, "status", root)
    if not policy and (known := _policy_of(root)):
        policy = known.file
        invocation.say(f"policy: {known.file} ({known.where})")
    if plot:
        drawing.check_path(plot, terminal=False)
    if prometheus:
        check_file("--prometheus", prometheus)
    found = status(
        root,
        expect_interval=(duration(expect_interval, "--expect-interval") if expect_interval else ""),
        late=late,
        slower=slower,
        tier=tier,
        policy=policy,
        scrub_every=duration(scrub_every, "--scrub-every") if scrub_every else "",
        ledger=ledger,
        prometheus=prometheus,
        stores=invocation.stores,
        counter=invocation.counter,
    )
    invocation.close()
    guard = _guard(found)
    invocation.report(**document(found), guard=guard)
    show(invocation, found, guard)
    if plot:
        from .timeline import draw

        numbers = draw(found, plot)
        invocation.report(plot=plot, numbers=numbers)
        invocation.say(f"drawn to {plot}, the numbers to {numbers}")
    for run in found.runs:
        where = f"{run.survey.url}: " if len(found.runs) > 1 else ""
        for alert in run.alerts:
            about = [f"{where}{name}" for name in alert.about or ([""] if where else [])]
            alerts.add(alert.kind, where + alert.message, alert.hint, about)
    alerts.complete()
    if found.alerts:
        first, *rest = found.alerts
        more = f" (and {len(rest)} more)" if rest else ""
        return Result(ExitCode.PARTIAL, f"{first.kind}: {first.message}{more}", first.hint)
    doubt = next((r.survey.doubt for r in found.runs if r.newest is None and r.survey.doubt), "")
    if doubt:
        return Result(ExitCode.UNVERIFIED, f"cannot tell which save is the newest: {doubt}")
    return Result(ExitCode.OK, f"{counted(len(found.runs), 'run')}, nothing to look at")


def _policy_of(root: str) -> RootPolicy | None:
    """Return the policy that the user's file of settings has for a root."""
    from ftckpt.storage.settings import read_settings

    if "policies" not in read_settings().tables:
        return None
    from ftckpt.commands.config.defaults import policy_of

    return policy_of(root)


def _guard(found: Status) -> Mapping[str, object] | None:
    """Return the last decision of the root's guard; None without one, or where it is not read."""
    from ftckpt.guard.journal import last_decision

    runs = [run.survey.run for run in found.runs if run.survey.run is not None]
    try:
        return last_decision(runs[0].root) if runs else None
    except FtckptError:
        return None
