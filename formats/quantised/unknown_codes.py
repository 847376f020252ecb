"""Numbers beside scales are codes, whatever stored them: their values are not the numbers.

Every library has names of its own for the tensors beside the codes of a weight, and new ones appear
each month. So what shows codes is the pair: a tensor of integers, or of 8-bit floats, and in the
same module one that is called scales, zero points, or a table. A cast would leave the codes as they
are and round the scales, and nothing would say that the model is another one.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, TensorInfo
from ftckpt.checkpoint.quantised import CODED
from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding, listed

# Scales of activations and caches: of no weight's values.
OTHER_SCALES = (
    ".input_scale", ".input_global_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale",
    ".prob_output_scale", ".activation_scale", ".input_zero_point", ".pre_quant_scale",
)  # fmt: skip
KEPT = "without --dtype every byte is kept as it is"
# What is called so stands beside codes: a word of the last part of a name.
_BESIDE = re.compile(
    r"(?:^|[._])(?:[a-z]*scales?|[a-z]*scale_inv|scb|q?zeros?|zero_?points?|absmax|codebooks?|luts?"
    r"|quant_map|centroids|biases)(?:$|[._\d])",
    re.IGNORECASE,
)
_AFFINE = "biases"  # beside scales alone: a module may call its own so
# Integers that are no codes, wherever they lie.
_APART = re.compile(
    r"(?:^|[._])(?:masks?|ids|idx|index|indexes|num|count|counter|shape|perm|order|steps?|size|seed"
    r"|state|bias|version|quant_state\S*|weight_format)(?:$|[._\d])",
    re.IGNORECASE,
)
_OFTEN = 3  # times as many siblings must have what one lacks


class UnknownCodes(NamedTuple):
    """Codes of a scheme that is not known.

    Attributes:
        codes: the tensor.
        beside: names of what shows it, without the module's.
    """

    codes: TensorInfo
    beside: frozenset[str]


def unknown_codes(tensors: Iterable[TensorInfo], known: Collection[str] = ()) -> list[UnknownCodes]:
    """Return the tensors of a model that hold codes of a scheme that is not known.

    What alone among its like has nothing beside it is among them: it lost its scales.

    Args:
        tensors: of the model.
        known: keys of codes, and of what belongs to them, that a scheme explains.
    """
    modules: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for info in tensors:
        if info.component == "model":
            module, _, leaf = info.name.rpartition(".")
            modules[module][leaf] = info
    found: list[UnknownCodes] = []
    bare: list[tuple[str, UnknownCodes]] = []
    for module, held in modules.items():
        beside = frozenset(leaf for leaf in held if _is_beside(leaf, held))
        for leaf, info in held.items():
            if info.key in known or leaf in beside or not _may_be_codes(leaf, info):
                continue
            # bitsandbytes and others put their parts below the name of the weight.
            below = modules.get(f"{module}.{leaf}" if module else leaf, {})
            parts = beside | {f"{leaf}.{n}" for n in below if _is_beside(n, below)}
            one = UnknownCodes(info, parts)
            if parts:
                found.append(one)
            else:
                bare.append((leaf, one))
    sorts = {(one.codes.name.rpartition(".")[2], one.codes.dtype.name) for one in found}
    found += [one for leaf, one in bare if (leaf, one.codes.dtype.name) in sorts]
    return found


def _may_be_codes(leaf: str, info: TensorInfo) -> bool:
    return info.dtype.name in CODED and info.numel > 1 and not _APART.search(leaf)


def _is_beside(leaf: str, held: Collection[str]) -> bool:
    if not _BESIDE.search(leaf) or f".{leaf}".endswith((*OTHER_SCALES, ".logit_scale")):
        return False
    return _AFFINE not in leaf or any("scale" in other for other in held)


def check_siblings(found: Iterable[UnknownCodes]) -> Iterator[Finding]:
    """Yield codes that lack what nearly all others of their name and type have."""
    sorts: dict[tuple[str, str], list[UnknownCodes]] = defaultdict(list)
    for one in found:
        sorts[one.codes.name.rpartition(".")[2], one.codes.dtype.name].append(one)
    for alike in sorts.values():
        having = Counter(leaf for one in alike for leaf in one.beside)
        for leaf, many in having.items():
            lacking = [one for one in alike if leaf not in one.beside]
            if not lacking or many < _OFTEN * len(lacking):
                continue
            for one in lacking:
                yield finding(
                    "missing-scale",
                    f"{one.codes.name} holds codes and lacks the {leaf} that {many} others have:"
                    " its values are lost",
                    file=one.codes.pieces[0].extent.file,
                    tensor=one.codes.key,
                )


def require_known(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint with codes of a scheme that is not known: a cast would spoil it.

    Raises:
        UnsupportedError: with the name of a tensor, and of what stands beside it.
    """
    found = unknown_codes(checkpoint.tensors.values())
    if not found:
        return
    first = max(found, key=lambda one: len(one.beside))
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    raise UnsupportedError(
        f"{first.codes.name}{more} holds codes of {first.codes.dtype.name}, with"
        f" {listed(sorted(first.beside), 3)} beside it: how its values are computed is not known",
        hint=KEPT,
        tensor=first.codes.key,
    )
