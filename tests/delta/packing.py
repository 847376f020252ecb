"""Deltas in memory: tensors as dictionaries of bytes, one data file, one index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import xxhash

from ftckpt.checkpoint import Box, Kind, TensorInfo, Topology
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.delta import (
    EFFORTS,
    BaseName,
    DataFile,
    DeltaDecoder,
    DeltaEncoder,
    DeltaIndex,
    DeltaObject,
    EncodedBlock,
    FitSettings,
    Rows,
    content_digest,
    pair,
)
from ftckpt.delta.codec.predict import DeltaSide
from ftckpt.delta.index.parse import parse_index
from ftckpt.digests.tensors import TensorDigest


@dataclass
class State:
    """Tensors in memory, by key."""

    infos: dict[str, TensorInfo] = field(default_factory=dict)
    data: dict[str, bytes] = field(default_factory=dict)

    def add(
        self, name: str, dtype: str, shape: tuple[int, ...], data: Any, kind: Kind = Kind.PARAM
    ) -> None:
        component = "model" if kind is Kind.PARAM else "optimizer"
        info = TensorInfo(component, name, kind, shape, DTYPES[dtype], ())
        self.infos[info.key] = info
        self.data[info.key] = data if isinstance(data, bytes) else data.tobytes()
        assert len(self.data[info.key]) == DTYPES[dtype].nbytes(prod(shape))

    def fill(self, key: str, offset: int, view: memoryview) -> None:
        part = self.data[key][offset : offset + len(view)]
        assert len(part) == len(view)
        view[:] = part

    def digest(self, key: str) -> str:
        info = self.infos[key]
        digest = TensorDigest(info.dtype, info.shape)
        digest.update(Box.whole(info.shape), self.data[key])
        return digest.hexdigest()

    def content(self) -> str:
        return content_digest({key: self.digest(key) for key in self.infos})


@dataclass
class Packed:
    """A delta in memory."""

    index: DeltaIndex
    files: dict[str, bytes]
    blocks: list[EncodedBlock]

    def read(self, name: str, offset: int, length: int) -> bytes:
        return self.files[name][offset : offset + length]

    def decoder(self, base: Any = None, **options: Any) -> DeltaDecoder:
        return DeltaDecoder(self.index, self.read, base, **options)

    def unpack(self, base: Any = None) -> dict[str, bytes]:
        decoder = self.decoder(base)
        result = {}
        for tensor in self.index.tensors:
            view = memoryview(bytearray(tensor.nbytes))
            decoder.fill(tensor.key, 0, view)
            result[tensor.key] = bytes(view)
        return result

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.files.values()))


def pack(
    target: State,
    base: State | None = None,
    *,
    base_fill: Any = None,
    settings: FitSettings = FitSettings(),  # noqa: B008 - a tuple of constants
    effort: int = 2,
    objects: Mapping[str, bytes] | None = None,
    digests: bool = False,
) -> Packed:
    """Pack a state, and check that what the encoder says of digests is right."""
    pairs = pair(target.infos.values(), {} if base is None else base.infos)
    fill = base_fill or (None if base is None else base.fill)
    encoder = DeltaEncoder(
        pairs,
        target.fill,
        fill,
        lambda pair: settings,
        EFFORTS[effort],
        tuple(DeltaSide) if digests else (),
    )
    rows = Rows([encoder.blocks(number) for number in range(len(pairs))])
    data = bytearray()
    tensors, blocks = [], []
    for number, each in enumerate(pairs):
        plan = encoder.plan(number)
        sums = [TensorDigest(each.info.dtype, each.info.shape) for _ in range(2)]
        for block in range(encoder.blocks(number)):
            made = encoder.encode(number, block, plan)
            rows.put(number, block, made.at(0, len(data)))
            data += made.payload
            blocks.append(made)
            for total, part in zip(sums, (made.target, made.base), strict=True):
                if part is not None:
                    total.merge(part)
        base_digest = "" if base is None or each.base is None else base.digest(each.base)
        entry = encoder.tensor(
            number, plan, rows.first[number], target.digest(each.info.key), base_digest
        )
        if digests:
            assert sums[0].hexdigest() == entry.digest
            assert entry.base is None or sums[1].hexdigest() == entry.base.digest
        tensors.append(entry)
    kept = []
    for name, record in (objects or {}).items():
        digest = xxhash.xxh3_128_digest(record)
        kept.append(DeltaObject(name, "bytes", None, 0, len(data), len(record), digest))
        data += record
    index = DeltaIndex(
        step=7,
        source_format="dcp",
        topology=Topology(world_size=2),
        base=None if base is None else BaseName("../step-6", 6, base.content()),
        files=[DataFile("00000.blocks", len(data))],
        tensors=tensors,
        objects=kept,
        aliases={},
        rows=rows.dump(),
        tool="ftckpt 0.1.0",
        created="2026-01-31T12:00:00Z",
    )
    return Packed(index, {"00000.blocks": bytes(data)}, blocks)


def reparsed(packed: Packed) -> Packed:
    """Return the delta as a reader sees it."""
    return replace(packed, index=parse_index(packed.index.dump()))


def trained(seed: int = 0, size: tuple[int, ...] = (300, 70), lr: float = 1e-3) -> list[State]:
    """Return two states one AdamW step apart: bf16 weights, masters and moments."""
    rng = np.random.default_rng(seed)
    f = np.float32
    w: Any
    g: Any
    w, g = (rng.standard_normal(size).astype(f) * f(0.02) for _ in range(2))
    m, v = g * f(0.1), g * g * f(0.05)
    states = []
    for step in (1, 2):
        if step == 2:
            g = rng.standard_normal(size).astype(f) * f(0.02)
            m = m + (g - m) * f(0.1)
            v = v * f(0.95) + f(0.05) * (g * g)
        root = np.sqrt(v) / f((1 - 0.95**step) ** 0.5) + f(1e-8)
        w = w * f(1 - lr * 0.1) + (m * f(-lr / (1 - 0.9**step))) / root
        state = State()
        state.add("w", "bfloat16", size, bf16(w))
        for kind, array in ((Kind.MASTER, w), (Kind.EXP_AVG, m), (Kind.EXP_AVG_SQ, v)):
            state.add("w", "float32", size, array, kind)
        states.append(state)
    return states


def bf16(array: Any) -> Any:
    """Round float32 to the bits of bfloat16."""
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
