"""Roots in a few lines of text, so that a golden plan can be read beside what it was made from.

    policy --keep-last 2 --min-survivors 1
    last-run 3h
    steps 100..500/100 every 1h
    entry step-600 STAGING age=10m why="no marker"

Ages are before a fixed now. `steps A..B/D every T` makes committed, checked checkpoints, the newest
as old as T. An `entry` is committed and checked unless it says something else; its step is by its
name unless `step=` says it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from ftckpt.amounts import duration
from ftckpt.discovery.step_names import step_in_name
from ftckpt.retention.policy import DeleteLimit, Metric, Policy
from ftckpt.retention.scan.entries import (
    EntryClass,
    EntryContents,
    Lease,
    Pin,
    RootEntry,
    SharedFile,
)

NOW = datetime(2026, 3, 31, 12, 30, tzinfo=UTC).timestamp()


@dataclass
class Scenario:
    """What a text describes."""

    policy: Policy = field(default_factory=Policy)
    entries: list[RootEntry] = field(default_factory=list)
    last_run: dict[str, float] = field(default_factory=dict)


def scenario(text: str) -> Scenario:
    """Return the scenario of a text; lines that begin with `#` are remarks."""
    found = Scenario()
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        match words[0]:
            case "policy":
                found.policy = policy(words[1:])
            case "last-run":
                found.last_run[""] = NOW - duration(words[1], "last-run")
            case "steps":
                found.entries += steps(*words[1:])
            case "entry":
                found.entries.append(entry(words[1], words[2:]))
            case other:
                raise ValueError(other)
    return found


def policy(words: list[str]) -> Policy:
    """Return the policy of flags as the command line takes them."""
    values: dict[str, object] = {}
    tags: list[str] = []
    waiting = list(words)
    while waiting:
        name = waiting.pop(0).removeprefix("--").replace("-", "_")
        if name == "delete_corrupt":
            values[name] = True
            continue
        value = waiting.pop(0)
        match name:
            case "keep_within":
                values[name] = duration(value, name)
            case "metric":
                values[name] = Metric.parse(value)
            case "max_delete":
                values[name] = DeleteLimit.parse(value)
            case "keep_tag":
                tags.append(value)
            case "free":
                values["reclaim"] = int(value)
            case _:
                values[name] = int(value)
    return Policy(**values, keep_tags=tuple(tags))  # type: ignore[arg-type]


def steps(span: str, every: str, interval: str) -> Iterator[RootEntry]:
    """Yield checkpoints of `A..B/D`, the newest as old as the interval."""
    assert every == "every"
    first, _, rest = span.partition("..")
    last, _, by = rest.partition("/")
    numbers = list(range(int(first), int(last) + 1, int(by)))
    apart = duration(interval, "every")
    for back, step in enumerate(reversed(numbers), 1):
        yield RootEntry(
            f"step-{step}", "", EntryClass.COMMITTED, step, NOW - back * apart, checked=True
        )


def entry(name: str, words: list[str]) -> RootEntry:
    """Return the entry of one line."""
    flags = {word for word in words if "=" not in word}
    values = dict(word.split("=", 1) for word in words if "=" in word)
    kinds = [EntryClass(flag) for flag in flags if flag.isupper()]
    kind = kinds[0] if kinds else EntryClass.COMMITTED
    group = values.get("group", "")
    said = step_in_name(name.rpartition("/")[2])
    return RootEntry(
        name=name,
        group=group,
        entry_class=kind,
        step=int(values["step"]) if "step" in values else said,
        time=None if "timeless" in flags else NOW - _age(values.get("age", "1d")),
        why=values.get("why", ""),
        contents=_contents(values),
        checked=kind is EntryClass.COMMITTED and "unchecked" not in flags,
        verified="verified" in flags,
        named="named" in flags,
        pointers=_list(values, "pointer"),
        pins=tuple(Pin(name, *_pair(pin), NOW) for pin in _list(values, "pin")),
        leases=tuple(Lease(name, holder, NOW + 60) for holder in _list(values, "lease")),
        tags=_list(values, "tag"),
        bases=_list(values, "base"),
        metric=float(values["metric"]) if "metric" in values else None,
    )


def _age(text: str) -> float:
    return -duration(text[1:], "age") if text.startswith("-") else duration(text, "age")


def _list(values: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(part for part in values.get(name, "").split(",") if part)


def _pair(text: str) -> tuple[str, str]:
    first, _, second = text.partition(":")
    return first, second


def _contents(values: Mapping[str, str]) -> EntryContents | None:
    """`size=100` and `shared=inode:size:links:here,…`."""
    if "size" not in values:
        return None
    shared = []
    for text in _list(values, "shared"):
        inode, size, links, here = text.split(":")
        shared.append(SharedFile(inode, int(size), int(links), int(here)))
    own = int(values["size"])
    return EntryContents(1, own + sum(s.size for s in shared), own, tuple(shared), None, "0" * 32)
