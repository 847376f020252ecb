"""Convert or reshard a checkpoint by several machines: each builds files, and proves tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.errors import RefusedError
from ftckpt.findings import Severity, as_error
from ftckpt.manifest.seal import utc_now
from ftckpt.parts import WorkPart
from ftckpt.parts.division import FromRecords, OwnShare
from ftckpt.parts.finish import gather
from ftckpt.parts.place import Heartbeat, PartsPlace, host, place_beside
from ftckpt.parts.plan import names_of, plan_of
from ftckpt.parts.proofs import PROOF, WRITE, Neighbours, is_ready
from ftckpt.parts.record import MEASURED, ShareRecord
from ftckpt.parts.shares import ByteRow, Shares
from ftckpt.storage import open_store
from ftckpt.transfer.run import BuiltByParts, FilesOfPart
from ftckpt.transfer.write.files import Built
from ftckpt.transfer.write.journal import layout_digest

from . import ManyOptions
from .run import (
    finishes,
    is_last,
    named_count,
    named_part,
    require_same_number,
    tell_part,
    use_up,
)
from .stages import POLL, all_written, units_of

if TYPE_CHECKING:
    from ftckpt.api.writing import LaidOut
    from ftckpt.transfer.run import TransferReport
    from ftckpt.verification import VerifyReport
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
class DividedTransfer:
    """A conversion, divided.

    Attributes:
        invocation: of the verb.
        prepared: what is written, and where.
        to: name of the target format.
        work: of this process.
        device: where elements are placed.
        proof: whether source and result are checked.
        check: verifies the source.
        told: tells what the whole check of the source found, and returns it.
        show: renders what the whole did.
        measures: of computed values; each part's record keeps what it has measured.
    """

    invocation: Invocation
    prepared: LaidOut
    to: str
    work: Work
    device: str
    proof: bool
    check: Check
    told: Callable[[VerifyReport], VerifyReport]
    show: Callable[[TransferReport], Result]
    measures: Sequence[Measures] = ()

    def run(self) -> Result:
        """Do what the options of the verb ask for.

        Raises:
            FtckptError: see `ftckpt.transfer.run.transfer`, and `Divided.run`.
        """
        many = self.invocation.options(ManyOptions)
        place = self._place(many.parts)
        if finishes(many):
            return self._finish(place, named_count(many.part))
        part = named_part(self.invocation, many.part)
        record = place.find(part, f".{WRITE}")
        again = record is not None
        with Heartbeat(place, part, self.work.counter) as beating:
            if record is None:
                require_same_number(place, part)
                record = self._write(place, part, beating)
            if self.proof and self.prepared.proves_by_elements:
                self._prove(place, part, beating)
            ready = is_ready([one for one in place.listed() if one.part.of == part.of], part)
        if many.finish_last and ready and is_last(self.invocation, place, part, again=again):
            return self._finish(place, part.of)
        return tell_part(self.invocation, place, record, again=again, stage=f".{WRITE}")

    def _place(self, elsewhere: str) -> PartsPlace:
        stores = self.invocation.stores
        target = open_store(self.prepared.destination, stores)
        local = target.local_path()
        flags = {
            "destination": local or target.identity(),
            "to": self.to,
            "layout": layout_digest(self.prepared.layout),
            "proof": self.proof,
        }
        verb = self.invocation.verb
        checkpoint = self.prepared.checkpoint
        plan = plan_of(checkpoint.as_stored, verb, flags, *checkpoint.made_from)
        return place_beside(local or target.describe(), plan, elsewhere, stores)

    def _own(self, part: WorkPart, number: int) -> OwnShare:
        stored = self.prepared.checkpoint.as_stored
        content = self.prepared.layout.content or self.prepared.content
        sizes = {
            key: wanted.dtype.nbytes(_volume(wanted.shape))
            for key, wanted in content.tensors.items()
        }
        return OwnShare(Shares(stored, names_of(stored), part.of, sizes), number)

    def _write(self, place: PartsPlace, part: WorkPart, beating: Heartbeat) -> ShareRecord:
        own = self._own(part, part.number)
        row = ByteRow.of((file.path, file.size) for file in self.prepared.layout.files)
        began = time.monotonic()
        kept: list[ShareRecord] = []

        def keep(built: Built, called: str) -> None:
            units = {**own.results, **units_of(built.blocks, called), **self._measured()}
            nbytes = sum(file.size for file in built.digests)
            kept.append(
                place.create(
                    ShareRecord(
                        place.plan, part, units, stage=WRITE, host=host(), ended=utc_now(),
                        seconds=time.monotonic() - began, nbytes=nbytes,
                    )
                )
            )  # fmt: skip

        def check() -> None:
            if not self.proof:
                return
            for found in self.check(replace(self.work, division=own, counter=beating)).findings:
                if found.severity is Severity.ERROR:
                    raise as_error(found, "nothing was written; ftckpt verify SRC says more")

        share = FilesOfPart(
            f"{part.number}-{part.of}",
            lambda file: row.part(file.path, 0, file.size, part.of) == part.number,
            lambda: place.find(part, f".{WRITE}") is None,
            keep,
        )
        self.prepared.write_share(
            check=check, work=replace(self.work, counter=beating), device=self.device, share=share
        )
        record = kept[0] if kept else place.find(part, f".{WRITE}")
        assert record is not None
        return record

    def _prove(self, place: PartsPlace, part: WorkPart, beating: Heartbeat) -> None:
        """Prove the share that the part before has roughly written, once all is there."""
        other = WorkPart((part.number - 1) % part.of, part.of)
        if place.find(other, f".{PROOF}") is not None or not self._all_written(
            place, part, beating
        ):
            return
        own = self._own(part, other.number)
        began = time.monotonic()
        work = replace(self.work, division=own, counter=beating)
        written = _written(gather(place, part.of, [WRITE]).records)
        versions = self.prepared.prove_share(work=work, device=self.device)
        units = {**own.results, "versions": versions, "written": written, **self._measured()}
        place.create(
            ShareRecord(
                place.plan, other, units, stage=PROOF, host=host(), ended=utc_now(),
                seconds=time.monotonic() - began,
            )
        )  # fmt: skip

    def _all_written(self, place: PartsPlace, part: WorkPart, beating: Heartbeat) -> bool:
        """Wait until all parts are written, as long as those that are not get on."""
        others = Neighbours(place, part)
        pause, most = POLL
        while True:
            lacking = others.unwritten()
            if not lacking:
                return True
            if not all(others.lives(number) for number in lacking):
                return False
            beating.add(0)
            time.sleep(pause)
            pause = min(2 * pause, most)

    def _finish(self, place: PartsPlace, number: int | None) -> Result:
        written = all_written(
            place, number, proof=self.proof, done="proven", say=self.invocation.say
        )
        self._hear([*written.records, *written.proofs])
        known = FromRecords(self._proven(written.records, written.proofs))
        checked = FromRecords(written.all.results)

        def check() -> VerifyReport:
            return self.told(self.check(replace(self.work, division=checked)))

        report = self.prepared.write(
            check=check if self.proof else None,
            work=self.work,
            device=self.device,
            restart=False,
            parts=BuiltByParts(written.blocks, written.built, known),
        )
        taken = max(0, report.taken_over - written.nbytes)
        result = self.show(replace(report, taken_over=taken))
        use_up(self.invocation, place, written.all, result)
        return result

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

    def _proven(
        self, written: Sequence[ShareRecord], proofs: Sequence[ShareRecord]
    ) -> dict[str, Any]:
        """Return what was proven of what stands there now; of anything else nothing is known."""
        store = open_store(self.prepared.destination, self.invocation.stores)
        standing = {} if store.traits.local else {e.path: e.etag or "" for e in store.walk("")}
        now = _written(written)
        known: dict[str, Any] = {}
        for record in proofs:
            versions = record.units.get("versions")
            same = isinstance(versions, dict) and all(
                not etag or standing.get(file) == etag for file, etag in versions.items()
            )
            if same and record.units.get("written") == now:
                known |= {
                    k: v for k, v in record.units.items() if k.startswith(("prove ", "known "))
                }
        return known


def _written(records: Sequence[ShareRecord]) -> str:
    """Return a digest of the records of all that parts have written.

    Not of the blocks alone: they are the same when a part has written them anew.
    """
    import xxhash

    rows = sorted((record.part, record.stamp()) for record in records)
    digest: str = xxhash.xxh3_128_hexdigest(repr(rows).encode())
    return digest


def _volume(shape: Sequence[int]) -> int:
    volume = 1
    for length in shape:
        volume *= length
    return volume
