"""Lay out a DeepSpeed checkpoint for another number of partitions and another stage of ZeRO.

The files are those that the job would have saved on that many ranks: flat partitions in the order
of its parameter groups, padded as its optimizer pads, with the state around them as it was. What
says how the files are cut is made anew. The configuration stays a record of the job that wrote the
source: DeepSpeed reads its own when it loads.

`latest` stands in the directory around a checkpoint and is never written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.formats.deepspeed.from_example.state import ExampleJobFiles
from ftckpt.formats.deepspeed.job.rank_states import RoleStates, read_states
from ftckpt.formats.deepspeed.job.read import read_job, stored_content
from ftckpt.formats.deepspeed.model.files import LayerStates
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest

from .checkpoint import DeepSpeedCheckpoint
from .files import JobFiles
from .job import LIKE
from .names import FileRole


class DeepSpeedWriter:
    """The writer of the format `deepspeed` (fits `ftckpt.transfer.layout.Writer`)."""

    name = "deepspeed"
    single = False
    supported_options = ("tp", "pp", "dp", "ep", "zero_stage", "rules", "true_vocab_size")

    def layout(self, content: Content, request: LayoutRequest) -> Layout:
        """Lay out `content` for `request.dp` partitions of stage `request.zero_stage`.

        Raises:
            UsageError: a wish for an axis that DeepSpeed does not have.
            UnsupportedError: other tensor slices or pipeline stages, tensors that ZeRO cannot hold,
                or nothing that says in which order a job lays its parameters out.
        """
        if isinstance(request.like, DeepSpeedCheckpoint):
            return ExampleJobFiles(content, request.like, request).layout()
        if not isinstance(content.checkpoint, DeepSpeedCheckpoint):
            raise UnsupportedError(
                f"a {content.checkpoint.format} checkpoint does not say in which groups and order a"
                " DeepSpeed job lays its parameters out: partitions have no names, and a wrong"
                " order would load without an error",
                hint=f"{LIKE}; or --to deepspeed-universal, which DeepSpeed loads by names",
            )
        return SourceJobFiles(content, content.checkpoint, request).layout()

    def axes(self, example: Checkpoint) -> Mapping[str, int]:
        """Return the sizes of an example's groups; see `ftckpt.transfer.request.example`."""
        assert isinstance(example, DeepSpeedCheckpoint)
        grid = example.grid
        return {"tp": grid.tp, "pp": grid.pp, "dp": grid.dp, "zero_stage": example.stage}


class SourceJobFiles(JobFiles):
    """A DeepSpeed source, laid out by its own job for other partitions or another stage."""

    def __init__(
        self, content: Content, checkpoint: DeepSpeedCheckpoint, request: LayoutRequest
    ) -> None:
        """Read the source's job.

        Raises:
            UsageError, UnsupportedError: see `read_job` and `DeepSpeedJob.repartitioned`.
        """
        job = read_job(checkpoint).repartitioned(request)
        stored = stored_content(job, content)
        super().__init__(
            content,
            stored,
            job,
            RoleStates(stored, read_states(checkpoint, job.files[FileRole.MODEL])),
            RoleStates(stored, read_states(checkpoint, job.files[FileRole.OPTIMIZER])),
            LayerStates(stored, job),
        )

    def remarks(self) -> Iterator[Finding]:
        """Yield what the user should know."""
        config = self.job.config if isinstance(self.job.config, dict) else {}
        before = self.job.checkpoint.grid.dp
        if "train_batch_size" in config and before != self.job.grid.dp:
            what = (
                "ds_config stays the record of the job that wrote it, train_batch_size for"
                f" {before} partitions: the job that loads has a configuration of its own"
            )
            yield finding("note", what)
