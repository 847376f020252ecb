"""Read `adapter_config.json` of PEFT: what was trained, and by which factor it counts.

A field that this version does not know, with a value that says something, is refused: it may change
what the tensors mean. Source: `peft/tuners/lora/config.py`, up to PEFT 0.21.

Layers that an adapter should have tensors of and has not.

PEFT saves tensors of every module that it adapts, and adapts each module of a name in all layers.
Where some of those have tensors and others not, a save has lost them: the other pipeline stage, the
other rank. That whole kinds of modules have none (a vision tower that was not loaded) is a note.

Say in a few words what adapter a checkpoint holds: for `inspect`, from names and small files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import (
    CorruptError,
    FtckptError,
    NewerWriterError,
    NotFoundError,
    RefusedError,
    UnsupportedError,
)
from ftckpt.findings import counted, listed
from ftckpt.formats.huggingface.config import ADAPTER_CONFIG, parsed_json
from ftckpt.formats.huggingface.weights import is_of_adapter
from ftckpt.strict_json import shown

from .bridge import has_adapter, is_alone, read_adapter
from .patterns import compiled, ends_with

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")


def require_no_gaps(
    adapter: Checkpoint,
    lacking: Sequence[str],
    has: Collection[str],
    base_config: Mapping[str, Any],
) -> None:
    """Refuse an adapter that has tensors of some layers, and lacks those of others.

    Args:
        adapter: that is merged.
        lacking: modules that its configuration names and that it has no tensors of.
        has: modules that it has.
        base_config: of the base; layers beyond its number (for multi-token prediction) are loaded
            by no trainer, and count as untrained.

    Raises:
        RefusedError: with the modules.
    """
    kinds = {_NUMBER.sub("*", one) for one in has}
    text = base_config.get("text_config")
    layers = (text if isinstance(text, dict) else base_config).get("num_hidden_layers")
    gone = [
        one
        for one in lacking
        if _NUMBER.search(one)
        and _NUMBER.sub("*", one) in kinds
        and not (type(layers) is int and layer_of(one) >= layers)
    ]
    if gone:
        there = sum(_NUMBER.sub("*", one) in {_NUMBER.sub("*", g) for g in gone} for one in has)
        raise RefusedError(
            f"{adapter.source.url} holds tensors of {counted(there, 'module')}, and none of"
            f" {counted(len(gone), 'other')} that its configuration names alike: {listed(gone)}",
            hint="a save has lost them; if they were never trained, layers_to_transform in"
            " adapter_config.json or --allow-gaps says so",
        )


def layer_of(module: str) -> int:
    """Return the number of a module's layer, as PEFT finds it; -1 where it has none."""
    found = _LAYER.match(module)
    return -1 if found is None else int(found[1])


# What says nothing about the merged weights, whatever it holds.
_NOTES = re.compile(
    r"alpha_pattern|auto_mapping|base_model_name_or_path|bias|corda_config|ensure_weight_tying|"
    r"eva_config|exclude_modules|fan_in_fan_out|inference_mode|init_lora_weights|"
    r"layers_pattern|layers_to_transform|"
    r"loftq_config|lora_alpha|lora_bias|lora_dropout|"
    r"lora_ga_config|megatron_core|modules_to_save|peft_type|peft_version|qalora_group_size|r|"
    r"rank_pattern|revision|runtime_config|target_modules|target_parameters|task_type|use_dora|"
    r"use_rslora"
)
_NOTHING: tuple[object, ...] = (None, False, [], {}, "")
# Beginnings that leave the base as it was; the others take a part of it away.
_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
_MOST_WORK = 300_000_000  # steps of all patterns on all names


class AdapterConfig(NamedTuple):
    """What an adapter says of itself.

    Attributes:
        rank, alpha: of modules that no pattern names.
        ranks, alphas: of modules by pattern; the first that matches decides.
        rooted: whether the factor is alpha by the root of the rank (rsLoRA).
        dora: whether weights are put together from direction and magnitude (DoRA).
        turned: whether weights are stored input first (`fan_in_fan_out`).
        targets: names of the trained modules, or one pattern.
        without: the same, of those that were left out.
        saved: modules that were trained whole.
        parameters: names of parameters that were trained by themselves.
        biases: `none`, `all` or `lora_only`.
        bias_of_b: whether B has a bias.
        tying: whether tied layers were trained as one.
        layers: numbers of the trained layers; None for all.
        layer_lists: names of the lists that these count in; none for any.
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    rooted: bool
    dora: bool
    turned: bool
    targets: Sequence[str] | str
    without: Sequence[str] | str
    saved: Sequence[str]
    parameters: Sequence[str]
    biases: str
    bias_of_b: bool
    tying: bool
    layers: frozenset[int] | None
    layer_lists: Sequence[str]

    def rank_of(self, name: str) -> int:
        """Return the rank of a module or parameter."""
        return int(_first(self.ranks, name, self.rank))

    def scale_of(self, name: str) -> float:
        """Return the factor by which the product of a module's or parameter's matrices counts."""
        rank, alpha = self.rank_of(name), _first(self.alphas, name, self.alpha)
        return alpha / math.sqrt(rank) if self.rooted else alpha / rank

    def trains(self, module: str) -> bool:
        """Return whether PEFT adapts a module; a list names ends, a text is a pattern."""
        if self.targets == "all-linear":
            return not _named(self.without, module)
        named = _named(self.targets, module) and not _named(self.without, module)
        if self.layers is None or isinstance(self.targets, str) or module in self.targets:
            return named
        lists = (rf"(?:^|.*?\.){re.escape(one)}\.(\d+)\." for one in self.layer_lists)
        at = next(filter(None, (re.match(one, module) for one in lists)), None)
        number = layer_of(module) if not self.layer_lists else int(at[1]) if at else -1
        return named and number in self.layers

    def require_affordable(self, names: Iterable[str]) -> None:
        """Refuse patterns that would take long on all these names together.

        Raises:
            UnsupportedError: they would, or one of them has something that is not matched here.
        """
        whole = [one for one in (self.targets, self.without) if isinstance(one, str) and one]
        named = 0 if isinstance(self.targets, str) else len(self.targets)
        require_affordable([*whole, *self.ranks, *self.alphas], names, named)


def require_affordable(patterns: Sequence[str], names: Iterable[str], more: int = 0) -> None:
    """Refuse patterns that would take long on all these names together, with `more` plain ones.

    Raises:
        UnsupportedError: they would, or one of them has something that is not matched here.
    """
    plain = {one for one in patterns if one.replace(".", "_").isidentifier()}
    cost = more + len(plain) + sum(compiled(one).cost for one in patterns if one not in plain)
    if cost * sum(map(len, names)) > _MOST_WORK:
        raise UnsupportedError(
            f"the {len(patterns)} patterns of {ADAPTER_CONFIG} would take minutes to match"
        )


def _first(table: Mapping[str, Any], name: str, default: float) -> float:
    for pattern, value in table.items():
        if ends_with(pattern, name):
            return float(value)
    return default


def _named(names: Sequence[str] | str, module: str) -> bool:
    if isinstance(names, str):
        return bool(names) and compiled(names).matches(module)
    return any(module == one or module.endswith(f".{one}") for one in names)


def read_config(adapter: Checkpoint) -> AdapterConfig:
    """Return what an adapter says of itself.

    Raises:
        NotFoundError: it has no `adapter_config.json`.
        CorruptError, UnsafeError: the file is damaged or hostile.
        UnsupportedError: it is of another kind than LoRA, or of a variant that is not computed
            here.
    """
    said = parsed_json(adapter.source, ADAPTER_CONFIG)
    if not said and has_adapter(adapter):
        raise NotFoundError(
            f"{adapter.source.url} is a checkpoint of Megatron-Bridge with an adapter",
            hint="ftckpt convert --only adapter takes it out, for --adapter",
        )
    if not said:
        raise NotFoundError(
            f"{adapter.source.url} has no {ADAPTER_CONFIG}: it is not an adapter of PEFT",
            hint="name the folder that PEFT's save_pretrained wrote",
        )
    where = f"{ADAPTER_CONFIG} of {adapter.source.url}"
    kind = said.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(
            f"{adapter.source.url} is an adapter of the kind {shown(kind)}: only LORA is merged"
        )
    odd = unknown_fields(said)
    if odd:
        raise UnsupportedError(
            f"{where} says {listed(odd)}: such an adapter is not merged by this version",
            hint="PeftModel.merge_and_unload merges it",
        )
    begun = said.get("init_lora_weights")
    if begun not in _BEGINNINGS and str(begun).lower() not in ("true", "false"):
        raise UnsupportedError(
            f"{where} says init_lora_weights = {shown(begun)}: it began with another base",
            hint="PEFT's save_pretrained with path_initial_model_for_weight_conversion makes a "
            "plain LoRA of it",
        )
    return fields_of(said, where)


def unknown_fields(said: Mapping[str, Any]) -> list[str]:
    """Return the fields that say something, and that this version does not know."""
    return [name for name in said if not _NOTES.fullmatch(name) and said[name] not in _NOTHING]


def fields_of(said: Mapping[str, Any], where: str) -> AdapterConfig:
    """Return the fields of a configuration, whatever else it says.

    Raises:
        CorruptError: one has a value of another type.
        UnsupportedError: one has a value that is not known.
    """
    read = AdapterFields(said, where)
    found = AdapterConfig(
        rank=read.rank("r", 8),
        alpha=read.number("lora_alpha", 8),
        ranks={name: read.rank_in(name, v) for name, v in read.table("rank_pattern").items()},
        alphas={name: read.number_in(name, v) for name, v in read.table("alpha_pattern").items()},
        rooted=read.flag("use_rslora"),
        dora=read.flag("use_dora"),
        turned=read.flag("fan_in_fan_out"),
        targets=read.names("target_modules"),
        without=read.names("exclude_modules"),
        saved=read.list_of("modules_to_save"),
        parameters=read.list_of("target_parameters"),
        biases=str(said.get("bias") or "none"),
        bias_of_b=read.flag("lora_bias"),
        tying=read.flag("ensure_weight_tying"),
        layers=read.numbers("layers_to_transform"),
        layer_lists=read.plain_names("layers_pattern"),
    )
    if found.biases not in ("none", "all", "lora_only"):
        raise UnsupportedError(f"{where} says bias = {shown(found.biases)}, which is not known")
    return found


class AdapterFields:
    """AdapterFields of a configuration, each of the type that it must have.

    Where one has another, its method raises `NewerWriterError`; where its value cannot be,
    `CorruptError` (`bad-index`).
    """

    def __init__(self, said: Mapping[str, Any], where: str, file: str = ADAPTER_CONFIG) -> None:
        self._said = said
        self._where = where
        self._file = file

    def bad(self, name: str, value: object) -> CorruptError:
        """Return the error that says a value is none that can be."""
        return CorruptError(
            f"{self._where} says {name} = {shown(value)}", kind="bad-index", file=self._file
        )

    def other(self, name: str, value: object, expected: str) -> NewerWriterError:
        """Return the error that says a value is not of a type that is known."""
        return NewerWriterError.of(
            f"{name} of {self._where}", expected=expected, found=shown(value), file=self._file
        )

    def rank(self, name: str, default: int) -> int:
        """Return a rank; `default` where it is not recorded."""
        return self.rank_in(name, self._said.get(name, default))

    def rank_in(self, name: str, value: object) -> int:
        """Return a value of a field as a rank."""
        if type(value) is not int:
            raise self.other(name, value, "a number")
        if not 0 < value < 1 << 31:
            raise self.bad(name, value)
        return value

    def number(self, name: str, default: float) -> float:
        """Return a finite number; `default` where it is not recorded."""
        return self.number_in(name, self._said.get(name, default))

    def number_in(self, name: str, value: object) -> float:
        """Return a value of a field as a finite number."""
        if type(value) not in (int, float):
            raise self.other(name, value, "a number")
        if not math.isfinite(float(value)):  # type: ignore[arg-type]
            raise self.bad(name, value)
        return float(value)  # type: ignore[arg-type]

    def flag(self, name: str) -> bool:
        """Return whether something is set."""
        value = self._said.get(name)
        if value not in (None, False, True) or type(value) not in (bool, type(None)):
            raise self.other(name, value, "true or false")
        return bool(value)

    def table(self, name: str) -> Mapping[str, Any]:
        """Return values by pattern."""
        value = self._said.get(name) or {}
        if not isinstance(value, dict):
            raise self.other(name, value, "a table")
        return value

    def list_of(self, name: str) -> Sequence[str]:
        """Return names."""
        value = self._said.get(name) or []
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.other(name, value, "a list of names")
        return value

    def numbers(self, name: str) -> frozenset[int] | None:
        """Return numbers of layers; None where all are meant."""
        value = self._said.get(name)
        found = value if isinstance(value, list) else [value]
        if value is None or value == []:
            return None
        if not all(type(one) is int and one >= 0 for one in found):
            raise self.other(name, value, "numbers of layers")
        return frozenset(found)

    def plain_names(self, name: str) -> Sequence[str]:
        """Return names that PEFT would take for patterns, and are none."""
        value = self._said.get(name) or []
        found = [value] if isinstance(value, str) else self.list_of(name)
        if not all(one.replace(".", "_").isidentifier() for one in found):
            raise UnsupportedError(f"{self._where} says {name} = {shown(value)}: a pattern")
        return found

    def names(self, name: str) -> Sequence[str] | str:
        """Return names, or one pattern."""
        value = self._said.get(name)
        return value if isinstance(value, str) else self.list_of(name)


class AdapterDescription(NamedTuple):
    """What is told of an adapter.

    Attributes:
        kind: `LoRA`, `DoRA` or `canonical LoRA`.
        rank, alpha: of modules that no pattern names; None where nothing says it.
        targets: the trained modules, as the configuration names them.
        alone: whether the checkpoint holds no other weight.
    """

    kind: str
    rank: int | None
    alpha: float | None
    targets: Sequence[str]
    alone: bool

    def __str__(self) -> str:
        known = "rank and alpha are not recorded"
        if self.rank is not None:
            known = f"rank {self.rank}, alpha {self.alpha:g}"
        on = f", on {listed(list(self.targets), 8)}" if self.targets else ""
        alone = "; the adapter alone, without its base" if self.alone else ""
        return f"{self.kind}: {known}{on}{alone}"


def describe(checkpoint: Checkpoint) -> AdapterDescription | None:
    """Return what adapter a checkpoint holds; None if it holds none.

    A configuration that cannot be read says nothing here: the merge names what is wrong.
    """
    if has_adapter(checkpoint):
        alone = is_alone(checkpoint)
        try:
            found = read_adapter(checkpoint)
        except FtckptError:
            found = None
        if found is None:
            return AdapterDescription("LoRA", None, None, (), alone)
        return AdapterDescription(found.kind, found.rank, found.alpha, found.targets, alone)
    if not any(is_of_adapter(info.name) for info in checkpoint.tensors.values()):
        return None
    try:
        config = read_config(checkpoint)
    except FtckptError:
        return AdapterDescription("LoRA", None, None, (), True)
    said = (config.targets,) if isinstance(config.targets, str) else config.targets
    targets = (*(one for one in said if one), *config.parameters)
    kind = "DoRA" if config.dora else "LoRA"
    return AdapterDescription(kind, config.rank, config.alpha, targets, True)
