"""When deltas pay: measured ratio and rates against the bandwidth of the storage.

Encoding and writing go on at once, so that a save takes as long as the slower of them: deltas make
it shorter where storage is slower than the encoder. That is one formula of `ftckpt plan compress`
(`ftckpt.planning.models.compression`); it stands here too, since importing it would load the
planner for each `delta pack`, and a test holds the two to each other. What deltas save on each
save, a restart pays for: it reads the full checkpoint and every delta up to its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, sqrt

from ftckpt.errors import UsageError

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
