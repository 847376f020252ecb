"""`ftckpt verify`: can it be trusted, and which evidence says so?"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from ftckpt.commands.cli.alerts import AlertOptions
from ftckpt.commands.cli.bounds import (
    JobsOption,
    MemoryOption,
    RateOption,
    bound_memory,
)
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import human_bytes, human_duration
from ftckpt.commands.cli.target import (
    AlsoOption,
    PathArgument,
    open_from,
    open_other,
    open_target,
)
from ftckpt.errors import (
    CorruptError,
    ExitCode,
    FtckptError,
    NotFoundError,
    UnsafeError,
    UsageError,
)
from ftckpt.findings import counted
from ftckpt.operations.definition import option, switch
from ftckpt.operations.many import Machines

from .cli import render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftckpt.discovery.resolve import Target
    from ftckpt.findings import Finding
    from ftckpt.verification.places import PlaceCheck, PlaceReport, Watcher
    from ftckpt.verification.scrub import Scrub, ScrubSummary
    from ftckpt.workers import Work

OPTIONS = (Machines, AlertOptions)
EXAMPLES = (
    ("ftckpt verify /ckpt/run7/step-1000", "by the best evidence that there is"),
    ("ftckpt verify /ckpt/run7 --all --level structure", "every checkpoint of a root, quickly"),
    ("ftckpt verify /ckpt/run7 --oldest-first --budget 1h", "every night: each is read in turn"),
    ("ftckpt verify s3://run7/ckpt@1000 --require content", "exit 6 where bytes have no evidence"),
    ("ftckpt verify /nvme/step-9 --against s3://run7/ckpt/step-9", "compare with a replica"),
    ("ftckpt verify /n0/step-9 --also /n1/step-9", "whose shards lie on two nodes' disks"),
    ("ftckpt verify run/step-9 --remember", "so that `latest`, `gc` and `status` know of it"),
    ("ftckpt verify big/ --sample 5% --limit-rate 200MiB/s", "a share, gently, beside a trainer"),
    ("ftckpt verify step-9 --level values --strict=replicas,masters", "copies that differ fail"),
    ("srun ftckpt verify step-9 --part auto --finish-last", "by all nodes of a job"),
)
CODES = {
    ExitCode.OK: "everything that the evidence allows was checked and passed",
    ExitCode.CORRUPT: "proven damage; the findings name file, tensor, rank and bytes",
    ExitCode.INCOMPLETE: "not committed, still being written, or changed meanwhile; parts missing",
    ExitCode.UNVERIFIED: "content was demanded and no evidence covers it",
    ExitCode.UNSAFE: "hostile or ambiguous content; nothing was executed",
    ExitCode.REFUSED: "parts do not fit together: another plan, or a record that is not whole",
    ExitCode.NOT_FOUND: "no checkpoint there",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "",
    ExitCode.UNSUPPORTED: "recognised, but not readable by this version",
}


class LevelChoice(StrEnum):
    """How deep to check; the core's `Level`, spelled here so that help needs no core."""

    AUTO = "auto"
    STRUCTURE = "structure"
    CONTENT = "content"
    VALUES = "values"


class Requirement(StrEnum):
    """What must not be missing."""

    CONTENT = "content"


def command(
    invocation: Invocation,
    path: PathArgument,
    level: Annotated[
        LevelChoice,
        option("", "structure: headers; content: every byte; values: the numbers too."),
    ] = LevelChoice.AUTO,
    require: Annotated[
        Requirement | None, option("", "Exit 6 where this evidence is missing.")
    ] = None,
    all_: Annotated[
        bool, switch("--all", "Every checkpoint of a root; the worst code wins.")
    ] = False,
    oldest_first: Annotated[
        bool,
        switch(
            "--oldest-first",
            "Scrub a root: read first what was not read for longest, and remember it.",
        ),
    ] = False,
    budget: Annotated[str, option("TIME", "Begin no further checkpoint of a scrub after it.")] = "",
    also: AlsoOption = None,
    against: Annotated[str, option("OTHER", "A replica to compare with, byte by byte.")] = "",
    manifest: Annotated[str, option("FILE", "A manifest that is kept elsewhere.")] = "",
    sample: Annotated[str, option("SHARE", "Read only this share of the content: 5%.")] = "",
    strict: Annotated[
        list[str] | None,
        option(
            "[=CLASS,...]",
            "Treat warnings as errors, or those alone of replicas, masters, values, stale, "
            "steps, names, pointers, counts, sizes, links, opaque, odd.",
        ),
    ] = None,
    fail_fast: Annotated[bool, switch("--fail-fast", "Stop at the first error.")] = False,
    remember: Annotated[
        bool,
        switch(
            "--remember", "Keep the verdict in the ledger of the root; implies --require content."
        ),
    ] = False,
    ledger: Annotated[
        str, option("DIR", "Where verdicts are remembered; else .ftckpt/ in the root.")
    ] = "",
    jobs: JobsOption = 0,
    limit_rate: RateOption = "",
    max_memory: MemoryOption = "1GiB",
) -> Result:
    """Check a checkpoint, and name the evidence for the verdict.

    Structure first: missing, truncated, swapped and stray files, holes and overlaps, mixed steps.
    Then the content, by the manifest that `ftckpt seal` wrote, else by the CRC-32s that torch puts
    into its files and never checks. What nothing covers is named.
    """
    from ftckpt.formats.unsupported import hostile_in
    from ftckpt.verification import Level
    from ftckpt.verification.places import PlaceCheck
    from ftckpt.workers import Work

    bound_memory(max_memory)
    many = invocation.options(Machines)
    if many.asked and (all_ or oldest_first or fail_fast or remember):
        # A verdict says that all bytes were read just now.
        raise UsageError(
            "--part is for one checkpoint that is read whole: not with --all, --oldest-first,"
            " --fail-fast or --remember"
        )
    scrub = _scrub(invocation, budget, ledger, oldest_first=oldest_first)
    told_of = invocation.options(AlertOptions)
    if scrub is None and (told_of.on_alert or told_of.alert_url):
        raise UsageError("--on-alert and --alert-url go with --oldest-first")
    alerts = told_of.begin(invocation, "verify", path)
    told: list[str] = []
    check = PlaceCheck.asked(
        Level(level.value),
        hostile=hostile_in,
        stores=invocation.stores,
        work=Work.of(jobs, limit_rate, invocation.counter),
        watcher=_watcher(invocation, path, told, everything=all_ or oldest_first),
        require_content=require is Requirement.CONTENT,
        also=also or (),
        against=open_other(invocation, against) if against else None,
        manifest=manifest,
        sample=sample,
        strict=strict or (),
        fail_fast=fail_fast,
        remember=remember,
        ledger=ledger,
        scrub=oldest_first,
    )
    invocation.report(
        level=level.value, evidence="none", strict=sorted(check.options.strict), bytes_read=0,
        seconds=0.0, findings=[],
    )  # fmt: skip
    try:
        target = open_target(invocation, path, also=also)
    except (CorruptError, UnsafeError) as error:
        report = check.unopened(error, path)
    else:
        if many.asked:
            return _divided(invocation, target, check, told, level)
        report = check.target(target, everything=all_, scrub=scrub)
    if report.scrub is not None:
        invocation.print(_progress(report.scrub))
        for one in report.checkpoints:
            if one.code is not ExitCode.OK:
                kind = one.code.name.lower().replace("_", "-")
                alerts.add(kind, one.message, one.hint, [one.url.rstrip("/").rpartition("/")[2]])
        for finding in report.findings:
            if finding.severity == "error":
                alerts.add(finding.kind, finding.message, "", [finding.file or ""])
        alerts.complete()
    return _conclude(invocation, report, told)


def _divided(
    invocation: Invocation, target: Target, check: PlaceCheck, told: list[str], level: LevelChoice
) -> Result:
    """Do a part of a check, or finish it; what no part can open is the whole answer at once."""
    from ftckpt.commands.cli.parts import session_of, shown
    from ftckpt.manifest.locate import find
    from ftckpt.operations.many.run import Divided, errors_of
    from ftckpt.parts.plan import identity_of, names_of, plan_of
    from ftckpt.verification import verify

    options = check.options
    try:
        checkpoint = open_from(invocation, target, newest=False)
    except (UsageError, NotFoundError):
        raise
    except FtckptError:
        return _conclude(invocation, check.target(target), told)
    sealed = options.manifest
    with suppress(FtckptError):  # the check reports it
        sealed = sealed or find(checkpoint.source)
    others = [] if options.against is None else [options.against]
    flags = {
        "level": level.value,
        "require": options.require_content,
        "strict": sorted(options.strict),
        "sample": options.sample,
        "against": [identity_of(one.source) for one in others],
        "given": options.manifest is not None,
    }

    def share(work: Work) -> tuple[Sequence[Finding], int]:
        report = verify(checkpoint, options, work=work, emit=errors_of(invocation))
        return report.findings, report.bytes_read

    def whole(work: Work) -> Result:
        return _conclude(invocation, replace(check, work=work).checkpoint(checkpoint), told)

    plan = plan_of(checkpoint, "verify", flags, *others, sealed=sealed)
    names = names_of(checkpoint, sealed)
    return shown(
        invocation,
        Divided(session_of(invocation), checkpoint, plan, names, check.work, share, whole).run(),
    )


def _scrub(invocation: Invocation, budget: str, ledger: str, *, oldest_first: bool) -> Scrub | None:
    if not (oldest_first or budget):
        return None
    from ftckpt.amounts import duration
    from ftckpt.verification.scrub import scrubbing

    left = duration(budget, "--budget") if budget else None
    return scrubbing(oldest_first, left, invocation.stores, ledger)


def _progress(scrub: ScrubSummary) -> str:
    """Say how far a scrub has come."""
    told = f"scrub: {scrub.checked} of {counted(scrub.checkpoints, 'checkpoint')} read"
    if scrub.unproven:
        told += f" ({scrub.unproven} without evidence of its content: ftckpt seal records it)"
    if scrub.oldest is None:
        return f"{told}; {scrub.never} not read since saved"
    age = human_duration(max(0.0, time.time() - scrub.oldest))
    return f"{told}; all of them in the last {age}"


# `--strict` alone; the other form is `--strict=CLASS,...`.
BARE = {"--strict": "all"}


def _watcher(invocation: Invocation, path: str, told: list[str], *, everything: bool) -> Watcher:
    """Return what prints; `told` gets the message of each verdict on a single checkpoint."""
    from ftckpt.verification.places import Watcher

    class Printer(Watcher):
        """Prints what is found as it is found, and the verdict on each checkpoint."""

        def begin(self, url: str) -> None:
            if everything:
                invocation.print(f"{render.printable(url)}:")
            else:
                invocation.say(f"{path} is a root; taking the newest, {url}")

        def open(self, url: str, name: str) -> None:
            invocation.report(target=url, format=name)

        def found(self, one: Finding) -> None:
            invocation.found(one)

        def end(self, report: PlaceReport) -> None:
            told.append(report.message)
            _tell(invocation, report)

        def note(self, text: str) -> None:
            invocation.warn(text)

    return Printer()


def _tell(invocation: Invocation, report: PlaceReport) -> None:
    """Print the verdict on a single checkpoint."""
    if report.code is not ExitCode.OK:
        invocation.complain(report.code, report.message, report.hint)
        return
    rate = report.bytes_read / report.seconds if report.seconds else 0
    read = (
        f", {human_bytes(report.bytes_read)} in {human_duration(report.seconds)}"
        f" ({human_bytes(int(rate))}/s)"
        if report.bytes_read
        else ""
    )
    invocation.print(f"ok: {report.message}{read}")
    if report.hint:
        invocation.say(f"hint: {report.hint}")


def _conclude(invocation: Invocation, report: PlaceReport, told: Sequence[str]) -> Result:
    """Report the whole answer, and complain of what was not told of a single checkpoint."""
    invocation.report(**_document(report, {"strict": invocation.document["strict"]}))
    if report.code is not ExitCode.OK and report.message not in told:
        invocation.complain(report.code, report.message, report.hint)
    return Result(report.code, report.message, report.hint)


def _document(report: PlaceReport, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the answer; `common` are those that each checkpoint's begins with."""
    fields = dict(common) | {
        "target": report.url,
        "format": report.format,
        "step": report.step,
        "level": report.level,
        "evidence": report.evidence,
        "findings": report.findings,
        "bytes_read": report.bytes_read,
        "bytes_covered": report.bytes_covered,
        "bytes_uncovered": report.bytes_uncovered,
        "sampled": report.sampled,
        "seconds": report.seconds,
    }
    if report.scrub is not None:
        fields["scrub"] = report.scrub._asdict()
    if report.checkpoints:
        fields["checkpoints"] = [_document(one, common) for one in report.checkpoints]
    return fields
