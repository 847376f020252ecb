"""Decide whether a checkpoint can be trusted, and on which evidence.

Three levels, each including the ones before:
- `structure`: names, sizes, headers, coverage, counters, and the manifest's names and sizes. Reads
  no tensor bytes.
- `content`: every byte that evidence covers, against a manifest or the CRC-32s in the files.
- `values`: the numbers themselves.

`auto` is content if there is evidence, else structure, and reports which. Modules for one kind of
evidence are imported only for that. A verdict of 0 means: every check that the available evidence
allows has passed; the report names the uncovered bytes.
"""

from __future__ import annotations

import time
from collections import Counter as Count
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import ExitCode, FtckptError, NotFoundError, worst
from ftckpt.findings import (
    KINDS,
    Finding,
    Level,
    Severity,
    Strictness,
    counted,
    finding,
    from_error,
    listed,
)
from ftckpt.manifest import Manifest
from ftckpt.own_files import is_own
from ftckpt.reports import UNSAID, Amount, GivenWords, Natural
from ftckpt.storage.source import Source
from ftckpt.workers import ALONE, Work

from .evidence import ContentResult, OwnerIndex, StopChecking
from .structure import Seal, check_age, check_structure, exports_beside

if TYPE_CHECKING:
    from ftckpt.manifest.altered import Altered
    from ftckpt.manifest.signature import Trust

    from .seen import SeenBytes
    from .used_bytes import UsedBytes

# The weakest first.
EVIDENCE = ("none", "crc32", "md5", "sha256", "digests", "manifest", "replica", "signature")

__all__ = [
    "EVIDENCE",
    "Level",
    "VerifyOptions",
    "VerifyReport",
    "check_structure",
    "failed",
    "verify",
]


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What to check.

    Attributes:
        level: CONTENT demands evidence, AUTO uses what exists.
        require_content: exit 6 unless evidence covers every tensor and object.
        strict: the classes of warnings and notes that count as errors.
        fail_fast: stop at the first error.
        sample: share of blocks or records to read, in (0, 1]; None for all.
        manifest: use this one instead of the one beside the checkpoint.
        against: a replica, compared file by file; of another layout, tensor by tensor.
        use_manifest: whether a manifest beside the checkpoint counts.
        used: the bytes whose content is checked; None for all. Structure is checked as a whole.
        decode: whether to decode what no digest covers; a transfer does that itself.
        seen: what other work reads of it, which is not read again. Before that work has ended only
            the structure is checked, and then only the content.
        signature: the signature that every file is held to, and whose it must be; None for none.
    """

    level: Level = Level.AUTO
    require_content: bool = False
    strict: Collection[Strictness] = ()
    fail_fast: bool = False
    sample: float | None = None
    manifest: Manifest | None = None
    against: Checkpoint | None = None
    use_manifest: bool = True
    used: UsedBytes | None = None
    decode: bool = True
    seen: SeenBytes | None = None
    signature: Trust | None = None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The verdict.

    Attributes:
        level: the executed one (never AUTO).
        evidence: `signature`, `manifest`, `digests`, `sha256`, `md5`, `crc32`, `replica` or `none`.
        message: the verdict in a sentence.
        hint: the next action.
        findings: in the order found.
        bytes_read: by the content check.
        bytes_covered: by evidence.
        bytes_uncovered: without evidence.
        sampled: the share of blocks read; None for all.
        seconds: wall time; of a check that was divided, of all machines together.
        whole: whether evidence covered every tensor and object, and all of it was read.
    """

    level: Level
    evidence: Annotated[str, GivenWords(EVIDENCE)]
    code: ExitCode = field(metadata=UNSAID)
    message: str = field(metadata=UNSAID)
    hint: str = field(metadata=UNSAID)
    findings: tuple[Finding, ...]
    bytes_read: Natural
    bytes_covered: Natural
    bytes_uncovered: Natural
    sampled: float | None
    seconds: Amount
    whole: bool = field(default=False, metadata=UNSAID)


Emit = Callable[[Finding], None]


def _ignore(found: Finding) -> None: ...


@dataclass
class _Collector:
    """Applies strictness to findings, keeps each once, and stops the checks if requested."""

    options: VerifyOptions
    emit: Emit
    source: Source
    seal: Seal
    findings: list[Finding] = field(default_factory=list)
    evidence: str = "none"
    _seen: set[tuple[object, ...]] = field(default_factory=set)
    _altered_files: dict[str, Altered | None] = field(default_factory=dict)

    def add(self, found: Finding) -> None:
        found = found.strict(self.options.strict)
        if found.kind == "unknown-part" and self.options.used is not None:
            found = replace(found, severity=Severity.NOTE)  # it is not carried, whatever it holds
        if found.code is ExitCode.UNSAFE:
            found = self._altered(found)
        if found.file is not None and found.severity is Severity.ERROR:
            found = self._placed(found, found.file)
        key: tuple[object, ...] = (found.kind, found.file, found.tensor, found.offset)
        if found.kind == "copies-differ":  # every reader of the file meets it
            key = key[:2]
        if key in self._seen:
            return
        self._seen.add(key)
        self.findings.append(found)
        self.emit(found)
        if self.options.fail_fast and found.severity is Severity.ERROR:
            raise StopChecking

    def _altered(self, found: Finding) -> Finding:
        """Return damage for hostile content of a file that is not what was sealed."""
        from ftckpt.manifest.altered import altered  # only for hostile content

        file = found.file or (next(iter(self.source.entries)) if self.source.single else "")
        if file not in self._altered_files:
            self._altered_files[file] = None
            with suppress(FtckptError):  # then it proves nothing
                manifest = self.seal.manifest() if file else None
                if manifest is not None:
                    near = found.offset or 0
                    self._altered_files[file] = altered(self.source, manifest, file, near)
        where = self._altered_files[file]
        if where is None:
            return found
        message = where.said(found.message)
        return finding("bad-digest", message, file=found.file, tensor=found.tensor,
                       rank=found.rank, offset=where.offset, length=where.length)  # fmt: skip

    def _placed(self, found: Finding, file: str) -> Finding:
        """Name the place of a file, if the checkpoint lies in several."""
        places = self.source.store.places_of(self.source.path(file))
        if not places or any(place in found.message for place in places):
            return found
        return replace(found, message=f"{found.message}, in {listed(places)}")

    def take(self, found: Iterable[Finding]) -> None:
        for one in found:
            self.add(one)


def verify(
    checkpoint: Checkpoint,
    options: VerifyOptions | None = None,
    *,
    work: Work = ALONE,
    emit: Emit = _ignore,
) -> VerifyReport:
    """Check one opened checkpoint.

    Args:
        checkpoint: opened.
        options: None: the defaults of `VerifyOptions`.
        work: threads, rate limit and counter of bytes.
        emit: receives each finding when it is found, with its final severity.

    Raises:
        UnavailableError, DeniedError, NoResourceError: the check could not be made.
    """
    options = options or VerifyOptions()
    began = time.monotonic()
    seal = Seal(checkpoint.source, options.manifest, use=options.use_manifest)
    collector = _Collector(options, emit, checkpoint.source, seal)
    content = ContentResult("none", 0, 0, checkpoint.source.nbytes, None, ok=True)
    level = Level.STRUCTURE
    seen = options.seen
    later = seen is not None and not seen.ended
    if later:
        options = replace(options, level=Level.STRUCTURE, require_content=False)
    try:
        if not work.partial and (seen is None or later):
            # It reads no tensor: who has the whole result does it.
            collector.take(check_structure(checkpoint, work.counter, seal))
        if seen is not None and not later:
            collector.take(seen.findings)
        if options.level is not Level.STRUCTURE:
            content = _check_content(checkpoint, options, collector, work, seal)
            level = Level.STRUCTURE if content.evidence == "none" else Level.CONTENT
            if len(checkpoint.source.store.parts()) > 1:
                from .file_digests import check_copies

                collector.take(check_copies(checkpoint, work))
        if options.level is Level.VALUES:
            from .values import check_values

            collector.take(check_values(checkpoint, work))
            if not work.partial:
                collector.take(checkpoint.known_faults(tuple(collector.findings)))
            level = Level.VALUES
        collector.take(_changed(checkpoint))
    except StopChecking:
        if collector.evidence != content.evidence:  # stopped during the content check
            content = replace(content, evidence=collector.evidence)
            level = Level.CONTENT
    except NotFoundError:
        # Listed, and then missing: somebody is writing or removing it.
        before = len(collector.findings)
        with suppress(StopChecking):
            collector.take(_changed(checkpoint))
        if len(collector.findings) == before:
            raise
    with suppress(StopChecking):
        if not work.partial:
            collector.take(check_age(checkpoint, seal, tuple(collector.findings)))
    if seen is not None and later:
        seen.findings = tuple(collector.findings)
    code, message, hint = _verdict(checkpoint, options, collector.findings, content, level)
    return VerifyReport(
        level=level,
        evidence=content.evidence,
        code=code,
        message=message,
        hint=hint,
        findings=tuple(collector.findings),
        bytes_read=content.bytes_read,
        bytes_covered=content.bytes_covered,
        bytes_uncovered=content.bytes_uncovered,
        sampled=content.sampled,
        seconds=time.monotonic() - began + (work.division.seconds if work.division else 0.0),
        whole=code is ExitCode.OK
        and content.sampled is None
        and not _lacking(checkpoint, collector.findings, content),
    )


def failed(
    error: FtckptError, more: Iterable[Finding] = (), *, seconds: float = 0.0
) -> VerifyReport:
    """Return the report for a checkpoint that cannot be opened.

    The worst code of `error` and the other findings `more` wins.
    """
    found = (from_error(error), *more)
    code = worst(f.code for f in found)
    first = next(f for f in found if f.code is code)
    hint = error.hint if first is found[0] else ""
    return VerifyReport(
        level=Level.STRUCTURE,
        evidence="none",
        code=code,
        message=first.message,
        hint=hint or _HINTS.get(code, ""),
        findings=found,
        bytes_read=0,
        bytes_covered=0,
        bytes_uncovered=0,
        sampled=None,
        seconds=seconds,
    )


def _check_content(
    checkpoint: Checkpoint,
    options: VerifyOptions,
    collector: _Collector,
    work: Work,
    seal: Seal,
) -> ContentResult:
    """Check by the strongest evidence, and compare the copies that the checkpoint keeps."""
    manifest = None
    with suppress(FtckptError):  # the structure check has reported it
        manifest = seal.manifest()
    found = _check_by_evidence(checkpoint, options, collector, work, manifest)
    if options.against is not None or options.used is not None or not checkpoint.file_copies:
        return found
    from .file_digests import check_file_copies

    bad = {f.file for f in collector.findings if f.severity is Severity.ERROR and f.file}
    read, alike = check_file_copies(
        checkpoint, emit=collector.add, work=work, manifest=manifest, sample=options.sample, bad=bad
    )
    return replace(found, bytes_read=found.bytes_read + read, ok=found.ok and alike)


def _check_by_evidence(
    checkpoint: Checkpoint,
    options: VerifyOptions,
    collector: _Collector,
    work: Work,
    manifest: Manifest | None,
) -> ContentResult:
    """Use the strongest evidence: what was named, a manifest, digests of files, CRC-32s."""
    if options.signature is not None:
        from .signed import check_signed

        collector.evidence = "signature"
        return check_signed(checkpoint, options.signature, emit=collector.add, work=work)
    if options.against is not None:
        from .replica import check_against, check_tensors_against

        collector.evidence = "replica"
        if _same_files(checkpoint, options.against):
            return check_against(
                checkpoint, options.against.source, emit=collector.add, work=work,
                sample=options.sample, owners=OwnerIndex(checkpoint),
            )  # fmt: skip
        return check_tensors_against(
            checkpoint, options.against, emit=collector.add, work=work, sample=options.sample
        )

    seen = options.seen is not None and checkpoint.decoding.proves_reads

    def itself() -> ContentResult:
        from .selfchecks import check_itself

        return check_itself(
            checkpoint,
            sealed=manifest is not None and not seen,
            emit=collector.add,
            work=work,
            sample=options.sample,
            decode=options.decode,
            seen=seen,
        )

    if manifest is not None and not seen:
        from .blocks import check_manifest

        collector.evidence = "manifest"
        result = check_manifest(
            checkpoint.source, manifest, emit=collector.add, members=checkpoint.members(),
            work=work, sample=options.sample, owners=OwnerIndex(checkpoint), used=options.used,
            seen=options.seen,
        )  # fmt: skip
        more = itself()
        return replace(
            result,
            bytes_read=result.bytes_read + more.bytes_read,
            ok=result.ok and more.ok,
            decoded=more.evidence != "none",
        )
    found = itself()
    if found.evidence != "none":
        return found

    def records() -> ContentResult:
        from .records import check_records

        return check_records(
            checkpoint, emit=collector.add, work=work, sample=options.sample, used=options.used,
            seen=options.seen,
        )  # fmt: skip

    digests = _file_digests(checkpoint)
    if not digests:
        collector.evidence = "crc32"
        return records()
    from .file_digests import check_file_digests, with_records

    collector.evidence = "sha256" if all(len(d) == 64 for d in digests.values()) else "md5"
    whole = check_file_digests(
        checkpoint, digests, emit=collector.add, work=work, sample=options.sample
    )
    # CRC-32s find the damaged tensors, and cover what the digests do not.
    held = {piece.extent.file for info in checkpoint.tensors.values() for piece in info.pieces}
    held |= {item.extent.file for item in checkpoint.objects.values()}
    enough = whole.ok and held.isdisjoint(whole.bare)
    return whole if enough else with_records(whole, records())


def _file_digests(checkpoint: Checkpoint) -> Mapping[str, str]:
    try:
        return checkpoint.file_digests()
    except FtckptError:  # the structure check has reported it
        return {}


def _changed(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield the members that changed since the listing, so the check does not apply to them.

    Raises:
        UnavailableError, DeniedError: the storage does not answer.
    """
    members = sorted(set(checkpoint.members()) & checkpoint.source.entries.keys())
    for name in checkpoint.source.changed(members):
        yield finding("changed-file", f"{name} changed while it was being read", file=name)


def _same_files(checkpoint: Checkpoint, other: Checkpoint) -> bool:
    """Whether the two are copies of each other, not two layouts of the same tensors."""
    if checkpoint.format != other.format:
        return False
    ours, theirs = set(checkpoint.members()), set(other.members())
    return len(ours & theirs) * 2 > len(ours | theirs)


def _verdict(
    checkpoint: Checkpoint,
    options: VerifyOptions,
    findings: list[Finding],
    content: ContentResult,
    level: Level,
) -> tuple[ExitCode, str, str]:
    errors = [f for f in findings if f.severity is Severity.ERROR]
    # A file that is still being written is not damaged yet.
    moving = {f.file for f in errors if f.kind == "changed-file"}
    errors = [f for f in errors if f.code is not ExitCode.CORRUPT or f.file not in moving]
    code = worst(f.code for f in errors)
    demanded = options.level is Level.CONTENT or options.require_content
    if demanded and worst((code, ExitCode.UNVERIFIED)) is ExitCode.UNVERIFIED:
        lacking = _lacking(checkpoint, findings, content)
        if lacking:
            hint = "seal the checkpoint right after it is saved: ftckpt seal PATH"
            return ExitCode.UNVERIFIED, lacking, hint
    if errors:
        first = min(errors, key=lambda f: 0 if f.code is code else 1)
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        older = next((f.message for f in findings if f.kind == "older-manifest"), "")
        if older and code is ExitCode.CORRUPT:
            return code, f"{first.message}{more}; {older}", _SAVED_AGAIN
        if first.kind == "unfetched-file":
            from ftckpt.storage.state_files import FETCH

            return code, f"{first.message}{more}", FETCH
        return code, f"{first.message}{more}", _hint(code, level)
    if not (checkpoint.tensors or checkpoint.source.single or options.used is not None):
        lacking = f"{checkpoint.source.url} holds no tensor: nothing shows that it is a checkpoint"
        return ExitCode.UNVERIFIED, lacking, "name the directory that holds the whole step"
    warned = _warned(findings)
    sentence = _praise(checkpoint, options, findings, content, level, sound=not warned)
    if not warned:
        return ExitCode.OK, sentence, ""
    classes = sorted({str(KINDS[kind].of) for kind in warned})
    hint = f"--strict={','.join(classes)} makes that an error"
    said = ", ".join(_WARNINGS[kind][number > 1].format(number) for kind, number in warned.items())
    return ExitCode.OK, f"{sentence}; {said}", hint


def _lacking(checkpoint: Checkpoint, findings: list[Finding], content: ContentResult) -> str:
    """Return in words which evidence for tensors and objects is missing; "" if none is."""
    if content.evidence == "none":
        return "the structure is whole, but no digest or CRC exists to check the content against"
    if any(f.kind == "no-crc" for f in findings):
        return "some records carry no CRC, so that not all content can be checked"
    without = _bare(checkpoint, content)
    return f"no digest or CRC covers {without}, so that not all content is checked" * bool(without)


def _bare(checkpoint: Checkpoint, content: ContentResult, used: UsedBytes | None = None) -> str:
    """Return in words which files hold tensors or objects that no evidence covers; "" for none."""
    if not content.bare:
        return ""
    held = {piece.extent.file for info in checkpoint.tensors.values() for piece in info.pieces}
    held |= {item.extent.file for item in checkpoint.objects.values()}
    size = checkpoint.source.size
    without = [f for f in sorted(held & set(content.bare)) if not used or used.takes(f, 0, size(f))]
    more = f" and {counted(len(without) - 1, 'more file')}" if len(without) > 1 else ""
    return f"{without[0]}{more}" if without else ""


def _praise(
    checkpoint: Checkpoint,
    options: VerifyOptions,
    findings: Iterable[Finding],
    content: ContentResult,
    level: Level,
    *,
    sound: bool,
) -> str:
    exported = exports_beside(checkpoint)
    files = sum(not is_own(n) and n not in exported for n in checkpoint.source.entries)
    tensors = f"{counted(len(checkpoint.tensors), 'tensor')} in {counted(files, 'file')}"
    share = "" if content.sampled is None else f" in a sample of {content.sampled:.3g}"
    if options.used is not None:
        share += " in what is carried"
    how = {
        "manifest": f"every block matches the manifest{share}",
        "digests": f"every block decodes to what was written{share}",
        "sha256": f"every file matches its SHA-256{share}",
        "md5": f"every file matches its MD5{share}",
        "crc32": f"every record matches its CRC-32{share}",
        "replica": f"every byte equals the replica{share}",
        "signature": f"every file is as signed by {content.signer}",
        "none": "the structure is whole; no evidence covers the content",
    }[content.evidence]
    if content.evidence == "digests" and content.bare:
        how = f"every checksum in the files matches{share}, and none covers the rest"
    elif content.evidence in ("sha256", "md5", "crc32"):
        how += ", or its records their CRC-32" * content.records
        if bare := _bare(checkpoint, content, options.used):
            how += f", and none covers {bare}"
        if any(f.kind == "no-crc" for f in findings):
            how += ", and some carry none"
    if content.decoded:
        how += " and decodes to what was written"
    if options.level is Level.STRUCTURE:
        how = "the structure is whole; the content was not read"
    if level is Level.VALUES and sound:
        how += "; the values are sound"
    return f"{tensors}: {how}"


def _warned(findings: Iterable[Finding]) -> Count[str]:
    """Count the warnings by kind, in the order of the reference."""
    counts = Count(found.kind for found in findings if found.severity is Severity.WARNING)
    return Count({kind: counts[kind] for kind in KINDS if counts[kind]})


# Sentences on warnings of a checkpoint that passes: for one, and for several.
_WARNINGS = {
    "replica-differs": ("1 replica differs", "{} replicas differ"),
    "master-differs": (
        "1 master does not cast to its weight", "{} masters do not cast to their weights",
    ),
    "untrained": ("an adapter that changes nothing", "{} adapters that change nothing"),
    "nonfinite-unknown": (
        "1 tensor that may be a parameter is not finite",
        "{} tensors that may be parameters are not finite",
    ),
    "zero-pages": ("1 tensor has pages of zeros", "{} tensors have pages of zeros"),
    "zero-layer": ("a layer is zero", "{} stacks have layers that are zero"),
    "stale-shard": ("1 shard of an earlier save", "{} shards of an earlier save"),
    "renamed-file": ("1 file bears another's name", "{} files bear others' names"),
    "pointer-disagrees": ("1 pointer to another step", "{} pointers to another step"),
    "count-unknown": ("1 number of files is not recorded", "{} numbers of files are not recorded"),
    "state-unknown": (
        "1 part of the state is not there or does not fit the rest",
        "{} parts of the state are not there or do not fit the rest",
    ),
    "step-name": ("its name says another step", "{} names say another step"),
    "clocks-differ": ("its files count different steps", "{} files count other steps"),
    "odd-zip": (
        "1 archive has header fields that torch never writes",
        "{} archives have header fields that torch never writes",
    ),
    "total-size": ("its index says another total size", "{} indexes say another total size"),
}  # fmt: skip


def _hint(code: ExitCode, level: Level) -> str:
    """Return the next action; `latest` must check as deeply as the failed check."""
    hint = _HINTS.get(code, "")
    if level is Level.VALUES:
        hint = hint.replace("--level content", "--level values").replace("whole", "sound")
    return hint


_SAVED_AGAIN = (
    "if the step was saved again, ftckpt seal --force PATH records what is there now; if not, do"
    " not resume from it"
)
_HINTS = {
    ExitCode.CORRUPT: "do not resume from it; "
    "`ftckpt latest ROOT --level content` finds the newest that is whole",
    ExitCode.INCOMPLETE: "wait for the save to finish, or use an earlier checkpoint",
    ExitCode.UNSAFE: "do not load it with any other tool; find out who wrote it",
}
