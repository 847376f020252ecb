"""Lay out weights as one safetensors file, for `load_file` and whatever else takes just that.

A destination that is called `….safetensors` asks for it (`writers`). A folder of safetensors holds
all of a training state; one file holds the model's tensors, and nothing is left out unsaid.
"""

from __future__ import annotations

from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.findings import finding
from ftckpt.formats.huggingface.sidecar_files import beside_weights
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest

from .content import StoredOnce
from .names import SUFFIX

FILE = f"model{SUFFIX}"


class SafetensorsFileWriter:
    """Writes one file of the format `safetensors` (see the module's docstring)."""

    name = "safetensors"
    single = True
    supported_options = ("max_shard_size",)

    def layout(self, content: Content, request: LayoutRequest) -> Layout:
        """Lay out the weights; all other state is `unplaced`.

        Raises:
            UsageError: the file should be divided by size.
            UnsupportedError: a tensor that safetensors cannot hold, by its name, or more of them
                than a header has room for; or the model has no tensor.
        """
        if request.max_shard_size is not None:
            raise UsageError(
                f"a name that ends in {SUFFIX} asks for one file, and --max-shard-size for several",
                hint="DST/ with a slash at its end, or another name, makes a folder",
            )
        stored = StoredOnce(content)
        if "model" not in stored.components:
            raise UnsupportedError(
                f"one safetensors file holds a model's tensors, and there is none to write of"
                f" {content.checkpoint.source.url}",
                hint="--to torchsave holds what else there is in one file",
            )
        others = [key for key, w in content.tensors.items() if w.component != "model"]
        beside = [file.path for file in beside_weights(content)]
        notes = []
        if beside:
            what = f"one file has no place for {', '.join(beside)}: not written"
            notes.append(finding("note", what))
        return Layout(
            files=[stored.file(FILE, "model", stored.components["model"])],
            unplaced=[*others, *content.objects],
            notes=notes,
        )
