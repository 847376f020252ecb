"""From the options about failures to their rates."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ftckpt.amounts import brief_duration
from ftckpt.errors import UsageError
from ftckpt.planning import Counted, Failures, Remedy, combine, quantities, rates
from ftckpt.planning.presets import preset

from .notes import Notes, positive
from .options import FailureOptions


def read_gpus(options: FailureOptions) -> int | None:
    """Return the number of GPUs: as given, else the preset's.

    Raises:
        UsageError: a preset is a rate for each GPU, and nothing says how many there are.
    """
    if options.gpus:
        return quantities.count(options.gpus, "--gpus", kilo=1024)
    known = preset(options.preset).gpus if options.preset else None
    if options.preset and known is None:
        raise UsageError(
            f"--preset {options.preset} is a rate for each GPU", hint="say how many: --gpus 16k"
        )
    return known


def read_failures(
    options: FailureOptions, gpus: int | None, notes: Notes, *, detect: float
) -> Failures:
    """Return all that stops the job, added up.

    Args:
        options: as typed.
        gpus: of the job, where known.
        notes: told what was taken from where.
        detect: seconds in which nothing else can fail, after each failure that was counted on the
            wall clock.

    Raises:
        UsageError: an option cannot be understood, contradicts another, or nothing ever fails.
    """
    known = [*_parts(options, gpus)]
    counted = []
    whole = [name for name in ("mtbf", "failures", "preset") if getattr(options, name)]
    if len(whole) > 1:
        flags = " and ".join(f"--{name}" for name in whole)
        raise UsageError(f"{flags} each speak of the whole job", hint="give one of them")
    if whole and known:
        notes.remarks.append(f"--{whole[0]} speaks of the whole job; the other causes add to it")
    if options.mtbf:
        known.append(rates.Cause("job", 1 / positive(options.mtbf, "--mtbf")))
    if options.failures:
        told = quantities.observed(options.failures, "--failures")
        counted.append(Counted("counted", *told, detect=detect))
    if options.preset and gpus is not None:
        cause = _preset(options.preset, gpus, notes)
        counted += [cause] if isinstance(cause, Counted) else []
        known += [cause] if isinstance(cause, rates.Cause) else []
    seen = notes.measured.failures
    if not known and not counted and seen is not None:
        wall = not notes.measured.exposed
        counted += _seen(seen, notes, detect if wall else 0.0)
        notes.remarks.append(
            f"{seen.failures} interruptions in {brief_duration(seen.seconds)}"
            f"{'' if wall else ' in which the job could fail'}, counted in {notes.measured.source}"
        )
    if detect and any(cause.detect for cause in counted):
        notes.remarks.append(
            f"nothing else can fail in the {brief_duration(detect)} until a failure is noticed: "
            "this time is taken off the time in which failures were counted"
        )
    burn_in = quantities.factor(options.burn_in, "--burn-in")
    notes.inputs |= {"gpus": gpus, "burn_in": burn_in, "counted": counted}
    return combine(known, counted, burn_in=burn_in)


# Below this share of all failures a component is not worth a line of its own.
_WORTH = 0.1


def _seen(seen: quantities.ObservedFailures, notes: Notes, detect: float) -> Iterator[Counted]:
    """Yield the counted failures by component, and note what fewer of them would bring."""
    parts, scatter = notes.measured.components, notes.measured.dispersion
    if scatter > 1:
        notes.remarks.append(
            f"failures come in clusters: their number scatters {scatter:.1f} times as much as that "
            f"of independent ones, so the limits are {math.sqrt(scatter):.1f} times as wide"
        )
    if not parts or set(parts) == {""}:
        yield Counted("counted", *seen, detect=detect, dispersion=scatter)
    else:
        for name, number in parts.items():
            yield Counted(name or "unknown", number, seen.seconds, detect, scatter)
            share = number / seen.failures
            if name and _WORTH <= share < 1:
                change = f"failures of {name} half as often"
                notes.remedies.append(Remedy(change, mtbf=1 / (1 - share / 2)))
    for node, (number, mean) in notes.measured.lemons.items():
        notes.remarks.append(
            f"{node} fails more often than chance explains: {number} of {seen.failures} failures, "
            f"where the mean of all nodes is {mean:.2g}"
        )
        better = seen.failures / max(1.0, seen.failures - number + mean)
        notes.remedies.append(Remedy(f"{node} replaced by a node like the others", mtbf=better))


def _preset(name: str, gpus: int, notes: Notes) -> Counted | rates.Cause:
    """Return the failures of a published run, scaled to the number of GPUs."""
    found = preset(name)
    notes.remarks.append(f"failures of {found.run}: {found.source}")
    if found.remark:
        notes.remarks.append(found.remark)
    if found.classes:
        most = sorted(found.classes.items(), key=lambda item: -item[1])[:5]
        total = sum(found.classes.values())
        causes = ", ".join(f"{cause} {100 * number / total:.0f} %" for cause, number in most)
        notes.remarks.append(f"its most frequent causes: {causes}")
    if found.failures is None or found.seconds is None or found.gpus is None:
        return rates.Cause(name, found.per_gpu * gpus)
    if gpus != found.gpus:
        notes.remarks.append(f"scaled from {found.gpus:,} to {gpus:,} GPUs in proportion")
    # This many failures would have taken this long on the cluster that is planned for.
    return Counted(name, found.failures, found.seconds * found.gpus / gpus)


def _parts(options: FailureOptions, gpus: int | None) -> Iterator[rates.Cause]:
    """Yield the causes that are parts, and the job's own software."""
    per_node = options.gpus_per_node
    hosts = None if gpus is None else -(-gpus // per_node)
    for name, flag, number, rate, default in (
        ("gpu", "--gpus", "", options.gpu_mtbf, gpus),
        ("hbm", "--gpus", "", options.hbm_mtbf, gpus),
        ("host", "--hosts", options.hosts, options.host_mtbf, hosts),
        ("switch", "--switches", options.switches, options.switch_mtbf, None),
        ("nic", "--nics", options.nics, options.nic_mtbf, gpus),
        ("psu", "--psus", options.psus, options.psu_mtbf, hosts),
    ):
        if number and not rate:
            raise UsageError(
                f"{flag} says how many there are, and nothing how often they fail",
                hint=f"--{name}-mtbf 50000h",
            )
        if not rate:
            continue
        many = quantities.count(number, flag, kilo=1024) if number else default
        if many is None:
            raise UsageError(
                f"--{name}-mtbf is one's, and nothing says how many there are", hint=f"{flag} 1024"
            )
        each = quantities.failure_rate(rate, f"--{name}-mtbf", per_node=per_node)
        yield rates.Cause(name, each * many, many)
    for text in options.component or ():
        part = quantities.component(text, "--component", per_node=per_node)
        yield rates.Cause(part.name, part.rate * part.number, part.number)
    if options.job_mtbf:
        yield rates.Cause("software", 1 / positive(options.job_mtbf, "--job-mtbf"))
