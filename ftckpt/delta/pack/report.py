"""Count what packing made of a checkpoint: by component, kind and method.

When deltas pay: measured ratio and rates against the bandwidth of the storage.

Encoding and writing go on at once, so that a save takes as long as the slower of them: deltas make
it shorter where storage is slower than the encoder. That is one formula of `ftckpt plan compress`
(`ftckpt.planning.models.storage`); it stands here too, since importing it would load the
planner for each `delta pack`, and a test holds the two to each other. What deltas save on each
save, a restart pays for: it reads the full checkpoint and every delta up to its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import floor, sqrt
from typing import TYPE_CHECKING

from ftckpt.delta.codec.choose_encoding import Form, Reference
from ftckpt.delta.codec.predict import CASTS
from ftckpt.delta.codec.words import words_of
from ftckpt.delta.index import DeltaIndex, DeltaTensor, StoredBlock
from ftckpt.errors import UsageError
from ftckpt.reports import IF_ANY, UNSAID, said_as

if TYPE_CHECKING:
    from ftckpt.manifest import Manifest
    from ftckpt.transfer.prove.against_source import Proof


# No quantity lies outside; within, no product or quotient overflows.
_LARGEST, _SMALLEST = 1e30, 1e-30

SAVES_PER_RESTORE = 24.0  # saves every hour, a restart a day


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do, and the numbers behind it.

    A time is one over that of a plain save or restore, which moves every byte of the state as it
    is: below 1 is shorter.

    Attributes:
        pays: whether saving a delta is shorter than saving plain.
        break_even: storage bandwidth in bytes a second, below which it is; 0 where it never is.
        chain: deltas on one full checkpoint for which saving and restoring together take least;
            0 where every checkpoint is best kept full.
        full_save, delta_save: time of saving a full checkpoint, and a delta.
        full_restore, link_restore: time of restoring a full checkpoint, and of each delta on it.
        stored: bytes kept for a checkpoint over its plain size, on the average of such a chain.
        save: time of a save on the average of such a chain.
        often: how many times as often to save, at the same share of the run for saving and lost
            work: by Young's rule the best interval goes with the root of what a save takes.
        sentence: the advice in words.
    """

    pays: bool
    break_even: float
    chain: int
    full_save: float
    delta_save: float
    full_restore: float
    link_restore: float
    stored: float
    save: float
    often: float
    sentence: str

    def restore(self, deltas: int) -> float:
        """Return the time to restore the last of a chain of deltas based on a full checkpoint."""
        return self.full_restore + deltas * self.link_restore


def advise(
    *,
    ratio: float,
    encode_rate: float,
    decode_rate: float,
    storage_write: float,
    storage_read: float | None = None,
    full_ratio: float = 1.0,
    saves_per_restore: float = SAVES_PER_RESTORE,
) -> Advice:
    """Say whether deltas pay on some storage, and how many to put on a full checkpoint.

    Args:
        ratio: of a delta: plain bytes of the state over bytes stored, > 0.
        encode_rate: bytes of the state that the encoder takes in a second, > 0; of all threads or
            machines together, as the storage's.
        decode_rate: bytes of the state that the decoder gives a second, > 0.
        storage_write: bytes a second that the storage takes, > 0.
        storage_read: bytes a second that it gives, > 0; as many as it takes where not known.
        full_ratio: of a full checkpoint, > 0; 1 where it is stored plain.
        saves_per_restore: how often the run saves for each time that it restarts, > 0.

    Raises:
        UsageError: an argument is out of range or not a number.
    """
    read = storage_write if storage_read is None else storage_read
    for what, value in (
        ("the compression ratio", ratio),
        ("the rate of encoding", encode_rate),
        ("the rate of decoding", decode_rate),
        ("the bandwidth of the storage", storage_write),
        ("the bandwidth of reading", read),
        ("the full ratio", full_ratio),
        ("saves for a restore", saves_per_restore),
    ):
        if not _SMALLEST <= value <= _LARGEST:
            raise UsageError(f"{what} must be above zero and finite, not {value:g}")
    full_save = full_restore = 1.0
    if full_ratio != 1.0:
        full_save = _pipelined(full_ratio, encode_rate, storage_write)
        full_restore = _pipelined(full_ratio, decode_rate, read)
    delta_save = _pipelined(ratio, encode_rate, storage_write)
    link = _pipelined(ratio, decode_rate, read)
    # The times of a plain save and a plain restore need not be equal.
    apart = storage_write / read
    chain = _chain(full_save, delta_save, link * apart, saves_per_restore)
    kept = chain + 1
    stored = (1 / full_ratio + chain / ratio) / kept
    save = (full_save + chain * delta_save) / kept
    pays = delta_save < 1 and ratio > 1
    break_even = encode_rate if ratio > 1 else 0.0
    return Advice(
        pays=pays,
        break_even=break_even,
        chain=chain,
        full_save=full_save,
        delta_save=delta_save,
        full_restore=full_restore,
        link_restore=link,
        stored=stored,
        save=save,
        often=sqrt(1 / save),
        sentence=_sentence(
            pays, ratio, break_even, storage_write, delta_save, chain,
            full_restore + chain * link, stored, sqrt(1 / save), saves_per_restore,
        ),
    )  # fmt: skip


def _pipelined(ratio: float, codec: float, storage: float) -> float:
    """Return the time of coding and moving at once, over that of moving every byte plain."""
    return max(storage / codec, 1 / ratio)


def _chain(full_save: float, delta_save: float, link: float, saves: float) -> int:
    """Return the number of deltas based on a full checkpoint for which the least time is spent.

    Between two restarts there are N saves, of which one in n + 1 is full, and a restart finds on
    average n / 2 deltas: N (F + n D) / (n + 1) + L n / 2 is least at n + 1 = sqrt(2 N (F - D) / L).
    """
    gain = full_save - delta_save
    if gain <= 0:
        return 0

    def spent(n: int) -> float:
        return saves * (full_save + n * delta_save) / (n + 1) + link * n / 2

    best = max(0, floor(sqrt(2 * saves * gain / link) - 1))
    return min((best, best + 1), key=spent)


def _sentence(
    pays: bool,
    ratio: float,
    break_even: float,
    storage: float,
    delta_save: float,
    chain: int,
    restore: float,
    stored: float,
    often: float,
    saves: float,
) -> str:
    if ratio <= 1:
        return "a delta is not smaller than the checkpoint here: keep every checkpoint full"
    if not pays:
        return (
            f"a delta takes {delta_save:.2g} times as long to save as the plain checkpoint: storage"
            f" of {_rate(storage)} is not slower than encoding, {_rate(break_even)}; it saves room"
            f" alone, {1 - 1 / ratio:.0%}"
        )
    begin = (
        f"a delta is saved in {delta_save:.0%} of the time of the plain checkpoint; that pays on"
        f" storage slower than {_rate(break_even)}"
    )
    if not chain:
        return f"{begin}, but with a restart for every {saves:g} saves keep every checkpoint full"
    return (
        f"{begin}; with a restart for every {saves:g} saves put {chain} "
        f"{'delta' if chain == 1 else 'deltas'} on each full checkpoint: the last takes"
        f" {restore:.2g} times as long to restore, {stored:.0%} of the room is needed,"
        f" and saving {often:.2g} times as often costs no more"
    )


def _rate(rate: float) -> str:
    unit, size = next(
        (pair for pair in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if rate >= pair[1]),
        ("B", 1.0),
    )
    return f"{rate / size:.3g} {unit}/s"


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
        extra_read: bytes of the sources that their checks and the proof have read, beside those
            that were read for the encoding and served the checks too.
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
    extra_read: int = 0
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
