"""Read how positions are rotated, in the one spelling of transformers 5.

Before, `rope_theta`, `rope_scaling` and some names of single families said it side by side; since,
`rope_parameters` says it, for each type of layer where they differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROPE = "rope_parameters"
_SCALING, _BASE, _SHARE, _TYPE = "rope_scaling", "rope_theta", "partial_rotary_factor", "rope_type"
_FULL, _SLIDING = "full_attention", "sliding_attention"
# GPT-NeoX had names of its own; Gemma 3 and ModernBERT had a base for sliding attention.
_BASES = (_BASE, "global_rope_theta", "rotary_emb_base")
_SHARES = (_SHARE, "rotary_pct")
_LOCAL = ("rope_local_base_freq", "local_rope_theta")
_OLD = frozenset({_SCALING, *_BASES, *_SHARES, *_LOCAL})


def with_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config, and those of its parts, with what old fields say in `rope_parameters`.

    What that says itself stands before them. A shape that no release writes is left as it is.
    """
    found = {
        key: with_rope(member)
        if isinstance(member, dict) and key not in (ROPE, _SCALING)
        else member
        for key, member in config.items()
    }
    new, scaling = config.get(ROPE), config.get(_SCALING)
    if not isinstance(new, dict | None) or not isinstance(scaling, dict | None):
        return found
    share = _first(config, _SHARES, _SHARE)
    told = _first(config, _BASES, _BASE) | share
    if _SCALING in config:
        told |= _typed(scaling or {_TYPE: "default"})
    local = _first(config, _LOCAL, _BASE)
    if _is_nested(new):
        rope = {name: part and {**share, **_typed(part)} for name, part in (new or {}).items()}
    elif local and not new:
        rope = {_FULL: told, _SLIDING: {_TYPE: "default", **local}}
    else:
        rope = told | _typed(new or {})
    found = {key: member for key, member in found.items() if key not in _OLD}
    return found | {ROPE: rope} if rope else found


def by_layer_type(mine: Any, theirs: Any) -> Any:
    """Return my `rope_parameters` by the types of layers that theirs name, where mine name none.

    Scaling was that of full attention alone in the families that had sliding attention.
    """
    if not isinstance(mine, dict) or _is_nested(mine) or not _is_nested(theirs):
        return mine
    base = {key: mine[key] for key in (_BASE,) if key in mine}
    return {name: mine if name == _FULL else base for name, part in theirs.items() if part}


def _is_nested(rope: Any) -> bool:
    return isinstance(rope, dict) and any(isinstance(part, dict) for part in rope.values())


def _first(config: Mapping[str, Any], names: tuple[str, ...], name: str) -> dict[str, Any]:
    """Return the first of several fields that is set, under one name; empty without any."""
    known = next((config[one] for one in names if config.get(one) is not None), None)
    return {} if known is None else {name: known}


def _typed(part: Any) -> dict[str, Any]:
    """Return the parameters of one type of layer; the type had a shorter name."""
    if not isinstance(part, dict):
        return {}
    kind = part.get(_TYPE, part.get("type"))
    rest = {key: member for key, member in part.items() if key != "type"}
    return rest if kind is None else rest | {_TYPE: kind}
