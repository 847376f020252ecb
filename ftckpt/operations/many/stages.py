"""What is divided into writing and proving: a copy, a conversion."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ftckpt.errors import RefusedError
from ftckpt.findings import counted
from ftckpt.manifest.seal import utc_now
from ftckpt.parts import WorkPart
from ftckpt.parts.finish import Gathered, gather
from ftckpt.parts.plan import WorkPlan
from ftckpt.parts.proofs import PROOF, WRITE
from ftckpt.parts.record import ShareRecord
from ftckpt.parts.shared_folder import PartsPlace, host, place_beside
from ftckpt.storage import StoreOptions, open_store
from ftckpt.transfer.write.blocks import BlockMade, Sum

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
