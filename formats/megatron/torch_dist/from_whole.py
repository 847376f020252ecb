"""Give a whole model and its optimizer the form that torch_dist's writer needs.

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
from ftckpt.formats.huggingface.sidecar_files import beside_weights
from ftckpt.formats.megatron.job.optimizer_tree import master_word, numbered
from ftckpt.formats.megatron.job.whole_model import VERSION, namespace, whole_model
from ftckpt.formats.megatron.rank_files.grid import Arguments
from ftckpt.transfer.content import Content

from .from_ranks import CONFIGURATION, CONTENT, EXTRA, StoredTensors, object_of
from .job import Blob, Common, TorchDistJob
from .owners import experts_of, layers_of
from .trained import trained_of

_ALONE = "these are the weights alone: Megatron begins its optimizer and its random streams anew"
_SEEDED = "random streams were not written: Megatron seeds them anew from --seed"
_LINEAR = re.compile(r"((?:decoder|mtp)\..*\.linear_\w+)\.weight")
_NORM = re.compile(
    r"((?:decoder|mtp)\..*_layernorm|decoder\.final_norm|decoder\..*\.(?:mixer\.norm|out_norm)"
    r"|mtp\..*\.[eh]norm)\.weight"
)
# Linear attention, state-space layers, and what joins further layers with the model.
_PROJECTION = re.compile(
    r"(decoder\..*\.(?:in_proj|out_proj)|mtp\..*\.eh_proj)\.weight(?:\.query|\.z)?"
)
_ATTENTION = re.compile(r"((?:decoder|mtp)\..*\.self_attention)\.linear_proj\.weight")
_OUTPUT = re.compile(r"(output_layer)\.weight")


def job_of_whole(content: Content) -> TorchDistJob:
    """Return what is written of a model that Megatron did not save.

    Raises:
        UnsupportedError, UsageError, CorruptError, UnsafeError: see `whole_model`.
    """
    whole = whole_model(content)
    args, trained = whole.layout.args, trained_of(content, whole)
    kept = whole.content
    if trained is not None:
        kept = kept.with_tensors([*kept.tensors.values(), *trained.tensors])
    tensors = StoredTensors(kept, args, frozenset())
    root = {
        "args": namespace(whole.arguments), "checkpoint_version": VERSION,
        "iteration": whole.iteration, "content_metadata": dict(CONTENT),
    }  # fmt: skip
    common = Common({**root, **(trained.root if trained is not None else {})})
    if trained is not None:
        common.make_reshardable(trained.optimizers)
    placed = trained.placed if trained is not None else frozenset[str]()
    named = tensors.named.values()
    stored = [wanted.name for wanted in named if wanted.component == "model"]
    sizes = (layers_of(stored), experts_of(stored))
    return TorchDistJob(
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
        master=master_word(numbered(common.root.get("optimizer")).values()),
        unplaced=[*(name for name in whole.unplaced if name not in placed), *tensors.unplaced],
        notes=[*whole.notes, finding("note", _ALONE if trained is None else _SEEDED)],
        further=list(beside_weights(content)),
        rows=whole.rows,
    )


def _modules(stored: Iterable[str], args: Arguments) -> Iterator[str]:
    """Yield the modules that keep something beside their weights, by their names on disk."""
    patterns = [_LINEAR, _PROJECTION]
    if args.get("hybrid_layer_pattern") is not None:
        patterns.append(_OUTPUT)  # a GPT model takes its own out
    if args.get("transformer_impl") != "local":
        patterns += (_NORM, _ATTENTION)
    for name in stored:
        for pattern in patterns:
            match = pattern.fullmatch(name)
            if match is not None:
                yield f"{match[1]}.core_attention" if pattern is _ATTENTION else match[1]
