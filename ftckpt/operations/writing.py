"""The way from a content to a checkpoint of another layout: lay out, rehearse, write, prove."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.errors import ExitCode, UnsupportedError
from ftckpt.formats.catalog import reads_by_rules
from ftckpt.formats.state.same_object import SameObject
from ftckpt.formats.writers import format_and_writer
from ftckpt.storage import StoreOptions, open_store
from ftckpt.transfer.prove.against_source import prove
from ftckpt.transfer.prove.rehearsal import rehearse
from ftckpt.transfer.request.dry_run import Planned, affordable_jobs, affordable_processes, planned
from ftckpt.transfer.request.example import lay_out
from ftckpt.transfer.run import (
    BuiltByParts,
    FilesOfPart,
    SourceCheck,
    TransferOptions,
    TransferReport,
    prove_share,
    require_place,
    transfer,
    transfer_share,
)

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.discovery.recognise import Format
    from ftckpt.manifest import ThinnedFrom
    from ftckpt.transfer.content import Content
    from ftckpt.transfer.layout import Layout, LayoutRequest, Writer
    from ftckpt.transfer.prove.against_source import Prover, SameObjects
    from ftckpt.verification import VerifyOptions, VerifyReport
    from ftckpt.verification.seen import SeenBytes
    from ftckpt.workers import Work


class Means(NamedTuple):
    """By what a result is written and proven.

    Attributes:
        target: reads it.
        writer: lays it out.
        prover: compares it with a content that the layout does not change.
        same_objects: how objects are compared.
    """

    target: Format
    writer: Writer
    prover: Prover
    same_objects: SameObjects


@dataclass(frozen=True)
class LaidOut:
    """A content laid out for a destination; nothing is written yet.

    Attributes:
        checkpoint: the source.
        content: what is written.
        destination: where it goes.
        layout: the files, and what each is made of.
        means: by what it is written and proven.
        jobs: threads that memory allows.
        local: whether the destination is on this machine.
        stores: how to reach object stores.
    """

    checkpoint: Checkpoint
    content: Content
    destination: str
    layout: Layout
    means: Means
    jobs: int
    local: bool
    stores: StoreOptions

    def plan(self, *, proof: bool) -> Planned:
        """Return what it would cost, after a rehearsal where the result would be proven.

        Raises:
            CorruptError, UnsupportedError: the rehearsal shows that the proof would fail.
        """
        target, writer, prover, same_objects = self.means
        if prover is prove and proof:
            rehearse(self.content, self.layout, target, same_objects, single=writer.single)
        return planned(self.layout, self.checkpoint, jobs=self.jobs, proof=proof, local=self.local)

    def write(
        self,
        *,
        check: SourceCheck | None,
        work: Work,
        device: str,
        restart: bool,
        parts: BuiltByParts | None = None,
        thinned: ThinnedFrom | None = None,
    ) -> TransferReport:
        """Write it and prove it; it becomes visible by the last act.

        Args:
            check: verifies the source; None where nothing is to be proven.
            work: how, with the threads that memory allows (see `jobs`).
            device: `cpu`, `cuda`, `cuda:N` or `auto`.
            restart: forget what another transfer to the destination has left.
            parts: what others have built there and proven.
            thinned: for the manifest, where the result is what is left of a thinned checkpoint.

        Raises:
            FtckptError: see `ftckpt.transfer.run.transfer`.
        """
        target, writer, prover, same_objects = self.means
        options = self._options(work, device, proof=check is not None, restart=restart)
        return transfer(
            self.content,
            self.layout,
            self.destination,
            target,
            single=writer.single,
            same_objects=same_objects,
            options=replace(options, thinned=thinned),
            store_options=self.stores,
            check=check,
            prover=prover if self.layout.content is None else prove,
            parts=parts,
        )

    def write_share(
        self, *, check: Callable[[], object], work: Work, device: str, share: FilesOfPart
    ) -> None:
        """Write some of its files beside other parts.

        Args:
            check: verifies a share of the source first.
            work: as in `write`.
            device: as in `write`.
            share: which files, and who is told.

        Raises:
            FtckptError: see `ftckpt.transfer.run.transfer`.
        """
        transfer_share(
            self.content, self.layout, self.destination, single=self.means.writer.single,
            options=self._options(work, device), store_options=self.stores, check=check,
            share=share,
        )  # fmt: skip

    def prove_share(self, *, work: Work, device: str) -> Mapping[str, str]:
        """Prove a share of what parts have written; see `ftckpt.transfer.run.prove_share`."""
        target, writer, prover, same_objects = self.means
        return prove_share(
            self.content, self.layout, self.destination, target, single=writer.single,
            same_objects=same_objects, options=self._options(work, device),
            store_options=self.stores,
            prover=prover if self.layout.content is None else prove,
        )  # fmt: skip

    def _options(
        self, work: Work, device: str, *, proof: bool = True, restart: bool = False
    ) -> TransferOptions:
        apart = self.local and work.limiter is None
        copies = affordable_processes(self.jobs, self.checkpoint) if apart else 0
        return TransferOptions(
            replace(work, threads=self.jobs, processes=copies),
            proof=proof,
            device=device,
            restart=restart,
        )


def verified(
    checkpoint: Checkpoint,
    content: Content,
    work: Work,
    seen: SeenBytes | None = None,
    options: VerifyOptions | None = None,
) -> VerifyReport:
    """Verify a source, and what its tensors are computed from beside it.

    Args:
        checkpoint: the source.
        content: what is written of it.
        work: how.
        seen: what the transfer reads of it, which is not read again.
        options: how deep; by default as far as evidence goes, and what is carried.

    Returns:
        The report of the source; that of the first other one that does not pass, if it does. A
        tensor that one save wrote twice, and that differs, is a warning: the first copy is written.
    """
    from ftckpt.verification import verify

    options = replace(options or checking(content), seen=seen)
    found = verify(checkpoint.as_stored, options, work=work)
    if seen is not None and not seen.ended:
        return found
    for other in checkpoint.made_from:
        if found.code is ExitCode.OK:
            # Another one is small, and each of several machines computes with it: it checks it.
            second = verify(other, work=replace(work, division=None))
            found = found if second.code is ExitCode.OK else second
    divided = work.division is not None and work.division.partial
    if found.code is ExitCode.OK and checkpoint.as_stored.second_copies and not divided:
        from ftckpt.verification.values.masters import differing_copies

        keys = {copy.key for wanted in content.tensors.values() for copy in wanted.copies}
        twice = differing_copies(checkpoint.as_stored, sorted(keys), replace(work, division=None))
        found = replace(found, findings=(*found.findings, *twice))
    return found


def checking(content: Content) -> VerifyOptions:
    """Return how the source of a content is verified: the bytes that are not carried are not read.

    Args:
        content: what is written.
    """
    from ftckpt.verification import VerifyOptions

    names = {copy.key for wanted in content.tensors.values() for copy in wanted.copies}
    names |= content.objects.keys()
    checkpoint = content.checkpoint
    if names >= checkpoint.tensors.keys() | checkpoint.objects.keys():
        return VerifyOptions(decode=False)
    from ftckpt.verification.used_bytes import UsedBytes

    return VerifyOptions(used=UsedBytes(checkpoint, names), decode=False)


def prepare(
    checkpoint: Checkpoint,
    content: Content,
    name: str,
    request: LayoutRequest,
    destination: str,
    *,
    jobs: int,
    stores: StoreOptions,
    means: Means | None = None,
    used: Collection[str] = (),
) -> LaidOut:
    """Lay out a content for a destination.

    Args:
        checkpoint: the source.
        content: what is written.
        name: of the target format.
        request: what the user asks of the layout.
        destination: where it goes.
        jobs: threads, at most.
        stores: how to reach object stores.
        means: by what it is written and proven; by default the format's own writer, and a
            comparison of every bit.
        used: options that the caller itself uses; others that the writer does not use are
            refused.

    Raises:
        UsageError: a wish that a shape cannot grant.
        UnsupportedError: the format cannot be written, or has no place for something.
    """
    store = open_store(destination, stores)
    local = store.traits.local
    if means is None:
        try:
            means = Means(*format_and_writer(name, request.rules, destination), prove, SameObject)
        except UnsupportedError as error:
            part = checkpoint.resharded_part if name == checkpoint.source_format else ""
            if part:
                error.hint = (
                    f"{part} is a checkpoint of its own: name {checkpoint.source.url}/{part}"
                )
            raise
    if reads_by_rules(checkpoint.source_format):
        used = (*used, "rules")
    layout = lay_out(means.writer, content, request, store, used=used)
    require_place(layout)
    threads = affordable_jobs(jobs, local=local, source=checkpoint.source.store)
    return LaidOut(checkpoint, content, destination, layout, means, threads, local, stores)
