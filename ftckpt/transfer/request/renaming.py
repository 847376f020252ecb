r"""Other names for parameters, by a table of patterns that the user gives.

A TOML file; for each parameter the first entry that matches its whole name decides.

    [[rename]]
    from = "layers.*.attn.wq.weight"              # `*` stands for any text, dots included
    to = "model.layers.*.self_attn.q_proj.weight" # as many `*`, filled in order

    [[rename]]
    regex = 'blocks\.(\d+)\.(.*)'                 # of the whole name
    to = 'model.layers.\1.\2'
    optional = true                               # it may match nothing

A name that no entry matches stays. Masters, moments and averages follow their parameter.

Find the parameter that a tensor belongs to; renaming one renames its optimizer state.

Weights, masters and moments carry the parameter's name itself. Other optimizer state carries it
and a word more (`layers.0.weight.step`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.sharding import name_pattern
from ftckpt.errors import UsageError
from ftckpt.transfer.content import Content, TargetTensor


def parameter_names(tensors: Iterable[TargetTensor]) -> frozenset[str]:
    """Return the names of the parameters and buffers that `tensors` are of."""
    return frozenset(wanted.name for wanted in tensors if wanted.kind is not Kind.OTHER)


def parted(wanted: TargetTensor, parameters: Set[str]) -> tuple[str, str]:
    """Return the name of the parameter that a tensor is of, and what follows it.

    The longest parameter's name that the tensor's own begins with, at a dot; where there is none,
    the tensor stands for itself.
    """
    head, rest = wanted.name, ""
    while wanted.kind is Kind.OTHER and head not in parameters:
        shorter, dot, word = head.rpartition(".")
        if not dot:
            return wanted.name, ""
        head, rest = shorter, f".{word}{rest}"
    return head, rest


_FIELDS = frozenset(("from", "regex", "to", "optional"))


class Rename(NamedTuple):
    """One entry of a table.

    Attributes:
        pattern: of whole names.
        template: of the new name, as `re.Match.expand` takes it.
        optional: whether it may match nothing.
        where: which entry of which file, for messages.
    """

    pattern: re.Pattern[str]
    template: str
    optional: bool
    where: str


def parse_renames(text: str, origin: str) -> tuple[Rename, ...]:
    """Parse a table.

    Args:
        text: TOML, as the module describes.
        origin: where it is from, for messages.

    Raises:
        UsageError: not TOML, a field that is unknown, missing or of the wrong type, a pattern that
            does not compile, or a new name that asks for text that the pattern does not give.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{origin} is not TOML: {error}") from error
    entries = table.get("rename")
    if set(table) - {"rename"}:
        raise UsageError(f"{origin}: a table of names knows no {min(set(table) - {'rename'})!r}")
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{origin}: a table of names needs [[rename]] entries")
    return tuple(_entry(e, f"rename {n} of {origin}") for n, e in enumerate(entries, 1))


def _entry(entry: Any, where: str) -> Rename:
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is not a table")
    unknown = set(entry) - _FIELDS
    if unknown:
        raise UsageError(f"{where} has an unknown field {min(unknown)!r}")
    optional, to = entry.get("optional", False), entry.get("to")
    given = [entry[field] for field in ("from", "regex") if field in entry]
    if len(given) != 1 or not isinstance(given[0], str) or not isinstance(to, str) or not to:
        raise UsageError(f'{where} needs from = "PATTERN" or regex = "REGEX", and to = "NAME"')
    if type(optional) is not bool:
        raise UsageError(f"{where}: optional is true or false")
    if "from" in entry:
        stars = given[0].count("*")
        if to.count("*") != stars:
            raise UsageError(f"{where}: {given[0]!r} and {to!r} have not as many `*`")
        parts = [part.replace("\\", r"\\") for part in to.split("*")]
        numbered = (f"\\g<{n}>{part}" for n, part in enumerate(parts[1:], 1))
        return Rename(name_pattern(given[0]), parts[0] + "".join(numbered), optional, where)
    try:
        pattern = re.compile(given[0], re.DOTALL)
        # Fails now, and not at the first name that matches, where the template asks for too much.
        re.compile(f"{given[0]}|", re.DOTALL).sub(to, "")
    except (re.error, IndexError) as error:
        raise UsageError(f"{where}: {error}") from error
    return Rename(pattern, to, optional, where)


def rename(content: Content, renames: Sequence[Rename]) -> Content:
    """Give parameters other names, their optimizer state and averages with them.

    Raises:
        UsageError: an entry that is not optional matches nothing, two tensors would have one name,
            or a name would be empty.
    """
    parameters = parameter_names(content.tensors.values())
    used: set[str] = set()
    known: dict[str, str] = {}

    def renamed(name: str) -> str:
        if name not in known:
            known[name] = _apply(name, renames, used)
        return known[name]

    made: dict[str, TargetTensor] = {}
    was: dict[str, str] = {}
    for key, wanted in content.tensors.items():
        parameter, rest = parted(wanted, parameters)
        new = wanted._replace(name=renamed(parameter) + rest)
        if new.key in made:
            raise UsageError(f"{was[new.key]} and {key} would both be called {new.key}")
        made[new.key], was[new.key] = new, key
    for entry in renames:
        if not entry.optional and entry.where not in used:
            raise UsageError(
                f"{entry.where} matches no parameter of {content.checkpoint.source.url}",
                hint="optional = true allows that",
            )
    now = {old: new for new, old in was.items()}
    aliases = {now[key]: now[owner] for key, owner in content.aliases.items() if owner in now}
    return replace(content, tensors=made, aliases=aliases)


def _apply(name: str, renames: Sequence[Rename], used: set[str]) -> str:
    for entry in renames:
        match = entry.pattern.fullmatch(name)
        if match is not None:
            used.add(entry.where)
            new = match.expand(entry.template)
            if not new:
                raise UsageError(f"{entry.where} leaves {name} without a name")
            return new
    return name
