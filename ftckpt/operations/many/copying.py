"""Copy a checkpoint by several machines: each writes a share, and reads back another's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ftckpt.digests.blocks import block_count, block_length
from ftckpt.errors import UsageError
from ftckpt.manifest.seal import utc_now
from ftckpt.parts import WorkPart
from ftckpt.parts.division import FromRecords, OwnShare
from ftckpt.parts.plan import ShareRecord, WorkPlan, names_of, plan_of, row_of
from ftckpt.parts.shared_folder import PROOF, WRITE, Heartbeat, Neighbours, PartsPlace, host
from ftckpt.parts.shares import ByteRow, Shares
from ftckpt.replication.copy import CopyJob, copy, prepare
from ftckpt.replication.share import CopiedShare, copy_share, prove_share
from ftckpt.transfer.staging.lock import marks_of
from ftckpt.transfer.write.blocks import BlockMade

from . import Session, Whole
from .building import POLL, Keep, all_written, blocks_of, place_of, units_of, write_once
from .run import OwnPart, carry_out, require_same_number, use_up

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.replication.options import ReplicationOptions


@dataclass(frozen=True)
class DividedCopy:
    """A copy, divided.

    Attributes:
        session: of the operation.
        checkpoint: that is copied.
        destination: where to.
        options: of the copy.
    """

    session: Session
    checkpoint: Checkpoint
    destination: str
    options: ReplicationOptions

    def run(self) -> Whole:
        """Do what the options of the verb ask for.

        Raises:
            FtckptError: see `copy`, and `Divided.run`.
        """
        many = self.session.division
        if self.options.restart:
            raise UsageError(
                "--restart would forget what other parts have copied",
                hint="remove the records and the staging place of the parts instead",
            )
        job = prepare(
            self.checkpoint, self.destination, self.options, self.session.stores, by_parts=True
        )
        return carry_out(
            self.session,
            lambda: self._place(job, many.parts),
            [WRITE, PROOF] if self.options.proof else [WRITE],
            lambda: sum(job.sizes.values()), partial(self._own, job), partial(self._finish, job),
        )  # fmt: skip

    def _place(self, job: CopyJob, elsewhere: str) -> PartsPlace:
        source = self.checkpoint.source

        def plan(destination: str) -> WorkPlan:
            flags = {
                "destination": destination,
                "proof": self.options.proof,
                "beside": [row_of(source, file.name) for file in job.contents.beside],
            }
            return plan_of(self.checkpoint, "copy", flags, sealed=job.manifest)

        return place_of(job.destination, elsewhere, self.session.stores, plan)

    def _own(self, job: CopyJob, place: PartsPlace, part: WorkPart) -> OwnPart:
        """Copy a part and read back others'."""
        record = place.find(part, f".{WRITE}")
        again = record is not None
        neighbours = Neighbours(place, part)
        with Heartbeat(place, part, self.options.work.counter) as beating:
            if record is None:
                require_same_number(place, part)
                record = self._write(job, place, part, beating)
            if self.options.proof:
                self._read_back(job, place, neighbours, beating)
            return OwnPart(record, again, neighbours.ended())

    def _write(
        self, job: CopyJob, place: PartsPlace, part: WorkPart, beating: Heartbeat
    ) -> ShareRecord:
        names = names_of(self.checkpoint, job.manifest)
        own = OwnShare(Shares(self.checkpoint, names, part.of), part.number)
        row = ByteRow.of(job.sizes.items())

        def write(needed: Callable[[], bool], keep: Keep) -> None:
            def kept(share: CopiedShare) -> None:
                keep({**own.results, **units_of(share.blocks, share.built)}, share.nbytes)

            copy_share(
                self.checkpoint, job, f"{part.number}-{part.of}",
                lambda path, at, n: row.part(path, at, n, part.of) == part.number,
                replace(self.options.work, counter=beating), share=_share(job, part.of),
                others=others, known=own, needed=needed, keep=kept,
            )  # fmt: skip

        def others(path: str) -> list[BlockMade] | None:
            numbers = set(_spans(job, part.of).get(path, ())) - {part.number}
            if numbers & set(Neighbours(place, part).unwritten()):
                return None
            found: list[BlockMade] = []
            for number in sorted(numbers):
                record = place.find(WorkPart(number, part.of), f".{WRITE}")
                if record is None:
                    return None
                found += (made for made in blocks_of(record) if made.file == path)
            return found

        return write_once(place, part, write)

    def _read_back(
        self, job: CopyJob, place: PartsPlace, neighbours: Neighbours, beating: Heartbeat
    ) -> None:
        work = replace(self.options.work, counter=beating)
        of = neighbours.part.of
        spans, staging = _spans(job, of), job.staging
        absent: set[int] = set()
        pause, most = POLL
        while True:
            other, wait = neighbours.next(absent)
            cut = {} if other is None else {p: s for p, s in spans.items() if other.number in s}
            if any(
                any(number in span for span in cut.values()) and neighbours.lives(number)
                for number in (neighbours.unwritten() if cut else ())
            ):
                other, wait = None, True  # what is proven now would be read again at the end
            elif other is not None and not all(staging.is_whole(job.plan, path) for path in cut):
                absent.add(other.number)  # nobody can read it before all of it is there
                continue
            if other is not None:
                self._prove(job, place, other, replace(work, counter=beating))
                pause, _ = POLL
            elif wait:
                beating.add(0)
                time.sleep(pause)
                pause = min(2 * pause, most)
            else:
                return

    def _prove(self, job: CopyJob, place: PartsPlace, other: WorkPart, work: Any) -> None:
        record = place.find(other, f".{WRITE}")
        if record is None:
            return
        began = time.monotonic()
        made = list(blocks_of(record))
        marks = marks_of(job.staging.built, (one.file for one in made))
        digests = prove_share(job, [(m.file, m.number, m.digest) for m in made], work)
        units: dict[str, Any] = {f"hash {n} {f}": d.hex() for (f, n), d in digests.items()}
        units |= {f"mark {file}": mark for file, mark in marks.items()}
        units["of"] = record.stamp()
        place.create(
            ShareRecord(
                place.plan, other, units, stage=PROOF, host=host(), ended=utc_now(),
                seconds=time.monotonic() - began, nbytes=record.nbytes,
            )
        )  # fmt: skip

    def _finish(self, job: CopyJob, place: PartsPlace, number: int | None) -> Whole:
        written = all_written(
            place, number, proof=self.options.proof, done="read back", say=self.session.on.note
        )
        known = FromRecords(_results(job, written.records, written.proofs))
        report = copy(
            self.checkpoint, self.destination, options=self.options,
            stores=self.session.stores, made=written.blocks, built=written.built, known=known,
        )  # fmt: skip
        taken = max(0, report.taken_over - written.nbytes)
        seconds = written.taken(report.seconds, "copy")
        result = replace(report, seconds=seconds, taken_over=taken)
        use_up(self.session, place, written.all, result)
        return result


def _results(
    job: CopyJob, written: Sequence[ShareRecord], proofs: Sequence[ShareRecord]
) -> dict[str, Any]:
    """Return what parts know of tasks: sums that they made before, and blocks that they read back.

    What was written anew since it was read back is to be read again.
    """
    stands = {record.part: record.stamp() for record in written}
    proofs = [one for one in proofs if one.units.get("of") == stands.get(one.part)]
    known: dict[str, Any] = {}
    for record in written:
        known |= {key: value for key, value in record.units.items() if key.startswith("crc ")}
    marks = [
        {key[5:]: value for key, value in one.units.items() if key.startswith("mark ")}
        for one in proofs
    ]
    standing = marks_of(job.staging.built, (file for files in marks for file in files))
    for record, files in zip(proofs, marks, strict=True):
        for key, value in record.units.items():
            word, _, rest = key.partition(" ")
            file = rest.partition(" ")[2]
            if word == "hash" and files.get(file) and files[file] == standing[file]:
                known[key] = value
    return known


def _share(job: CopyJob, of: int) -> int:
    """Return the bytes of a part, roughly."""
    return -(-sum(job.sizes.values()) // of)


def _spans(job: CopyJob, of: int) -> dict[str, range]:
    """Return the parts that write blocks of one file, for each file that several write."""
    row, share = ByteRow.of(job.sizes.items()), _share(job, of)
    found: dict[str, range] = {}
    for path, size in job.sizes.items():
        if size and job.staging.cuts(size, share):
            last = block_length(size, block_count(size) - 1)
            begin = row.part(path, 0, block_length(size, 0), of)
            end = row.part(path, size - last, last, of)
            if begin != end:
                found[path] = range(begin, end + 1)
    return found
