"""Lay out any content as a safetensors folder from which nothing is lost and transformers loads.

The weights are `model-*.safetensors` with an index, or one `model.safetensors`; the optimizer's
tensors and other components lie in folders beside them (`safetensors_beside`), non-tensor state in
`ftckpt.objects/` (`object_records`). What else a Hugging Face folder holds (configuration, a
tokenizer) is carried along.

Shards are dealt out as `huggingface_hub.serialization` does: tensors in order, a new file where one
more would pass the limit, a tensor beyond it in a file of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ftckpt.errors import UsageError
from ftckpt.transfer.content import Content, Wanted
from ftckpt.transfer.layout import Layout, Literal, OutputFile, Wishes

from .hf_beside import beside_weights
from .object_records import lay_out_objects
from .safetensors import SafetensorsCheckpoint
from .safetensors_file import lay_out_file
from .safetensors_files import COMPONENTS, OPTIMIZER, SUFFIX
from .safetensors_names import Alias, metadata, stored_name

MAX_SHARD_SIZE = 5 * 10**9  # bytes; huggingface_hub's
# Stems whose loaders look for just that name; every other model is called `model`.
_STEMS = ("adapter_model", "diffusion_pytorch_model")
_FOLDER_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


class SafetensorsWriter:
    """Writes the format `safetensors` (see the module's docstring)."""

    name = "safetensors"
    single = False

    def layout(self, content: Content, wishes: Wishes) -> Layout:
        """Lay out `content`; reads the first bytes of non-tensor state, to know what it is.

        Raises:
            UsageError: the folder should be divided over ranks, or a shard hold less than a byte.
            UnsupportedError: a tensor of a type that safetensors does not have, by its name.
        """
        _require_undivided(wishes)
        limit = wishes.max_shard_size or MAX_SHARD_SIZE
        if limit < 1:
            raise UsageError(f"a shard of {limit} bytes holds nothing")
        owners = _owners(content)
        files: list[OutputFile] = []
        commit: list[OutputFile] = []
        weights: list[OutputFile] = []
        for component, tensors in _by_component(content, owners).items():
            stem = _stem(content, component)
            made, index = _lay_out_set(content, component, stem, tensors, owners, limit)
            files += made
            (weights if component == "model" else commit).extend(index)
        resumable = content.objects or any(w.component != "model" for w in content.tensors.values())
        objects = lay_out_objects(content, content.checkpoint.step if resumable else None)
        return Layout(
            files=[*files, *objects.files, *beside_weights(content)],
            # The index of the weights is what makes a folder of shards a checkpoint.
            commit=[*commit, *objects.commit, *weights],
            unplaced=objects.unplaced,
        )


def _require_undivided(wishes: Wishes) -> None:
    for flag in ("tp", "pp", "vp", "dp", "ep"):
        if (getattr(wishes, flag) or 1) > 1:
            raise UsageError(
                f"a safetensors folder is not divided over ranks, so --{flag} has no meaning",
                hint="--max-shard-size sets the size of its files",
            )


def _owners(content: Content) -> dict[str, str]:
    """Return the key of the tensor that is stored in the place of each alias.

    An alias of another component or form is stored of itself: it may not be an alias any more.
    """
    found = {}
    for key, owner in content.aliases.items():
        seen = {key}
        while owner in content.aliases and owner not in seen:
            seen.add(owner)
            owner = content.aliases[owner]
        alias, stored = content.tensors.get(key), content.tensors.get(owner)
        if alias is None or stored is None or owner in seen:
            continue
        same = (alias.component, alias.shape, alias.dtype)
        if same == (stored.component, stored.shape, stored.dtype):
            found[key] = owner
    return found


def _by_component(content: Content, owners: Mapping[str, str]) -> dict[str, dict[str, Wanted]]:
    """Sort the tensors that are stored by component, the model first, by stored name."""
    found: dict[str, dict[str, Wanted]] = {"model": {}}
    for key, wanted in content.tensors.items():
        if key not in owners:
            found.setdefault(wanted.component, {})[stored_name(wanted)] = wanted
    return {component: tensors for component, tensors in found.items() if tensors}


def _stem(content: Content, component: str) -> str:
    """Return folder and stem of a component's files."""
    if component == "optimizer":
        return f"{OPTIMIZER}optimizer"
    if component != "model":
        # The header says which component it is, so that the name need not be exact.
        return COMPONENTS + _FOLDER_NAME.sub("_", component)
    if isinstance(content.checkpoint, SafetensorsCheckpoint):
        for weights in content.checkpoint.sets:
            for stem in _STEMS:
                if weights.component == "model" and weights.files[0].startswith(stem):
                    return stem
    return "model"


def _lay_out_set(
    content: Content,
    component: str,
    stem: str,
    tensors: Mapping[str, Wanted],
    owners: Mapping[str, str],
    limit: int,
) -> tuple[list[OutputFile], list[OutputFile]]:
    """Return the data files of one component, and its index where it has one."""
    aliases: dict[str, list[Alias]] = {}
    for key, owner in owners.items():
        alias = content.tensors[key]
        stored = stored_name(content.tensors[owner])
        aliases.setdefault(owner, []).append(Alias(alias.component, alias.kind, alias.name, stored))
    shards = list(_shards(tensors, limit))
    folder = stem[: stem.rfind("/") + 1]
    files: list[OutputFile] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = stem + SUFFIX
        if len(shards) > 1:
            name = f"{stem}-{number:05d}-of-{len(shards):05d}{SUFFIX}"
        held = {stored: tensors[stored] for stored in shard}
        shared = [alias for wanted in held.values() for alias in aliases.get(wanted.key, ())]
        files.append(
            lay_out_file(
                name,
                {stored: content.whole(wanted.key) for stored, wanted in held.items()},
                metadata(component, held, shared),
            )
        )
        weight_map |= dict.fromkeys(shard, name.removeprefix(folder))
    if len(shards) == 1 and component == "model":
        return files, []
    index: dict[str, Any] = {
        "metadata": {"total_size": sum(wanted.nbytes for wanted in tensors.values())},
        "weight_map": weight_map,
    }
    text = json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    return files, [OutputFile(f"{stem}{SUFFIX}.index.json", [Literal(text.encode())])]


def _shards(tensors: Mapping[str, Wanted], limit: int) -> Iterator[Sequence[str]]:
    """Deal out names to files of at most `limit` bytes, in order."""
    held: list[str] = []
    size = 0
    for name, wanted in tensors.items():
        if wanted.nbytes > limit:
            yield [name]
            continue
        if size + wanted.nbytes > limit:
            yield held
            held, size = [], 0
        held.append(name)
        size += wanted.nbytes
    if held:
        yield held
