"""Every failure that has a name, and its exit code.

    FtckptError
    ├── UsageError           2   flags, configuration, an ambiguous target
    ├── DifferentError       3   a comparison found a difference
    ├── CorruptError         4   proven damage
    │   └── TruncatedError       a file ends before the bytes that it must hold
    ├── IncompleteError      5   not committed, or still being written
    ├── UnverifiedError      6   the evidence that was asked for does not exist
    ├── UnsafeError          7   hostile or ambiguous content, refused
    ├── RefusedError         8   a safety rule stopped it
    │   └── ExistsError          the name is taken; committed names are never overwritten
    ├── NotFoundError        9   root, step, tensor or file absent
    │   ├── MissingError    15   a root from which a run restarts is not there
    │   └── NoSuchTensorError    a KeyError: a checkpoint has no tensor of that key
    ├── UnavailableError    10   storage failed after retries
    ├── DeniedError         11   credentials or permissions
    ├── NoResourceError     12   disk, quota or memory budget
    ├── UnsupportedError    13   layout, version or store capability
    │   ├── NewerWriterError     a record, a version or a field of another form than is known
    │   └── MissingPackageError  a Python package that this needs is not installed
    └── PartialError        14   finished, some items failed

A failure is a class with one sentence and one exit code. The codes are an interface: job scripts
branch on them. Python itself exits 1 for a traceback, so 1 is a bug and never a verdict.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any, ClassVar, TypeVar


class ExitCode(IntEnum):
    """What a process ends with; `docs/exit-codes.md` says what a script should do with each."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    DIFFERENT = 3
    CORRUPT = 4
    INCOMPLETE = 5
    UNVERIFIED = 6
    UNSAFE = 7
    REFUSED = 8
    NOT_FOUND = 9
    UNAVAILABLE = 10
    DENIED = 11
    NO_RESOURCE = 12
    UNSUPPORTED = 13
    PARTIAL = 14
    MISSING = 15
    REQUEUE = 75
    INTERRUPTED = 130
    CLOSED_PIPE = 141
    TERMINATED = 143


# Which code wins when several apply: the one that a script must not miss comes first.
PRECEDENCE: tuple[ExitCode, ...] = (
    ExitCode.INTERRUPTED,
    ExitCode.TERMINATED,
    ExitCode.CLOSED_PIPE,
    ExitCode.INTERNAL,
    ExitCode.USAGE,
    ExitCode.UNSAFE,
    ExitCode.CORRUPT,
    ExitCode.REFUSED,
    ExitCode.DENIED,
    ExitCode.NO_RESOURCE,
    ExitCode.UNAVAILABLE,
    ExitCode.REQUEUE,
    ExitCode.UNSUPPORTED,
    ExitCode.MISSING,
    ExitCode.NOT_FOUND,
    ExitCode.UNVERIFIED,
    ExitCode.INCOMPLETE,
    ExitCode.DIFFERENT,
    ExitCode.PARTIAL,
    ExitCode.OK,
)


# Verdicts that say what could not be checked or understood, and of no damage.
UNPROVEN = frozenset({ExitCode.UNVERIFIED, ExitCode.UNSUPPORTED})


def worst(codes: Iterable[ExitCode]) -> ExitCode:
    """Return the code that wins by `PRECEDENCE`; OK for no codes at all."""
    return min(codes, key=PRECEDENCE.index, default=ExitCode.OK)


class FtckptError(Exception):
    """A failure with a sentence, an exit code and, where known, the place.

    Args:
        message: one sentence: what, where.
        hint: what to do next; printed after `hint:`.
        kind: the finding kind (`ftckpt.findings.KINDS`) that `verify` reports for it.
        file: path relative to the checkpoint, where one file is at fault.
        tensor: key of the tensor or object at fault.
        offset: first byte at fault in `file`.
        length: number of bytes at fault.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL
    default_kind: ClassVar[str] = "internal"

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        kind: str = "",
        file: str | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        length: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.kind = kind or self.default_kind
        self.file = file
        self.tensor = tensor
        self.offset = offset
        self.length = length


class UsageError(FtckptError, ValueError):
    """Flags or configuration that cannot be carried out."""

    exit_code = ExitCode.USAGE
    default_kind = "usage"


class DifferentError(FtckptError):
    """A comparison found a difference."""

    exit_code = ExitCode.DIFFERENT
    default_kind = "different"


class CorruptError(FtckptError):
    """Proven damage: bytes that are there and wrong, or committed and gone."""

    exit_code = ExitCode.CORRUPT
    default_kind = "corrupt"


class TruncatedError(CorruptError):
    """A file ends before the bytes that it must hold."""

    default_kind = "truncated-file"


class IncompleteError(FtckptError):
    """Not committed, or still being written."""

    exit_code = ExitCode.INCOMPLETE
    default_kind = "uncommitted"


class UnverifiedError(FtckptError):
    """The evidence that was asked for does not exist."""

    exit_code = ExitCode.UNVERIFIED
    default_kind = "no-evidence"


class UnsafeError(FtckptError):
    """Hostile or ambiguous content, refused."""

    exit_code = ExitCode.UNSAFE
    default_kind = "unsafe"


class RefusedError(FtckptError):
    """A safety rule stopped it."""

    exit_code = ExitCode.REFUSED
    default_kind = "refused"


class ExistsError(RefusedError, FileExistsError):
    """The name is taken, and committed names are never overwritten."""


class NotFoundError(FtckptError, FileNotFoundError):
    """Root, step, tensor or file absent."""

    exit_code = ExitCode.NOT_FOUND
    default_kind = "not-found"


class MissingError(NotFoundError):
    """Nothing shows that the root is there from which a run restarts: no fresh start."""

    exit_code = ExitCode.MISSING


class NoSuchTensorError(NotFoundError, KeyError):
    """A checkpoint has no tensor of that key."""

    def __str__(self) -> str:
        return f"{self.message}: {self.hint}" if self.hint else self.message


class UnavailableError(FtckptError, OSError):
    """Storage failed after retries."""

    exit_code = ExitCode.UNAVAILABLE
    default_kind = "unavailable"


class DeniedError(FtckptError, PermissionError):
    """Credentials or permissions."""

    exit_code = ExitCode.DENIED
    default_kind = "denied"


class NoResourceError(FtckptError):
    """Disk, quota or memory budget."""

    exit_code = ExitCode.NO_RESOURCE
    default_kind = "no-resource"


class UnsupportedError(FtckptError):
    """A layout, version or store capability that ftckpt does not have."""

    exit_code = ExitCode.UNSUPPORTED
    default_kind = "unsupported"


class NoStateError(UnsupportedError):
    """A file that can be read and holds no state of a training: it is not a checkpoint at all.

    In a root it is foreign: it stands in no order, and nothing is said of it.
    """


_SHOWN = 255  # a text out of a file may have any length
_Newer = TypeVar("_Newer", bound="NewerWriterError")


class NewerWriterError(UnsupportedError):
    """A record, a version or a field that parses, and has another form than ftckpt knows.

    Writers add fields, so that alone proves no damage. Damage is what the bytes themselves
    contradict: a checksum, a length, an overlap, a missing file.
    """

    default_kind = "newer-writer"

    @classmethod
    def of(
        cls: type[_Newer],
        what: str,
        *,
        expected: str,
        found: object,
        file: str | None = None,
        tensor: str | None = None,
    ) -> _Newer:
        """Return the error for `what`, where `expected` is known and `found` is there.

        Args:
            what: the record or field, with its place where the caller knows it.
            expected: the forms that ftckpt knows, in words.
            found: what stands there: text is taken as it is, of another value its type is told.
            file: path relative to the checkpoint.
            tensor: key of the tensor or object concerned.
        """
        said = found if type(found) is str else _type_of(found)
        said = said if len(said) <= _SHOWN else f"{said[:_SHOWN]}…"
        return cls(
            f"{what}: expected {expected}, found {said}",
            hint="a newer release of its writer may have made it; a newer ftckpt may read it",
            file=file,
            tensor=tensor,
        )


def _type_of(value: object) -> str:
    """Return what a value out of a file is, in words; a record of a pickle has a name."""
    name = getattr(value, "qualname", "")
    if isinstance(name, str) and name:
        return name
    if type(value) is tuple:
        return f"{len(value)} values"
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


class MissingPackageError(UnsupportedError):
    """A Python package that this needs is not installed."""


class PartialError(FtckptError):
    """Finished, but some items failed."""

    exit_code = ExitCode.PARTIAL
    default_kind = "partial"


def error_of(code: ExitCode, message: str, **fields: Any) -> FtckptError:
    """Return the error that a verdict's exit code and sentence make; the fields are its others."""
    kinds = {kind.exit_code: kind for kind in FtckptError.__subclasses__()}
    return kinds[code](message, **fields)
