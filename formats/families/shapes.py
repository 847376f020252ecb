"""List the tensors that a model has on Hugging Face's side, by its family's table and config.json.

    [defaults]                       # what config.json may leave out
    head_dim = "hidden_size/num_attention_heads"

    [counts]                         # how many numbers stand for {layer} and {expert}
    layer = "num_hidden_layers"

    [shapes]                         # products and sums of the fields of config.json; #field is the
                                     # number of entries of a list
    "model.layers.{layer}.self_attn.q_proj.weight" = "num_attention_heads*head_dim hidden_size"
    "lm_head.weight" = {axes = "vocab_size hidden_size", unless = "tie_word_embeddings"}
    "model.layers.{layer}.mlp.gate.weight" = {axes = "…", layers = "first_k_dense_replace:"}

`when` and `unless` name a field; `layers` gives a range, or `field=value` for the layers where a
list (or a text, letter by letter) has that value. `field=value,value or other=value` takes the
first of these fields that is there. Where none is, `every field` at the end means each layer whose
number, from 1, that field divides, and `except every field` all others. `in field` gives the
layers whose numbers a list has, `not in field` all others; `or every field` may stand behind, too.
An empty text takes away what an extended table has.

Names of parameters with places for the numbers of layers and experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from ftckpt.checkpoint.names import unwrapped
from ftckpt.errors import UsageError
from ftckpt.findings import counted, listed
from ftckpt.formats.huggingface.config import CONFIG
from ftckpt.transfer.content import Content
from ftckpt.transfer.request.renaming import parameter_names, parted

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


_MOST = 1 << 40
_DEEPEST = 50  # defaults that refer to each other
_TENSORS = 1 << 20  # more than any model has


class ShapeRule(NamedTuple):
    """The shape of a tensor, or of one in each layer.

    Attributes:
        name: of the tensor.
        axes: an expression each.
        layers: which of them have it; "" for all.
        when, unless: fields of `config.json` that decide whether the model has it; "" for none.
    """

    name: Name
    axes: tuple[str, ...]
    layers: str = ""
    when: str = ""
    unless: str = ""

    @classmethod
    def of(cls, name: str, said: object) -> ShapeRule:
        """Return the rule that a table has for a name.

        Raises:
            UsageError: it does not say a shape.
        """
        fields: Mapping[str, Any] = {"axes": said} if isinstance(said, str) else {}
        if isinstance(said, Mapping):
            fields = said
        wrong = fields.keys() - {"axes", "layers", "when", "unless"}
        if wrong or not all(isinstance(v, str) for v in fields.values()) or "axes" not in fields:
            raise UsageError(f"the shape of {name} is given by {said!r}, which does not say it")
        rest = {key: value for key, value in fields.items() if key != "axes"}
        return cls(Name.of(name), tuple(fields["axes"].split()), **rest)


class ShapeTable(NamedTuple):
    """What a family says of the shapes of its tensors.

    Attributes:
        rules: by name; one without axes is absent.
        defaults: expressions for fields that `config.json` may leave out.
        counts: how many layers and experts there are, an expression each.
    """

    rules: Mapping[str, ShapeRule]
    defaults: Mapping[str, str]
    counts: Mapping[str, str]

    def tensors(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of a model, by name.

        Args:
            config: its `config.json`.

        Raises:
            UsageError: it lacks a field, or has a value that gives no shape.
        """
        fields = _Fields(config, self.defaults)
        found: dict[str, tuple[int, ...]] = {}
        for rule in self.rules.values():
            if not rule.axes or (rule.when and not fields.flag(rule.when)):
                continue
            if rule.unless and fields.flag(rule.unless):
                continue
            every = list(self._numbers(rule, fields))
            if not every:  # what no layer has need not have a size
                continue
            shape = tuple(fields.amount(axis) for axis in rule.axes)
            found |= {rule.name.fill(numbers): shape for numbers in every}
            if len(found) > _TENSORS:
                raise UsageError(f"{CONFIG} describes more than {_TENSORS:,} tensors")
        return found

    def amount(self, word: str, config: Mapping[str, Any]) -> int:
        """Return how many layers or experts a model has.

        Args:
            word: `layer` or `expert`.
            config: its `config.json`.

        Raises:
            UsageError: neither the table nor `config` says it.
        """
        if word not in self.counts:
            raise UsageError(f"the table does not say how many {word}s a model has")
        count = _Fields(config, self.defaults).amount(self.counts[word])
        if count > _TENSORS:
            raise UsageError(f"{CONFIG} says {count:,} {word}s")
        return count

    def number(self, text: str, config: Mapping[str, Any]) -> int:
        """Return the value of an expression.

        Raises:
            UsageError: `config` lacks a field of it, or gives no such number.
        """
        return _Fields(config, self.defaults).amount(text)

    def flag(self, field: str, config: Mapping[str, Any]) -> bool:
        """Whether a field is there, and neither false nor zero; one with a default has that."""
        return _Fields(config, self.defaults).flag(field)

    def layers(self, text: str, config: Mapping[str, Any]) -> frozenset[int]:
        """Return the layers that a rule's `layers` is about.

        Raises:
            UsageError: `config` does not say it.
        """
        fields = _Fields(config, self.defaults)
        if "layer" not in self.counts:
            raise UsageError("the table does not say how many layers a model has")
        return frozenset(fields.layers(text, fields.amount(self.counts["layer"])))

    def _numbers(self, rule: ShapeRule, fields: _Fields) -> Iterator[dict[str, str]]:
        ranges: list[list[int]] = []
        words = rule.name.words
        total = 1
        for word in words:
            if word not in self.counts:
                raise UsageError(f"the table does not say how many {word}s a model has")
            count = fields.amount(self.counts[word])
            total *= count
            if total > _TENSORS:
                raise UsageError(f"{CONFIG} says {count:,} {word}s")
            of_layers = word == "layer" and rule.layers
            ranges.append(fields.layers(rule.layers, count) if of_layers else list(range(count)))
        for each in product(*ranges):
            yield {word: str(number) for word, number in zip(words, each, strict=True)}


class _Fields:
    """The numbers of a `config.json`."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, str]) -> None:
        self._config = config
        self._defaults = defaults
        self._asked: list[str] = []
        self._known: dict[str, int] = {}  # what defaults give: each is computed once

    def flag(self, field: str) -> bool:
        """Whether a field is there, and neither false nor zero; one with a default has that."""
        value = self._config.get(field)
        if value is None and field in self._defaults:
            return self._defaults[field] == "true"
        return bool(value)

    def amount(self, text: str) -> int:
        """Return the value of an expression: products, and sums of them.

        Raises:
            UsageError: a field is not there or no such number.
        """
        total = sum(self._product(one) for one in text.split("+"))
        if not 0 < total < _MOST:
            raise UsageError(f"{CONFIG} gives {text} = {total}")
        return total

    def _product(self, text: str) -> int:
        text, *divisors = text.split("/")
        value = 1
        for factor in text.split("*"):
            value *= self._one(factor)
            if value >= _MOST * _MOST:
                raise UsageError(f"{CONFIG} gives {text[:80]} more than any shape has")
        for divisor in divisors:
            by = self._one(divisor)
            if not by or value % by:
                raise UsageError(f"{CONFIG} gives no whole number for {text}/{divisor}")
            value //= by
        return value

    def _one(self, word: str) -> int:
        if word.isdecimal() and len(word) < 20:
            return int(word)
        if word.startswith("#"):  # as many as a list has
            entries = self._config.get(word[1:])
            if not isinstance(entries, list):
                raise UsageError(f"{CONFIG} says {word[1:]} = {entries!r}, not a list")
            return len(entries)
        value = self._config.get(word)
        if value is None:
            value = self._known.get(word)
        if value is None and word in self._defaults and word not in self._asked:
            if len(self._asked) >= _DEEPEST:
                raise UsageError(f"the defaults of a table refer to each other {_DEEPEST} deep")
            self._asked.append(word)
            value = self._known[word] = self.amount(self._defaults[word])
            self._asked.pop()
        if type(value) is not int or not 0 <= value < _MOST:
            raise UsageError(f"{CONFIG} says {word} = {value!r}, and the table needs a number")
        return value

    def layers(self, text: str, count: int) -> list[int]:
        """Return the layers that a rule is of.

        Raises:
            UsageError: the field does not have one value a layer, or more layers than a model has.
        """
        if count > _TENSORS:
            raise UsageError(f"{CONFIG} says {count:,} layers")
        if text.startswith(("in ", "not in ")):
            return self._listed(text, count)
        if "=" in text:
            ways = [way.partition("=") for way in text.split(" or ")]
            there = [way for way in ways if self._config.get(way[0])]
            if not there and not ways[-1][1]:
                return self._every(ways[-1][0], count)
            field, _, values = (there or ways)[0]
            said = self._config.get(field)
            if not isinstance(said, (str, list)) or len(said) != count:
                raise UsageError(f"{CONFIG} says {field} = {said!r}, not one for each layer")
            return [n for n, one in enumerate(said) if one in values.split(",")]
        begin, colon, end = text.partition(":")
        if not colon:
            raise UsageError(f"a table says layers = {text!r}, which does not give a range")
        first = self._product(begin) if begin else 0
        return list(range(min(first, count), min(self._product(end), count) if end else count))

    def _listed(self, text: str, count: int) -> list[int]:
        kept, _, field = text.partition("in ")
        field, _, other = field.partition(" or ")
        said = self._config.get(field)
        if said is None and other:
            return self._every(other, count)
        if not isinstance(said, list) or not all(
            type(one) is int and 0 <= one < count for one in said
        ):
            raise UsageError(f"{CONFIG} says {field} = {said!r}, not a list of its layers")
        numbers = set(said)
        return [n for n in range(count) if (n in numbers) is (kept == "")]

    def _every(self, text: str, count: int) -> list[int]:
        kept, _, field = text.rpartition("every ")
        if kept not in ("", "except ") or not field:
            raise UsageError(f"a table says layers = {text!r}, which does not give layers")
        step = self.amount(field)
        return [n for n in range(count) if ((n + 1) % step == 0) is (kept == "")]


def require_same(
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    family: str,
    hint: str = "",
) -> None:
    """Refuse a model that is not what its configuration says.

    Args:
        wanted: shapes by Hugging Face's names.
        found: likewise, of the checkpoint.
        family: of the model.
        hint: what the user can do.

    Raises:
        UsageError: a tensor too many, one missing, or another shape; the first few are named.
    """
    missing = [name for name in wanted if name not in found]
    more = [name for name in found if name not in wanted]
    other = [
        f"{name} of {list(found[name])} is to be {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    said = []
    if missing:
        said.append(f"{counted(len(missing), 'tensor')} missing ({listed(missing, 3)})")
    if more:
        said.append(f"{counted(len(more), 'tensor')} too many ({listed(more, 3)})")
    if other:
        said.append(f"{counted(len(other), 'shape')} different ({listed(other, 3)})")
    if said:
        raise UsageError(
            f"the model is not the {family} that {CONFIG} describes: {'; '.join(said)}",
            hint=hint,
            tensor=(missing or more or [name for name in wanted if found[name] != wanted[name]])[0],
        )
