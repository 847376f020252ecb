"""A whole model as a writer of torch_dist sees it: a job that has saved nothing but its weights.

Megatron up to core 0.18 loads no store that lacks an object for what a module keeps beside its
weights (`_extra_state`), mostly nothing. Which modules ask for one depends on the implementation;
what no module asks for is passed over.

Source: `sharded_state_dict` in megatron/core/tensor_parallel/layers.py and
megatron/core/extensions/transformer_engine.py, `StrictHandling` in
megatron/core/dist_checkpointing/validation.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

from ftckpt.findings import finding
from ftckpt.transfer.content import Content

from .hf_beside import beside_weights
from .megatron_dist_from_ranks import CONFIGURATION, CONTENT, EXTRA, StoredTensors, object_of
from .megatron_dist_job import Blob, Common, Job
from .megatron_dist_owners import experts_of, layers_of
from .megatron_ranks import Arguments
from .megatron_whole import VERSION, namespace, whole_model

_LINEAR = re.compile(r"(decoder\..*\.linear_\w+)\.weight")
_NORM = re.compile(r"(decoder\..*_layernorm)\.weight")
_ATTENTION = re.compile(r"(decoder\.layers\.\d+\.self_attention)\.linear_proj\.weight")


def job_of_whole(content: Content) -> Job:
    """Return what is written of a model that Megatron did not save.

    Raises:
        UnsupportedError, UsageError, CorruptError, UnsafeError: see `whole_model`.
    """
    whole = whole_model(content)
    args = whole.layout.args
    tensors = StoredTensors(whole.content, args, frozenset())
    common = Common({
        "args": namespace(whole.arguments), "checkpoint_version": VERSION,
        "iteration": whole.iteration, "content_metadata": dict(CONTENT),
    })  # fmt: skip
    stored = [wanted.name for wanted in tensors.named.values()]
    sizes = (layers_of(stored), experts_of(stored))
    what = "these are the weights alone: Megatron begins its optimizer and its random streams anew"
    return Job(
        content=whole.content.with_tensors(tensors.named.values()),
        layout=whole.layout,
        common=common,
        form_of=tensors.form,
        weight_of=tensors.weight,
        objects={
            object_of(module + EXTRA, tensors.form_of(module + EXTRA), sizes): Blob([None])
            for module in _modules(stored, args)
        },
        configuration=json.dumps(CONFIGURATION).encode(),
        unplaced=[*whole.unplaced, *tensors.unplaced],
        notes=[*whole.notes, finding("note", what)],
        further=list(beside_weights(content)),
        rows=whole.rows,
    )


def _modules(stored: Iterable[str], args: Arguments) -> Iterator[str]:
    """Yield the modules that keep something beside their weights, by their names on disk."""
    patterns = [_LINEAR]
    if args.get("transformer_impl") != "local":
        patterns += (_NORM, _ATTENTION)
    for name in stored:
        for pattern in patterns:
            match = pattern.fullmatch(name)
            if match is not None:
                yield f"{match[1]}.core_attention" if pattern is _ATTENTION else match[1]
