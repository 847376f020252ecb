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

from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.extents import Extent
from ftckpt.findings import listed
from ftckpt.formats.huggingface.config import CONFIG
from ftckpt.formats.huggingface.declared_folders import HoldsFolders
from ftckpt.formats.huggingface.index import is_beside
from ftckpt.formats.huggingface.sidecar_files import beside_weights
from ftckpt.formats.huggingface.weights import is_of_adapter
from ftckpt.formats.safetensors.write_records import lay_out_objects
from ftckpt.own_files import is_own
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.layout import Layout, LayoutRequest, Literal, OutputFile, Stored

from .layout import StoredOnce
from .names import COMPONENTS, OPTIMIZER, SUFFIX
from .reader import SafetensorsCheckpoint

MAX_SHARD_SIZE = 5 * 10**9  # bytes; huggingface_hub's
# Stems whose loaders look for just that name; every other model is called `model`.
_STEMS = ("adapter_model", "diffusion_pytorch_model")
_WEIGHTS = r"\.(?:safetensors|bin|pt|pth|ckpt)(?:\.index(?:\.[^/]+)?\.json)?$"
_FOLDER_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


class SafetensorsWriter:
    """Writes the format `safetensors` (see the module's docstring)."""

    name = "safetensors"
    single = False
    supported_options = ("max_shard_size",)

    def layout(self, content: Content, request: LayoutRequest) -> Layout:
        """Lay out `content`; reads the first bytes of non-tensor state, to know what it is.

        Raises:
            UsageError: a shard should hold less than a byte.
            UnsupportedError: a tensor of a type that safetensors does not have, by its name; or
                no tensor at all, and so no file that would make this a checkpoint.
        """
        if not content.tensors:
            raise UnsupportedError(
                "safetensors checkpoints are made of tensors, and there is none to write of"
                f" {content.checkpoint.source.url} beside {listed(list(content.objects), 3)}",
                hint="--to torchsave and --to dcp hold such state alone",
            )
        limit = request.max_shard_size or MAX_SHARD_SIZE
        if limit < 1:
            raise UsageError(f"a shard of {limit} bytes holds nothing")
        folders = _folders(content)
        stored = StoredOnce(content)
        files: list[OutputFile] = []
        commit: list[OutputFile] = []
        weights: list[OutputFile] = []
        for component in stored.components:
            stem = folders.get(component) or _stem(content, component)
            made, index = _lay_out_set(stored, component, stem, limit, model=component in folders)
            files += made
            (weights if component == "model" else commit).extend(index)
        resumable = content.objects or any(w.component != "model" for w in content.tensors.values())
        objects = lay_out_objects(content, content.checkpoint.step if resumable else None)
        return Layout(
            files=[*files, *objects.files, *beside_weights(content), *_in_folders(content)],
            # The index of the weights is what makes a folder of shards a checkpoint.
            commit=[*commit, *objects.commit, *weights],
            unplaced=objects.unplaced,
        )


def _folders(content: Content) -> Mapping[str, str]:
    """Return the component of the weights in a folder that a file names -> folder and stem.

    Raises:
        UnsupportedError: not all of these weights are to be written: the file names them all.
    """
    stored = content.checkpoint.as_stored
    if not isinstance(stored, HoldsFolders) or not stored.declared:
        return {}
    carried = {wanted.component for wanted in content.tensors.values()}
    left = [place for component, place in stored.stems.items() if component not in carried]
    if left:
        by = stored.declared[0].by
        raise UnsupportedError(
            f"{by} names {left[0].rpartition('/')[0]} as a part of the model, and its weights are"
            " not to be written",
            hint="convert without --only, or name the part's own folder",
            file=by,
        )
    return stored.stems


def _in_folders(content: Content) -> Iterator[OutputFile]:
    """Yield the files without tensors in folders that a file names, and that file."""
    stored = content.checkpoint.as_stored
    if not isinstance(stored, HoldsFolders) or not stored.declared:
        return
    source = content.checkpoint.source
    top = CONFIG in source.entries  # what lies at the top goes with it already
    inside = tuple(f"{one.path}/" for one in stored.declared if one.path)
    for name, entry in sorted(source.entries.items()):
        beside = name.startswith(inside) or (not top and is_beside(name))
        if beside and not re.search(_WEIGHTS, name) and not is_own(name):
            yield OutputFile(name, [Stored(Extent(name, 0, entry.size))])


def _stem(content: Content, component: str) -> str:
    """Return folder and stem of a component's files."""
    if component == "optimizer":
        return f"{OPTIMIZER}optimizer"
    if component != "model":
        # The header says which component it is, so that the name need not be exact.
        return COMPONENTS + _FOLDER_NAME.sub("_", component)
    if any(is_of_adapter(wanted.name) for wanted in content.tensors.values()):
        return "adapter_model"
    stored = content.checkpoint.as_stored
    if isinstance(stored, SafetensorsCheckpoint):
        for weights in stored.sets:
            for stem in _STEMS:
                if weights.component == "model" and weights.files[0].startswith(stem):
                    return stem
    return "model"


def _lay_out_set(
    stored: StoredOnce, component: str, stem: str, limit: int, *, model: bool
) -> tuple[list[OutputFile], list[OutputFile]]:
    """Return the data files of one component, and its index where it has one.

    Args:
        stored: the tensors.
        component: of which.
        stem: folder and stem of the files' names.
        limit: bytes a file.
        model: whether a folder of its own makes them a model's.
    """
    tensors = stored.components[component]
    shards = list(_shards(tensors, limit))
    folder = stem[: stem.rfind("/") + 1]
    files: list[OutputFile] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = stem + SUFFIX
        if len(shards) > 1:
            name = f"{stem}-{number:05d}-of-{len(shards):05d}{SUFFIX}"
        files.append(stored.file(name, component, shard, label="model" if model else ""))
        weight_map |= dict.fromkeys(shard, name.removeprefix(folder))
    if len(shards) == 1 and (model or component == "model"):
        return files, []
    index: dict[str, Any] = {
        "metadata": {"total_size": sum(wanted.nbytes for wanted in tensors.values())},
        "weight_map": weight_map,
    }
    text = json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    return files, [OutputFile(f"{stem}{SUFFIX}.index.json", [Literal(text.encode())])]


def _shards(tensors: Mapping[str, TargetTensor], limit: int) -> Iterator[Sequence[str]]:
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
