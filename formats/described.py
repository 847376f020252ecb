"""Hold the weights of a Hugging Face folder to the model that its `config.json` describes.

transformers fills a tensor that is missing with random numbers, and says so in its log alone. Only
families whose table gives the shapes are judged, and only models with their output layer: others
(a classifier, a bare decoder, quantised weights) have other tensors for the same configuration.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from ftckpt.checkpoint import Checkpoint, Kind
from ftckpt.errors import CorruptError, UnsafeError, UsageError
from ftckpt.findings import Finding, counted, finding, listed
from ftckpt.formats.huggingface.config import CONFIG, config_file, read_config

from .families.shapes import ShapeTable
from .families.tables import family, family_names

_WHOLE = "ForCausalLM"
_TIED = "tie_word_embeddings"
_EXPERTS = ".experts."
# Modules within a module: an adapter was trained in place.
_ADAPTED = (".base_layer.", ".lora_")
# What says that weights are codes, whose shapes are others.
_QUANTISED = ("quantization_config", "quantization", "compression_config")


def check_described(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield where weights are not those of the model that `config.json` describes."""
    try:
        config = read_config(checkpoint)
    except (CorruptError, UnsafeError):  # said where JSON is checked
        return
    table = _shapes(config)
    if table is None or checkpoint.quantised:
        return
    kinds = (Kind.PARAM, Kind.BUFFER)
    found = {
        info.name: info.shape
        for info in checkpoint.tensors.values()
        if info.component == "model" and info.kind in kinds
    }
    wanted = _wanted(table, config)
    if not wanted.keys() & found.keys():  # names of another prefix: nothing to compare
        return
    file, name = config_file(checkpoint), CONFIG
    more = [one for one in found if one not in wanted]
    if any(part in one for one in more for part in _ADAPTED):
        return
    absent = (one for one in wanted if one not in found and one not in checkpoint.aliases)
    missing = [one for one in absent if not _otherwise(one, more, table)]
    if missing:
        message = (
            f"{name} describes {counted(len(wanted), 'tensor')}, and"
            f" {counted(len(missing), 'of them is', 'of them are')} in no file:"
            f" {listed(missing, 3)}"
        )
        yield finding("missing-tensor", message, file=file, tensor=missing[0])
    other = [one for one, shape in wanted.items() if found.get(one, shape) != shape]
    if other:
        said = [f"{one} of {list(found[one])} is to be {list(wanted[one])}" for one in other]
        message = f"{name} describes a model with other shapes: {listed(said, 3)}"
        yield finding("shape-mismatch", message, file=file, tensor=other[0])
    beyond = _beyond(table, config, found)
    if beyond:
        message = f"{name} describes a model with fewer layers: {listed(beyond, 3)} is in none"
        yield finding("unindexed-tensor", message, file=file, tensor=beyond[0])


def _otherwise(name: str, more: Collection[str], table: ShapeTable) -> bool:
    """Say whether a model may have what a name stands for under another.

    Experts may be joined in one tensor. A critic has a head of its own in place of the vocabulary's
    although `config.json` may still name the model that it began as.
    """
    if _EXPERTS in name:
        return any(_EXPERTS in one for one in more)
    rule = table.rules.get(name)
    top = {one.partition(".")[0] for one in table.rules}
    is_output = rule is not None and rule.unless == _TIED
    return is_output and any(one.partition(".")[0] not in top for one in more)


def _shapes(config: Mapping[str, Any]) -> ShapeTable | None:
    """Return the table of a model whose tensors it gives, all of them."""
    kind, built = config.get("model_type"), config.get("architectures")
    if not isinstance(kind, str) or kind not in family_names():
        return None
    whole = isinstance(built, list) and len(built) == 1 and str(built[0]).endswith(_WHOLE)
    if not whole or any(config.get(field) for field in _QUANTISED):
        return None
    table = family(kind)
    return None if table.parts else table.shapes


def _wanted(table: ShapeTable, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes that can be told: a configuration may contradict itself in one field."""
    found: dict[str, tuple[int, ...]] = {}
    for name, rule in table.rules.items():
        with suppress(UsageError):
            found |= table._replace(rules={name: rule}).tensors(config)
    return found


def _beyond(
    table: ShapeTable, config: Mapping[str, Any], found: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Return the tensors of layers behind the last; those that predict further tokens may be."""
    try:
        layers = table.amount("layer", config)
    except UsageError:
        return []
    further = config.get("num_nextn_predict_layers")
    layers += further if type(further) is int else 0
    rules = [rule.name for rule in table.rules.values() if "layer" in rule.name.words]
    numbers = ((name, rule.numbers(name)) for name in found for rule in rules)
    return list(dict.fromkeys(n for n, at in numbers if at and int(at["layer"]) >= layers))
