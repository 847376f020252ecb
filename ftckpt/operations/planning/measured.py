"""What was measured of a run, from a root of checkpoints or from the run's own log.

How failures are drawn that a plan is simulated with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ftckpt.amounts import brief_duration, decimal_bytes
from ftckpt.errors import UsageError
from ftckpt.observer import Observer
from ftckpt.planning import quantities
from ftckpt.planning.exposure import dispersion
from ftckpt.planning.quantities import ObservedFailures
from ftckpt.storage import StoreOptions

from .failures import CostOptions, FailureOptions, Measured, Notes

if TYPE_CHECKING:
    from ftckpt.health.cadence import Cadence
    from ftckpt.joblogs.runlog import RunLog
    from ftckpt.planning.rates import Cause
    from ftckpt.planning.simulation import Law


def measure(
    root: str,
    logs: Sequence[str],
    zone: str,
    failing: FailureOptions,
    costs: CostOptions,
    stores: StoreOptions,
    on: Observer,
) -> Notes:
    """Measure what was named; nothing where nothing was.

    Raises:
        NotFoundError: the root or the log is not there.
        UsageError: both are named, or the file is not a log.
    """
    if root and logs:
        raise UsageError("--from and --from-log both say what was measured", hint="give one")
    if root:
        return _root(root, stores, on)
    return _logs(logs, zone, failing, costs, on) if logs else Notes()


def _root(path: str, stores: StoreOptions, on: Observer) -> Notes:
    from ftckpt.discovery import resolve
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.health.cadence import measure as measure_root

    place = resolve.locate(path, stores)
    if place.which:
        raise UsageError(f"--from wants the root, not one step of it: {path}")
    root = resolve.open_root(place, FORMATS)
    cadence = measure_root(root, counter=on.counter)
    on.report(measured=_cadence_record(cadence))
    return Notes(_of_cadence(cadence, root.url), list(_said(cadence, root.url)))


def _of_cadence(cadence: Cadence, url: str) -> Measured:
    failures = None
    if cadence.gaps and cadence.span_s is not None:
        failures = ObservedFailures(len(cadence.gaps), cadence.span_s)
    interval = None
    if cadence.every_s is not None:
        interval = cadence.every_s - (cadence.write_s or 0.0)
    return Measured(
        source=url,
        save=cadence.write_s,
        nbytes=cadence.nbytes,
        step=cadence.step_s,
        failures=failures,
        interval=interval if interval is not None and interval > 0 else None,
    )


def _said(cadence: Cadence, url: str) -> list[str]:
    size = decimal_bytes(cadence.nbytes)
    said = [f"{url} holds {len(cadence.saves)} finished saves, the newest of {size}"]
    if cadence.reason:
        return [*said, f"their times say nothing: {cadence.reason}"]
    if cadence.every_s is not None and cadence.every_steps is not None:
        pace = f"{cadence.every_steps:,g} steps" if cadence.every_steps > 1 else "step"
        said.append(f"they come every {pace} = {brief_duration(cadence.every_s)}")
    if cadence.write_s is not None:
        said.append(
            f"from the first file to the last a save takes {brief_duration(cadence.write_s)}: a "
            "lower limit of what training waits"
        )
    if cadence.gaps:
        longest = max(gap.extra_s for gap in cadence.gaps)
        said.append(
            f"{len(cadence.gaps)} times it took far longer than the steps do, "
            f"{brief_duration(longest)} at most: each may be an interruption"
        )
    return said


def _cadence_record(cadence: Cadence) -> dict[str, object]:
    return {
        "saves": len(cadence.saves),
        "bytes": cadence.nbytes,
        "every_steps": cadence.every_steps,
        "every_s": cadence.every_s,
        "step_s": cadence.step_s,
        "write_s": cadence.write_s,
        "span_s": cadence.span_s,
        "gaps": cadence.gaps,
        "reason": cadence.reason,
    }


def _logs(
    paths: Sequence[str], zone: str, failing: FailureOptions, costs: CostOptions, on: Observer
) -> Notes:
    from ftckpt.joblogs import TOGETHER, read_logs, report_of
    from ftckpt.joblogs.reading.times import zone_of
    from ftckpt.joblogs.runlog import run_log_of

    detect = quantities.duration(costs.detect, "--detect") if costs.detect else None
    restart = quantities.duration(costs.restart, "--restart") if costs.restart else None
    read = read_logs(paths, zone=zone_of(zone), counter=on.counter)
    silent = [log for log in read.logs if log.lines and not log.entries]
    if silent:
        raise UsageError(
            f"{silent[0].path}: no line says anything that is known",
            hint="docs/incidents.md lists the logs and lines that are read",
        )
    nodes = None
    if failing.gpus:
        gpus = quantities.count(failing.gpus, "--gpus", kilo=1024)
        nodes = -(-gpus // failing.gpus_per_node)
    report = report_of(read.collections, TOGETHER, detect=detect, restart=restart, nodes=nodes)
    name = paths[0] if len(paths) == 1 else f"{len(paths)} logs"
    log = run_log_of(report, name)
    on.report(measured=log)
    lemons = {one.node: (one.incidents, one.expected) for one in report.lemons}
    remarks = list(_log_said(log, name))
    remarks += [f"{one.path} ends too early: {one.cut}" for one in read.logs if one.cut]
    if any(one.zoneless for one in read.logs):
        remarks.append(f"times without a zone were read as {zone} (--timezone)")
    times = [one.time for one in report.incidents if one.exposed and one.time is not None]
    began, ended = report.began, report.ended
    scatter = 1.0
    if began is not None and ended is not None:
        scatter = dispersion([time - began for time in times], ended - began)
    return Notes(replace(_of_log(log, name, lemons), dispersion=scatter), remarks)


def _of_log(log: RunLog, name: str, lemons: Mapping[str, tuple[int, float]]) -> Measured:
    failures = None
    if log.exposed_s is not None:
        failures = ObservedFailures(log.exposed_failures, log.exposed_s)
    return Measured(
        source=name,
        save=log.save_s,
        snapshot=log.snapshot_s,
        flush=log.flush_s,
        nbytes=log.nbytes,
        detect=log.detect_s,
        restart=log.restart_s,
        step=log.step_s,
        failures=failures,
        exposed=True,
        components=log.components,
        lemons=lemons,
        whole_recovery=log.whole_recovery,
    )


def _log_said(log: RunLog, name: str) -> list[str]:
    said = [f"{name} holds {log.saves} saves and {log.failures} failures"]
    classes = ", ".join(f"{number} {what}" for what, number in log.classes.items() if what)
    if classes:
        said.append(f"failures by class: {classes}")
    worst = [(node, number) for node, number in log.nodes.items() if node][:3]
    if worst:
        said.append("failures by node: " + ", ".join(f"{number} {node}" for node, number in worst))
    if log.whole_recovery:
        said.append(
            "recoveries were measured from a failure's first line to the next step, detection "
            "included; --detect is taken off them"
        )
    if log.span_s is not None and log.failures and log.exposed_s is None:
        said.append("in none of its time could the job fail: it was down from the first failure on")
    if log.exposed_s is not None and log.exposed_failures < log.failures:
        said.append(
            f"{log.failures - log.exposed_failures} of the failures do not count towards the rate: "
            "the job was down already, or the log begins there"
        )
    if log.ignored:
        said.append(f"{log.ignored} lines of other events were not used")
    return said


def read_law(text: str, mtbf: float) -> Law:
    """Return the law of times between failures.

    Args:
        text: `exponential`, `weibull:0.7`, `lognormal:2`, or `trace:FILE` with one duration a line.
        mtbf: its mean, in seconds; a trace brings its own.

    Raises:
        UsageError: it is none of these, or a line of the trace is not a duration.
        NotFoundError: the trace does not exist.
    """
    from ftckpt.planning import simulation

    name, _, parameter = text.partition(":")
    if name == "exponential" and not parameter:
        return simulation.Exponential(mtbf)
    if name == "weibull" and parameter:
        return simulation.Weibull(mtbf, quantities.factor(parameter, "--set law=weibull"))
    if name == "lognormal" and parameter:
        return simulation.Lognormal(mtbf, quantities.factor(parameter, "--set law=lognormal"))
    if name == "trace" and parameter:
        return simulation.Trace(_trace(parameter))
    raise UsageError(
        f"--set law={text}: unknown law of failures",
        hint="write exponential, weibull:0.7, lognormal:2 or trace:FILE",
    )


def read_ageing(texts: Sequence[str], causes: Sequence[Cause]) -> Law:
    """Return the law of parts that age, of `gpu=0.7` for each.

    Raises:
        UsageError: it is of another form, or nothing says how many such parts there are.
    """
    from ftckpt.planning.simulation import AgeingParts, Fleet

    shapes: dict[str, float] = {}
    for text in texts:
        name, _, shape = text.partition("=")
        shapes[name.strip()] = quantities.factor(shape, f"--set ageing={name}")
    ageing, rest = [], 0.0
    for cause in causes:
        if cause.name not in shapes:
            rest += cause.per_second
        elif cause.parts is None:
            raise UsageError(
                f"--set ageing={cause.name}: nothing says how many there are",
                hint="--gpus 16384 --gpu-mtbf 50000h, or --component name=N@RATE",
            )
        else:
            mean = cause.parts / cause.per_second
            ageing.append(AgeingParts(cause.name, cause.parts, mean, shapes.pop(cause.name)))
    if shapes:
        raise UsageError(
            f"--set ageing={' and '.join(shapes)}: nothing says how often these fail",
            hint=f"what fails: {', '.join(dict.fromkeys(c.name for c in causes))}",
        )
    return Fleet(ageing, rest)


def _trace(path: str) -> list[float]:
    from ftckpt.storage.local.oserror import translate

    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except OSError as error:
        raise translate(error, path, "read") from error
    return [
        quantities.duration(line, f"line {number} of {path}:")
        for number, line in enumerate(lines, 1)
        if line
    ]
