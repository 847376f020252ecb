"""What a job's files store of the parameters at another stage of ZeRO.

A job that goes from stage 3 to a lower one gets weights: its masters in the compute type of the
placeholders, which is how DeepSpeed makes its weights from masters after every step. One that goes
to stage 3 has no place for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from ftckpt.checkpoint import Kind, tensor_key
from ftckpt.checkpoint.dtypes import DType
from ftckpt.errors import UnsupportedError
from ftckpt.formats.deepspeed.universal.reader import UniversalCheckpoint
from ftckpt.transfer.content import Content, TargetTensor

from . import DeepSpeedJob

# What DeepSpeed's converter makes of buffers, of frozen and of shared parameters.
COPIES = "extra:universal"


def stored_content(job: DeepSpeedJob, content: Content) -> Content:
    """Return the content that a repartitioned job stores."""
    content = content.with_tensors(_padded(job, content))
    if job.stage == 3:
        return without_weights(content, job.trained)
    made = {wanted.key: wanted for wanted in _cast_masters(job, content)}
    if not made:
        return content
    tied = {n: owner for n, owner in job.shared.items() if {n, owner} <= made.keys()}
    return replace(
        content, tensors={**made, **content.tensors}, aliases={**content.aliases, **tied}
    )


def _padded(job: DeepSpeedJob, content: Content) -> Iterator[TargetTensor]:
    """Yield the tensors of a job's own files, which a universal checkpoint has otherwise.

    There a vocabulary has lost its padding, which is zeros, and there are copies of weights.
    """
    for wanted in content.tensors.values():
        placed = job.placed.get(wanted.name)
        short = placed is not None and wanted.shape[1:] == placed.shape[1:] != ()
        if placed is not None and short and wanted.component == "optimizer":
            yield wanted._replace(shape=placed.shape)
        elif wanted.component != COPIES:
            yield wanted


def without_weights(content: Content, names: Collection[str]) -> Content:
    """Return content without the weights of parameters that are their masters, cast."""
    tensors = content.tensors
    return content.with_tensors(
        wanted
        for wanted in tensors.values()
        if (wanted.component, wanted.kind) != ("model", Kind.PARAM) or wanted.name not in names
    )


def _cast_masters(job: DeepSpeedJob, content: Content) -> Iterator[TargetTensor]:
    """Yield the weights that the source does not store.

    Stage 3 stores none, a universal checkpoint those alone that AutoEP does not stack. Where any
    other source lacks one, it is lost.

    Raises:
        UnsupportedError: the type of a stacked weight is not known.
    """
    partitioned = job.checkpoint.stage == 3
    if not partitioned and not isinstance(job.checkpoint, UniversalCheckpoint):
        return
    for state in job.states.values():
        dtypes = {name: ref.dtype for name, ref in state.weights.items() if name in job.trained}
        stacked = job.zero.experts.stacked if dtypes else ()
        for name in (*(dtypes if partitioned else ()), *stacked):
            key = tensor_key("optimizer", Kind.MASTER, job.shared.get(name, name))
            master = content.tensors.get(key)
            if name in job.trained and name not in content.tensors and master is not None:
                dtype = dtypes.get(name) or _only_one(dtypes, name)
                yield master._replace(component="model", kind=Kind.PARAM, name=name, dtype=dtype)


def _only_one(dtypes: Mapping[str, DType], name: str) -> DType:
    """Return the type of all weights, which is that of a stacked one, of which none is recorded."""
    found = sorted({dtype.name for dtype in dtypes.values()})
    if len(found) > 1:
        raise UnsupportedError(
            f"{name} is to be made of its master, and other weights are {' and '.join(found)}:"
            " which of these types the experts have is not recorded",
            hint="--zero-stage 3 stores no weights",
            tensor=name,
        )
    return next(iter(dtypes.values()))
