"""Match names by patterns out of a file, in time that is linear in the name.

Python's `re` goes back and tries again: `(a+)+$` on thirty letters takes hours. Here all places in
the pattern that a name can have reached are followed together (Thompson, 1968), so a hostile
pattern costs what a plain one does. What needs going back (references, looking ahead or behind,
possessive repeats) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

from ftckpt.errors import UnsupportedError
from ftckpt.strict_json import shown

MAX_PATTERN = 1000  # characters
_MAX_STEPS = 20_000  # of a pattern, its repeats written out
_MAX_DEPTH = 50
_PLAIN = re.compile(r"[\w.-]+")
_COUNT = re.compile(r"\{(\d{1,3})(?:(,)(\d{0,3}))?\}")
_KINDS: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda c: c.isalnum() or c == "_",
    "s": str.isspace,
}
Test = Callable[[str], bool]


class _Step(NamedTuple):
    """One step: takes a character (`test`), asks for a place (`at`), or goes on elsewhere.

    Attributes:
        test: of the character that it takes.
        at: `^`, `$` or `b`: the place that it asks for; "" for none.
        to: where it goes on, relative to itself; it goes to each.
    """

    test: Test | None
    at: str
    to: tuple[int, ...]


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def refuse(self, why: str) -> UnsupportedError:
        return UnsupportedError(
            f"the pattern {shown(self.text)} has {why}, which is not matched here",
            hint="list the names of the modules in adapter_config.json instead",
        )

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def take(self) -> str:
        char = self.peek()
        self.at += 1
        return char

    def alternatives(self) -> list[_Step]:
        made = self.sequence()
        while self.peek() == "|":
            self.at += 1
            other = self.sequence()
            split = _Step(None, "", (1, len(made) + 2))
            made = [split, *made, _Step(None, "", (len(other) + 1,)), *other]
        return made

    def sequence(self) -> list[_Step]:
        made: list[_Step] = []
        while self.peek() not in ("", "|", ")"):
            made += self.repeated(self.atom())
            if len(made) > _MAX_STEPS:
                raise self.refuse("too many repeats")
        return made

    def repeated(self, atom: list[_Step]) -> list[_Step]:
        counted = _COUNT.match(self.text, self.at)
        sign = self.peek()
        if counted:
            self.at = counted.end()
            least, comma, most = int(counted[1]), counted[2], counted[3]
            last = int(most) if most else (None if comma else least)
            if last is not None and last < least:
                raise self.refuse("a repeat from more to fewer")
        elif sign in ("*", "+", "?") and sign:
            self.at += 1
            least, last = int(sign == "+"), 1 if sign == "?" else None
        else:
            return atom
        if self.peek() == "?":
            self.at += 1  # as few as possible: the whole name is to match all the same
        if self.peek() in ("*", "+", "?", "{") and self.peek():
            raise self.refuse("a repeat of a repeat")
        size = len(atom)
        if size * max(least, last or 1) > _MAX_STEPS:
            raise self.refuse("too many repeats")
        made = atom * least
        if last is None:
            return [*made, _Step(None, "", (1, size + 2)), *atom, _Step(None, "", (-size - 1,))]
        for left in range(last - least, 0, -1):
            made = [*made, _Step(None, "", (1, left * (size + 1))), *atom]
        return made

    def atom(self) -> list[_Step]:
        char = self.take()
        if char == "(":
            return self.group()
        if char == "[":
            return [_Step(self.choice(), "", (1,))]
        if char == "\\":
            return [self.escape()]
        if char in "^$":
            return [_Step(None, char, (1,))]
        if char == ".":
            return [_Step(lambda c: c != "\n", "", (1,))]
        if char in "*+?{":
            raise self.refuse(f"a {char} that repeats nothing")
        return [_Step(char.__eq__, "", (1,))]

    def group(self) -> list[_Step]:
        if self.peek() == "?":
            if self.text[self.at : self.at + 2] != "?:":
                raise self.refuse(f"a group ({self.text[self.at : self.at + 3]}...)")
            self.at += 2
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise self.refuse("too many groups inside each other")
        made = self.alternatives()
        self.depth -= 1
        if self.take() != ")":
            raise self.refuse("a group without an end")
        return made

    def escape(self) -> _Step:
        char = self.take()
        if char == "b":
            return _Step(None, "b", (1,))
        test = self.kind(char)
        return _Step(char.__eq__ if test is None else test, "", (1,))

    def kind(self, char: str) -> Test | None:
        r"""Return the test of `\d` and its like; None where the character means itself."""
        if char.lower() in _KINDS:
            test = _KINDS[char.lower()]
            return test if char.islower() else lambda c: not test(c)
        if not char or char.isalnum():
            raise self.refuse(f"\\{char}")
        return None

    def choice(self) -> Test:
        negative = self.peek() == "^"
        self.at += negative
        tests: list[Test] = []
        ranges: list[tuple[str, str]] = []
        begin = self.at
        while self.peek() != "]" or self.at == begin:
            low, test = self.member()
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high, other = self.member()
                if test or other or high < low:
                    raise self.refuse("a range that is none")
                ranges.append((low, high))
            elif test:
                tests.append(test)
            else:
                ranges.append((low, low))
        self.at += 1

        def found(c: str) -> bool:
            return any(a <= c <= b for a, b in ranges) or any(one(c) for one in tests)

        return (lambda c: not found(c)) if negative else found

    def member(self) -> tuple[str, Test | None]:
        char = self.take()
        if not char:
            raise self.refuse("a [ without an end")
        if char != "\\":
            return char, None
        char = self.take()
        return char, self.kind(char)


class LinearPattern:
    """A compiled pattern; see `compiled`."""

    def __init__(self, steps: list[_Step]) -> None:
        self._steps = steps
        self.cost = len(steps) + 1

    def matches(self, name: str, *, whole: bool = True) -> bool:
        """Return whether a name matches from its beginning, as `re.fullmatch` does.

        Args:
            name: the name.
            whole: whether to its end; else as `re.match`.
        """
        end = len(self._steps)
        states = self._closed((0,), name, 0)
        for place, char in enumerate(name):
            if not whole and end in states:
                return True
            steps = self._steps
            taken = (n + 1 for n in states if n < end and (test := steps[n].test) and test(char))
            states = self._closed(taken, name, place + 1)
            if not states:
                return False
        return end in states

    def _closed(self, states: Iterable[int], name: str, place: int) -> set[int]:
        """Return all steps that are reached without a character."""
        seen: set[int] = set()
        left = list(states)
        while left:
            number = left.pop()
            if number in seen:
                continue
            seen.add(number)
            if number == len(self._steps) or (step := self._steps[number]).test:
                continue
            if not step.at or _is_there(step.at, name, place):
                left += [number + to for to in step.to]
        return seen


def _is_there(at: str, name: str, place: int) -> bool:
    if at == "^":
        return place == 0
    if at == "$":
        return place == len(name) or (place == len(name) - 1 and name[place] == "\n")
    inside = [0 <= n < len(name) and _KINDS["w"](name[n]) for n in (place - 1, place)]
    return inside[0] != inside[1]


@lru_cache(maxsize=256)
def compiled(text: str) -> LinearPattern:
    r"""Return a pattern, made ready.

    Literals, `.`, classes, groups, alternatives, `* + ? {m,n}`, `^`, `$`, `\b`, `\d`, `\w` and
    `\s` are understood.

    Raises:
        UnsupportedError: it is longer than 1,000 characters, or has something else.
    """
    parser = _Parser(text)
    if len(text) > MAX_PATTERN:
        raise parser.refuse(f"{len(text)} characters")
    steps = parser.alternatives()
    if parser.at < len(text):
        raise parser.refuse("a ) without a beginning")
    if len(steps) > _MAX_STEPS:
        raise parser.refuse("too many repeats")
    return LinearPattern(steps)


def ends_with(pattern: str, name: str) -> bool:
    """Return whether a name ends with a pattern, at its beginning or at a dot.

    So PEFT looks names up in `rank_pattern` and `alpha_pattern`. Most patterns there are names, of
    which a dot stands for any character: those are compared without a machine.

    Raises:
        UnsupportedError: see `compiled`.
    """
    if _PLAIN.fullmatch(pattern) and "\n" not in name:
        tail = name[-len(pattern) :]
        head = name[: -len(pattern)]
        return (
            len(tail) == len(pattern)
            and all(p in (c, ".") for p, c in zip(pattern, tail, strict=True))
            and (not head or head.endswith("."))
        )
    return compiled(rf"(.*\.)?({pattern})$").matches(name, whole=False)
