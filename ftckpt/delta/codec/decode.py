"""Read any bytes of any tensor of a delta, decoding the blocks that they need and no others.

A decoder is asked for bytes of a tensor's dense C order, and asks the base for bytes in the same
way, so that a decoder serves as the base of another: a chain.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from ftckpt.delta.index import DeltaIndex, DeltaTensor, StoredBlock
from ftckpt.delta.pack.scratch import Lend, lender
from ftckpt.errors import CorruptError, UsageError
from ftckpt.storage.computed import Fill as Fill

from .choose_encoding import Form, Reference, decode_block
from .predict import DeltaSide, predict
from .words import GUESS, as_words, scratch, words_of

if TYPE_CHECKING:
    from ftckpt.checkpoint import Look

    from .words import Array

# Return bytes of a data file: its name, offset and length.
ReadPayload = Callable[[str, int, int], "bytes | memoryview"]

CACHE = 64 << 20


class DeltaDecoder:
    """Decodes one delta; may be used from many threads.

    Args:
        index: its index.
        read: reads its data files.
        base: gives the base's bytes, by the base's keys; None where the delta needs no base.
        cache: says how many bytes of decoded blocks may be kept for the next question: a block
            that is asked for in parts, or that several predictions need.

    Attributes:
        look: finds blocks that predict others where they may lie decoded, as in files that are
            being made of them; what it gives counts only where its digest is right.

    Raises:
        UsageError: the delta needs a base and none is given.
    """

    look: Look | None = None

    def __init__(
        self,
        index: DeltaIndex,
        read: ReadPayload,
        base: Fill | None = None,
        cache: Callable[[], int] = lambda: CACHE,
    ) -> None:
        if index.base is not None and base is None:
            raise UsageError(f"the delta depends on {index.base.path}, which was not given")
        self.index = index
        self._numbers = {tensor.key: number for number, tensor in enumerate(index.tensors)}
        # Blocks that predict others are kept: who reads a parameter's tensors decodes each once.
        self._predicts = {number for tensor in index.tensors for number in tensor.helpers}
        self._read = read
        self._base = base
        self._limit = cache
        self._kept: OrderedDict[tuple[int, int], Array] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()

    def fill(self, key: str, offset: int, view: memoryview) -> None:
        """Put the bytes of a tensor that begin at `offset` of its dense C order into `view`.

        Raises:
            ValueError: the tensor ends before them.
            CorruptError: a block is damaged (`bad-digest`, `bad-delta`), or the base is another
                than the delta was made from (`wrong-base`).
            FtckptError: what reading the data files or the base raises.
        """
        number = self._numbers[key]
        tensor = self.index.tensors[number]
        nbytes, word = tensor.nbytes, words_of(tensor.dtype).size
        if offset < 0 or offset + len(view) > nbytes:
            raise ValueError(f"{key} has {nbytes} bytes, not {offset + len(view)}")
        size = tensor.block_words * word
        done = 0
        while done < len(view):
            block, skip = divmod(offset + done, size)
            length = min(size, nbytes - block * size)
            part = view[done : done + length - skip]
            if len(part) == length and number not in self._predicts:
                self._decode(number, block, as_words(part, word))
            else:
                # An array's assignment lets other threads go on, a view's does not.
                held = self._whole(number, block).view("u1")
                as_words(part, 1)[...] = held[skip : skip + len(part)]
            done += len(part)

    def _whole(self, number: int, block: int, *, helps: bool = False) -> Array:
        """Return a decoded block, from the cache where it is there.

        Args:
            number: of the tensor.
            block: of it.
            helps: whether it is not asked for itself, so that it may lie elsewhere by now.
        """
        import numpy as np

        with self._lock:
            kept = self._kept.get((number, block))
            if kept is not None:
                self._kept.move_to_end((number, block))
                return kept
        tensor = self.index.tensors[number]
        whole = tensor.block_words
        count = min(whole, tensor.words - block * whole)
        out = np.empty(count, f"<u{words_of(tensor.dtype).size}")
        if not helps or not self._found(tensor, block, out):
            self._decode(number, block, out)
        limit = self._limit()
        with self._lock:
            if (number, block) not in self._kept:
                self._held += out.nbytes
            self._kept[number, block] = out
            while self._held > limit and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                self._held -= dropped.nbytes
        return out

    def _found(self, tensor: DeltaTensor, block: int, out: Array) -> bool:
        """Put a block into `out` from where it lies decoded; say whether it does."""
        import xxhash

        look = self.look  # once: who set it may end while another thread decodes
        view = out.view("u1").data
        at = block * tensor.block_words * out.itemsize
        if look is None or not look(tensor.key, at, view):
            return False
        return xxhash.xxh3_128_digest(view) == self.index.block(tensor, block).digest

    def _decode(self, number: int, block: int, out: Array) -> None:
        """Put one whole block into `out`, its bytes and its result checked."""
        import xxhash

        tensor = self.index.tensors[number]
        stored = self.index.block(tensor, block)
        payload = memoryview(b"")
        if stored.form is not Form.EXACT:
            payload = memoryview(self._payload(tensor, stored))
        if stored.reference is Reference.NOTHING:
            self._unfold(tensor, stored, payload, None, out)
        else:
            with lender() as lend:
                reference = self._reference(tensor, block, stored, lend, out)
                self._unfold(tensor, stored, payload, reference, out)
        if xxhash.xxh3_128_digest(out.data) != stored.digest:
            self._explain(tensor, block, stored)

    def _unfold(
        self,
        tensor: DeltaTensor,
        stored: StoredBlock,
        payload: memoryview,
        reference: Array | None,
        out: Array,
    ) -> None:
        try:
            decode_block(stored.form, payload, reference, out)
        except CorruptError as error:
            raise self._located(error, tensor, stored) from None

    def _payload(self, tensor: DeltaTensor, stored: StoredBlock) -> bytes | memoryview:
        import xxhash

        file = self.index.files[stored.file].name
        payload = self._read(file, stored.offset, stored.length)
        if xxhash.xxh3_64_digest(payload) != stored.stored:
            raise CorruptError(
                f"{file} holds other bytes than the index says for a block of {tensor.key}",
                kind="bad-digest",
                file=file,
                tensor=tensor.key,
                offset=stored.offset,
                length=stored.length,
            )
        return payload

    def _reference(
        self, tensor: DeltaTensor, block: int, stored: StoredBlock, lend: Lend, out: Array
    ) -> Array:
        """Return what a block is stored against; put into `out` where the block is the same."""
        count, size = out.size, out.itemsize
        exact = stored.form is Form.EXACT
        if stored.reference is Reference.BASE:
            if exact:
                self._fill_base(tensor, block, out.view("u1").data)
                return out
            return self._base_words(tensor, block, count, lend)
        assert tensor.fit is not None
        rule = tensor.fit.rule
        helpers = dict(zip(rule.helpers, tensor.helpers, strict=True))
        arrays = []
        for need in rule.needs:
            if need.kind is not None and need.side is DeltaSide.TARGET:
                arrays.append(self._whole(helpers[need.kind], block, helps=True))
                continue
            owner = tensor if need.kind is None else self.index.tensors[helpers[need.kind]]
            arrays.append(self._base_words(owner, block, count, lend))
        guess = out if exact else scratch(count, size, GUESS)
        predict(rule, arrays, tensor.fit.coefficients, guess, watch=False)
        return guess

    def _base_words(self, tensor: DeltaTensor, block: int, count: int, lend: Lend) -> Array:
        size = words_of(tensor.dtype).size
        view = lend(count * size)
        self._fill_base(tensor, block, view)
        return as_words(view, size)

    def _fill_base(self, tensor: DeltaTensor, block: int, view: memoryview) -> None:
        assert self._base is not None
        assert tensor.base is not None
        size = words_of(tensor.dtype).size
        self._base(tensor.base.key, block * tensor.block_words * size, view)

    def _located(
        self, error: CorruptError, tensor: DeltaTensor, stored: StoredBlock
    ) -> CorruptError:
        file = self.index.files[stored.file].name
        return CorruptError(
            f"{error.message} (in {file}, of {tensor.key})",
            kind=error.kind,
            file=file,
            tensor=tensor.key,
            offset=stored.offset,
            length=stored.length,
        )

    def _explain(self, tensor: DeltaTensor, block: int, stored: StoredBlock) -> None:
        """Raise for a block that was stored as it is and decodes to something else."""
        if tensor.base is None and self.index.base is None:
            raise CorruptError(
                f"block {block} of {tensor.key} decodes to other elements than were packed",
                kind="bad-delta",
                tensor=tensor.key,
            )
        where = self.index.base.path if self.index.base is not None else ""
        raise CorruptError(
            f"block {block} of {tensor.key} decodes to other elements than were packed: "
            f"the base is not what {where} was",
            hint="find the base whose content digest the delta names",
            kind="wrong-base",
            tensor=tensor.key,
        )
