"""Say in Meta's words what `config.json` says: the content of `params.json`.

Meta's code rounds the width of the MLP up from the model's: two thirds of four times `dim`, times
`ffn_dim_multiplier`, to a multiple of `multiple_of`. Many pairs give one width; one is written.

Sources: `FeedForward` and `ModelArgs` in llama3/llama/model.py of Meta and in llama-models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.huggingface.config import CONFIG

_FIELDS = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}  # fmt: skip
# How Meta's code scales frequencies where `use_scaled_rope` says so.
_SCALED = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
_MULTIPLES = (256, 1024, 4096, 512, 2048, 128, 64, 32, 16, 8, 4, 2, 1)


def meta_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `params.json` says of a Llama.

    Args:
        config: its `config.json`.

    Raises:
        UsageError: a field is not there or no number.
        UnsupportedError: Meta's code does not do what it says.
    """
    said: dict[str, Any] = {name: _count(config, field) for name, field in _FIELDS.items()}
    grouped = config.get("num_key_value_heads") is not None
    said["n_kv_heads"] = _count(config, "num_key_value_heads" if grouped else _FIELDS["n_heads"])
    width = config.get("head_dim")
    if width is not None and width != said["dim"] // said["n_heads"]:
        said["head_dim"] = width  # Meta's code has none; its loader refuses the word
    said |= _inner(said["dim"], _count(config, "intermediate_size"))
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    known = {**config, **(rotary if isinstance(rotary, Mapping) else {})}
    said["norm_eps"] = known.get("rms_norm_eps", 1e-6)
    said["rope_theta"] = known.get("rope_theta", 10000.0)
    kind = known.get("rope_type", known.get("type", "default"))
    if kind == "default":
        return said
    if kind != "llama3" or any(known.get(name) != value for name, value in _SCALED.items()):
        raise UnsupportedError(
            f"{CONFIG} scales rotary frequencies in a way that Meta's code does not: {rotary!r}",
            file=CONFIG,
        )
    said["use_scaled_rope"] = True
    if known.get("factor") != 8.0:
        said["rope_scaling_factor"] = known.get("factor")
    return said


def inner_width(dim: int, multiple: int, multiplier: float | None) -> int:
    """Return the width of the MLP that Meta's code makes."""
    width = int(2 * (4 * dim) / 3)
    if multiplier is not None:
        width = int(multiplier * width)
    return multiple * ((width + multiple - 1) // multiple)


def _inner(dim: int, wanted: int) -> dict[str, Any]:
    for multiple in _MULTIPLES:
        if inner_width(dim, multiple, None) == wanted:
            return {"multiple_of": multiple}
    for multiplier in _multipliers(wanted / max(int(8 * dim / 3), 1)):
        for multiple in _MULTIPLES:
            if inner_width(dim, multiple, multiplier) == wanted:
                return {"multiple_of": multiple, "ffn_dim_multiplier": multiplier}
    raise UnsupportedError(
        f"{CONFIG} says intermediate_size = {wanted}, which Meta's code makes of no hidden_size ="
        f" {dim}",
        file=CONFIG,
    )


def _multipliers(ratio: float) -> Iterator[float]:
    """Yield factors near a ratio, those of few digits first."""
    for digits in range(1, 13):
        scale = 10**digits
        near = int(ratio * scale)
        yield from (number / scale for number in (near, near + 1, near - 1) if number > 0)


def _count(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if type(value) is not int or not 0 < value < 1 << 40:
        raise UsageError(f"{CONFIG} says {field} = {value!r}, and {field} is a number")
    return value
