"""`ftckpt verify`: can it be trusted, and which evidence says so?"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftckpt.commands.cli.bounds import (
    JobsOption,
    MemoryOption,
    RateOption,
    bound_memory,
    job_count,
    rate_limit,
)
from ftckpt.commands.cli.invocation import Invocation, Result, invoked
from ftckpt.commands.cli.render import human_bytes, human_duration
from ftckpt.commands.cli.target import (
    PathArgument,
    choose,
    hostile_findings,
    known_step,
    open_other,
    open_target,
)
from ftckpt.errors import (
    CorruptError,
    ExitCode,
    FtckptError,
    UnsafeError,
    UnsupportedError,
    UsageError,
    worst,
)
from ftckpt.findings import finding

from .cli import render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftckpt.checkpoint import Checkpoint
    from ftckpt.discovery.recognise import UnopenedPart
    from ftckpt.discovery.resolve import Target
    from ftckpt.discovery.roots import Child, Root
    from ftckpt.findings import Finding, Strictness
    from ftckpt.manifest import Manifest
    from ftckpt.storage.store import Store
    from ftckpt.verification import VerifyOptions, VerifyReport

EXAMPLES = (
    ("ftckpt verify /ckpt/run7/step-1000", "by the best evidence that there is"),
    ("ftckpt verify /ckpt/run7 --all --level structure", "every checkpoint of a root, quickly"),
    ("ftckpt verify s3://run7/ckpt@1000 --require content", "exit 6 where bytes have no evidence"),
    ("ftckpt verify /nvme/step-9 --against s3://run7/ckpt/step-9", "compare with a replica"),
    ("ftckpt verify run/step-9 --remember", "so that `latest --reuse` need not read it again"),
    ("ftckpt verify big/ --sample 5% --limit-rate 200MB/s", "a share, gently, beside a trainer"),
    ("ftckpt verify step-9 --level values --strict=replicas,masters", "copies that differ fail"),
)
CODES = {
    ExitCode.OK: "everything that the evidence allows was checked and passed",
    ExitCode.CORRUPT: "proven damage; the findings name file, tensor, rank and bytes",
    ExitCode.INCOMPLETE: "not committed, still being written, or changed meanwhile",
    ExitCode.UNVERIFIED: "content was demanded and no evidence covers it",
    ExitCode.UNSAFE: "hostile or ambiguous content; nothing was executed",
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


@dataclass(frozen=True)
class Receipts:
    """Where receipts are kept: a folder, or "" for beside each checkpoint."""

    folder: str


def command(
    ctx: typer.Context,
    path: PathArgument,
    level: Annotated[
        LevelChoice,
        typer.Option(help="structure: headers; content: every byte; values: the numbers too."),
    ] = LevelChoice.AUTO,
    require: Annotated[
        Requirement | None, typer.Option(help="Exit 6 where this evidence is missing.")
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Every checkpoint of a root; the worst code wins.")
    ] = False,
    against: Annotated[
        str, typer.Option(metavar="OTHER", help="A replica to compare with, byte by byte.")
    ] = "",
    manifest: Annotated[
        str, typer.Option(metavar="FILE", help="A manifest that is kept elsewhere.")
    ] = "",
    sample: Annotated[
        str, typer.Option(metavar="SHARE", help="Read only this share of the content: 5%.")
    ] = "",
    strict: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[=CLASS,...]",
            help="Treat warnings as errors, or those alone of replicas, masters, values, stale, "
            "steps, pointers, counts, sizes, links, opaque, odd.",
        ),
    ] = None,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="Stop at the first error.")
    ] = False,
    remember: Annotated[
        bool,
        typer.Option(
            "--remember",
            help="Keep a receipt for `latest --reuse`; implies --require content.",
        ),
    ] = False,
    receipts: Annotated[str, typer.Option(metavar="DIR", help="Where --remember keeps it.")] = "",
    jobs: JobsOption = 0,
    limit_rate: RateOption = "",
    max_memory: MemoryOption = "1GiB",
) -> Result:
    """Check that a checkpoint can be trusted, and say which evidence says so.

    Structure first: missing, truncated, swapped and stray files, holes and overlaps, mixed steps.
    Then the content, by the manifest that `ftckpt seal` wrote, else by the CRC-32s that torch puts
    into its files and never checks. What nothing covers is named.
    """
    from ftckpt.verification import Level, VerifyOptions, failed

    invocation = invoked(ctx)
    bound_memory(max_memory)
    if remember:
        if level is LevelChoice.STRUCTURE or sample:
            raise UsageError("--remember needs a check of the whole content")
        invocation.groups[Receipts] = Receipts(receipts)
    elif receipts:
        raise UsageError("--receipts needs --remember")
    options = VerifyOptions(
        level=Level(level.value),
        require_content=require is Requirement.CONTENT or remember,
        strict=_strictness(strict or ()),
        fail_fast=fail_fast,
        sample=_share(sample),
        jobs=job_count(jobs),
        forks=job_count(jobs),
        limiter=rate_limit(limit_rate),
        manifest=_manifest(manifest, invocation),
        against=_replica(invocation, against),
    )
    invocation.report(
        level=level.value, evidence="none", strict=sorted(options.strict), bytes_read=0,
        seconds=0.0, findings=[],
    )  # fmt: skip
    try:
        target = open_target(invocation, path)
    except (CorruptError, UnsafeError) as error:
        return _conclude(invocation, failed(error), shown=False)
    if target.root is not None and not target.place.which:
        return _verify_root(invocation, target, target.root, options, everything=all_)
    if target.root is not None:
        child = choose(target.root, target.place.which, invocation.warn)
        return _verify_child(invocation, target.root, child, options)
    assert target.part is not None
    return _verify_part(invocation, target.place.store, target.part, options)


# `--strict` alone; the other form is `--strict=CLASS,...`.
BARE = {"--strict": "all"}


def _strictness(given: Sequence[str]) -> frozenset[Strictness]:
    """Return the classes that are treated as errors.

    Raises:
        UsageError: the class does not exist.
    """
    from difflib import get_close_matches

    from ftckpt.findings import Strictness

    found: set[Strictness] = set()
    for word in (word.strip() for text in given for word in text.split(",")):
        if word in ("all", "1", "true", "yes", "on"):  # the last four in the environment
            found |= set(Strictness)
        elif word in list(Strictness):
            found.add(Strictness(word))
        elif word not in ("", "0", "false", "no", "off"):
            near = get_close_matches(word, list(Strictness), 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(
                f"--strict has no class {word!r}{meant}",
                hint=f"the classes are {', '.join(Strictness)}",
            )
    return frozenset(found)


def _share(text: str) -> float | None:
    from ftckpt.workers.limits import parse_fraction

    return parse_fraction(text) if text else None


def _manifest(path: str, invocation: Invocation) -> Manifest | None:
    if not path:
        return None
    from ftckpt.manifest.locate import read
    from ftckpt.storage import open_store
    from ftckpt.storage.remotes import split

    parent, name = split(path)
    return read(open_store(parent, invocation.stores), name)


def _replica(invocation: Invocation, path: str) -> Checkpoint | None:
    if not path:
        return None
    return open_other(invocation, path)


def _verify_root(
    invocation: Invocation, target: Target, root: Root, options: VerifyOptions, *, everything: bool
) -> Result:
    """Check the pointers and the newest checkpoint, or all of them."""
    chosen = root.children() if everything else [choose(root, "", invocation.warn)]
    pointed = [
        finding(
            "pointer-dangling",
            f"{p.name} points to {p.says}, and that is not there",
            file=p.name,
        )
        for p in root.pointers
        if p.dangling
    ]
    for found in pointed:
        invocation.print(render.finding_line(found))
    results: list[tuple[str, Result]] = []
    documents: list[dict[str, Any]] = []
    if not everything:
        url = root.url_of(chosen[0].candidate)
        invocation.say(f"{target.place.url} is a root; taking the newest, {url}")
    for child in chosen:
        if everything:
            invocation.print(f"{render.printable(root.url_of(child.candidate))}:")
        result = _verify_child(invocation, root, child, options)
        results.append((root.url_of(child.candidate), result))
        documents.append(dict(invocation.document))
    codes = [r.code for _, r in results] + [ExitCode.CORRUPT for _ in pointed]
    code = worst(codes)
    if everything:
        invocation.document.pop("parts", None)
        invocation.report(target=target.place.url, checkpoints=documents, **_whole(documents))
    invocation.report(findings=[*pointed, *invocation.document["findings"]])
    bad = [url for url, r in results if r.code is not ExitCode.OK]
    if code is ExitCode.OK:
        if len(results) == 1:
            return results[0][1]
        warned = sum(bool(result.hint) for _, result in results)
        more = f", {warned} of them with warnings" if warned else ""
        return Result(code, f"{len(results)} checkpoints passed{more}")
    if pointed and not bad:
        return invocation.fail(code, pointed[0].message, "point it to a checkpoint that is there")
    if len(results) == 1:
        return results[0][1]
    return invocation.fail(code, f"{len(bad)} of {len(results)} checkpoints failed: {bad[0]} first")


def _verify_child(
    invocation: Invocation, root: Root, child: Child, options: VerifyOptions
) -> Result:
    """Check one step; it may hold several checkpoints, the worst of which decides."""
    results: list[Result] = []
    documents: list[dict[str, Any]] = []
    invocation.document.pop("parts", None)  # of the checkpoint before
    for part in child.parts:
        invocation.report(target=root.store.describe(part.entry.path), format=part.format.name)
        results.append(_verify_part(invocation, root.store, part, options))
        documents.append(dict(invocation.document))
    if len(results) > 1:
        whole = _whole(documents)
        invocation.report(target=root.url_of(child.candidate), parts=documents, **whole)
    code = worst(r.code for r in results)
    return next(r for r in results if r.code is code)


# What is said of several checkpoints must hold for each, so the weakest word is the word.
_LEVELS = ("auto", "structure", "content", "values")
_EVIDENCE = ("none", "crc32", "digests", "manifest", "replica")


def _whole(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the answers about several checkpoints say together; their findings stay there."""
    formats = {d["format"] for d in documents}
    steps = {d.get("step") for d in documents}
    shares = [d["sampled"] for d in documents if d.get("sampled") is not None]
    sums = ("bytes_read", "bytes_covered", "bytes_uncovered", "seconds")
    return {
        "format": formats.pop() if len(formats) == 1 else None,
        "step": steps.pop() if len(steps) == 1 else None,
        "level": min((str(d["level"]) for d in documents), key=_LEVELS.index),
        "evidence": min((str(d["evidence"]) for d in documents), key=_EVIDENCE.index),
        "sampled": min(shares, default=None),
        "findings": [],
    } | {name: sum(d[name] for d in documents) for name in sums}


def _verify_part(
    invocation: Invocation, store: Store, part: UnopenedPart, options: VerifyOptions
) -> Result:
    from ftckpt.discovery.checks import check_and_remember
    from ftckpt.discovery.open_part import open_part
    from ftckpt.verification import failed, verify
    from ftckpt.verification.receipts import Book

    def emit(found: Finding) -> None:
        invocation.print(render.finding_line(found))

    began = time.monotonic()
    try:
        checkpoint = open_part(store, part)
    except FtckptError as error:
        # What is not readable may be hostile all the same, and that verdict wins.
        invocation.report(step=None)
        unread = isinstance(error, UnsupportedError)
        more = hostile_findings(store, part) if unread else ()
        report = failed(error, more, seconds=time.monotonic() - began)
        return _conclude(invocation, report, shown=False)
    invocation.report(target=checkpoint.source.url, format=checkpoint.format)
    kept = invocation.groups.get(Receipts)
    if kept is None:
        report = verify(checkpoint, options, counter=invocation.counter, emit=emit)
    else:
        book = Book(checkpoint, invocation.stores, kept.folder)
        report = check_and_remember(
            checkpoint, options, book, invocation.counter, invocation.warn, emit
        )
    invocation.report(step=known_step(checkpoint))
    return _conclude(invocation, report, shown=True)


def _conclude(invocation: Invocation, report: VerifyReport, *, shown: bool) -> Result:
    invocation.report(
        level=report.level,
        evidence=report.evidence,
        findings=report.findings,
        bytes_read=report.bytes_read,
        bytes_covered=report.bytes_covered,
        bytes_uncovered=report.bytes_uncovered,
        sampled=report.sampled,
        seconds=report.seconds,
    )
    if not shown:
        for found in report.findings:
            invocation.print(render.finding_line(found))
    if report.code is ExitCode.OK:
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
        return Result(report.code, report.message, report.hint)
    return invocation.fail(report.code, report.message, report.hint)
