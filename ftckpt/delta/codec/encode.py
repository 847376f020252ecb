"""Encode a target against a base, block by block, with the elements asked for when needed.

`DeltaEncoder` is told how to read; it plans each tensor by a sample and encodes each block on its
own, in any order and from many threads. Who writes the payloads, and where, is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import Box, Kind
from ftckpt.delta.index import ROW, BaseTensor, DeltaTensor, StoredBlock, pack_row
from ftckpt.delta.pack.pair import DeltaPair
from ftckpt.delta.pack.tensor_bytes import RecentBlocks
from ftckpt.digests.tensors import TensorDigest

from .choose_encoding import (
    ALONE,
    BLOCK,
    EFFORTS,
    TINY,
    Effort,
    EncodingPlan,
    Form,
    Reference,
    choose,
    encode_block,
    sample_ranges,
    untried,
)
from .fit_predictor import Fit, FitSettings, fits
from .predict import RULES, DeltaSide, Need, predict
from .words import EXPECTED, as_words, scratch, word_count, words_of

if TYPE_CHECKING:
    from .decode import Fill
    from .words import Array


class EncodedBlock(NamedTuple):
    """One block, ready to be written.

    Attributes:
        tensor: its tensor's place in the list of pairs.
        block: its number in the tensor.
        reference, form: how it is stored.
        payload: the bytes to write, before this thread encodes another block: it uses the memory
            again. None where the block is as its reference.
        nbytes: of its elements.
        stored: XXH3-64 of the payload.
        digest: XXH3-128 of the elements.
        target: the tensor digest of these elements alone, to be merged; None if not asked for.
        base: likewise of the base's elements; None where the tensor has no base.
    """

    tensor: int
    block: int
    reference: Reference
    form: Form
    payload: bytes | memoryview
    nbytes: int
    stored: bytes
    digest: bytes
    target: TensorDigest | None = None
    base: TensorDigest | None = None

    def at(self, file: int, offset: int) -> StoredBlock:
        """Return the block as the index knows it, once its payload has a place."""
        return StoredBlock(
            file, offset, len(self.payload), self.reference, self.form, self.stored, self.digest
        )


class DeltaEncoder:
    """Encodes the tensors of one target; may be used from many threads.

    Args:
        pairs: the target's tensors (`ftckpt.delta.pack.pair`).
        target: gives the target's bytes, by key.
        base: gives the base's bytes, by the base's keys; None without a base.
        settings: of the optimizer, as far as known, for a tensor's pair; guesses otherwise.
        effort: how much is tried.
        digests: of which sides blocks carry tensor digests. They cost as much as the encoding; ask
            for them where nobody knows them yet.
    """

    def __init__(
        self,
        pairs: Sequence[DeltaPair],
        target: Fill,
        base: Fill | None = None,
        settings: Callable[[DeltaPair], FitSettings] = lambda pair: FitSettings(),
        effort: Effort = EFFORTS[2],
        digests: Container[DeltaSide] = (),
    ) -> None:
        self.pairs = pairs
        self._target = target
        self._base = base
        self._settings = settings
        self._effort = effort
        self._digests = digests
        self._recent = RecentBlocks()

    def blocks(self, number: int) -> int:
        """Return how many blocks the tensor at a place in the list of pairs has."""
        return self.pairs[number].blocks

    def plan(self, number: int) -> EncodingPlan:
        """Choose, by a sample, how a tensor is stored.

        Raises:
            FtckptError: what reading the sample raises.
        """
        pair = self.pairs[number]
        if pair.info.nbytes <= TINY:
            return untried(pair.info.dtype, with_base=self._has_base(pair))
        dtype, size = pair.info.dtype, words_of(pair.info.dtype).size
        ranges = sample_ranges(word_count(dtype, pair.info.numel))
        values = _sampled(self._target, pair.info.key, ranges, size)
        base = None
        if pair.base is not None and self._base is not None:
            base = _sampled(self._base, pair.base, ranges, size)
        held: dict[Need, Array] = {}
        tried: list[tuple[Fit, Sequence[Array]]] = []
        if self._may_predict(pair):
            for need in self._available(pair):
                if need == Need(None, DeltaSide.BASE):
                    assert base is not None
                    held[need] = base
                else:
                    side, key = self._place(pair, need)
                    held[need] = _sampled(self._fill(side), key, ranges, 4)
            for fit in fits(pair.info.kind, values, held, self._settings(pair)):
                if fit.rule.fits(dtype) and (self._effort.predictions or not fit.coefficients):
                    tried.append((fit, [held[need] for need in fit.rule.needs]))
        return choose(dtype, values, base, tried, self._effort)

    def encode(self, number: int, block: int, plan: EncodingPlan) -> EncodedBlock:
        """Encode one block of a tensor.

        Args:
            number: the tensor's place in the list of pairs.
            block: which, from 0.
            plan: as `plan` has chosen for the tensor.

        Raises:
            FtckptError: what reading the elements raises.
        """
        import xxhash

        pair = self.pairs[number]
        words = words_of(pair.info.dtype)
        start = block * BLOCK * words.each
        count = min(BLOCK * words.each, word_count(pair.info.dtype, pair.info.numel) - start)
        read = partial(self._read, start=start, count=count)
        values = read(DeltaSide.TARGET, pair.info.key, words.size)
        base = None
        wanted = plan.reference is Reference.BASE or DeltaSide.BASE in self._digests
        if wanted and self._base is not None and pair.base is not None:
            base = read(DeltaSide.BASE, pair.base, words.size)
        kind, reference = plan.reference, base
        if plan.reference is Reference.PREDICTION:
            assert plan.fit is not None
            rule = plan.fit.rule
            arrays = [read(*self._place(pair, need), 4) for need in rule.needs]
            reference = scratch(count, words.size, EXPECTED)
            if not predict(rule, arrays, plan.fit.coefficients, reference):
                kind = Reference.NOTHING
        if kind is Reference.NOTHING:
            reference = None
        form, payload = encode_block(values, reference, plan.choice)
        if form in ALONE:
            kind = Reference.NOTHING
        return EncodedBlock(
            number,
            block,
            kind,
            form,
            payload,
            values.nbytes,
            xxhash.xxh3_64_digest(payload),
            xxhash.xxh3_128_digest(values.data),
            self._digest(DeltaSide.TARGET, pair, values, start),
            None if base is None else self._digest(DeltaSide.BASE, pair, base, start),
        )

    def tensor(
        self, number: int, plan: EncodingPlan, first: int, digest: str, base_digest: str = ""
    ) -> DeltaTensor:
        """Return a tensor's entry in the index.

        Args:
            number: the tensor's place in the list of pairs.
            plan: by which its blocks were encoded.
            first: row of its first block (`Rows.first`).
            digest: its tensor digest.
            base_digest: that of the base's tensor; needed where it has one.
        """
        info, base, helpers, _ = self.pairs[number]
        fit = plan.fit if plan.reference is Reference.PREDICTION else None
        return DeltaTensor(
            info.component,
            info.name,
            info.kind,
            info.shape,
            info.dtype,
            digest,
            None if base is None else BaseTensor(base, base_digest),
            fit,
            () if fit is None else tuple(helpers[kind] for kind in fit.rule.helpers),
            first,
            stored_name=info.stored_name,
        )

    def _may_predict(self, pair: DeltaPair) -> bool:
        return self._effort.predictions or Kind.MASTER in pair.helpers

    def _available(self, pair: DeltaPair) -> set[Need]:
        """Return what there is of what any rule may need for a tensor."""
        found = set()
        for rule in RULES.values():
            for need in rule.needs if rule.fits(pair.info.dtype) else ():
                owner = pair if need.kind is None else self._helper(pair, need.kind)
                if owner is not None and (need.side is DeltaSide.TARGET or self._has_base(owner)):
                    found.add(need)
        return found

    def _has_base(self, pair: DeltaPair) -> bool:
        return pair.base is not None and self._base is not None

    def _helper(self, pair: DeltaPair, kind: Kind) -> DeltaPair | None:
        number = pair.helpers.get(kind)
        return None if number is None else self.pairs[number]

    def _place(self, pair: DeltaPair, need: Need) -> tuple[DeltaSide, str]:
        """Return from whom, and by which key, what a rule needs is read."""
        owner = pair if need.kind is None else self._helper(pair, need.kind)
        assert owner is not None
        if need.side is DeltaSide.TARGET:
            return need.side, owner.info.key
        assert owner.base is not None
        return need.side, owner.base

    def _fill(self, side: DeltaSide) -> Fill:
        if side is DeltaSide.TARGET:
            return self._target
        assert self._base is not None
        return self._base

    def _read(self, side: DeltaSide, key: str, size: int, *, start: int, count: int) -> Array:
        fill = self._fill(side)
        return as_words(self._recent.read(fill, side, key, start * size, count * size), size)

    def _digest(
        self, side: DeltaSide, pair: DeltaPair, words: Array, start: int
    ) -> TensorDigest | None:
        if side not in self._digests:
            return None
        dtype, shape = pair.info.dtype, pair.info.shape
        digest = TensorDigest(dtype, shape)
        digest.update(Box.whole(shape), words, start * words.itemsize * 8 // dtype.bits)
        return digest


class Rows:
    """The rows of an index, filled in as blocks are written, in any order.

    Args:
        blocks: number of blocks of each tensor, in the index's order.
    """

    def __init__(self, blocks: Sequence[int]) -> None:
        self.first = [0]
        for count in blocks:
            self.first.append(self.first[-1] + count)
        self._rows = bytearray(self.first[-1] * ROW.size)

    def put(self, tensor: int, number: int, block: StoredBlock) -> None:
        """Set the row of one block of a tensor."""
        at = (self.first[tensor] + number) * ROW.size
        self._rows[at : at + ROW.size] = pack_row(block)

    def dump(self) -> bytes:
        """Return all rows."""
        return bytes(self._rows)


def _sampled(fill: Fill, key: str, ranges: Sequence[tuple[int, int]], size: int) -> Array:
    total = sum(stop - start for start, stop in ranges)
    data = memoryview(bytearray(total * size))
    at = 0
    for start, stop in ranges:
        length = (stop - start) * size
        fill(key, start * size, data[at : at + length])
        at += length
    return as_words(data, size)
