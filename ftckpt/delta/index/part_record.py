"""Record a finished data file, for the index and for a later run that reuses it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.delta.codec.choose_encoding import Form, Reference
from ftckpt.delta.index import ROW, StoredBlock, pack_row
from ftckpt.strict_json import decode

if TYPE_CHECKING:
    from ftckpt.delta.codec.choose_encoding import EncodingPlan
    from ftckpt.digests.tensors import TensorDigest


class ElementSums(NamedTuple):
    """The tensor digest of some elements, as it can be merged: `TensorDigest.add` takes it."""

    elements: int = 0
    s1: int = 0
    s2: int = 0

    def plus(self, other: ElementSums) -> ElementSums:
        """Return the sums of both."""
        return ElementSums(self.elements + other.elements, self.s1 + other.s1, self.s2 + other.s2)

    def and_of(self, digest: TensorDigest | None) -> ElementSums:
        """Return the sums of these elements and of what a digest was given."""
        return self if digest is None else self.plus(ElementSums(digest.elements, *digest.sums))


@dataclass
class PartRecord:
    """One data file, finished.

    Attributes:
        plans: fingerprint of the plans by which it was encoded.
        size: bytes of the file.
        rows: of its blocks, in the order of `Part.blocks`.
        sums: by tensor, those of the target's elements in the file and of the base's.
    """

    plans: str
    size: int = 0
    rows: bytearray = field(default_factory=bytearray)
    sums: dict[int, tuple[ElementSums, ElementSums]] = field(default_factory=dict)

    def add(self, tensor: int, stored: StoredBlock, target: ElementSums, base: ElementSums) -> None:
        """Add one block and the sums of its tensor so far."""
        self.rows += pack_row(stored)
        self.sums[tensor] = target, base

    @property
    def blocks(self) -> Iterator[StoredBlock]:
        """The blocks, in order."""
        for file, reference, form, _, offset, length, stored, digest in ROW.iter_unpack(self.rows):
            yield StoredBlock(
                file, offset, length, Reference(reference), Form(form), stored, digest
            )

    def dump(self) -> str:
        """Return it as text."""
        sums = [[number, *target, *base] for number, (target, base) in self.sums.items()]
        rows = base64.b64encode(self.rows).decode()
        return json.dumps({"plans": self.plans, "size": self.size, "rows": rows, "sums": sums})

    @classmethod
    def parse(cls, text: str, plans: str, blocks: int) -> PartRecord | None:
        """Return what `dump` gave; None where it is of other plans, or not understood.

        Args:
            text: from the journal of an earlier run.
            plans: fingerprint of the plans of this one.
            blocks: how many the file has.
        """
        try:
            said = decode(text)
            rows = bytearray(base64.b64decode(said["rows"], validate=True))
            if said["plans"] != plans or len(rows) != blocks * ROW.size:
                return None
            sums = {
                int(number): (
                    ElementSums(int(a), int(b), int(c)),
                    ElementSums(int(d), int(e), int(f)),
                )
                for number, a, b, c, d, e, f in said["sums"]
            }
            return cls(plans, int(said["size"]), rows, sums)
        except (ValueError, TypeError, KeyError):
            return None


def plans_digest(
    plans: Mapping[int, EncodingPlan] | Sequence[EncodingPlan], tensors: Iterable[int]
) -> str:
    """Return a digest of what the index will say of some tensors' plans.

    Two runs may choose otherwise, by a last bit of a coefficient; a file that was encoded by one
    choice cannot be read by another.
    """
    import xxhash

    said = [(number, plans[number].reference, plans[number].fit) for number in sorted(set(tensors))]
    text = repr([(n, r.name, f and (f.rule.name, f.coefficients)) for n, r, f in said])
    digest: str = xxhash.xxh3_128_hexdigest(text.encode())
    return digest
