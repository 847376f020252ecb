"""Weights that lie twice in a Hugging Face folder: they are read once, and the other is compared.

The Hub has had both `model.safetensors` and `pytorch_model.bin` in one folder since it converted
the second to the first; transformers loads the first. Mistral puts `consolidated.safetensors`, with
its own names, beside the shards of transformers. A conversion that took both would write the model
twice. Only what has the same name, shape and type is compared; what is not is said. A pickled
adapter beside a model is read as an adapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from ftckpt.checkpoint import Checkpoint, TensorInfo
from ftckpt.errors import (
    CorruptError,
    IncompleteError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.findings import counted, finding, from_error, listed
from ftckpt.formats.huggingface.index import shard_name
from ftckpt.formats.safetensors.names import INDEX, SUFFIX
from ftckpt.formats.safetensors.reader import SafetensorsCheckpoint
from ftckpt.formats.safetensors.weight_sets import WeightSet
from ftckpt.formats.torchsave.reader import open_torchsave
from ftckpt.formats.trainer_dirs.weight_folders import second_copy

# What torch.save's file of the weights is called beside a safetensors file of a stem.
_PICKLED = {
    "model": ("pytorch_model", "model"),
    "adapter_model": ("adapter_model",),
    "diffusion_pytorch_model": ("diffusion_pytorch_model",),
}
_ADAPTER = "adapter_model"
_CONSOLIDATED = re.compile(r"extra:consolidated([.-]\d+)?")


def join_second_copies(checkpoint: SafetensorsCheckpoint) -> None:
    """Join what a folder holds twice: `--level values` compares it, and nothing writes it."""
    main = next((one for one in checkpoint.sets if one.component == "model"), None)
    if checkpoint.source.single or main is None:
        return
    for one in checkpoint.sets:
        if _CONSOLIDATED.fullmatch(one.component):
            _join_consolidated(checkpoint, one)
    stems = {_stem(one): one for one in checkpoint.sets}
    for stem, one in stems.items():
        if one is main or stem == _ADAPTER:
            for pickled in _PICKLED.get(stem, ()):
                if names := _pickled(checkpoint, pickled):
                    _join_pickled(checkpoint, names, one.component)
    if _ADAPTER not in stems and (names := _pickled(checkpoint, _ADAPTER)):
        _join_adapter(checkpoint, names)


def _pickled(checkpoint: SafetensorsCheckpoint, stem: str) -> list[str]:
    """Return torch.save's files of a stem with their index; none where only the index is there."""
    pattern = re.compile(rf"{stem}(-\d+-of-\d+)?\.bin(\.index\.json)?")
    names = [name for name in checkpoint.source.entries if pattern.fullmatch(name)]
    return names if any(name.endswith(".bin") for name in names) else []


def _stem(weights: WeightSet) -> str:
    if weights.index is not None:
        match = INDEX.fullmatch(weights.index.file)
        return match["stem"] if match else ""
    shard = shard_name(weights.files[0])
    return weights.files[0].removesuffix(SUFFIX) if shard is None else shard.stem


def _opened(checkpoint: SafetensorsCheckpoint, names: list[str]) -> Checkpoint:
    source = checkpoint.source
    return open_torchsave(replace(source, entries={name: source.entries[name] for name in names}))


def _join_adapter(checkpoint: SafetensorsCheckpoint, names: list[str]) -> None:
    """Add an adapter's tensors as `adapter_model.safetensors` would; else nobody read them."""
    try:
        found = _opened(checkpoint, names)
    except (CorruptError, UnsafeError, IncompleteError) as error:
        checkpoint.open_findings = [*checkpoint.open_findings, from_error(error)]
        return
    except UnsupportedError:
        return  # the check of the folder says that it was not read
    if found.objects:
        return
    moved = {key: one._replace(component=f"extra:{_ADAPTER}") for key, one in found.tensors.items()}
    aliases = {moved[one].key: moved[owner].key for one, owner in found.aliases.items()}
    checkpoint.tensors = {**checkpoint.tensors, **{one.key: one for one in moved.values()}}
    checkpoint.aliases = {**checkpoint.aliases, **aliases}
    checkpoint.copies = [*checkpoint.copies, found]


def _join_pickled(checkpoint: SafetensorsCheckpoint, names: list[str], component: str) -> None:
    first = min(names)
    try:
        found = _opened(checkpoint, names)
    except (CorruptError, UnsafeError) as error:
        checkpoint.open_findings = [*checkpoint.open_findings, from_error(error)]
        checkpoint.second_copies |= frozenset(names)
        return
    except (UnsupportedError, IncompleteError, NotFoundError) as error:
        # The model is whole without it; that storage failed would say nothing of it.
        checkpoint.second_copies |= frozenset(names)
        what = f"the second copy of the weights was not read: {error.message}"
        checkpoint.notes = [*checkpoint.notes, finding("note", what, file=error.file or first)]
        return
    # Tied weights stand once in safetensors.
    tensors = {key: one for key, one in found.tensors.items() if key not in found.aliases}
    _compare(checkpoint, replace(found, tensors=tensors), first, component)
    checkpoint.copies = [*checkpoint.copies, found]


def _join_consolidated(checkpoint: SafetensorsCheckpoint, one: WeightSet) -> None:
    """Take the set for a copy where it has the model's names, or as many elements of each type."""
    own = {k: t for k, t in checkpoint.tensors.items() if t.component == one.component}
    model = {k: t for k, t in checkpoint.tensors.items() if t.component == "model"}
    named = {t.name for t in own.values()} == {t.name for t in model.values()}
    if not own or not (named or _amounts(own.values()) == _amounts(model.values())):
        return
    checkpoint.tensors = {k: t for k, t in checkpoint.tensors.items() if k not in own}
    checkpoint.set_aside = checkpoint.set_aside | {one.component}
    if named:
        moved = [t._replace(component="model") for t in own.values()]
        _compare(checkpoint, replace(checkpoint, tensors={t.key: t for t in moved}), one.files[0])
        return
    what = (
        f"{listed(list(one.files), 2)} holds the model a second time, under names of its own: it is"
        f" read from {listed([s.files[0] for s in checkpoint.sets if s.component == 'model'])}, and"
        " the two are not compared"
    )
    checkpoint.notes = [*checkpoint.notes, finding("note", what, file=one.files[0])]


def _amounts(tensors: Iterable[TensorInfo]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in tensors:
        found[one.dtype.name] = found.get(one.dtype.name, 0) + one.numel
    return found


def _compare(
    checkpoint: SafetensorsCheckpoint, found: Checkpoint, file: str, component: str = "model"
) -> None:
    """Add the pieces of a second copy as replicas."""
    made = second_copy(found, checkpoint.tensors, checkpoint.aliases, component)
    joined: dict[str, TensorInfo] = {
        key: one for key, one in made.tensors.items() if key in checkpoint.tensors
    }
    checkpoint.tensors = {**checkpoint.tensors, **joined}
    checkpoint.second_copies = checkpoint.second_copies | made.files
    checkpoint.open_findings = [*checkpoint.open_findings, *made.findings]
    apart = len(found.tensors) - len(joined)
    what = f"{file} is a second copy of the weights: --level values compares"
    what += f" {counted(len(joined), 'tensor')}"
    if apart:
        what += f"; {counted(apart, 'other')} have another name or type there"
    checkpoint.notes = [*checkpoint.notes, finding("note", what, file=file)]
