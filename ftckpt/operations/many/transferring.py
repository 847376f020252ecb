"""Convert or reshard a checkpoint by several machines: each builds files, and proves tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ftckpt.errors import RefusedError
from ftckpt.findings import Severity, as_error
from ftckpt.parts import WorkPart
from ftckpt.parts.division import FromRecords, OwnShare
from ftckpt.parts.plan import MEASURED, ShareRecord, WorkPlan, plan_of
from ftckpt.parts.shared_folder import Heartbeat
from ftckpt.parts.shares import ByteRow
from ftckpt.transfer.run import BuiltByParts, FilesOfPart
from ftckpt.transfer.write.blocks import layout_digest
from ftckpt.transfer.write.files import Built

from . import Session, Whole
from .building import AllWritten, DividedBuild, Keep, share_of, units_of

if TYPE_CHECKING:
    from ftckpt.operations.writing import LaidOut
    from ftckpt.parts.finish import Gathered
    from ftckpt.verification import VerifyReport
    from ftckpt.verification.seen import SeenBytes
    from ftckpt.workers import Work

Check = Callable[["Work"], "VerifyReport"]


class Measures(Protocol):
    """What is measured of values while they are computed, each value where it is computed."""

    def told(self) -> Any:
        """Return what was measured here, as plain data."""

    def hear(self, said: Any) -> None:
        """Take in what was measured elsewhere.

        Raises:
            ValueError, TypeError: it is other data.
        """


@dataclass(frozen=True)
class DividedTransfer(DividedBuild):
    """A conversion, divided.

    Attributes:
        session: of the operation.
        work: of this process.
        proof: whether source and result are checked.
        destination: where it goes.
        prepared: what is written, and where.
        to: name of the target format.
        device: where elements are placed.
        check: verifies the source.
        told: tells what the whole check of the source found, and returns it.
        measures: of computed values; each part's record keeps what it has measured.
    """

    session: Session
    work: Work
    proof: bool
    destination: str
    prepared: LaidOut
    to: str
    device: str
    check: Check
    told: Callable[[VerifyReport], VerifyReport]
    measures: Sequence[Measures] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return self.prepared.layout.nbytes

    def plan(self, destination: str) -> WorkPlan:
        """Return the plan, given the destination however it was spelled."""
        flags = {
            "destination": destination,
            "to": self.to,
            "layout": layout_digest(self.prepared.layout),
            "proof": self.proof,
        }
        checkpoint = self.prepared.checkpoint
        return plan_of(checkpoint.as_stored, self.session.verb, flags, *checkpoint.made_from)

    def write(
        self,
        part: WorkPart,
        beating: Heartbeat,
        needed: Callable[[], bool],
        keep: Keep,
    ) -> None:
        """Build a part's files, after its share of the source's check."""
        own = self._own(part, part.number)
        row = ByteRow.of((file.path, file.size) for file in self.prepared.layout.files)

        def built(made: Built, called: str) -> None:
            units = {**own.results, **units_of(made.blocks, called), **self._measured()}
            keep(units, sum(file.size for file in made.digests))

        def check() -> None:
            if not self.proof:
                return
            for found in self.check(replace(self.work, division=own, counter=beating)).findings:
                if found.severity is Severity.ERROR:
                    raise as_error(found, "nothing was written; ftckpt verify SRC says more")

        share = FilesOfPart(
            f"{part.number}-{part.of}",
            lambda file: row.part(file.path, 0, file.size, part.of) == part.number,
            needed,
            built,
        )
        self.prepared.write_share(
            check=check, work=replace(self.work, counter=beating), device=self.device, share=share
        )

    def prove(
        self, other: WorkPart, written: Gathered, beating: Heartbeat
    ) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        """Compare a part's tensors with the source."""
        own = self._own(other, other.number)
        work = replace(self.work, division=own, counter=beating)
        versions = self.prepared.prove_share(work=work, device=self.device)
        return {**own.results, **self._measured()}, versions

    def whole(self, written: AllWritten, known: Mapping[str, Any]) -> Whole:
        """Prove what nobody has, and show the result."""
        self._hear([*written.records, *written.proofs])
        checked = FromRecords(written.all.results)

        def check(seen: SeenBytes | None = None) -> VerifyReport:
            return self.told(self.check(replace(self.work, division=checked)))

        report = self.prepared.write(
            check=check if self.proof else None,
            work=self.work,
            device=self.device,
            restart=False,
            parts=BuiltByParts(written.blocks, written.built, FromRecords(known)),
        )
        seconds = written.taken(report.seconds, "write")
        taken_over = max(0, report.taken_over - written.nbytes)
        return replace(report, seconds=seconds, taken_over=taken_over)

    def _measured(self) -> dict[str, Any]:
        return {MEASURED: [one.told() for one in self.measures]} if self.measures else {}

    def _hear(self, records: Sequence[ShareRecord]) -> None:
        """Take in what all parts have measured.

        Raises:
            RefusedError: a record does not say it.
        """
        for record in records:
            try:
                said = record.units.get(MEASURED, []) if self.measures else []
                for one, words in zip(self.measures, said, strict=True):
                    one.hear(words)
            except (ValueError, TypeError) as error:
                raise RefusedError(
                    f"the record of part {record.part} does not say what it has measured"
                ) from error

    def _own(self, part: WorkPart, number: int) -> OwnShare:
        content = self.prepared.layout.content or self.prepared.content
        return share_of(self.prepared.checkpoint.as_stored, part, number, content)
