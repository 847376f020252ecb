"""What is built by parts and then proven by them: what part I wrote, another one compares."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ftckpt.manifest.seal import utc_now
from ftckpt.parts import WorkPart
from ftckpt.parts.division import OwnShare
from ftckpt.parts.finish import Gathered, gather
from ftckpt.parts.plan import names_of
from ftckpt.parts.proofs import PROOF, WRITE, Neighbours, is_ready
from ftckpt.parts.record import ShareRecord
from ftckpt.parts.shared_folder import Heartbeat, PartsPlace, host
from ftckpt.parts.shares import Shares
from ftckpt.storage import open_store
from ftckpt.transfer.places import absolute
from ftckpt.transfer.staging.local import built_below
from ftckpt.transfer.staging.marks import marks_of, same

from . import Session, Whole
from .run import OwnPart, carry_out, require_same_number, use_up
from .stages import POLL, AllWritten, Keep, all_written, place_of, write_once

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.parts.plan import WorkPlan
    from ftckpt.transfer.content import Content
    from ftckpt.workers import Work

# How the keys of a proof's tasks begin.
_PROVEN = ("prove ", "known ", "sum ", "rest ")


class DividedBuild(ABC):
    """Something that is built by parts, divided.

    Attributes:
        session: of the operation.
        work: of this process.
        proof: whether sources and result are checked.
        destination: where the result goes.
    """

    session: Session
    work: Work
    proof: bool
    destination: str

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that are read, roughly."""

    @abstractmethod
    def plan(self, destination: str) -> WorkPlan:
        """Return the plan, given the destination however it was spelled."""

    @abstractmethod
    def write(
        self,
        part: WorkPart,
        beating: Heartbeat,
        needed: Callable[[], bool],
        keep: Keep,
    ) -> None:
        """Build a part's files.

        Args:
            part: which.
            beating: is told of the work.
            needed: asked when no other process can do the same part: whether there is work.
            keep: told of the units of what was made, and its bytes, while no other can do the same.
        """

    @abstractmethod
    def prove(
        self, other: WorkPart, written: Gathered, beating: Heartbeat
    ) -> tuple[Mapping[str, Any], Mapping[str, str]] | None:
        """Prove the share that a part has roughly written.

        Returns:
            The results, and marks of the files as they were before; None where nothing can be
            proven.
        """

    @abstractmethod
    def whole(self, written: AllWritten, known: Mapping[str, Any]) -> Whole:
        """Finish from what was written, and what is known to be proven."""

    def run(self) -> Whole:
        """Do what the options of the verb ask for.

        Raises:
            FtckptError: what the verb raises, and `Divided.run`.
        """
        elsewhere = self.session.division.parts
        return carry_out(
            self.session,
            lambda: place_of(self.destination, elsewhere, self.session.stores, self.plan),
            [WRITE, PROOF] if self.proof else [WRITE],
            lambda: self.nbytes, self._part, self._finish,
        )  # fmt: skip

    def _part(self, place: PartsPlace, part: WorkPart) -> OwnPart:
        record = place.find(part, f".{WRITE}")
        again = record is not None
        with Heartbeat(place, part, self.work.counter) as beating:
            if record is None:
                require_same_number(place, part)
                record = write_once(place, part, partial(self.write, part, beating))
            if self.proof:
                self._prove(place, part, beating)
            ready = is_ready([one for one in place.listed() if one.part.of == part.of], part)
            return OwnPart(record, again, ready)

    def _prove(self, place: PartsPlace, part: WorkPart, beating: Heartbeat) -> None:
        """Prove the share that the part before has roughly written, once all is there."""
        other = WorkPart((part.number - 1) % part.of, part.of)
        if place.find(other, f".{PROOF}") is not None or not self._all_written(
            place, part, beating
        ):
            return
        began = time.monotonic()
        all_of_them = gather(place, part.of, [WRITE])
        proven = self.prove(other, all_of_them, beating)
        if proven is None:
            return
        results, marks = proven
        written = written_digest(all_of_them.records)
        units = {**results, "marks": marks, "written": written}
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

    def _finish(self, place: PartsPlace, number: int | None) -> Whole:
        written = all_written(
            place, number, proof=self.proof, done="proven", say=self.session.on.note
        )
        result = self.whole(written, self._proven(written.records, written.proofs))
        use_up(self.session, place, written.all, result)
        return result

    def _proven(
        self, written: Sequence[ShareRecord], proofs: Sequence[ShareRecord]
    ) -> dict[str, Any]:
        """Return what was proven of what stands there now; of anything else nothing is known."""
        now = written_digest(written)
        proofs = [one for one in proofs if one.units.get("written") == now]
        store = open_store(self.destination, self.session.stores)
        if store.traits.local:
            store = built_below(absolute(store))
        standing = marks_of(store, (file for one in proofs for file in one.units.get("marks", ())))
        known: dict[str, Any] = {}
        for record in proofs:
            if same(record.units.get("marks"), standing):
                known |= {k: v for k, v in record.units.items() if k.startswith(_PROVEN)}
        return known


def written_digest(records: Sequence[ShareRecord]) -> str:
    """Return a digest of the records of all that parts have written.

    Not of the blocks alone: they are the same when a part has written them anew.
    """
    import xxhash

    rows = sorted((record.part, record.stamp()) for record in records)
    digest: str = xxhash.xxh3_128_hexdigest(repr(rows).encode())
    return digest


def share_of(
    checkpoint: Checkpoint, part: WorkPart, number: int, content: Content | None = None
) -> OwnShare:
    """Return a part's share of the tasks on a checkpoint.

    Args:
        checkpoint: whose files are divided.
        part: of how many parts.
        number: of the part whose share it is.
        content: tensors that are written, and divided too.
    """
    tensors = {} if content is None else content.tensors
    sizes = {key: wanted.nbytes for key, wanted in tensors.items()}
    return OwnShare(Shares(checkpoint, names_of(checkpoint), part.of, sizes), number)
