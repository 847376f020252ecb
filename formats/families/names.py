"""Names of parameters with places for the numbers of layers and experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_NUMBERS = re.compile(r"\{(layer|expert)\}")


class Name(NamedTuple):
    """A parameter's name with places for numbers."""

    text: str
    pattern: re.Pattern[str]

    @classmethod
    def of(cls, text: str) -> Name:
        """Return the name; `{layer}` and `{expert}` match numbers."""
        parts = _NUMBERS.split(text)
        named: set[str] = set()
        pattern = ""
        for index, part in enumerate(parts):
            if index % 2 and part not in named:
                pattern += rf"(?P<{part}>\d{{1,9}})"  # a longer number is nobody's
                named.add(part)
            else:
                pattern += rf"(?P={part})" if index % 2 else re.escape(part)
        return cls(text, re.compile(pattern))

    @property
    def words(self) -> tuple[str, ...]:
        """What its numbers count, in order."""
        return tuple(_NUMBERS.findall(self.text))

    def numbers(self, name: str) -> Mapping[str, str] | None:
        """Return the numbers in `name`, or None where it is another's."""
        match = self.pattern.fullmatch(name)
        return None if match is None else match.groupdict()

    def fill(self, numbers: Mapping[str, str]) -> str:
        """Return the name with its numbers."""
        return _NUMBERS.sub(lambda match: numbers[match[1]], self.text)
