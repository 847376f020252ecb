"""Copy a checkpoint by several machines: each writes a share, and reads back another's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.errors import ExitCode, FtckptError, RefusedError, UsageError
from ftckpt.findings import counted
from ftckpt.manifest.seal import utc_now
from ftckpt.parts import WorkPart
from ftckpt.parts.division import FromRecords, OwnShare
from ftckpt.parts.finish import consume, elected, gather
from ftckpt.parts.place import Heartbeat, PartsPlace, host, place_beside
from ftckpt.parts.plan import names_of, plan_of
from ftckpt.parts.proofs import PROOF, WRITE, Neighbours
from ftckpt.parts.record import ShareRecord
from ftckpt.parts.shares import ByteRow, Shares
from ftckpt.replication.copy import CopyJob, CopyReport, copy, prepare
from ftckpt.replication.share import CopiedShare, copy_share, prove_share, versions_of
from ftckpt.storage import open_store
from ftckpt.transfer.write.blocks import BlockMade, Sum

from . import ManyOptions
from .run import named_count, named_part, require_same_number, tell_part

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.replication.options import ReplicationOptions

POLL = (0.2, 15.0)  # seconds between looks at a part that is waited for: the first and the most


@dataclass(frozen=True)
class DividedCopy:
    """A copy, divided.

    Attributes:
        invocation: of the verb.
        checkpoint: that is copied.
        destination: where to.
        options: of the copy.
        show: renders what the whole copy did.
    """

    invocation: Invocation
    checkpoint: Checkpoint
    destination: str
    options: ReplicationOptions
    show: Callable[[CopyReport], Result]

    def run(self) -> Result:
        """Do what the options of the verb ask for.

        Raises:
            FtckptError: see `copy`, and `Divided.run`.
        """
        many = self.invocation.options(ManyOptions)
        if self.options.restart:
            raise UsageError(
                "--restart would forget what other parts have copied",
                hint="remove the records and the staging place of the parts instead",
            )
        job = prepare(self.checkpoint, self.destination, self.options, self.invocation.stores)
        place = self._place(job, many.parts)
        if many.finish:
            if many.finish_last:
                raise UsageError("--finish and --finish-last are two ways to end: name one")
            return self._finish(job, place, named_count(many.part))
        part = named_part(self.invocation, many.part)
        record, again, ready = self._own(job, place, part)
        if many.finish_last and ready and elected(place, part, again=again):
            self.invocation.say(f"part {part} is the last to end, and finishes")
            return self._finish(job, place, part.of)
        return tell_part(self.invocation, place, record, again=again, stage=f".{WRITE}")

    def _place(self, job: CopyJob, elsewhere: str) -> PartsPlace:
        source = self.checkpoint.source
        stores = self.invocation.stores
        target = open_store(job.destination, stores)
        local = target.local_path()
        entries = [source.entries[file.name] for file in job.contents.beside]
        flags = {
            "destination": local or target.identity(),
            "proof": self.options.proof,
            "beside": [[e.path, e.size, e.etag, e.mtime] for e in entries],
        }
        plan = plan_of(self.checkpoint, "copy", flags, sealed=job.manifest)
        return place_beside(local or target.describe(), plan, elsewhere, stores)

    def _own(
        self, job: CopyJob, place: PartsPlace, part: WorkPart
    ) -> tuple[ShareRecord, bool, bool]:
        """Copy a part and read back others'.

        Returns:
            The part's record, whether it was there before, and whether all others have ended.
        """
        record = place.find(part, f".{WRITE}")
        again = record is not None
        neighbours = Neighbours(place, part)
        with Heartbeat(place, part, self.options.work.counter) as beating:
            if record is None:
                require_same_number(place, part)
                record = self._write(job, place, part, beating)
            if self.options.proof:
                self._read_back(job, place, neighbours, beating)
            return record, again, neighbours.ended()

    def _write(
        self, job: CopyJob, place: PartsPlace, part: WorkPart, beating: Heartbeat
    ) -> ShareRecord:
        names = names_of(self.checkpoint, job.manifest)
        own = OwnShare(Shares(self.checkpoint, names, part.of), part.number)
        row = ByteRow.of(job.sizes.items())
        began = time.monotonic()
        kept: list[ShareRecord] = []

        def keep(share: CopiedShare) -> None:
            units: dict[str, Any] = {**own.results, "built": share.built}
            for made in share.blocks:
                sums = [list(one) for one in made.sums]
                units[f"made {made.number} {made.file}"] = [made.digest.hex(), sums]
            kept.append(
                place.create(
                    ShareRecord(
                        place.plan, part, units, stage=WRITE, host=host(), ended=utc_now(),
                        seconds=time.monotonic() - began, nbytes=share.nbytes,
                    )
                )
            )  # fmt: skip

        copy_share(
            self.checkpoint, job, f"{part.number}-{part.of}",
            lambda path, at, n: row.part(path, at, n, part.of) == part.number,
            replace(self.options.work, counter=beating), known=own,
            needed=lambda: place.find(part, f".{WRITE}") is None, keep=keep,
        )  # fmt: skip
        record = kept[0] if kept else place.find(part, f".{WRITE}")
        assert record is not None
        return record

    def _read_back(
        self, job: CopyJob, place: PartsPlace, neighbours: Neighbours, beating: Heartbeat
    ) -> None:
        work = replace(self.options.work, counter=beating)
        pause, most = POLL
        while True:
            other, wait = neighbours.next()
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
        versions = versions_of(job, (one.file for one in made))
        digests = prove_share(job, [(m.file, m.number, m.digest) for m in made], work)
        units: dict[str, Any] = {f"hash {n} {f}": d.hex() for (f, n), d in digests.items()}
        units |= {f"etag {file}": etag for file, etag in versions.items()}
        units["of"] = record.stamp()
        place.create(
            ShareRecord(
                place.plan, other, units, stage=PROOF, host=host(), ended=utc_now(),
                seconds=time.monotonic() - began, nbytes=record.nbytes,
            )
        )  # fmt: skip

    def _finish(self, job: CopyJob, place: PartsPlace, number: int | None) -> Result:
        gathered = gather(place, number, [WRITE])
        of = gathered.records[0].part.of
        listed = [one for one in place.listed() if one.part.of == of and one.what == f".{PROOF}"]
        proofs = [place.read(one) for one in listed]
        if self.options.proof and len(proofs) < of:
            unread = counted(of - len(proofs), "part is", "parts are")
            self.invocation.say(f"{unread} read back here, because no other machine did")
        built = {str(record.units.get("built")) for record in gathered.records}
        if len(built) != 1:
            raise RefusedError(
                "the parts were built in several staging places, one after the other",
                hint="remove the records of the parts, and run them again",
            )
        made = [one for record in gathered.records for one in blocks_of(record)]
        known = FromRecords(_results(job, gathered.records, proofs))
        report = copy(
            self.checkpoint, self.destination, options=self.options,
            stores=self.invocation.stores, made=made, built=built.pop(), known=known,
        )  # fmt: skip
        parted = sum(record.nbytes for record in gathered.records)
        result = self.show(replace(report, taken_over=max(0, report.taken_over - parted)))
        if result.code is ExitCode.OK:
            try:
                consume(
                    # Proofs first: none outlives the record that it is of.
                    place, replace(gathered, listed=[*listed, *gathered.listed]),
                    {"code": int(result.code), "message": result.message},
                )  # fmt: skip
            except FtckptError as error:
                self.invocation.warn(f"the records could not be removed: {error}")
        return result


def blocks_of(record: ShareRecord) -> Sequence[BlockMade]:
    """Return the blocks that a part has written.

    Raises:
        RefusedError: the record does not say it.
    """
    found = []
    try:
        for key, value in record.units.items():
            word, _, rest = key.partition(" ")
            if word == "made":
                number, _, file = rest.partition(" ")
                digest, sums = value
                parts = tuple(Sum(int(a), int(b), int(c)) for a, b, c in sums)
                found.append(BlockMade(file, int(number), bytes.fromhex(digest), parts))
    except (ValueError, TypeError) as error:
        raise RefusedError(
            f"the record of part {record.part} holds a block that is none"
        ) from error
    return found


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
    read = {key: value for record in proofs for key, value in record.units.items()}
    etags = {key[5:]: value for key, value in read.items() if key.startswith("etag ")}
    now = versions_of(job, etags)
    moved = {file for file, etag in etags.items() if now.get(file) != etag}
    for key, value in read.items():
        word, _, rest = key.partition(" ")
        if word == "hash" and rest.partition(" ")[2] not in moved:
            known[key] = value
    return known
