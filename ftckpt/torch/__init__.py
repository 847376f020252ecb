"""Seal checkpoints inside the training process.

    import torch.distributed.checkpoint as dcp
    from ftckpt.torch import SealingWriter

    dcp.save(state, storage_writer=SealingWriter(dcp.FileSystemWriter("/ckpt/step-1000")))

The writer hashes bytes while they are written, so a seal costs no second read. A failure to seal is
a warning and leaves an unsealed checkpoint: it never ends a training, unless `strict` is set.
Importing this module imports torch and nothing else that is heavy.

- `SealingWriter` wraps a writer of DCP, of Megatron or of NVRx; `writer` has it.
- `seal_dcp` does so for trainers that call `dcp.save` themselves; `calls` has it.
- `seal_after` seals what another save wrote; `after` has it.
- `files` hashes what is written, `workers` what other processes write, and `ranks` keeps the
  digests of saves without collectives.
"""

from __future__ import annotations

from .files import WrittenFile
from .reader import CheckpointReader as Reader
from .reader import LoadReport, StateCheck
from .writer import SealingWriter, SealWarning, barrier, digests_of, seal_after, seal_dcp

__all__ = (
    "LoadReport",
    "Reader",
    "SealWarning",
    "SealingWriter",
    "StateCheck",
    "WrittenFile",
    "barrier",
    "digests_of",
    "seal_after",
    "seal_dcp",
)
