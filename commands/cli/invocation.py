"""How a verb was called, what it has reported so far, and where its words go."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from ftckpt.errors import ExitCode
from ftckpt.progress import NULL, Counter
from ftckpt.storage import StoreOptions

from .render import printable
from .terminal import is_terminal, write

if TYPE_CHECKING:
    from typer import Context


T = TypeVar("T")


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
