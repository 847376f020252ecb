"""How a verb was called, what it has reported so far, and where its words go."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from ftckpt.errors import ExitCode, NoResourceError
from ftckpt.progress import NULL, Counter
from ftckpt.storage import StoreOptions

from .render import printable

if TYPE_CHECKING:
    from typer import Context


T = TypeVar("T")


class ClosedPipeError(BaseException):
    """The reader of our output has gone; not an Exception, so that no handler takes it for one."""


class Result(NamedTuple):
    """How a verb ended.

    Attributes:
        code: exit code of the process.
        message: one sentence, for the JSON document.
        hint: what to do next, or "".
    """

    code: ExitCode = ExitCode.OK
    message: str = ""
    hint: str = ""


@dataclass
class Invocation:
    """One run of one verb.

    Attributes:
        verb: its name; "" before it is known.
        words: the whole command line, without the program.
        json: print one JSON document and no text on stdout.
        quiet: no progress and no remarks on stderr; warnings and errors stay.
        debug: show tracebacks.
        stores: settings of object stores.
        environment: environment variables that set flags of this run.
        document: what was reported so far.
        groups: the values of option groups that the verb shares with others, by their dataclass.
        started: whether the verb itself ran (it does not where only its help is shown).
        aside: whether `print` writes to stderr, because stdout takes one path alone.
        on_begin: called when the verb begins.
    """

    verb: str = ""
    words: Sequence[str] = ()
    json: bool = False
    quiet: bool = False
    debug: bool = False
    stores: StoreOptions = field(default_factory=StoreOptions)
    environment: Mapping[str, str] = field(default_factory=dict)
    document: dict[str, Any] = field(default_factory=dict)
    groups: dict[type[Any], Any] = field(default_factory=dict)
    started: bool = False
    aside: bool = False
    on_begin: Callable[[], None] | None = None
    _kept: list[object] = field(default_factory=list)

    def begin(self) -> None:
        """Note that the verb itself runs from now on."""
        self.started = True
        if self.on_begin is not None:
            self.on_begin()

    def keep(self, thing: T) -> T:
        """Hold on to something large until the process ends, out of the collector's sight."""
        self._kept.append(thing)
        gc.freeze()
        return thing

    def options(self, group: type[T]) -> T:
        """Return the values of an option group that the verb's `OPTIONS` name."""
        return cast(T, self.groups[group])

    def report(self, **fields: Any) -> None:
        """Set fields of the JSON document: plain data, dataclasses, NamedTuples, enums."""
        self.document.update(fields)

    def print(self, text: str = "") -> None:
        """Print lines of the answer on stdout; nothing under `--json`."""
        if self.aside:
            self.say(text)
        elif not self.json:
            counter = self.__dict__.get("counter")
            if counter is not None and counter is not NULL:
                counter.clear()
            # A name in a file must not move the cursor; only our own line ends pass.
            write(sys.stdout, "\n".join(map(printable, text.split("\n"))) + "\n")

    def say(self, text: str) -> None:
        """Print a remark on stderr; nothing under `--quiet`."""
        if not self.quiet:
            self._above_progress(printable(text))

    def warn(self, text: str) -> None:
        """Print what must be seen on stderr, also under `--quiet`."""
        self._above_progress(printable(text))

    def fail(self, code: ExitCode, message: str, hint: str = "") -> Result:
        """Complain on stderr as an error would, and return the result for `command` to return."""
        complain(message, hint)
        return Result(code, message, hint)

    @cached_property
    def counter(self) -> Counter:
        """The progress counter of this run: drawn on a terminal, lines elsewhere."""
        if self.quiet or (self.json and not is_terminal(sys.stderr)):
            return NULL
        from .progress import ProgressCounter

        return ProgressCounter(sys.stderr)

    def close(self) -> None:
        """End the progress display, so that what follows stands on a clean line."""
        counter = self.__dict__.get("counter")
        if counter is not None and counter is not NULL:
            counter.close()

    def _above_progress(self, text: str) -> None:
        counter = self.__dict__.get("counter")
        if counter is None or counter is NULL:
            write(sys.stderr, text + "\n")
        else:
            counter.line(text)


def invoked(ctx: Context) -> Invocation:
    """Return the invocation that `app` attached to the context of a verb."""
    return cast(Invocation, ctx.obj)


def complain(message: str, hint: str = "") -> None:
    """Print an error: one sentence, and what to do next."""
    lines = f"ftckpt: {printable(message)}\n" + (f"hint: {printable(hint)}\n" if hint else "")
    write(sys.stderr, lines)


def is_terminal(stream: IO[str] | None) -> bool:
    """Say whether a stream is a terminal that understands control sequences."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def write(stream: IO[str] | None, text: str) -> None:
    """Write and flush text.

    Raises:
        ClosedPipeError: nobody reads any more.
        NoResourceError: stdout goes to a full disk.
    """
    if stream is None:  # closed by the process that started us (`>&-`)
        return
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        unwritable(stream, error)


def write_bytes(stream: IO[str] | None, data: bytes) -> None:
    """Write bytes as they are and flush: a path must reach the shell unchanged.

    Raises:
        ClosedPipeError, NoResourceError: as `write`.
    """
    if stream is None:
        return
    try:
        stream.flush()
        stream.buffer.write(data)  # type: ignore[attr-defined]
        stream.buffer.flush()  # type: ignore[attr-defined]
    except OSError as error:
        unwritable(stream, error)


def unwritable(stream: IO[str], error: OSError) -> None:
    """Raise what a failed write means, and drop what the stream still holds.

    Raises:
        ClosedPipeError: nobody reads any more.
        NoResourceError: stdout cannot take it.

    Remarks that do not fit on a disk are lost without a word: there is no place left for the word.

    What stays in the buffer would fail again at interpreter shutdown, with a message and a code of
    the interpreter's own; so the descriptor is turned to the null device first.
    """
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    except (OSError, ValueError):
        pass
    if isinstance(error, BrokenPipeError):
        raise ClosedPipeError from error
    if stream is sys.stderr:
        return
    raise NoResourceError(
        f"cannot write to standard output: {error.strerror or error}",
        hint="the output goes to a full or failing device",
    ) from error
