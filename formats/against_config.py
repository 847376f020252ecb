"""Hold the weights of a Hugging Face folder to the model that its `config.json` describes.

transformers fills a tensor that is missing with random numbers, and says so in its log alone. But
a family's table is a guess: another version, a fork, a hook or a save of some layers has other
names for the same configuration. So what the table alone says is a warning. Damage is what the
files contradict too: one layer or expert lacks what the others have (`formats.siblings`).

Only families whose table gives the shapes are judged, and only models with their output layer:
others (a classifier, a bare decoder, quantised weights) have other tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

from ftckpt.checkpoint import Checkpoint, Kind
from ftckpt.checkpoint.names import unwrapped
from ftckpt.errors import CorruptError, UnsafeError, UsageError
from ftckpt.findings import Finding, counted, finding, from_error, listed
from ftckpt.formats.huggingface.config import (
    CONFIG,
    LARGEST,
    config_file,
    is_partial,
    of_another_name,
    read_config,
)
from ftckpt.formats.pickles.inert import one_bit_from
from ftckpt.strict_json import shown

from .families.facts import outputs_of
from .families.shapes import ShapeRule, ShapeTable
from .families.tables import Family, family, family_names
from .siblings import Shapes, lost, misshapen

_WHOLE = "ForCausalLM"
_TIED = "tie_word_embeddings"
_OUTPUT = "lm_head.weight"
_INPUTS = (".embed_tokens.weight", ".wte.weight", ".word_embeddings.weight", ".embed_in.weight")
_BEGIN = 64 << 10  # bytes of either that are compared
_RUN_TIME = "packed"  # how a table calls the names of transformers 5 in memory
_EXPERTS = ".experts."
_LAYER = re.compile(r"(.*?\.\d+)\.")
_WORD = re.compile(r"(?<!#)\b[A-Za-z_]\w*")
_NUMBERED = re.compile(r"\.experts\.\d+\.")
# A layer that predicts further tokens joins the embedding and the state by this matrix.
_FURTHER = ".eh_proj."
# Modules within a module: an adapter was trained in place. Names of GPTQ and AWQ: codes.
_OTHER_NAMES = (".base_layer.", ".lora_", ".qweight", ".qzeros")
# What says that weights are codes, whose shapes are others; that the code is not transformers'
# own; that it is a draft of EAGLE-3, whose vocabulary and first layer are others.
_OTHER_MODEL = (
    "quantization_config", "quantization", "compression_config", "auto_map", "draft_vocab_size"
)  # fmt: skip
_OTHER_FILES = ("quantize_config.json", "quant_config.json")
# The fields of transformers' configurations that shape a model or its sums, and the names of its
# activations (transformers/activations.py).
_FIELDS = frozenset((
    "model_type", "architectures", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "layer_types",
    "max_position_embeddings", "tie_word_embeddings", "rope_theta", "rope_scaling",
    "rope_parameters", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "hidden_act",
    "hidden_activation", "activation_function", "attention_bias", "mlp_bias", "sliding_window",
    "quantization_config", "text_config", "vision_config", "num_experts", "num_local_experts",
    "num_experts_per_tok", "n_routed_experts", "moe_intermediate_size", "n_embd", "n_head",
    "n_layer", "n_positions", "torch_dtype", "partial_rotary_factor", "auto_map",
))  # fmt: skip
_ACTIVATIONS = frozenset((
    "gelu", "gelu_10", "gelu_fast", "gelu_new", "gelu_python", "gelu_pytorch_tanh",
    "gelu_accurate", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2",
    "relu6", "sigmoid", "silu", "swish", "tanh", "prelu", "xielu", "swiglu", "geglu",
))  # fmt: skip
# Those of its `quantization_config` (transformers/utils/quantization_config.py and, below it,
# compressed_tensors/quantization/{quant_config,quant_args}.py), and the words that some take.
_QUANTISED = frozenset((
    "quant_method", "bits", "group_size", "sym", "desc_act", "damp_percent", "true_sequential",
    "checkpoint_format", "zero_point", "modules_to_not_convert", "load_in_4bit", "load_in_8bit",
    "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage", "llm_int8_threshold", "llm_int8_skip_modules",
    "llm_int8_has_fp16_weight", "llm_int8_enable_fp32_cpu_offload", "weight_block_size",
    "activation_scheme", "scale_fmt", "fmt", "format", "config_groups", "ignore",
    "quantization_status", "kv_cache_scheme", "global_compression_ratio", "sparsity_config",
    "targets", "weights", "input_activations", "output_activations", "num_bits", "type",
    "symmetric", "strategy", "block_structure", "dynamic", "actorder", "scale_dtype", "zp_dtype",
    "observer", "observer_kwargs",
))  # fmt: skip
_QUANTISED_WORDS = {
    "quant_method": frozenset((
        "awq", "gptq", "bitsandbytes", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4",
        "modelopt", "torchao", "hqq", "quanto", "quark", "aqlm", "eetq", "higgs", "vptq", "spqr",
        "bitnet", "auto-round", "fp_quant",
    )),
    "format": frozenset((
        "dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized",
        "marlin-24", "mixed-precision", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
        "mxfp8-quantized", "sparse-bitmask", "sparse-24-bitmask",
    )),
    "strategy": frozenset((
        "tensor", "channel", "group", "block", "token", "tensor_group", "attn_head"
    )),
    "type": frozenset(("int", "float")),
    "quantization_status": frozenset(("compressed", "frozen", "initialized", "calibration")),
    "activation_scheme": frozenset(("dynamic", "static")),
    "bnb_4bit_quant_type": frozenset(("nf4", "fp4")),
}  # fmt: skip
_LONGEST = 64
# Levels of a `quantization_config` that are looked at, and names of one.
_LEVELS, _NAMES = 4, 256
# A configuration of many times the tensors that are there is not listed: it may say anything.
_TIMES, _FEW = 4, 64


class _Wanted(NamedTuple):
    """What `config.json` describes.

    Attributes:
        shapes: by name.
        rules: likewise; which row of the table says it.
    """

    shapes: dict[str, tuple[int, ...]]
    rules: dict[str, ShapeRule]


def check_described(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield where weights are not those of the model that `config.json` describes."""
    try:
        config = read_config(checkpoint)
    except CorruptError:  # said where JSON is checked
        return
    except UnsafeError as error:
        if checkpoint.source.size(config_file(checkpoint)) > LARGEST:  # nobody else reads it
            yield from_error(error)
        return
    file = config_file(checkpoint)
    yield from _slips(config, file)
    yield from _untied(checkpoint, config, file)
    folder = file.removesuffix(CONFIG)
    table = _table(config)
    if table is None or table.shapes is None or checkpoint.quantised:
        return
    if any(folder + one in checkpoint.source.entries for one in _OTHER_FILES):
        return
    kinds = (Kind.PARAM, Kind.BUFFER)
    found = {
        info.name: info.shape
        for info in checkpoint.tensors.values()
        if info.component == "model" and info.kind in kinds
    }
    plain = [one for one in found if not any(part in f"{one}." for part in _OTHER_NAMES)]
    most = _TIMES * len(found) + _FEW
    wanted = _wanted(table.shapes, config, found, most)
    if len(plain) < len(found) and (wanted is None or wanted.shapes.keys() & found.keys()):
        return
    partial = is_partial(checkpoint)
    if wanted is None and not partial:
        rules = table.shapes.rules.values()
        if any(rule.name.numbers(one) is not None for one in found for rule in rules):
            message = f"{CONFIG} describes more than {most:,} tensors, and {len(found):,} are there"
            yield finding("state-unknown", message, file=file)
    yield from _no_sizes(table.shapes, config, file)
    if wanted is None:
        return
    if not wanted.shapes.keys() & found.keys():  # names of another prefix: nothing to compare
        prefix = _prefix(wanted.shapes, plain)
        if prefix and all(a == b for a, b in unwrapped(found).items()):  # said of all folders
            yield of_another_name(prefix, found, file)
        return
    if not partial:
        yield from _missing(wanted, found, checkpoint, table, config, file)
    yield from _misshapen(wanted, found, file)
    beyond = _beyond(table.shapes, config, [one for one in found if one not in wanted.shapes])
    if beyond:
        message = f"{CONFIG} describes a model with fewer layers: {listed(beyond, 3)} is in none"
        yield finding("state-unknown", message, file=file, tensor=beyond[0])


def _slips(config: Mapping[str, Any], file: str) -> Iterator[Finding]:
    """Yield a field or a value that is a known one but for one bit.

    transformers passes over a field that it does not know, and takes its default for the one that
    is not there: a model of 32 layers where 2 were saved, or codes with other scales.
    """
    words = {"model_type": frozenset(family_names()), "hidden_act": _ACTIVATIONS}
    yield from _slips_in(config, file, _FIELDS, words)
    for part in (config, config.get("text_config")):
        for field in ("quantization_config", "compression_config"):
            said = part.get(field) if isinstance(part, dict) else None
            levels = [said] if isinstance(said, dict) else []
            for _ in range(_LEVELS):
                levels = [one for one in levels if len(one) <= _NAMES][:_NAMES]
                for level in levels:
                    yield from _slips_in(level, file, _QUANTISED, _QUANTISED_WORDS)
                levels = [v for one in levels for v in one.values() if isinstance(v, dict)]


def _slips_in(
    said: Mapping[str, Any],
    file: str,
    fields: frozenset[str],
    words: Mapping[str, frozenset[str]],
) -> Iterator[Finding]:
    """Yield the slips of one object, with the names of its `fields` and the `words` of some."""
    for name in said.keys() - fields:
        near = one_bit_from(name, fields) if len(name) <= _LONGEST else ""
        if near and near not in said:
            message = f"{file} has a field {shown(name)}, one bit from {near}: the bit flipped"
            yield finding("bad-index", message, file=file)
    for field, values in words.items():
        value = said.get(field)
        if not isinstance(value, str) or value in values or len(value) > _LONGEST:
            continue
        near = one_bit_from(value, values)
        # A later version of a family or a method differs in a digit, too.
        if near and re.sub(r"\d", "0", near) != re.sub(r"\d", "0", value):
            message = f"{file} says {field} = {shown(value)}, one bit from {near}: the bit flipped"
            yield finding("bad-index", message, file=file)


def _no_sizes(table: ShapeTable, config: Mapping[str, Any], file: str) -> Iterator[Finding]:
    """Yield fields that are to say a size and say none: the shapes that need them are not told."""
    texts = [*table.counts.values(), *chain.from_iterable(r.axes for r in table.rules.values())]
    fields = {word for text in texts for word in _WORD.findall(text)} & config.keys()
    for field in sorted(fields):
        value = config[field]
        if value is not None and (type(value) is not int or value < 0):  # null: not there
            message = f"{file} says {field} = {shown(value)}, which is not a size"
            yield finding("state-unknown", message, file=file)


def _prefix(wanted: Collection[str], found: Collection[str]) -> str:
    """Return what stands before every name that is there, and before none that is wanted."""
    first = next(iter(found), "")
    ends = (first[at + 1 :] for at, sign in enumerate(first) if sign == ".")
    end = next((one for one in ends if one in wanted), "")
    prefix = first.removesuffix(end) if end else ""
    return prefix if all(one.startswith(prefix) for one in found) else ""


def _untied(checkpoint: Checkpoint, config: Mapping[str, Any], file: str) -> Iterator[Finding]:
    """Yield an output layer of its own where `config.json` ties it to the embedding.

    transformers loads the embedding in its place. The beginning of both tells them apart.
    """
    text = config.get("text_config")
    if not (config.get(_TIED) or (isinstance(text, dict) and text.get(_TIED))):
        return
    model = [one for one in checkpoint.tensors.values() if one.component == "model"]
    outputs = [one for one in model if one.name.endswith(_OUTPUT)]
    inputs = [one for one in model if one.name.endswith(_INPUTS)]
    if len(outputs) != 1 or len(inputs) != 1:
        return
    (output,), (embedding,) = outputs, inputs
    alike = (output.shape, output.dtype) == (embedding.shape, embedding.dtype)
    places = [
        one.pieces[0].extent._replace(length=min(one.pieces[0].extent.length, _BEGIN))
        for one in (output, embedding)
        if len(one.pieces) == 1 and not (one.pieces[0].packed or one.pieces[0].strides)
    ]
    if not alike or len(places) < 2 or checkpoint.quantised or output.key in checkpoint.aliases:
        return
    try:
        first, second = checkpoint.source.read_many(places)
    except CorruptError:  # said where extents are checked
        return
    if first != second:
        message = (
            f"{file} ties {output.name} to {embedding.name}, and another one is stored: loaders"
            " differ in which they take"
        )
        yield finding("state-unknown", message, file=file, tensor=output.key)


def _missing(
    wanted: _Wanted,
    found: Shapes,
    checkpoint: Checkpoint,
    table: Family,
    config: Mapping[str, Any],
    file: str,
) -> Iterator[Finding]:
    absent = [one for one in wanted.shapes if one not in found and one not in checkpoint.aliases]
    if not absent:
        return
    more = [one for one in found if one not in wanted.shapes]
    left_out = _renamed(absent, wanted, found, more, table) | _tied(table, config, found)
    absent = [one for one in absent if one not in left_out]
    damaged = lost(absent, found)
    if damaged:
        message = (
            f"{CONFIG} describes {counted(len(damaged), 'tensor')} that other layers or experts"
            f" have and no file holds: {listed(damaged, 3)}"
        )
        yield finding("missing-tensor", message, file=file, tensor=damaged[0])
    known = frozenset(damaged)
    rest = [one for one in absent if one not in known]
    if rest:
        message = (
            f"{CONFIG} describes {counted(len(wanted.shapes), 'tensor')}, and"
            f" {counted(len(rest), 'of them is', 'of them are')} in no file: {listed(rest, 3)};"
            " they were lost, or never saved"
        )
        yield finding("state-unknown", message, file=file, tensor=rest[0])


def _misshapen(wanted: _Wanted, found: Shapes, file: str) -> Iterator[Finding]:
    axes = {name: rule.axes for name, rule in wanted.rules.items()}
    damaged, rest = misshapen(wanted.shapes, found, axes)
    for kind, names in (("shape-mismatch", damaged), ("state-unknown", rest)):
        said = [f"{one} of {list(found[one])} is to be {list(wanted.shapes[one])}" for one in names]
        if said:
            others = "" if kind == "state-unknown" else ", which the other tensors have"
            message = f"{CONFIG} describes a model with other shapes{others}: {listed(said, 3)}"
            yield finding(kind, message, file=file, tensor=names[0])


def _renamed(
    absent: Collection[str],
    wanted: _Wanted,
    found: Collection[str],
    more: Collection[str],
    table: Family,
) -> set[str]:
    """Return those that a model may have under another name.

    The experts of a layer may be joined in one tensor, or apart, and a raw state_dict has the names
    of transformers in memory. A critic has a head of its own in place of the vocabulary's although
    `config.json` may still name the model that it began as.
    """
    numbered, joined = _expert_layers(found)
    rules = table.shapes.rules if table.shapes is not None else {}
    top = {one.partition(".")[0] for one in rules}
    has_head = any(one.partition(".")[0] not in top for one in more)
    packed = [one for one in table.natives if _RUN_TIME in one.names]
    left_out = set()
    for name in absent:
        apart = _NUMBERED.search(name) is not None
        layer = _LAYER.match(name)
        if _EXPERTS in name and layer is not None:
            other = joined - numbered if apart else numbered - joined
            if layer[1] in other:
                left_out.add(name)
        elif wanted.rules[name].unless == _TIED and has_head:
            left_out.add(name)
        for entry in packed:
            numbers = next(
                (n for n in (hf.numbers(name) for hf in entry.hf) if n is not None), None
            )
            if numbers is not None and not apart:
                names = (own.fill({"expert": "0", **numbers}) for own in entry.names[_RUN_TIME])
                left_out |= {name} if any(own in found for own in names) else set()
    return left_out


def _expert_layers(found: Collection[str]) -> tuple[set[str], set[str]]:
    """Return the layers with experts by number, and those with a tensor of all of them."""
    numbered: set[str] = set()
    joined: set[str] = set()
    for name in found:
        layer = _LAYER.match(name) if _EXPERTS in name else None
        if layer is not None:
            (numbered if _NUMBERED.search(name) else joined).add(layer[1])
    return numbered, joined


def _tied(table: Family, config: Mapping[str, Any], found: Collection[str]) -> set[str]:
    """Return the embedding where its tied output layer is there: either may be what is saved."""
    if table.shapes is None or not table.shapes.flag(_TIED, config):
        return set()
    with suppress(UsageError):
        return {one for output, one in outputs_of(table).items() if output in found}
    return set()


def _table(config: Mapping[str, Any]) -> Family | None:
    """Return the table of a model whose tensors it gives, all of them."""
    kind, built = config.get("model_type"), config.get("architectures")
    if not isinstance(kind, str) or kind not in family_names():
        return None
    whole = isinstance(built, list) and len(built) == 1 and str(built[0]).endswith(_WHOLE)
    if not whole or any(config.get(field) for field in _OTHER_MODEL):
        return None
    table = family(kind)
    return None if table.parts else table


def _wanted(
    table: ShapeTable, config: Mapping[str, Any], found: Collection[str], most: int
) -> _Wanted | None:
    """Return what can be told: a configuration may contradict itself in one field.

    Where no expert has a number, one stands for all of a layer. None where there are more than
    `most`: they are counted before they are listed.
    """
    if "expert" in table.counts and not _expert_layers(found)[0]:
        table = table._replace(counts={**table.counts, "expert": "1"})
    wanted = _Wanted({}, {})
    for name, rule in table.rules.items():
        with suppress(UsageError):
            if _many(table, rule, config, most) > most - len(wanted.shapes):
                return None
            made = table._replace(rules={name: rule}).tensors(config)
            wanted.shapes.update(made)
            wanted.rules.update(dict.fromkeys(made, rule))
    return wanted


def _many(table: ShapeTable, rule: ShapeRule, config: Mapping[str, Any], most: int) -> int:
    """Return how many tensors a rule is of; at once where there are more layers than `most`.

    Raises:
        UsageError: `config` does not say it.
    """
    absent = (rule.when and not table.flag(rule.when, config)) or (
        rule.unless and table.flag(rule.unless, config)
    )
    if absent or not rule.axes:
        return 0
    many = 1
    if "layer" in rule.name.words:
        many = table.number(table.counts["layer"], config)
        if many > most:
            return many
        many = len(table.layers(rule.layers, config)) if rule.layers else many
    if "expert" in rule.name.words and many:
        many *= table.number(table.counts["expert"], config)
    return many


def _beyond(table: ShapeTable, config: Mapping[str, Any], more: Collection[str]) -> list[str]:
    """Return the tensors of layers behind the last; those that predict further tokens may be."""
    try:
        layers = table.amount("layer", config)
    except UsageError:
        return []
    further = config.get("num_nextn_predict_layers")
    layers += further if type(further) is int else 0
    more = [one for one in more if _LAYER.match(one)]
    predict = {one.partition(_FURTHER)[0] for one in more if _FURTHER in one}
    rules = [rule.name for rule in table.rules.values() if "layer" in rule.name.words]
    numbers = ((name, rule.numbers(name)) for name in more for rule in rules)
    names = dict.fromkeys(n for n, at in numbers if at and int(at["layer"]) >= layers)
    return [one for one in names if (_LAYER.match(one) or [""] * 2)[1] not in predict]
