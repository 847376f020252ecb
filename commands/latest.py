"""`ftckpt latest`: the checkpoint to restart from."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

from ftckpt.amounts import duration
from ftckpt.commands.cli.choose_checkpoint import (
    CheckLevel,
    ChoiceOptions,
    checks_of,
    read_root,
    report_choice,
    report_remembered,
    warn_about,
)
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import printable
from ftckpt.commands.cli.target import AlsoOption
from ftckpt.commands.cli.terminal import write_bytes
from ftckpt.errors import ExitCode, UsageError
from ftckpt.operations.definition import argument, option, switch

if TYPE_CHECKING:
    from ftckpt.discovery.conditions import Worlds
    from ftckpt.discovery.select import Check, Selection, SelectionRules

EXAMPLES = (
    ("ftckpt latest /ckpt/run7", "the newest whose names, sizes and coverage are right"),
    (
        'CKPT=$(ftckpt latest "$ROOT" --verify content) || exit $?',
        "in a job script: every byte checked before the restart",
    ),
    (
        "ftckpt latest s3://run7/ckpt --wait --timeout 10m",
        "let the save in flight finish first",
    ),
    ("ftckpt latest /ckpt/run7 --step-at-most 12000", "go back to before a loss spike"),
    (
        "ftckpt latest /ckpt/run7 --verify content --reuse 24h",
        "a check of the last day counts, unless a file has changed since",
    ),
    (
        "ftckpt latest /ckpt/run7 --require model,optimizer,rng --world-size 64",
        "walk back over those that 64 ranks cannot resume from exactly",
    ),
    ("ftckpt latest /nvme/run7 /shared/run7 s3://run7", "of several tiers, the nearest first"),
    ("ftckpt latest /ckpt/run7 --pointer last-known-good", "what ftckpt promote has verified"),
    ("ftckpt latest /ckpt/gan --series G", "the newest G of a save whose D passes, too"),
    ("ftckpt latest /ckpt/run8 --create-root", "once, before the first start of a run"),
)
CODES = {
    ExitCode.OK: "one path on stdout: the newest checkpoint that passes",
    ExitCode.USAGE: "flags; or series that are saved together: one alone is half a checkpoint",
    ExitCode.CORRUPT: "all checkpoints are damaged; or there were some, and none is left",
    ExitCode.INCOMPLETE: "there are checkpoints, and none is committed",
    ExitCode.UNVERIFIED: "the newest has no evidence for --verify content; or each lacks what "
    "--require or --world-size asks for; or nothing tells which is the newest",
    ExitCode.UNSAFE: "all are hostile or ambiguous; or the newest is, with --stop-at-unsafe",
    ExitCode.REFUSED: "every checkpoint is newer than --step-at-most, or was dropped",
    ExitCode.NOT_FOUND: "a root made by --create-root that holds no checkpoint yet: a first start",
    ExitCode.UNAVAILABLE: "storage failed; nothing older was taken instead",
    ExitCode.DENIED: "credentials or permissions; nothing older was taken instead",
    ExitCode.NO_RESOURCE: "",
    ExitCode.UNSUPPORTED: "the newest is of a format that this version does not read",
    ExitCode.MISSING: "no such root, or an unmarked one without a checkpoint: never a first start",
}
OPTIONS = (ChoiceOptions,)


def command(
    invocation: Invocation,
    roots: Annotated[
        list[str],
        argument(
            "ROOT...",
            "Directory or URL that holds the checkpoints; or several tiers, nearest first.",
        ),
    ],
    verify: Annotated[
        CheckLevel,
        option("", "Check names, sizes and coverage; every byte; or the numbers, too."),
    ] = CheckLevel.STRUCTURE,
    world_size: Annotated[
        int | None, option("N", "Take only one that N ranks load as it is.", min=1)
    ] = None,
    or_reshard: Annotated[
        bool, switch("--or-reshard", "With --world-size: take any, and print the reshard command.")
    ] = False,
    not_newer_than: Annotated[int | None, option("N", "", min=0, hidden=True)] = None,
    wait: Annotated[bool, switch("--wait", "Wait for a save in flight that is newer.")] = False,
    timeout: Annotated[str, option("T", "How long --wait waits: 90s, 5m, 1h.")] = "10m",
    skip_unverified: Annotated[
        bool, switch("--skip-unverified", "Walk back over those without evidence.")
    ] = False,
    weights: Annotated[
        bool, switch("--weights", "Take one that gc has thinned to its weights, too.")
    ] = False,
    pointer: Annotated[
        str, option("NAME", "Choose the target of this pointer: last-known-good (see promote).")
    ] = "",
    series: Annotated[
        str,
        option("NAME", "Choose in this series alone: G of G_N and D_N, saved together."),
    ] = "",
    allow_missing_tier: Annotated[
        bool,
        switch(
            "--allow-missing-tier",
            "Of several tiers: choose although one cannot be read and may hold a newer step.",
        ),
    ] = False,
    create_root: Annotated[
        bool,
        switch("--create-root", "Mark ROOT as the root of a run, once, before its first start."),
    ] = False,
    also: AlsoOption = None,
) -> Result:
    """Print the newest checkpoint that passes.

    Newest is the largest step in the content. Damaged, unsafe and uncommitted checkpoints are
    walked over, with the reason on stderr, and so is one that the ledger of the root knows as bad.
    A storage error stops the search with its own code, because an older checkpoint must not be
    taken while the newest could not be reached. Pointers (latest, tracker files, links) are
    compared with what is there, and never believed. A ROOT without checkpoints is a first start (9)
    only if --create-root has marked it: an unmounted filesystem is empty, too.

    Of several tiers the newest step that passes in any is taken, from the nearest that has it. A
    tier that cannot be read may hold the newest: nothing is taken then, with its code, unless
    --allow-missing-tier is given.
    """
    from ftckpt.api.choosing import require_one_root, requiring
    from ftckpt.discovery.conditions import Worlds, all_of
    from ftckpt.discovery.select import SelectionRules, select

    choice = invocation.options(ChoiceOptions)
    root = roots[0]
    require_one_root(
        roots,
        wait=wait,
        pointer=pointer,
        series=series,
        create_root=create_root,
        allow_missing_tier=allow_missing_tier,
        also=also,
    )
    if also:
        invocation.report(also=list(also))
    invocation.report(target=root, path=None, step=None, level=verify, skipped=[], pointers=[])
    seconds = duration(timeout, "--timeout")
    limit = not_newer_than if choice.step_at_most is None else choice.step_at_most
    parts = choice.parts
    if or_reshard and world_size is None:
        raise UsageError("--or-reshard needs --world-size")
    worlds = Worlds(world_size, any_size=or_reshard)
    condition = all_of([requiring(parts, invocation.say), worlds])
    rules = SelectionRules(
        limit, choice.max_fallback, skip_unverified, choice.stop_at_unsafe, condition,
        weights,
    )  # fmt: skip
    check = checks_of(invocation, verify, choice)

    # That a newer one is not taken can cost hours of training: also --quiet says so.
    def note(line: str) -> None:
        invocation.warn(printable(line))

    if len(roots) > 1:
        found = _of_tiers(invocation, roots, check, rules, note, allow_missing=allow_missing_tier)
    elif pointer:
        from ftckpt.discovery.follow_pointer import follow

        found = select(
            follow(read_root(invocation, root, also=also), pointer, rules), check, rules, note
        )
    elif series:
        from ftckpt.discovery.one_series import select_series

        known = read_root(invocation, root, create=create_root, also=also)
        found = select_series(known, series, check, rules, note)
    elif wait:
        from ftckpt.discovery.wait import select_waiting

        read = partial(read_root, invocation, root, create=create_root, also=also)
        found = select_waiting(read, check, rules, seconds, note, say=invocation.say)
    else:
        found = select(
            read_root(invocation, root, create=create_root, also=also), check, rules, note
        )
    invocation.report(path=found.path)
    report_choice(invocation, found)
    invocation.close()
    report_remembered(invocation, check, found)
    _report_reshard(invocation, worlds, found)
    warn_about(invocation, found)
    if found.path is None:
        return invocation.fail(found.code, printable(found.message), printable(found.hint))
    if not invocation.json:
        # The bytes of the path, whatever the locale: the shell hands them on to the trainer.
        write_bytes(sys.stdout, os.fsencode(found.path) + b"\n")
    if verify is CheckLevel.STRUCTURE:
        invocation.say(
            "note: only names, sizes and headers were checked; --verify content reads every byte"
        )
    return Result(ExitCode.OK, f"{found.path} passes", "")


def _of_tiers(
    invocation: Invocation,
    roots: Sequence[str],
    check: Check,
    rules: SelectionRules,
    note: Callable[[str], None],
    *,
    allow_missing: bool,
) -> Selection:
    """Choose of several tiers, and report what each had to give."""
    from ftckpt.api.choosing import read_tiers
    from ftckpt.discovery.tiers import select_tiers

    tiers = read_tiers(roots, invocation.stores)
    found = select_tiers(tiers, check, rules, note, allow_missing=allow_missing)
    invocation.report(
        tiers=[t._asdict() | {"code": int(t.code), "name": t.code.name} for t in found.tiers]
    )
    return found.chosen


def _report_reshard(invocation: Invocation, worlds: Worlds, found: Selection) -> None:
    """Report the command that makes the chosen checkpoint loadable at the world size."""
    command = worlds.command(found.path) if found.path is not None else None
    if worlds.any_size:
        invocation.report(reshard=command)
    if command is not None:
        said = worlds.reasons[command[2]]
        invocation.warn(printable(f"note: {command[2]} {said}; {shlex.join(command)}"))
