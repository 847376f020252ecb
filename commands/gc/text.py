"""A plan as text: for every entry what becomes of it and why, and what that comes to."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence

from ftckpt.commands.cli.environment import said_again
from ftckpt.commands.cli.render import block, human_bytes, table
from ftckpt.operations.retaining import kept_saves
from ftckpt.retention.document import Row, rows
from ftckpt.retention.policy.plan import RetentionPlan
from ftckpt.retention.scan.entries import EntryClass

_HEAD = ["step>", "name", "age>", "size>", "class", "looked at", "plan", "why"]


def plan_text(plan: RetentionPlan) -> str:
    """Return a table a run: each entry with step, age, size, class, depth, verdict and reasons.

    Of a plan for what a person has named, what is not named is left out.

    The newest of each run come first, and of several reasons the strongest: a protection before a
    rule of the policy. What lies in the trash is left to `gc undelete`, which lists it.
    """
    by_group: dict[str, list[Row]] = defaultdict(list)
    for decision, row in zip(plan.decisions, rows(plan), strict=True):
        if plan.policy.only and decision.entry.name not in plan.policy.only:
            continue
        if decision.entry.entry_class is not EntryClass.TRASH:
            by_group[decision.entry.group].append(row)
    parts = []
    for group, members in by_group.items():
        head = [f"{plan.url.rstrip('/')}/{group}:"] if len(by_group) > 1 else []
        skip = len(group) + 1 if group and len(by_group) > 1 else 0
        parts.append(block(*head, table(_HEAD, [_cells(row, skip) for row in members])))
    return block(*parts, between="\n\n")


def _cells(row: Row, skip: int) -> list[str]:
    size = "-" if row.nbytes is None else human_bytes(row.nbytes)
    name = row.name[skip:]
    return [row.step, name, row.age, size, row.entry_class, row.looked, row.verdict, row.reason]


def summary(plan: RetentionPlan) -> str:
    """Return one sentence: what the plan keeps, drops and frees."""
    trashed = sum(d.entry.entry_class is EntryClass.TRASH for d in plan.keep)
    trash = f"; {trashed} in the trash" if trashed else ""
    if plan.thin:
        wins = human_bytes(plan.wins)
        trash = f", thins {len(plan.thin)} to their weights, wins {wins}{trash}"
    if not plan.order:
        return f"nothing to drop, {kept_saves(plan)} kept{trash}"
    known = all(decision.frees is not None for decision in plan.drop)
    frees = human_bytes(plan.frees) if known else "what was not counted"
    return f"keeps {kept_saves(plan)}, drops {len(plan.drop)}, frees {frees}{trash}"


def command_to_apply(words: Sequence[str]) -> str:
    """Return the command line that carries out what this one has planned."""
    own = [word for word in said_again(words) if word not in ("--json", "--quiet", "-q")]
    end = own.index("--") if "--" in own else len(own)
    return shlex.join(["ftckpt", *own[:end], "--apply", *own[end:]])
