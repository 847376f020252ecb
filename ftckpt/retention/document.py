"""Plans as documents: JSON that a later run carries out exactly, and rows for a table."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ftckpt.amounts import shown_duration
from ftckpt.checkpoint import CommitState
from ftckpt.errors import UsageError
from ftckpt.retention.policy.plan import BrokenFloor, Decision, Reason, RetentionPlan
from ftckpt.retention.scan.entries import (
    EntryClass,
    EntryContents,
    EntryVerdict,
    Lease,
    Pin,
    RootEntry,
    ScanDepth,
    SharedFile,
)
from ftckpt.strict_json import decode

from .policy import DeleteLimit, Metric, Policy

SCHEMA = "ftckpt.gc-plan/1"

# Python maps bytes of a name that are not UTF-8 here; lone surrogates are not text either.
_RAW = 0xDC00
_ODD = re.compile("[\ud800-\udfff\\\\]")
_ESCAPED = r"\\(?:\\|x([0-9a-f]{2})|u([0-9a-f]{4}))"


class Row(NamedTuple):
    """One entry in a table, every field text.

    Attributes:
        age: time since it was saved, or "-".
        nbytes: None if its files were not listed.
        entry_class: `NO MARKER` if it is COMMITTED in a format without a commit marker.
        verdict: `keep`, `thin` (it keeps its weights alone) or `drop`.
        reason: the rules for it.
    """

    step: str
    name: str
    age: str
    nbytes: int | None
    entry_class: str
    looked: str
    verdict: str
    reason: str


def rows(plan: RetentionPlan) -> list[Row]:
    """Return one row per entry, in the order of the plan."""
    return [_row(decision, plan.now) for decision in plan.decisions]


def dump_plan(plan: RetentionPlan) -> dict[str, Any]:
    r"""Return a plan as JSON values; equal plans give equal documents.

    `plan` is the digest of everything else: it identifies the plan in the log and detects edits.
    Text is valid Unicode for any name: a byte that is not UTF-8 is `\xNN`, and a backslash is
    doubled.
    """
    body: dict[str, Any] = _every_text(
        _escaped,
        {
            "schema": SCHEMA,
            "url": plan.url,
            "now": plan.now,
            "policy": _policy(plan.policy),
            "decisions": [_decision(d) for d in plan.decisions],
            "order": list(plan.order),
            "broken": [b._asdict() for b in plan.broken],
            "notes": list(plan.notes),
        },
    )
    return {**body, "plan": _digest(body)}


def plan_id(plan: RetentionPlan) -> str:
    """Return the digest that identifies a plan: 32 hex digits."""
    found = dump_plan(plan)["plan"]
    assert isinstance(found, str)
    return found


def load_plan(data: bytes, file: str) -> RetentionPlan:
    """Parse the JSON document of `dump_plan`; `file` is its name for messages.

    Raises:
        UsageError: not a plan, another version, or edited.
    """
    try:
        document = decode(data)
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
        if document.get("schema") != SCHEMA:
            raise ValueError(f"its schema is {document.get('schema')!r}, not {SCHEMA}")
        said = document.pop("plan", None)
        if said != _digest(document):
            raise ValueError("it was changed since it was made")
        plan = _plan(_every_text(_unescaped, document))
        _require_types(plan, RetentionPlan, "plan")
        dropped = {d.entry.name for d in plan.decisions if not d.keep}
        if len(dropped.intersection(plan.order)) < len(plan.order):
            raise ValueError("it orders what it does not drop")
        return plan
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        hint = "make a new one: ftckpt gc ROOT … --json"
        raise UsageError(f"{file} is not a plan of this version: {error}", hint=hint) from None


def _require_types(value: Any, hint: Any, what: str) -> None:
    """Refuse a value of another type than a field has, at any depth.

    Raises:
        ValueError: it is of another.
    """
    hints = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    fitting = next((one for one in hints if _fits(value, one)), None)
    if fitting is None:
        raise ValueError(f"{what} is {str(value)[:80]!r}")
    for inner in typing.get_args(fitting)[:1]:  # tuple[str, ...]
        for one in value:
            _require_types(one, inner, what)
    if dataclasses.is_dataclass(fitting) or hasattr(fitting, "_fields"):
        for name, one in typing.get_type_hints(fitting).items():
            _require_types(getattr(value, name), one, name)


def _fits(value: Any, hint: Any) -> bool:
    kind = typing.get_origin(hint) or hint
    kind = (int, float) if kind is float else kind
    return isinstance(value, kind) and (type(value) is bool) == (hint is bool)


def _every_text(change: Callable[[str], str], value: Any) -> Any:
    """Return JSON values with `change` applied to every string, not to keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _every_text(change, one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_every_text(change, one) for one in value]
    return value


def _escaped(text: str) -> str:
    return _ODD.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code == ord("\\"):
        return "\\\\"
    return f"\\x{code - _RAW:02x}" if _RAW + 0x80 <= code <= _RAW + 0xFF else f"\\u{code:04x}"


def _unescaped(text: str) -> str:
    return re.sub(_ESCAPED, _unescape, text)


def _unescape(match: re.Match[str]) -> str:
    if match[1]:
        return chr(_RAW + int(match[1], 16))
    return chr(int(match[2], 16)) if match[2] else "\\"


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _policy(policy: Policy) -> dict[str, Any]:
    values = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)}
    values["keep_tags"], values["only"] = list(policy.keep_tags), list(policy.only)
    for name in ("metric", "max_delete"):
        values[name] = None if values[name] is None else str(values[name])
    return values


def _decision(decision: Decision) -> dict[str, Any]:
    entry = decision.entry
    values = {f.name: getattr(entry, f.name) for f in dataclasses.fields(entry)}
    for name in ("entry_class", "looked"):
        values[name] = str(values[name])
    values["commit"] = None if entry.commit is None else str(entry.commit)
    values["verdict"] = None if entry.verdict is None else entry.verdict._asdict()
    values["pins"] = [p._asdict() for p in entry.pins]
    values["leases"] = [lease._asdict() for lease in entry.leases]
    for name in ("pointers", "tags", "bases", "needs"):
        values[name] = list(values[name])
    values["counts"] = [list(one) for one in entry.counts]
    if entry.contents is not None:
        values["contents"] = {
            **{f.name: getattr(entry.contents, f.name) for f in dataclasses.fields(EntryContents)},
            "shared": [s._asdict() for s in entry.contents.shared],
        }
    return {
        **values,
        "keep": decision.keep,
        "thin": decision.thin,
        "reasons": [r._asdict() for r in decision.reasons],
        "frees": decision.frees,
    }


def _plan(document: Mapping[str, Any]) -> RetentionPlan:
    policy = dict(document["policy"])
    policy["keep_tags"], policy["only"] = tuple(policy["keep_tags"]), tuple(policy["only"])
    if policy["metric"] is not None:
        policy["metric"] = Metric.parse(policy["metric"])
    if policy["max_delete"] is not None:
        policy["max_delete"] = DeleteLimit.parse(policy["max_delete"])
    return RetentionPlan(
        url=document["url"],
        now=document["now"],
        policy=Policy(**policy),
        decisions=tuple(_loaded(row) for row in document["decisions"]),
        order=tuple(document["order"]),
        broken=tuple(BrokenFloor(**b) for b in document["broken"]),
        notes=tuple(document["notes"]),
    )


def _loaded(row: Mapping[str, Any]) -> Decision:
    values = dict(row)
    keep, frees = values.pop("keep"), values.pop("frees")
    thin = values.pop("thin", False)
    reasons = tuple(Reason(**r) for r in values.pop("reasons"))
    values["entry_class"] = EntryClass(values["entry_class"])
    values["looked"] = ScanDepth(values["looked"])
    if values["commit"] is not None:
        values["commit"] = CommitState(values["commit"])
    if values.get("verdict") is not None:
        values["verdict"] = EntryVerdict(**values["verdict"])
    values["pins"] = tuple(Pin(**p) for p in values["pins"])
    values["leases"] = tuple(Lease(**lease) for lease in values["leases"])
    for name in ("pointers", "tags", "bases", "needs"):
        values[name] = tuple(values.get(name, ()))
    values["counts"] = tuple((key, value) for key, value in values.get("counts", ()))
    if values["contents"] is not None:
        shared = tuple(SharedFile(**s) for s in values["contents"]["shared"])
        values["contents"] = EntryContents(**{**values["contents"], "shared": shared})
    return Decision(RootEntry(**values), keep, reasons, frees, thin)


# Shown for COMMITTED where the format has no marker of it.
NO_MARKER = "NO MARKER"


def shown_class(entry: RootEntry) -> str:
    """Do not call an entry committed if its format records nothing."""
    unsaid = entry.commit is CommitState.NO_MARKER and entry.entry_class is EntryClass.COMMITTED
    return NO_MARKER if unsaid else str(entry.entry_class)


def _row(decision: Decision, now: float) -> Row:
    entry = decision.entry
    age = "-"
    if entry.time is not None:
        ahead = entry.time > now
        age = ("in " if ahead else "") + shown_duration(abs(now - entry.time))
    return Row(
        step="-" if entry.step is None else str(entry.step),
        name=entry.name,
        age=age,
        nbytes=None if entry.contents is None else entry.contents.nbytes,
        entry_class=shown_class(entry),
        looked=str(entry.looked),
        verdict="thin" if decision.thin else "keep" if decision.keep else "drop",
        reason="; ".join(map(str, decision.reasons)),
    )
