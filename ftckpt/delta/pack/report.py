"""Count what packing made of a checkpoint: by component, kind and method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from ftckpt.delta.codec.blocks import Form, Reference
from ftckpt.delta.codec.predict import CASTS
from ftckpt.delta.codec.words import words_of
from ftckpt.delta.index import DeltaIndex, DeltaTensor, StoredBlock
from ftckpt.reports import IF_ANY, UNSAID, said_as

if TYPE_CHECKING:
    from ftckpt.delta.pack.advice import Advice
    from ftckpt.manifest import Manifest
    from ftckpt.transfer.prove.against_source import Proof


class Method(StrEnum):
    """How a block is stored."""

    DERIVED = "derived"  # it is another tensor of the checkpoint, in another type
    EQUAL = "equal"  # to the base
    PREDICTED = "predicted"  # what the optimizer's rule says, and what that misses
    DIFFERENCE = "difference"  # to the base, as numbers
    XOR = "xor"  # with the base
    SPARSE = "sparse"  # what changed since the base, and where
    ALONE = "alone"  # compressed without the base
    PLAIN = "plain"  # as it is

    @property
    def reads_the_base(self) -> bool:
        """Whether a block so stored cannot be decoded without its base."""
        return self not in (Method.DERIVED, Method.ALONE, Method.PLAIN)


@dataclass(frozen=True, slots=True)
class PackedShare:
    """A part of what was packed.

    Attributes:
        bytes_in: of elements.
        bytes_out: of them as stored.
        ratio: the first over the second; None where nothing is stored.
    """

    bytes_in: int
    bytes_out: int
    ratio: float | None

    @classmethod
    def of(cls, bytes_in: int, bytes_out: int) -> PackedShare:
        """Return a share with its ratio."""
        return cls(bytes_in, bytes_out, bytes_in / bytes_out if bytes_out else None)


@dataclass(frozen=True)
class PackReport:
    """What packing did.

    Attributes:
        url: where the delta stands.
        base: where its base stands; None for a full one.
        tensors: number of logical tensors.
        objects: number of objects, byte for byte.
        files: number of files, the manifest aside.
        bytes_in: of the tensors' elements, and of what is stored beside them, once.
        bytes_out: of all files, the index among them.
        ratio: the first over the second.
        components: what was packed, by component and kind (`model.param`), and as `objects` what
            lies beside the tensors.
        methods: the tensors alone, by method.
        index_bytes: of the index.
        content: the digest of the content, by which a delta based on this one names it.
        taken_over: bytes that an earlier, killed run had made.
        already_there: whether an earlier run had finished and this one only swept up.
        proof: what was compared; None where nothing was.
        seconds: how long each stage took: `check`, `encode`, `prove`.
        manifest: as written; None where an earlier run had finished.
        advice: whether it pays on a storage of a given rate.
        break_even: bytes a second; on slower storage it does, where no rate was given.
    """

    url: str = field(metadata=said_as("destination"))
    base: str | None
    tensors: int = 0
    objects: int = 0
    files: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    ratio: float | None = None
    components: Mapping[str, PackedShare] = field(default_factory=dict)
    methods: Mapping[Method, PackedShare] = field(default_factory=dict)
    index_bytes: int = 0
    content: str = ""
    taken_over: int = 0
    already_there: bool = False
    proof: Proof | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    manifest: Manifest | None = field(default=None, metadata=UNSAID)
    advice: Advice | None = field(default=None, metadata=IF_ANY)
    break_even: float | None = field(default=None, metadata=IF_ANY)

    @property
    def reported(self) -> bool:
        """Whether the document has all that is known: not where an earlier run had finished."""
        return self.already_there


def method_of(tensor: DeltaTensor, block: StoredBlock) -> Method:
    """Return how a block of a tensor is stored."""
    if block.reference is Reference.NOTHING:
        return Method.PLAIN if block.form is Form.PLAIN else Method.ALONE
    if block.reference is Reference.PREDICTION:
        derived = tensor.fit is not None and tensor.fit.rule in CASTS
        return Method.DERIVED if derived and block.form is Form.EXACT else Method.PREDICTED
    forms = {Form.EXACT: Method.EQUAL, Form.DIFFERENCE: Method.DIFFERENCE, Form.XOR: Method.XOR}
    return forms.get(block.form, Method.SPARSE)


def shares(index: DeltaIndex) -> tuple[dict[str, PackedShare], dict[Method, PackedShare]]:
    """Return what a delta holds by component and kind, and by method; tied copies once."""
    components: dict[str, list[int]] = {}
    methods: dict[Method, list[int]] = {}
    for tensor in index.tensors:
        if tensor.key in index.aliases:
            continue
        name = f"{tensor.component}.{tensor.kind.value}"
        whole = tensor.block_words * words_of(tensor.dtype).size
        for number, block in enumerate(index.blocks_of(tensor)):
            nbytes = min(whole, tensor.nbytes - number * whole)
            for count in (
                components.setdefault(name, [0, 0]),
                methods.setdefault(method_of(tensor, block), [0, 0]),
            ):
                count[0] += nbytes
                count[1] += block.length
    in_order = {method: methods[method] for method in Method if method in methods}
    return (
        {name: PackedShare.of(*count) for name, count in components.items()},
        {method: PackedShare.of(*count) for method, count in in_order.items()},
    )
