"""What is built by parts and then proven by them: what part I wrote, another one compares.

What is divided into writing and proving: a copy, a conversion.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ftckpt.errors import RefusedError
from ftckpt.findings import counted
from ftckpt.manifest.seal import utc_now
from ftckpt.parts import WorkPart
from ftckpt.parts.division import OwnShare
from ftckpt.parts.finish import Gathered, gather
from ftckpt.parts.plan import ShareRecord, WorkPlan, names_of
from ftckpt.parts.shared_folder import (
    PROOF,
    WRITE,
    Heartbeat,
    Neighbours,
    PartsPlace,
    host,
    is_ready,
    place_beside,
)
from ftckpt.parts.shares import Shares
from ftckpt.storage import StoreOptions, open_store
from ftckpt.transfer.places import absolute
from ftckpt.transfer.staging.local import built_below
from ftckpt.transfer.staging.lock import marks_of, same
from ftckpt.transfer.write.blocks import BlockMade, Sum

from . import Session, Whole
from .run import OwnPart, carry_out, require_same_number, use_up

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.transfer.content import Content
    from ftckpt.workers import Work


POLL = (0.2, 15.0)  # seconds between looks at a part that is waited for: the first and the most


# Is told of the units of what a part has made, and of its bytes.
Keep = Callable[[Mapping[str, Any], int], None]


def place_of(
    destination: str, elsewhere: str, stores: StoreOptions, plan: Callable[[str], WorkPlan]
) -> PartsPlace:
    """Return the place of the records of what is written: beside it, or elsewhere.

    Args:
        destination: where the result goes.
        elsewhere: the place that the user names; "" for beside it.
        stores: how to reach object stores.
        plan: returns the plan, given the destination however it was spelled.
    """
    target = open_store(destination, stores)
    local = target.local_path()
    made = plan(local or target.identity())
    return place_beside(local or target.describe(), made, elsewhere, stores)


def write_once(
    place: PartsPlace, part: WorkPart, write: Callable[[Callable[[], bool], Keep], None]
) -> ShareRecord:
    """Write a part; return its record, or the one that another process made of the same part.

    Args:
        place: of the records.
        part: which.
        write: is given what says, when no other process can do the same part, whether there is
            work, and what keeps the record of the work while none can.
    """
    began = time.monotonic()
    kept: list[ShareRecord] = []

    def keep(units: Mapping[str, Any], nbytes: int) -> None:
        kept.append(
            place.create(
                ShareRecord(
                    place.plan, part, units, stage=WRITE, host=host(), ended=utc_now(),
                    seconds=time.monotonic() - began, nbytes=nbytes,
                )
            )
        )  # fmt: skip

    write(lambda: place.find(part, f".{WRITE}") is None, keep)
    record = kept[0] if kept else place.find(part, f".{WRITE}")
    assert record is not None
    return record


@dataclass(frozen=True)
class AllWritten:
    """The records of a plan of which every part is written.

    Attributes:
        proofs: of what was proven; of some parts, and perhaps of an earlier writing.
        built: what the staging place is called in which all have written.
        all: the records of what was written. Its files are theirs and the proofs', proofs first:
            none outlives the record that it is of.
    """

    proofs: Sequence[ShareRecord]
    built: str
    all: Gathered

    @property
    def records(self) -> Sequence[ShareRecord]:
        """The records of what was written."""
        return self.all.records

    @property
    def blocks(self) -> list[BlockMade]:
        """All blocks that were written."""
        return [one for record in self.records for one in blocks_of(record)]

    @property
    def nbytes(self) -> int:
        """Bytes of them."""
        return sum(record.nbytes for record in self.records)

    def taken(self, here: Mapping[str, float], writing: str) -> Mapping[str, float]:
        """Return the seconds of each stage with those of all parts.

        Args:
            here: seconds of the stages in this process.
            writing: the stage that parts have written in.
        """
        parts = {writing: self.records, "prove": self.proofs}
        return {
            name: seconds + sum(record.seconds for record in parts.get(name, ()))
            for name, seconds in here.items()
        }


def all_written(
    place: PartsPlace, number: int | None, *, proof: bool, done: str, say: Callable[[str], None]
) -> AllWritten:
    """Read the records of all parts.

    Args:
        place: of the records.
        number: of parts; None: as many as they say.
        proof: whether the result is proven.
        done: what the finisher does itself where no other machine has: "proven".
        say: is told how many of them.

    Raises:
        RefusedError: they were not built in one staging place, or see `gather`.
        IncompleteError: see `gather`.
    """
    gathered = gather(place, number, [WRITE])
    of = gathered.records[0].part.of
    listed = [one for one in place.listed() if one.part.of == of and one.what == f".{PROOF}"]
    if proof and len(listed) < of:
        unread = counted(of - len(listed), "part is", "parts are")
        say(f"{unread} {done} here, because no other machine did")
    built = {str(record.units.get("built")) for record in gathered.records}
    if len(built) != 1:
        raise RefusedError(
            "the parts were built in several staging places, one after the other",
            hint="remove the records of the parts, and run them again",
        )
    return AllWritten(
        [place.read(one) for one in listed],
        built.pop(),
        replace(gathered, listed=[*listed, *gathered.listed]),
    )


def units_of(blocks: Iterable[BlockMade], built: str) -> dict[str, Any]:
    """Return blocks that a part has written as a record holds them; `blocks_of` reads them."""
    units: dict[str, Any] = {"built": built}
    for made in blocks:
        sums = [list(one) for one in made.sums]
        note = [made.note] if made.note else []
        units[f"made {made.number} {made.file}"] = [made.digest.hex(), sums, *note]
    return units


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
                digest, sums, *note = value
                parts = tuple(Sum(int(a), int(b), int(c)) for a, b, c in sums)
                said = "".join(map(str, note))
                found.append(BlockMade(file, int(number), bytes.fromhex(digest), parts, said))
    except (ValueError, TypeError) as error:
        raise RefusedError(
            f"the record of part {record.part} holds a block that is none"
        ) from error
    return found


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
