"""Findings: one record a defect, with a kind that is an interface."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from .errors import ExitCode, FtckptError, UsageError, error_of


class Severity(StrEnum):
    """How much a finding weighs."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Level(StrEnum):
    """How deep a checkpoint is verified."""

    AUTO = "auto"
    STRUCTURE = "structure"
    CONTENT = "content"
    VALUES = "values"


class CheckLevel(StrEnum):
    """How deep a checkpoint of a root is checked."""

    STRUCTURE = "structure"
    CONTENT = "content"
    VALUES = "values"


class Strictness(StrEnum):
    """What `--strict` may treat as errors: every warning, and some notes, is of one class."""

    REPLICAS = "replicas"
    MASTERS = "masters"
    VALUES = "values"
    STALE = "stale"
    STEPS = "steps"
    NAMES = "names"
    POINTERS = "pointers"
    COUNTS = "counts"
    SIZES = "sizes"
    LINKS = "links"
    OPAQUE = "opaque"
    ODD = "odd"


class KindInfo(NamedTuple):
    """What a finding kind means by default.

    Attributes:
        code: exit code that an ERROR of this kind causes.
        severity: default severity.
        strict: exit code under `--strict` where the severity is not ERROR; OK leaves it.
        meaning: one sentence for the reference in docs/.
        of: the class that `--strict` may name alone; None where strictness changes nothing.
    """

    code: ExitCode
    severity: Severity
    strict: ExitCode
    meaning: str
    of: Strictness | None = None


_C, _I, _U = ExitCode.CORRUPT, ExitCode.INCOMPLETE, ExitCode.UNSAFE
_OK = ExitCode.OK
_E, _W, _N = Severity.ERROR, Severity.WARNING, Severity.NOTE

# fmt: off
KINDS: dict[str, KindInfo] = {
    # files
    "missing-file": KindInfo(_C, _E, _C, "A file that the checkpoint names is not there."),
    "truncated-file": KindInfo(_C, _E, _C, "A file ends before bytes that it must hold."),
    "trailing-bytes": KindInfo(_C, _E, _C, "A file holds bytes after its last record."),
    "stray-file": KindInfo(_OK, _N, _OK, "A file that nothing in the checkpoint names."),
    "unknown-part": KindInfo(ExitCode.UNVERIFIED, _E, _OK, "A file that may hold tensors is of no part that was read."),
    "stale-shard": KindInfo(_OK, _W, _C, "A shard file left by an earlier save, named by no index.", Strictness.STALE),
    "changed-file": KindInfo(_I, _E, _I, "A file changed while it was being read."),
    "unfetched-file": KindInfo(_I, _E, _I, "A file is a Git LFS pointer: its content was never fetched."),
    "link-followed": KindInfo(_OK, _N, _U, "A file is a symbolic link and was followed for reading.", Strictness.LINKS),
    "special-file": KindInfo(_U, _E, _U, "A file is a fifo, socket or device."),
    "unsafe-path": KindInfo(_U, _E, _U, "A name is absolute, climbs out of the checkpoint, is not portable, or counts beyond any job."),
    "copies-differ": KindInfo(_C, _E, _C, "Two places hold different files of one name, or two copies of one file."),
    "absent-place": KindInfo(_I, _E, _I, "A place that was named holds no file of the checkpoint."),
    "archived-object": KindInfo(ExitCode.UNSUPPORTED, _E, _OK, "An object is in an archive tier and must be restored first."),
    # commit
    "uncommitted": KindInfo(_I, _E, _I, "The commit marker is absent: the save did not finish."),
    "missing-part": KindInfo(_I, _E, _I, "A part that the steps beside it have is not there: the save did not finish, or it was lost."),
    "no-weights": KindInfo(ExitCode.UNVERIFIED, _E, ExitCode.UNVERIFIED, "The model is not there: an optimizer's state, or a model that is trained beside it, is all; 5 where config.json describes it."),
    "leftover-commit": KindInfo(_OK, _N, _OK, "A temporary commit marker of another save was left behind."),
    "pointer-dangling": KindInfo(_C, _E, _C, "A pointer (latest, tracker) names a checkpoint that is not there."),
    "pointer-disagrees": KindInfo(_OK, _W, _C, "A pointer names another step than the newest good checkpoint.", Strictness.POINTERS),
    # coverage
    "hole": KindInfo(_C, _E, _C, "Elements of a tensor are in no piece."),
    "overlap": KindInfo(_C, _E, _C, "Elements of a tensor are in more than one piece."),
    "out-of-bounds": KindInfo(_C, _E, _C, "A piece lies outside its tensor, or its bytes outside the file."),
    "extent-overlap": KindInfo(_C, _E, _C, "Two records claim the same bytes of a file."),
    "extent-hole": KindInfo(_OK, _N, _OK, "Bytes of a file belong to no record."),
    "size-mismatch": KindInfo(_C, _E, _C, "A record's length differs from what shape and dtype need."),
    "dtype-mismatch": KindInfo(_C, _E, _C, "The element type in a record differs from the index."),
    "shape-mismatch": KindInfo(_C, _E, _C, "The shape in a record differs from the index or from its siblings, or a moment's from its weight's."),
    # index
    "missing-tensor": KindInfo(_C, _E, _C, "A tensor that an index or a list names, or that all siblings have, is in no file, or one of a pair."),
    "unindexed-tensor": KindInfo(_C, _E, _C, "A tensor in a file is not in the index."),
    "wrong-shard": KindInfo(_C, _E, _C, "The index sends a tensor to a file that does not hold it."),
    "empty-weights": KindInfo(_C, _E, _C, "A file of weights holds no tensor, or tensors without elements: the save lost them."),
    "duplicate-tensor": KindInfo(_C, _E, _C, "One tensor stands in two files."),
    "shard-count": KindInfo(_C, _E, _C, "The number of shard files disagrees with their names."),
    "bad-index": KindInfo(_C, _E, _C, "An index or configuration file cannot be parsed."),
    "unsafe-index": KindInfo(_U, _E, _U, "An index or configuration file is ambiguous or abusive."),
    "total-size": KindInfo(_OK, _W, _C, "The index's total size differs from the tensors' bytes.", Strictness.SIZES),
    "bad-metadata": KindInfo(_C, _E, _C, "The metadata parses but contradicts itself."),
    # ranks and steps
    "missing-rank": KindInfo(_C, _E, _C, "A rank's file is not there; 5 where nothing says that the save was finished."),
    "wrong-rank": KindInfo(_C, _E, _C, "A file's content is of another rank than its name says."),
    "renamed-file": KindInfo(_OK, _W, _C, "A file was saved under the name of another one that is there; 4 where they hold different kinds of state.", Strictness.NAMES),
    "world-size": KindInfo(_C, _E, _C, "Files of different world sizes, or fewer ranks than recorded."),
    "count-unknown": KindInfo(_OK, _W, ExitCode.UNVERIFIED, "Nothing records how many files (ranks, stages, shards) there are, or what does contradicts itself; what is present implies it.", Strictness.COUNTS),
    "state-unknown": KindInfo(_OK, _W, ExitCode.UNVERIFIED, "State that a trainer saves with what is there, or that config.json describes, is not there, or does not fit it: lost, or never saved; nothing records which.", Strictness.COUNTS),
    "partial-tensor": KindInfo(ExitCode.UNSUPPORTED, _E, _OK, "A tensor is stored as unreduced partial sums."),
    "mixed-steps": KindInfo(_C, _E, _C, "Two independent step counters of a file disagree with the other files, or its weights are not what their masters cast to: those of this file alone, or those that have little in common with them."),
    "step-disagrees": KindInfo(_OK, _N, _OK, "One step counter disagrees; one alone is not a verdict."),
    "clocks-differ": KindInfo(_OK, _W, _C, "Files of a trainer that counts the same steps in each count different ones.", Strictness.STEPS),
    "step-name": KindInfo(_OK, _W, _C, "The directory's name says another step than its content.", Strictness.STEPS),
    "step-unknown": KindInfo(_OK, _N, _OK, "Nothing in a file shows its step."),
    "write-order": KindInfo(_OK, _N, _OK, "Data files are newer than the commit marker: perhaps a torn overwrite."),
    # records
    "bad-zip": KindInfo(_C, _E, _C, "A torch.save archive is damaged."),
    "odd-zip": KindInfo(_OK, _W, _U, "A header field of a torch.save archive that torch never writes and that changes nothing it reads: another program wrote it, or a bit flipped.", Strictness.ODD),
    "unsafe-zip": KindInfo(_U, _E, _U, "A torch.save archive is ambiguous: two readers would see different content."),
    "bad-crc": KindInfo(_C, _E, _C, "The CRC-32 of a record does not match its bytes."),
    "bad-digest": KindInfo(_C, _E, _C, "The digest of a block differs from the manifest, or of a file from the framework's record."),
    "bad-transform": KindInfo(_C, _E, _C, "A compressed record cannot be decompressed."),
    "bad-header": KindInfo(_C, _E, _C, "A safetensors header is invalid."),
    "unsafe-header": KindInfo(_U, _E, _U, "A safetensors header is ambiguous or abusive."),
    "differs-from-replica": KindInfo(_C, _E, _C, "Bytes differ from the replica given by --against."),
    # manifest
    "bad-manifest": KindInfo(_C, _E, _C, "The manifest is damaged or not understood."),
    "older-manifest": KindInfo(_OK, _N, _OK, "What differs from the manifest was written after it: the step may have been saved again."),
    "unmanaged-file": KindInfo(_OK, _N, _OK, "A file beside the checkpoint that the manifest does not list."),
    "added-file": KindInfo(_C, _E, _C, "A file belongs to the checkpoint but the manifest does not list it."),
    # deltas
    "bad-delta": KindInfo(_C, _E, _C, "The index or a block of a delta is damaged or not understood."),
    "missing-base": KindInfo(ExitCode.NOT_FOUND, _E, _OK, "What a delta depends on is not where it was."),
    "wrong-base": KindInfo(_C, _E, _C, "The base holds other content than the delta was made from."),
    # pickles
    "bad-pickle": KindInfo(_C, _E, _C, "A pickle is damaged: it ends early or is not a pickle."),
    "unsafe-pickle": KindInfo(_U, _E, _U, "A pickle calls what no checkpoint needs; nothing was executed."),
    "opaque-object": KindInfo(_OK, _N, _U, "A pickle names a class outside the allow-list; kept inert.", Strictness.OPAQUE),
    # values
    "nan": KindInfo(_C, _E, _C, "NaN in weights, masters or moments."),
    "inf": KindInfo(_C, _E, _C, "Infinity in weights, masters or moments."),
    "negative-exp-avg-sq": KindInfo(_C, _E, _C, "A second moment is negative."),
    "nonfinite-buffer": KindInfo(_OK, _N, _OK, "NaN or infinity in a buffer, often a mask."),
    "nonfinite-unknown": KindInfo(_OK, _W, _C, "NaN or infinity in a tensor of the model that may be a parameter or a buffer: nothing tells.", Strictness.VALUES),
    "zero-moment": KindInfo(_OK, _N, _OK, "A moment is all zero: frozen, an unused expert, or step 0."),
    "zero-pages": KindInfo(_OK, _W, _C, "A tensor is zero between two page boundaries of its file, not at its rows: pages that were never written.", Strictness.VALUES),
    "zero-layer": KindInfo(_OK, _W, _C, "Every matrix of a layer is zero, and those of other layers are not.", Strictness.VALUES),
    "missing-scale": KindInfo(_C, _E, _C, "A quantised weight has no scale: its values are lost."),
    "scale-shape": KindInfo(_C, _E, _C, "A scale does not fit the weight beside it, by shape or type."),
    "lone-scale": KindInfo(_C, _E, _C, "A scale stands beside no quantised weight."),
    "bad-scale": KindInfo(_C, _E, _C, "A scale is zero or negative, or the NaN of E8M0, where its scheme has none."),
    "untrained": KindInfo(_OK, _W, _C, "Every matrix B of a LoRA adapter is zero: nothing was trained, or the values were lost.", Strictness.VALUES),
    "equal-rng": KindInfo(_OK, _N, _OK, "Ranks share one RNG state."),
    "replica-differs": KindInfo(_OK, _W, _C, "Replicas of one piece hold different bytes.", Strictness.REPLICAS),
    "copy-differs": KindInfo(_C, _E, _C, "A tensor that one save wrote twice differs between its two files."),
    "master-differs": KindInfo(_OK, _W, _C, "A master weight does not cast to its weight.", Strictness.MASTERS),
    # coverage of the evidence
    "not-covered": KindInfo(_OK, _N, _OK, "Bytes that no evidence covers."),
    "fill-value": KindInfo(_OK, _N, _OK, "Chunks that zarr did not store; they read as its value."),
    "no-crc": KindInfo(_OK, _N, _OK, "A record carries no CRC-32: not recorded, not corrupt."),
    "no-evidence": KindInfo(ExitCode.UNVERIFIED, _E, _OK, "No digest or CRC exists to check the content against."),
    # not checked, and why
    "unsupported": KindInfo(ExitCode.UNSUPPORTED, _E, _OK, "Recognised, but not readable by this version."),
    "newer-writer": KindInfo(ExitCode.UNSUPPORTED, _E, _OK, "A record, a version or a field has another form than is known: a newer writer's, not damage."),
    "unknown-rule": KindInfo(ExitCode.UNSUPPORTED, _E, _OK, "No rule says how a tensor is divided over ranks."),
    "unavailable": KindInfo(ExitCode.UNAVAILABLE, _E, _OK, "Storage failed after retries."),
    "denied": KindInfo(ExitCode.DENIED, _E, _OK, "Credentials or permissions."),
    "no-resource": KindInfo(ExitCode.NO_RESOURCE, _E, _OK, "Disk, quota or memory budget."),
    "not-found": KindInfo(ExitCode.NOT_FOUND, _E, _OK, "What was asked for is not there."),
    "corrupt": KindInfo(_C, _E, _C, "Damage with no finer name."),
    "unsafe": KindInfo(_U, _E, _U, "Refused content with no finer name."),
    "note": KindInfo(_OK, _N, _OK, "Something worth knowing."),
}
# fmt: on


def parse_strictness(given: Iterable[str]) -> frozenset[Strictness]:
    """Return the classes of findings that words name; "all" and the environment's "1" name all.

    Raises:
        UsageError: the class does not exist.
    """
    from difflib import get_close_matches

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


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number of things in words: `1 file`, `3 files`, `3 copies`."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return names in words: up to a number of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect or remark.

    Attributes:
        kind: a key of `KINDS`.
        message: one sentence.
        severity: how much it weighs.
        code: exit code that it causes; OK unless `severity` is ERROR.
        file: path relative to the checkpoint.
        tensor: key of the tensor or name of the object.
        rank: the rank concerned.
        offset: first byte in `file`.
        length: number of bytes.
    """

    kind: str
    message: str
    severity: Severity
    code: ExitCode
    file: str | None = None
    tensor: str | None = None
    rank: int | None = None
    offset: int | None = None
    length: int | None = None

    def strict(self, classes: Container[Strictness]) -> Finding:
        """Return the finding as `--strict` weighs it.

        Args:
            classes: what is treated as an error.
        """
        kind = KINDS[self.kind]
        if self.severity is Severity.ERROR or kind.of is None or kind.of not in classes:
            return self
        return replace(self, severity=Severity.ERROR, code=kind.strict)


def finding(
    kind: str,
    message: str,
    *,
    file: str | None = None,
    tensor: str | None = None,
    rank: int | None = None,
    offset: int | None = None,
    length: int | None = None,
) -> Finding:
    """Return a finding of `kind` with that kind's severity and exit code."""
    info = KINDS[kind]
    code = info.code if info.severity is Severity.ERROR else ExitCode.OK
    return Finding(kind, message, info.severity, code, file, tensor, rank, offset, length)


def from_error(
    error: FtckptError, *, tensor: str | None = None, rank: int | None = None
) -> Finding:
    """Return the finding that says what `error` says, with the error's own exit code."""
    return Finding(
        error.kind,
        error.message,
        Severity.ERROR,
        error.exit_code,
        error.file,
        error.tensor or tensor,
        rank,
        error.offset,
        error.length,
    )


def as_error(found: Finding, hint: str = "") -> FtckptError:
    """Return the error that says what `found`, an ERROR, says, with its exit code."""
    return error_of(
        found.code,
        found.message,
        hint=hint,
        kind=found.kind,
        file=found.file,
        tensor=found.tensor,
        offset=found.offset,
        length=found.length,
    )


def reference() -> str:
    """Return docs/findings.md: every kind, its severity and exit codes (`python -m` this module)."""
    rows = []
    for kind, info in KINDS.items():
        code = int(info.code) if info.severity is Severity.ERROR else 0
        strict = "" if info.of is None else f"{int(info.strict)} (`{info.of}`)"
        rows.append(f"| `{kind}` | {info.severity} | {code} | {strict} | {info.meaning} |")
    return _REFERENCE_HEAD + "\n".join(rows) + "\n"


_REFERENCE_HEAD = """\
# Findings

What `ftckpt verify` reports, one record a defect. The kind is an interface: scripts may match it. The
exit code of a run is the worst of its findings' codes (docs/exit-codes.md has the order). A finding that
an error caused carries that error's code.

`--strict` treats every kind that has a class in the fourth column as an error of that exit code;
`--strict=replicas,opaque` those of the classes that it names.

Generated by `python -m ftckpt.findings > docs/findings.md`.

| kind | severity | exit code | with `--strict` (class) | meaning |
|---|---|---|---|---|
"""


def described(finding: Finding) -> str:
    """Return one finding as one line: severity, kind, place, sentence.

    The place has what the sentence does not say itself: nothing is said twice.
    """
    said = finding.message
    place = [finding.file] if finding.file and not _says(said, finding.file) else []
    if finding.offset is not None:
        end = "" if finding.length is None else f"-{finding.offset + finding.length}"
        place.append(f"bytes {finding.offset}{end}")
    if finding.tensor and not _says(said, finding.tensor):
        # The sentence may tell it by its name, or as the file spells it.
        kind, _, name = finding.tensor.rpartition(":")
        if not _says(said, name, within=True):
            place.append(finding.tensor)
        elif kind and not _says(said, kind, within=True):
            place.append(kind)
    if finding.rank is not None and not _says(said, f"rank {finding.rank}"):
        place.append(f"rank {finding.rank}")
    where = f" [{', '.join(place)}]" if place else ""
    # The kind that says no more than the severity need not be said.
    kind = f"{finding.kind}{where}" if finding.kind != finding.severity else where.strip()
    return ": ".join(filter(None, [str(finding.severity), kind, said]))


def renamed(found: Finding, tensor: str) -> Finding:
    """Return a finding that names a tensor by its key, in its sentence too.

    Args:
        found: names it as the file spells it.
        tensor: the key.
    """
    said, stored = found.message, found.tensor
    if stored and "." in stored:  # any other name may be a word of the sentence
        said = re.sub(_alone(stored), lambda _: tensor, said)
    return replace(found, tensor=tensor, message=said)


def in_file(found: Finding, file: str) -> Finding:
    """Return a finding that names its file so, in its sentence too."""
    said = found.message
    if found.file is not None:
        said = re.sub(_alone(found.file), lambda _: file, said)
    return replace(found, file=file, message=said)


def _says(sentence: str, name: str, *, within: bool = False) -> bool:
    """Whether a sentence says a name: by itself, or `within` a longer one too, between dots."""
    sought = rf"(?<![\w-]){re.escape(name)}(?![\w-])" if within else _alone(name)
    return re.search(sought, sentence) is not None


def _alone(name: str) -> str:
    return rf"(?<![\w./-]){re.escape(name)}(?![\w/-]|[.:]\w)"


if __name__ == "__main__":
    print(reference(), end="")
