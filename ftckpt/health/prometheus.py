"""A status as metrics in Prometheus' text format, for node_exporter's textfile collector.

The format: https://prometheus.io/docs/instrumenting/exposition_formats/ ; times are exported as
times, not as ages, so that an alert rule computes the age itself while nobody rewrites the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .alerts import AlertKind
from .judge import Health, Status

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class Gauge(NamedTuple):
    """One gauge.

    Attributes:
        name: with its unit, as the convention has it.
        help: one line.
    """

    name: str
    help: str


UP = Gauge("ftckpt_status_up", "1 where the root could be read, 0 where it could not.")
AT = Gauge("ftckpt_status_timestamp_seconds", "When the root was looked at.")
ALERT = Gauge("ftckpt_status_alert", "1 where somebody should look at it, by kind.")
NEWEST_STEP = Gauge("ftckpt_newest_step", "Step of the newest finished checkpoint.")
NEWEST_TIME = Gauge("ftckpt_newest_timestamp_seconds", "When the last checkpoint was finished.")
VERIFIED_STEP = Gauge("ftckpt_verified_step", "Step of the newest verified checkpoint.")
VERIFIED_TIME = Gauge("ftckpt_verified_timestamp_seconds", "When that was finished.")
INTERVAL = Gauge("ftckpt_interval_seconds", "Between checkpoints: median, last, jitter, expected.")
WRITING = Gauge("ftckpt_write_seconds", "First to last file of a save: last, now, before.")
GROWTH = Gauge("ftckpt_growth_bytes_per_day", "What saves add while nothing is dropped.")
COUNT = Gauge("ftckpt_checkpoints", "Entries of the root, by class.")
BYTES = Gauge("ftckpt_checkpoint_bytes", "Bytes of the entries, by class.")
THINNED = Gauge("ftckpt_thinned_checkpoints", "Those of them that hold weights alone.")
FREE = Gauge("ftckpt_free_bytes", "What the filesystem has left.")
MISSING = Gauge("ftckpt_not_durable", "Finished checkpoints that the second tier lacks.")
DURABLE_STEP = Gauge("ftckpt_durable_step", "Step of the newest checkpoint that both tiers hold.")
UNREAD = Gauge("ftckpt_unread_since_timestamp_seconds", "Since when nobody has read one.")
BAD = Gauge("ftckpt_scrub_bad", "Checkpoints that are known to be bad and unchanged.")

_ORDER = (
    UP, AT, ALERT, NEWEST_STEP, NEWEST_TIME, VERIFIED_STEP, VERIFIED_TIME, INTERVAL, WRITING,
    GROWTH, COUNT, BYTES, THINNED, FREE, MISSING, DURABLE_STEP, UNREAD, BAD,
)  # fmt: skip

_Sample = tuple[Gauge, Mapping[str, str], float | None]


def metrics(status: Status) -> str:
    """Return the metrics of a status; what is not known has no sample."""
    samples: list[_Sample] = [
        (UP, {"root": status.url}, 1.0),
        (AT, {"root": status.url}, status.now),
    ]
    for run in status.runs:
        samples += _samples(run, {"root": status.url, "run": run.survey.url}, status.now)
    return text_of(samples)


def unreadable(url: str, now: float) -> str:
    """Return the metrics of a root that could not be read: that nothing is known of it."""
    return text_of([(UP, {"root": url}, 0.0), (AT, {"root": url}, now)])


def _samples(run: Health, labels: Mapping[str, str], now: float) -> Iterator[_Sample]:
    raised = {alert.kind for alert in run.alerts}
    for kind in AlertKind:
        yield ALERT, {**labels, "kind": kind.value}, float(kind in raised)
    if run.newest is not None:
        yield NEWEST_STEP, labels, run.newest.entry.step
    if run.last is not None:
        yield NEWEST_TIME, labels, run.last.finished
    if run.survey.verified is not None:
        yield VERIFIED_STEP, labels, run.survey.verified.entry.step
        yield VERIFIED_TIME, labels, run.survey.verified.finished
    rhythm, writing = run.rhythm, run.writing
    for which, seconds in (
        ("median", rhythm.median_s),
        ("last", rhythm.last_s),
        ("jitter", rhythm.jitter_s),
        ("expected", rhythm.expected_s),
    ):
        yield INTERVAL, {**labels, "which": which}, seconds
    for which, seconds in (
        ("last", writing.last_s),
        ("now", writing.now_s),
        ("before", writing.before_s),
    ):
        yield WRITING, {**labels, "which": which}, seconds
    yield GROWTH, labels, run.growth
    for entry_class, count in run.counts.items():
        yield COUNT, {**labels, "class": entry_class.value}, count
    for entry_class, nbytes in run.nbytes.items():
        yield BYTES, {**labels, "class": entry_class.value}, nbytes
    yield THINNED, labels, len(run.thinned)
    yield FREE, labels, run.survey.free
    if run.durable is not None:
        yield MISSING, {**labels, "tier": run.durable.url}, len(run.durable.missing)
        if run.durable.newest is not None:
            yield DURABLE_STEP, {**labels, "tier": run.durable.url}, run.durable.newest.entry.step
    if (scrub := run.scrubbed) is not None:
        yield UNREAD, labels, None if scrub.unread_s is None else now - scrub.unread_s
        yield BAD, labels, len(scrub.bad)


def text_of(samples: Sequence[_Sample], order: Sequence[Gauge] = _ORDER) -> str:
    """Return samples in Prometheus' text format; those without a value are left out."""
    lines = []
    for metric in order:
        mine = [
            (labels, value) for m, labels, value in samples if m is metric and value is not None
        ]
        if mine:
            lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} gauge"]
        for labels, value in mine:
            inside = ",".join(f'{k}="{_label(v)}"' for k, v in labels.items())
            lines.append(f"{metric.name}{{{inside}}} {_number(value)}")
    return "\n".join(lines) + "\n"


def _label(value: str) -> str:
    """Return a label's value; bytes of a path that are no UTF-8 become U+FFFD."""
    return value.encode(errors="replace").decode().translate(_ESCAPES)


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
