"""Translate an adapter of Megatron-core's modules: joined matrices have one in each part.

A is shared by the parts, B and DoRA's magnitudes have the rows of the weight and are cut as it is
(`_get_fused_adapter_linear_out_slices` of Megatron-Bridge).
"""

from __future__ import annotations

from dataclasses import replace

from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.huggingface.config import ADAPTER_CONFIG
from ftckpt.formats.lora.bridge import configuration, part_of, read_adapter
from ftckpt.formats.lora.tensors import PREFIX
from ftckpt.transfer.content import Content, TargetTensor

from .facts import ModelFacts
from .translator import Naming, Translator
from .views.joins import part_rows


def adapter_to_hugging_face(content: Content, model: ModelFacts) -> Content:
    """Return an adapter of Bridge under the names that PEFT gives it for Hugging Face's model.

    Raises:
        UnsupportedError: a module that the family does not have, or whose weight is turned there.
        UsageError: rows that do not fit the heads.
    """
    translator = Translator(model.family, model.heads, config=model.config)
    made: dict[str, TargetTensor] = {}
    for wanted in content.tensors.values():
        module, _, end = wanted.name.removeprefix(PREFIX).partition(".lora_")
        module, part = part_of(module)
        found = translator.find(f"{module}.weight", Naming.MEGATRON)
        if found is None or found.entry.transposed:
            raise UnsupportedError(
                f"{module} has no adapter in Hugging Face's {model.family.name}: its weight is"
                " stored otherwise"
            )
        entry = found.entry
        if part >= len(entry.hf):
            raise UnsupportedError(f"{module} of {model.family.name} is not joined of {part + 1}")
        if part >= 0:
            _require_rows(model, wanted, end, entry.join, part, len(entry.hf))
            pairs = [(entry.hf[part], wanted)]
        elif end == "A.weight":
            pairs = [(one, wanted) for one in entry.hf]
        else:
            pairs = list(zip(entry.hf, translator.parts(wanted, entry), strict=True))
        for known, tensor in pairs:
            name = known.fill(found.numbers).removesuffix(".weight")
            new = tensor._replace(name=f"{PREFIX}{name}.lora_{end}")
            made[new.key] = new
    adapter = read_adapter(content.checkpoint)
    beside = dict(content.beside)
    if adapter is not None:
        beside[ADAPTER_CONFIG] = configuration(adapter, [one.name for one in made.values()])
    return replace(content, tensors=made, beside=beside)


def _require_rows(
    model: ModelFacts, wanted: TargetTensor, end: str, join: object, part: int, parts: int
) -> None:
    """Refuse queries, keys or values of another number of rows than the heads have."""
    from .views.joins import Join

    if join is not Join.GROUPED or end == "A.weight":
        return
    sizes = part_rows(Join.GROUPED, parts, model.heads.rows, model.heads)
    if sizes is None or sizes[part] != wanted.shape[0]:
        raise UsageError(f"{wanted.name} has {wanted.shape[0]} rows, which the heads do not have")
