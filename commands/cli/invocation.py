"""How a verb was called, what it has reported so far, and where its words go."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from ftckpt.errors import ExitCode
from ftckpt.observer import Observer
from ftckpt.storage import StoreOptions

from .render import CommandCode, block, finding_line, printable
from .terminal import coloured, is_terminal, same_place, write

if TYPE_CHECKING:
    from ftckpt.findings import Finding
    from ftckpt.progress import Counter

    from .progress import ProgressCounter


T = TypeVar("T")

# Findings of one kind that have a line each: a checkpoint may lack 300,000 files.
_MOST_ALIKE = 100


class ProgressChoice(StrEnum):
    """How progress is shown on stderr."""

    AUTO = "auto"
    JSON = "json"


class Result(NamedTuple):
    """How a verb ended.

    Attributes:
        code: exit code of the process.
        message: one sentence, for the JSON document.
        hint: what to do next, or "".
    """

    code: ExitCode | CommandCode = ExitCode.OK
    message: str = ""
    hint: str = ""


@dataclass
class Invocation(Observer):
    """One run of one verb: what its operation tells is shown and reported.

    Attributes:
        verb: its name; "" before it is known.
        words: the whole command line, without the program.
        json: print one JSON document and no text on stdout.
        quiet: no progress and no remarks on stderr; warnings and errors stay.
        progress: how progress is shown.
        debug: show tracebacks.
        stores: settings of object stores.
        environment: environment variables that set flags of this run.
        settings: options that the user's file of settings has set.
        document: what was reported so far.
        groups: the values of option groups that the verb shares with others, by their dataclass.
        screen: hears the operation: this, or the verb's own observer around it.
        started: whether the verb itself ran (it does not where only its help is shown).
        aside: whether `print` writes to stderr, because stdout takes one path alone.
        on_begin: called when the verb begins.
        on_end: called with the result when the verb has ended, however it did.
        errors: how many findings that are errors were told so far.
    """

    verb: str = ""
    words: Sequence[str] = ()
    json: bool = False
    quiet: bool = False
    progress: ProgressChoice = ProgressChoice.AUTO
    debug: bool = False
    stores: StoreOptions = field(default_factory=StoreOptions)
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    document: dict[str, Any] = field(default_factory=dict)
    groups: dict[type[Any], Any] = field(default_factory=dict)
    screen: Any = None
    started: bool = False
    aside: bool = False
    on_begin: Callable[[], None] | None = None
    on_end: Callable[[Result], None] | None = None
    errors: int = 0
    _told: set[str] = field(default_factory=set)
    _alike: dict[tuple[str, str], int] = field(default_factory=dict)
    _kept: list[object] = field(default_factory=list)

    @property
    def output(self) -> int | None:
        """Under `--json` stdout holds one document, and nothing that another program prints."""
        return sys.stderr.fileno() if self.json else None

    def start(self, *, watched: bool = True) -> None:
        """Note that the verb itself runs from now on; `watched`: signals are to end it in time."""
        self.started = True
        if watched and self.on_begin is not None:
            self.on_begin()

    def keep(self, thing: T) -> T:
        """Hold on to something large until the process ends, out of the collector's sight."""
        self._kept.append(thing)
        gc.freeze()
        return thing

    def options(self, group: type[T]) -> T:
        """Return the values of an option group that the verb's `OPTIONS` name."""
        return cast(T, self.groups[group])

    def open(self, url: str, name: str) -> None:
        """Report which checkpoint it is."""
        self.report(target=url, format=name)

    def report(self, **fields: Any) -> None:
        """Set fields of the JSON document: plain data, dataclasses, NamedTuples, enums."""
        self.document.update(fields)

    def print(self, text: str = "") -> None:
        """Print one line of the answer on stdout, or `Lines`; nothing under `--json`."""
        self._tell_rest()
        self._print(text)

    def _print(self, text: str) -> None:
        if self.aside:
            self.say(text)
        elif not self.json:
            if self._shown is not None:
                self._shown.clear()
            write(sys.stdout, coloured(sys.stdout, block(text)) + "\n")

    def found(self, one: Finding) -> None:
        """Print a finding as a line of the answer, and count it where it is an error.

        Very many of one kind are counted instead of printed; the JSON document has all.
        """
        if one.severity == "error":
            self.errors += 1
        alike = str(one.severity), one.kind
        self._alike[alike] = self._alike.get(alike, 0) + 1
        if self._alike[alike] <= _MOST_ALIKE:
            if one.severity == "error" and not self.json:
                self._told.add(one.message)
            self._print(finding_line(one))

    def _tell_rest(self) -> None:
        """Say how many findings had no line of their own, once those of a checkpoint are told."""
        alike, self._alike = self._alike, {}
        for (severity, kind), number in alike.items():
            if number > _MOST_ALIKE:
                more = number - _MOST_ALIKE
                self._print(f"{severity}: {kind}: {more} more of this kind (--json has them all)")

    def note(self, text: str) -> None:
        """Print a remark on stderr, whatever a name in it holds; nothing under `--quiet`."""
        self.say(text)

    def say(self, text: str) -> None:
        """Print a remark on stderr; nothing under `--quiet`."""
        if not self.quiet:
            self._above_progress(block(text))

    def warn(self, text: str) -> None:
        """Print what must be seen on stderr, also under `--quiet`."""
        self._above_progress(block(text))

    def fail(self, code: ExitCode | CommandCode, message: str, hint: str = "") -> Result:
        """Complain on stderr as an error would, and return the result for `command` to return."""
        self.complain(code, message, hint)
        return Result(code, message, hint)

    def complain(self, code: ExitCode | CommandCode, message: str, hint: str = "") -> None:
        """Print an error on stderr: one sentence, and what to do next.

        What a finding has said just above, in the same terminal or log, is not said again.
        """
        self._tell_rest()
        if self._told and (self.aside or same_place(sys.stdout, sys.stderr)):
            shorter = message
            for said in self._told:
                shorter = shorter.replace(said, "see the error above")
            if shorter != message:
                message = f"{code.name} (exit code {int(code)}): {shorter}"
        if self._shown is not None:
            self._shown.clear()
        complain(message, hint)

    @cached_property
    def counter(self) -> ProgressCounter:
        """The progress counter of this run: drawn on a terminal, lines elsewhere, or as asked."""
        from .progress import ProgressCounter, ProgressForm

        if self.progress is ProgressChoice.JSON:
            form = ProgressForm.JSON
        elif self.quiet or (self.json and not is_terminal(sys.stderr)):
            form = ProgressForm.SILENT
        else:
            form = ProgressForm.BAR if is_terminal(sys.stderr) else ProgressForm.LINES
        return ProgressCounter(sys.stderr, form, verb=self.verb, errors=lambda: self.errors)

    def tell_progress(self) -> None:
        """Answer a signal with one line on stderr; the work may be anywhere, also in a write."""
        counter, text = self._shown, f"{self.verb or 'ftckpt'}: nothing is counted yet"
        if counter is not None and counter.started:
            text = counter.answer()
        with suppress(OSError, ValueError, AttributeError):
            os.write(sys.stderr.fileno(), f"{text}\n".encode())

    def close(self) -> None:
        """End the progress display, so that what follows stands on a clean line."""
        if self._shown is not None:
            self._shown.close()

    @property
    def _shown(self) -> ProgressCounter | None:
        """The progress counter, where anybody wanted one."""
        return self.__dict__.get("counter")

    def _above_progress(self, text: str) -> None:
        text = coloured(sys.stderr, text)
        if self._shown is None:
            write(sys.stderr, text + "\n")
        else:
            self._shown.line(text)


class Relay(Observer):
    """Hands on to an invocation what a verb does not show in its own way."""

    def __init__(self, invocation: Invocation) -> None:
        self.invocation = invocation

    @property
    def counter(self) -> Counter:
        """See `Observer`."""
        return self.invocation.counter

    def begin(self, url: str) -> None:
        """See `Observer`."""
        self.invocation.begin(url)

    def open(self, url: str, name: str) -> None:
        """See `Observer`."""
        self.invocation.open(url, name)

    def found(self, one: Finding) -> None:
        """See `Observer`."""
        self.invocation.found(one)

    def end(self, report: Any) -> None:
        """See `Observer`."""
        self.invocation.end(report)

    def note(self, text: str) -> None:
        """See `Observer`."""
        self.invocation.note(text)

    def warn(self, text: str) -> None:
        """See `Observer`."""
        self.invocation.warn(text)

    def report(self, **fields: Any) -> None:
        """See `Observer`."""
        self.invocation.report(**fields)

    def keep(self, thing: T) -> T:
        """See `Observer`."""
        return self.invocation.keep(thing)


def complain(message: str, hint: str = "") -> None:
    """Print an error: one sentence, and what to do next."""
    lines = f"ftckpt: {printable(message)}\n" + (f"hint: {printable(hint)}\n" if hint else "")
    write(sys.stderr, coloured(sys.stderr, lines))
