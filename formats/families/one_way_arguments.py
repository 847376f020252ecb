"""Give the arguments of Megatron that a table has for a `config.json`, in that direction alone.

    [megatron]
    qk_layernorm = true                                      # whatever config.json says
    moe_ffn_hidden_size = {field = "moe_intermediate_size"}  # what a field says
    position_embedding_type = {field = "rope_type", words = {yarn = "yarn", default = "rope"}}
    init_method_std = {field = "initializer_range", default = 0.02}  # where it is left out
    add_qkv_bias = {flag = "attention_bias"}                 # whether it is true
    moe_shared_expert_intermediate_size = {amount = "n_shared_experts*moe_intermediate_size"}
    window_size = {window = "sliding_window"}                # of that many tokens, its own too
    moe_layer_freq = {layers = "first_k_dense_replace:"}     # 1 for each of these layers, else 0
    linear_attention_freq = {every = "layer_types=…"}        # N for all layers but each Nth
    hybrid_layer_pattern = {letters = {M = "…", E = "…"}}    # one for each layer

Expressions and rules of layers are those of `shapes`. With `where` the model has the argument if it
has such layers, with `when` if a field is true; `is` gives a value beside these. An empty text
takes away what an extended table has.

    [required]                                               # no argument says it in another way
    norm_topk_prob = true
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.huggingface.config import CONFIG

from .shapes import ShapeTable

_KINDS = ("is", "field", "flag", "amount", "window", "layers", "every", "letters")
_LARGEST = 1e18
_BESIDE = ("default", "words", "where", "when")


class WrittenArgument(NamedTuple):
    """How one argument follows from `config.json`.

    Attributes:
        kind: a word of the table; "" for a value that is always the same.
        said: what stands behind the word, or the value.
        default: for a field that may be left out; None where it may not.
        words: what the argument says for each value of a field; None for the value itself.
        where: a rule of layers that the model must have; "" for none.
        when: a field that must be true; "" for none.
    """

    kind: str
    said: Any
    default: Any = None
    words: Mapping[str, Any] | None = None
    where: str = ""
    when: str = ""

    @classmethod
    def of(cls, name: str, said: Any, table: str) -> WrittenArgument:
        """Return what a table says of an argument.

        Raises:
            UsageError: it does not say a value.
        """
        if not isinstance(said, dict):
            return cls("", said)
        kinds = [kind for kind in _KINDS if kind in said]
        texts = [said[kind] for kind in kinds if kind not in ("is", "letters")]
        letters = said.get("letters", {})
        texts += letters.values() if isinstance(letters, dict) else [letters]
        texts += [said.get(word, "") for word in ("where", "when")]
        known = said.keys() <= {*_KINDS, *_BESIDE} and len(kinds) == 1
        known = known and all(isinstance(said.get(w, {}), dict) for w in ("words", "letters"))
        if not known or not all(isinstance(text, str) for text in texts):
            raise UsageError(f"the table of {table} says {name} = {said!r}, which gives no value")
        beside = {word: said[word] for word in _BESIDE if word in said}
        return cls(kinds[0], said[kinds[0]], **beside)

    def value(self, name: str, shapes: ShapeTable, config: Mapping[str, Any]) -> Any:
        """Return its value; None where the model has no such argument.

        Args:
            name: of the argument.
            shapes: of the family.
            config: the model's `config.json`.

        Raises:
            UsageError: `config` lacks a field, or gives no such number or word.
            UnsupportedError: layers that the argument has no letter for.
        """
        if self.where and not shapes.layers(self.where, config):
            return None
        if self.when and not shapes.flag(self.when, config):
            return None
        match self.kind:
            case "field":
                return self._field(name, shapes, config)
            case "flag":
                return shapes.flag(self.said, config)
            case "amount":
                return shapes.number(self.said, config)
            case "window":
                if config.get(self.said, 0) is None:
                    raise UsageError(f"{CONFIG} says {self.said} = None: Megatron's has a window")
                return (shapes.number(self.said, config) - 1, 0)
            case "layers":
                found = shapes.layers(self.said, config)
                return [int(n in found) for n in range(shapes.amount("layer", config))]
            case "every":
                found = shapes.layers(self.said, config)
                return _every([int(n in found) for n in range(shapes.amount("layer", config))])
            case "letters":
                return self._letters(name, shapes, config)
        return self.said

    def _field(self, name: str, shapes: ShapeTable, config: Mapping[str, Any]) -> Any:
        value = config.get(self.said)
        if value is None and self.said in shapes.defaults:
            return shapes.number(self.said, config)
        value = self.default if value is None else value
        if self.words is None and is_number(value):
            return value
        if self.words is not None and isinstance(value, str) and value in self.words:
            return self.words[value]
        raise UsageError(
            f"{CONFIG} says {self.said} = {value!r}, and Megatron's {name} follows from it"
        )

    def _letters(self, name: str, shapes: ShapeTable, config: Mapping[str, Any]) -> str:
        made = [""] * shapes.amount("layer", config)
        for letter, rule in self.said.items():
            for number in shapes.layers(rule, config):
                made[number] += letter
        odd = [number for number, letter in enumerate(made) if len(letter) != 1]
        if odd:
            raise UnsupportedError(
                f"{CONFIG} gives layer {odd[0]} a kind that Megatron's {name} has no letter for",
                file=CONFIG,
            )
        return "".join(made)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number that a model can have."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return -_LARGEST < value < _LARGEST


def _every(flags: list[int]) -> int | list[int]:
    """Return N where each Nth layer alone has no flag; else a flag for each layer."""
    every = flags.index(0) + 1 if 0 in flags else 0
    same = every > 1 and all(flag == ((n + 1) % every != 0) for n, flag in enumerate(flags))
    return every if same else flags


def require_expressible(
    required: Mapping[str, Any], config: Mapping[str, Any], family: str
) -> None:
    """Refuse a `config.json` that says what no argument of Megatron can say.

    Args:
        required: the only value of each field.
        config: the model's `config.json`.
        family: of the model.

    Raises:
        UnsupportedError: a field has another value.
    """
    for field, wanted in required.items():
        value = config.get(field)
        if isinstance(value, list):  # transformers 5 writes what JSON has no number for as a map
            value = [math.inf if one == {"__float__": "Infinity"} else one for one in value]
        if value is not None and value != wanted:
            raise UnsupportedError(
                f"{CONFIG} says {field} = {value!r}, and no argument of Megatron-LM makes a"
                f" {family} of that: it is {wanted!r} there",
                file=CONFIG,
            )
