"""Names of parameters with places for the numbers of layers and experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ftckpt.checkpoint.names import unwrapped
from ftckpt.transfer.content import Content
from ftckpt.transfer.request.parameters import parameter_names, parted

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


def renamed(content: Content, name: Callable[[str], str]) -> Content:
    """Return a content whose parameters have other names, their optimizer state with them."""
    parameters = parameter_names(content.tensors.values())
    made = []
    for wanted in content.tensors.values():
        if not wanted.component.startswith("extra:"):
            parameter, rest = parted(wanted, parameters)
            wanted = wanted._replace(name=name(parameter) + rest)
        made.append(wanted)
    return content.with_tensors(made)


def without_wrappers(content: Content) -> Content:
    """Return a content without the names of wrappers (`_orig_mod.`) in those of its parameters."""
    bare = unwrapped(parameter_names(content.tensors.values()))
    if all(name == own for name, own in bare.items()):
        return content
    return renamed(content, lambda name: bare.get(name, name))
