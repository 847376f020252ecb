"""Pack a delta by several machines: each fills data files, and proves what others filled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ftckpt.errors import FtckptError, RefusedError
from ftckpt.findings import Severity, as_error
from ftckpt.parts import WorkPart
from ftckpt.parts.division import FromRecords, OwnShare
from ftckpt.parts.plan import WorkPlan, plan_of
from ftckpt.parts.shared_folder import Heartbeat
from ftckpt.parts.shares import ByteRow
from ftckpt.transfer.content import Content

from . import Session, Whole
from .building import AllWritten, DividedBuild, Keep, blocks_of, share_of, units_of

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint, TensorInfo
    from ftckpt.delta.codec.choose_encoding import EncodingPlan
    from ftckpt.delta.pack.build import PackedFile
    from ftckpt.delta.pack.run import PackedByParts, ShareMade
    from ftckpt.formats.delta.pack import Check as SourceCheck
    from ftckpt.formats.delta.pack import PackJob
    from ftckpt.parts.finish import Gathered
    from ftckpt.parts.plan import ShareRecord
    from ftckpt.verification import VerifyReport
    from ftckpt.verification.seen import SeenBytes
    from ftckpt.workers import Division, Work

Check = Callable[["Checkpoint", "Work"], "VerifyReport"]

_DIGEST = 32  # hexadecimal digits of a tensor digest


@dataclass(frozen=True)
class DividedPack(DividedBuild):
    """A delta that is packed, divided.

    Attributes:
        session: of the operation.
        work: of this process.
        proof: whether sources and result are checked.
        destination: where it goes.
        target: what is packed.
        base: what it is packed against; None packs it whole.
        flags: that decide the bytes.
        job: returns what packs, for a check of the sources.
        check: verifies a source.
        told: tells what the whole check of a source found.
    """

    session: Session
    work: Work
    proof: bool
    destination: str
    target: Checkpoint
    base: Checkpoint | None
    flags: Mapping[str, Any]
    job: Callable[[SourceCheck], PackJob]
    check: Check
    told: Callable[[Checkpoint, VerifyReport], None]

    @property
    def nbytes(self) -> int:
        """Bytes of the target's tensors."""
        return sum(info.nbytes for info in self.target.tensors.values())

    def plan(self, destination: str) -> WorkPlan:
        """Return the plan, given the destination however it was spelled."""
        flags = {**self.flags, "destination": destination, "proof": self.proof}
        others = [] if self.base is None else [self.base]
        return plan_of(self.target, self.session.verb, flags, *others)

    def write(
        self,
        part: WorkPart,
        beating: Heartbeat,
        needed: Callable[[], bool],
        keep: Keep,
    ) -> None:
        """Fill a part's data files, after its share of the sources' checks."""
        from ftckpt.delta.pack.run import PackShare, dump_plan

        checked: dict[str, OwnShare] = {}

        def check() -> None:
            for word, source in self._sources() if self.proof else ():
                own = checked[word] = share_of(source, part, part.number)
                work = replace(self.work, division=own, counter=beating)
                for found in self.check(source, work).findings:
                    if found.severity is Severity.ERROR:
                        raise as_error(found, "nothing was written; ftckpt verify says more")

        def built(made: ShareMade) -> None:
            units = units_of(made.blocks, made.place)
            units |= {f"plan {n}": dump_plan(plan) for n, plan in made.plans.items()}
            units |= {f"digest {key}": digest for key, digest in made.base_digests.items()}
            for word, own in checked.items():
                units |= {f"{word} {key}": result for key, result in own.results.items()}
            keep(units, made.nbytes)

        def takes(files: Sequence[PackedFile], file: PackedFile) -> bool:
            row = ByteRow.of((one.path, one.nbytes) for one in files)
            return row.part(file.path, 0, file.nbytes, part.of) == part.number

        def reads(tensors: Sequence[TensorInfo], info: TensorInfo) -> bool:
            row = ByteRow.of((one.key, one.nbytes) for one in tensors)
            return row.part(info.key, 0, info.nbytes, part.of) == part.number

        share = PackShare(
            f"{part.number}-{part.of}", takes, reads, part.number == 0, check, needed, built
        )
        job = self.job(lambda source, _: self.check(source, self.work))
        job.write_share(share, replace(self.work, counter=beating))

    def prove(
        self, other: WorkPart, written: Gathered, beating: Heartbeat
    ) -> tuple[Mapping[str, Any], Mapping[str, str]] | None:
        """Compare a part's tensors, decoded, with the target's."""
        own = share_of(self.target, other, other.number, Content.of(self.target))
        blocks = [one for record in written.records for one in blocks_of(record)]
        packed = _packed(written.records, blocks, "", None)
        job = self.job(lambda source, _: self.check(source, self.work))
        versions = job.prove_share(packed, replace(self.work, division=own, counter=beating))
        return None if versions is None else (own.results, versions)

    def whole(self, written: AllWritten, known: Mapping[str, Any]) -> Whole:
        """Prove what nobody has, and show it."""
        divisions = {word: FromRecords(_beginning(written, word)) for word, _ in self._sources()}

        def check(source: Checkpoint, _: SeenBytes | None) -> VerifyReport:
            word = "target" if source is self.target else "base"
            found = self.check(source, replace(self.work, division=divisions[word]))
            self.told(source, found)
            return found

        parts = _packed(written.records, written.blocks, written.built, FromRecords(known))
        report = self.job(check).write(parts)
        seconds = written.taken(report.seconds, "encode")
        taken_over = max(0, report.taken_over - written.nbytes)
        return replace(report, seconds=seconds, taken_over=taken_over)

    def _sources(self) -> Sequence[tuple[str, Checkpoint]]:
        base = [] if self.base is None else [("base", self.base)]
        return [("target", self.target), *base]


def _beginning(written: AllWritten, word: str) -> Mapping[str, Any]:
    """Return the results of a source's check, by task."""
    return {
        key.removeprefix(f"{word} "): value
        for key, value in written.all.results.items()
        if key.startswith(f"{word} ")
    }


def _packed(
    records: Sequence[ShareRecord], blocks: Sequence[Any], built: str, known: Division | None
) -> PackedByParts:
    """Return what parts have built, as their records say.

    Raises:
        RefusedError: a record holds something else.
    """
    from ftckpt.delta.pack.run import PackedByParts, load_plan

    plans: dict[int, EncodingPlan] = {}
    digests: dict[str, str] = {}
    for record in records:
        try:
            for key, value in record.units.items():
                word, _, rest = key.partition(" ")
                if word == "plan":
                    plans.setdefault(int(rest), load_plan(value))
                elif word == "digest" and isinstance(value, str) and len(value) == _DIGEST:
                    digests[rest] = value
        except (ValueError, TypeError, KeyError, FtckptError) as error:
            message = f"the record of part {record.part} holds a plan that is none"
            raise RefusedError(message) from error
    return PackedByParts(blocks, built, plans, digests, known)
