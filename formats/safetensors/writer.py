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
from ftckpt.findings import listed
from ftckpt.formats.huggingface.sidecar_files import beside_weights
from ftckpt.formats.huggingface.weights import is_of_adapter
from ftckpt.formats.safetensors.write_records import lay_out_objects
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.layout import Layout, LayoutRequest, Literal, OutputFile

from .content import StoredOnce
from .names import COMPONENTS, OPTIMIZER, SUFFIX
from .reader import SafetensorsCheckpoint

MAX_SHARD_SIZE = 5 * 10**9  # bytes; huggingface_hub's
# Stems whose loaders look for just that name; every other model is called `model`.
_STEMS = ("adapter_model", "diffusion_pytorch_model")
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
        stored = StoredOnce(content)
        files: list[OutputFile] = []
        commit: list[OutputFile] = []
        weights: list[OutputFile] = []
        for component in stored.components:
            made, index = _lay_out_set(stored, component, _stem(content, component), limit)
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
    stored: StoredOnce, component: str, stem: str, limit: int
) -> tuple[list[OutputFile], list[OutputFile]]:
    """Return the data files of one component, and its index where it has one."""
    tensors = stored.components[component]
    shards = list(_shards(tensors, limit))
    folder = stem[: stem.rfind("/") + 1]
    files: list[OutputFile] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = stem + SUFFIX
        if len(shards) > 1:
            name = f"{stem}-{number:05d}-of-{len(shards):05d}{SUFFIX}"
        files.append(stored.file(name, component, shard))
        weight_map |= dict.fromkeys(shard, name.removeprefix(folder))
    if len(shards) == 1 and component == "model":
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
