"""Reports as text and as JSON; the only place, with progress, that knows about terminals.

What each exit code means, in the words of the help and of docs/exit-codes.md.
"""

from __future__ import annotations

import math
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.amounts import brief_duration as brief_duration
from ftckpt.amounts import human_bytes as human_bytes
from ftckpt.amounts import human_count as human_count
from ftckpt.amounts import human_duration as human_duration
from ftckpt.errors import ExitCode, FtckptError
from ftckpt.reports import document

if TYPE_CHECKING:
    from ftckpt.findings import Finding


class Meaning(NamedTuple):
    """One exit code, explained.

    Attributes:
        meaning: what happened.
        retry: whether trying again can help: `no`, `yes`, `later`, or what must be done first.
    """

    meaning: str
    retry: str = "no"


class CommandCode(int):
    """The exit code of a command that a verb ran, and ends with in its turn."""

    @property
    def name(self) -> str:
        """Return what stands in place of an exit code's name."""
        return "COMMAND"


MEANINGS: dict[ExitCode, Meaning] = {
    ExitCode.OK: Meaning("done, positive, complete", "-"),
    ExitCode.INTERNAL: Meaning("a bug in ftckpt; never a verdict"),
    ExitCode.USAGE: Meaning("flags, configuration, or an ambiguous target"),
    ExitCode.DIFFERENT: Meaning("a comparison found a difference"),
    ExitCode.CORRUPT: Meaning("proven damage"),
    ExitCode.INCOMPLETE: Meaning("not committed, or still being written", "later"),
    ExitCode.UNVERIFIED: Meaning("the evidence that was asked for does not exist"),
    ExitCode.UNSAFE: Meaning("hostile or ambiguous content, refused; nothing was executed"),
    ExitCode.REFUSED: Meaning("a safety rule stopped it", "look first"),
    ExitCode.NOT_FOUND: Meaning("root, step or tensor absent; nothing matched"),
    ExitCode.UNAVAILABLE: Meaning("storage failed after retries", "yes"),
    ExitCode.DENIED: Meaning("credentials or permissions"),
    ExitCode.NO_RESOURCE: Meaning("disk, quota or memory budget", "after a fix"),
    ExitCode.UNSUPPORTED: Meaning("a layout, version or store capability that is not supported"),
    ExitCode.PARTIAL: Meaning("finished, but some items failed; they are listed", "look first"),
    ExitCode.MISSING: Meaning("nothing shows that the root is there: no fresh start", "look first"),
    ExitCode.REQUEUE: Meaning("the job was preempted, and goes on when it is started again", "yes"),
    ExitCode.INTERRUPTED: Meaning("interrupted (SIGINT, Ctrl-C)", "yes"),
    ExitCode.CLOSED_PIPE: Meaning("the reader of the output closed the pipe", "-"),
    ExitCode.TERMINATED: Meaning("terminated (SIGTERM)", "yes"),
}

# Any verb can end with these; its help says the others.
ALWAYS = (
    ExitCode.INTERNAL,
    ExitCode.USAGE,
    ExitCode.INTERRUPTED,
    ExitCode.CLOSED_PIPE,
    ExitCode.TERMINATED,
)


_SURROGATE = re.compile("[\ud800-\udfff]")
# C0 and C1 controls, marks that reorder a line, and letters without width: a name must not move the
# cursor, forge a line of our output, or look like another name.
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]"
)

# Columns below which words are not wrapped: a name would stand alone on every line.
_FEWEST = 20
# A path has at most 4,096 bytes, a key of an object store 1,024. A file may record a longer name,
# of megabytes; a line that joins many names has spaces between them.
_MOST_WORD = 4096
_MOST_LINE = 1 << 20
_SHOWN = 256  # characters of what is cut
_LONG_WORD = re.compile(rf"\S{{{_MOST_WORD + 1},}}+")


def printable(text: str) -> str:
    """Return `text` for one line: control characters escaped, a word longer than any name cut.

    What is longer than any name or line is said to be: how many characters were left out.
    """
    if len(text) > _MOST_WORD:
        text = _LONG_WORD.sub(lambda word: _cut(word[0]), text)
        text = _cut(text) if len(text) > _MOST_LINE else text
    return escaped(text)


def escaped(text: str) -> str:
    """Return `text` whole, with control characters and undecodable bytes written as escapes."""
    return _CONTROL.sub(_escape, _SURROGATE.sub(_escape, text))


def _cut(text: str) -> str:
    return f"{text[:_SHOWN]}[... {len(text) - _SHOWN} characters more]"


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a path that is not UTF-8, as Python carries it
        return f"\\x{code - 0xDC00:02x}"
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class Lines(str):
    """Text of several lines that are ours: every value in it is escaped already.

    Any other text is one line when it is printed, whatever a name in it holds.
    """

    __slots__ = ()


def block(*parts: str, between: str = "\n") -> Lines:
    """Return texts below each other; each is one line, unless it is `Lines` already."""
    return Lines(
        between.join(part if isinstance(part, Lines) else printable(part) for part in parts)
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Lines:
    """Return rows under headings, in aligned columns.

    A column heading that ends in `>` is aligned to the right. On a terminal that is too narrow a
    last column of words goes on below itself, and columns that do not fit stand on lines of their
    own. A cell that is wider than the terminal runs on.
    """
    right = [name.endswith(">") for name in columns]
    head = [printable(name.rstrip(">")) for name in columns]
    body = [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    limit = terminal_width()
    result = []
    for start, stop in _folded(widths, limit, words=not right[-1]):
        indent = "  " * bool(start)
        before = len(indent) + sum(widths[start : stop - 1]) + 2 * (stop - 1 - start)
        room = _room(before) if stop == len(widths) and not right[-1] else None
        last_width = min(widths[stop - 1], room or widths[stop - 1])
        fitted = [*widths[start : stop - 1], last_width]
        cut = []
        for line in (head[start:stop], ["-" * w for w in fitted], *(r[start:stop] for r in body)):
            last, *more = _wrapped(line[-1], room)
            cells = zip([*line[:-1], last], fitted, right[start:stop], strict=True)
            text = indent + "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in cells)
            cut.append([text.rstrip(), *(" " * before + rest for rest in more)])
        result.append(cut)
    return Lines(
        "\n".join(line for row in zip(*result, strict=True) for cut in row for line in cut)
    )


def _folded(widths: Sequence[int], limit: int | None, *, words: bool) -> list[tuple[int, int]]:
    """Return which columns stand on one line, as half-open ranges; one where all of them fit.

    Args:
        widths: of the columns.
        limit: of the terminal; None where there is none.
        words: whether the last column may be wrapped.
    """
    if limit is None:
        return [(0, len(widths))]
    folds, used = [0], -2
    for column, width in enumerate(widths):
        wraps = words and column == len(widths) - 1
        needed = min(width, _FEWEST) if wraps else width
        if column and used + 2 + needed > limit:
            folds.append(column)
            used = 0
        used += 2 + width
    return list(zip(folds, [*folds[1:], len(widths)], strict=True))


def pairs(rows: Sequence[tuple[str, object]]) -> Lines:
    """Return `name  value` lines with the values aligned; a value may be `Lines`."""
    rows = [(printable(name), value) for name, value in rows]
    width = max((len(name) for name, _ in rows), default=0)
    room = _room(width + 2)
    result = []
    for name, value in rows:
        lines = value.split("\n") if isinstance(value, Lines) else [printable(str(value))]
        first, *more = [part for line in lines for part in _wrapped(line, room)]
        result.append(f"{name.ljust(width)}  {first}".rstrip())
        result.extend(f"{' ' * width}  {line}" for line in more)
    return Lines("\n".join(result))


def _room(before: int) -> int | None:
    """Return the columns that the terminal has after `before`; None where words may run on.

    They may where nobody looks at columns, and where too few are left to hold words.
    """
    limit = terminal_width()
    return None if limit is None or limit - before < _FEWEST else limit - before


def _wrapped(text: str, room: int | None) -> list[str]:
    """Return `text` in lines of at most `room` columns; a word that is longer stays whole."""
    if room is None or len(text) <= room:
        return [text]
    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)


def terminal_width() -> int | None:
    """Return the width of the terminal on stdout, or None where stdout is not a terminal."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return max(40, shutil.get_terminal_size().columns)


def text_width() -> int:
    """Return the columns to wrap sentences to: the terminal's, else COLUMNS, else 100."""
    return terminal_width() or max(40, shutil.get_terminal_size((100, 24)).columns)


def branch(component: str, prefix: str, depth: int) -> str:
    """Return a prefix of names as a row of a tree: its last part, indented."""
    return f"{'  ' * depth}{prefix.rpartition('.')[2]}" if depth else component


def finding_line(finding: Finding) -> str:
    """Return one finding as one line: severity, kind, place, sentence."""
    from ftckpt.findings import described  # the help of all verbs needs none

    return printable(described(finding))


def error_line(error: FtckptError) -> str:
    """Return an error's sentence, safe to print."""
    return printable(error.message)


def result_record(code: ExitCode | CommandCode, message: str, hint: str = "") -> dict[str, Any]:
    """Return the `result` record that ends every JSON document."""
    return {"code": int(code), "name": code.name, "message": message, "hint": hint}


def json_text(document: Mapping[str, Any]) -> str:
    r"""Return a JSON document in pure ASCII that every parser accepts.

    Dataclasses and NamedTuples become objects, enums their values (exit codes their names), sets
    sorted lists. JSON has no NaN and no infinity: they become the strings "NaN", "Infinity" and
    "-Infinity". Bytes of paths that are no UTF-8 are written as `\xNN`.
    """
    import json

    return json.dumps(plain(document), indent=2, allow_nan=False)


def plain(value: Any) -> Any:
    """Return `value` made of dict, list, str, int, finite float, bool and None."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, ExitCode):
        return value.name
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, str):
        return _SURROGATE.sub(_escape, value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        return value.hex()
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(one) for name, one in document(value).items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {_key(k): plain(v) for k, v in value.items()}
    if isinstance(value, AbstractSet):
        return sorted((plain(v) for v in value), key=repr)
    if isinstance(value, (Sequence, map, filter)) or hasattr(value, "__iter__"):
        return [plain(v) for v in value]
    return _SURROGATE.sub(_escape, str(value))


def _key(key: object) -> str:
    done = plain(key)
    if isinstance(done, str):
        return done
    import json

    return json.dumps(done)
