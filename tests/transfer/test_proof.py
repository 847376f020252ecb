"""The proof reads in small steps, whatever the size, the type and the number of tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ftckpt.transfer.proof as proof
from ftckpt import open_checkpoint
from ftckpt.dtypes import DTYPES, DType
from ftckpt.errors import CorruptError
from ftckpt.formats.same_object import SameObject
from ftckpt.limits import RateLimit
from ftckpt.progress import Counter
from ftckpt.transfer.content import Content, Known
from tests.raw_checkpoint import RawCheckpoint, checkpoints, placed

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class Added(Counter):
    """Adds up what it is told."""

    def __init__(self) -> None:
        self.total = self.done = 0

    def start(self, label: str, total: int | None, unit: str = "B") -> None:
        self.total = total or 0

    def add(self, amount: int) -> None:
        self.done += amount


def _write(path: Path, tensors: Mapping[str, tuple[str, int, bytes]]) -> Path:
    """Write one safetensors file of flat tensors: type, elements, bytes."""
    header, data = {}, b""
    for name, (dtype, count, content) in tensors.items():
        span = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": [count], "data_offsets": span}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def _prove(one: Path, two: Path, **more: Any) -> proof.Proof:
    content = Content.of(open_checkpoint(str(one)))
    return proof.prove(content, open_checkpoint(str(two)), SameObject, jobs=2, **more)


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "U8", "F32"])
def test_every_type_is_compared_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(proof, "_STEP", 100)
    monkeypatch.setattr(proof, "_TASK", 1000)
    asked: list[int] = []
    real = proof.__dict__["buffer"]

    def buffer(nbytes: int, slot: int = 0) -> memoryview:
        asked.append(nbytes)
        return real(nbytes, slot)  # type: ignore[no-any-return]

    monkeypatch.setattr(proof, "buffer", buffer)
    count = 4096
    nbytes = count * {"F4": 4, "F6_E2M3": 6, "U8": 8, "F32": 32}[dtype] // 8
    data = bytes(i * 7 % 251 for i in range(nbytes))
    one = _write(tmp_path / "one.safetensors", {"w": (dtype, count, data)})
    counter = Added()
    assert _prove(one, one, counter=counter).nbytes == nbytes
    assert counter.done == counter.total == nbytes
    assert max(asked) <= 100
    for at in (0, nbytes // 2, nbytes - 1):
        damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        two = _write(tmp_path / "two.safetensors", {"w": (dtype, count, damaged)})
        with pytest.raises(CorruptError, match="of w are not what"):
            _prove(one, two)


def test_what_a_writer_made_of_an_object_is_compared(tmp_path: Path) -> None:
    data = b"\x00\x00\x80?"
    one = _write(tmp_path / "one.safetensors", {"w": ("F32", 1, data)})
    two = _write(tmp_path / "two.safetensors", {"w": ("F32", 1, data), "step": ("F32", 1, data)})
    plain = Content.of(open_checkpoint(str(one)))
    result = open_checkpoint(str(two))
    with pytest.raises(CorruptError, match="has step, which nobody asked for"):
        proof.prove(plain, result, SameObject)
    good = Known((1,), DTYPES["float32"], data)
    found = proof.prove(replace(plain, known={"step": good}), result, SameObject)
    assert (found.tensors, found.nbytes) == (2, 8)
    for bad, says in (
        (good._replace(data=bytes(4)), "step is not what the source holds"),
        (good._replace(dtype=DTYPES["float16"]), r"step is float32\[1\] in the result"),
    ):
        with pytest.raises(CorruptError, match=says):
            proof.prove(replace(plain, known={"step": bad}), result, SameObject)
    with pytest.raises(CorruptError, match="lacks more"):
        proof.prove(replace(plain, known={"step": good, "more": good}), result, SameObject)


def test_many_tensors_share_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"w{i}": ("U8", i % 5, bytes(i % 5)) for i in range(1000)}
    one = _write(tmp_path / "one.safetensors", tensors)
    handed: list[int] = []
    real = proof.__dict__["run"]

    def run(tasks: Any, work: Any, **more: Any) -> Any:
        whole = list(tasks)
        handed.extend(map(len, whole))
        return real(whole, work, **more)

    monkeypatch.setattr(proof, "run", run)
    counter = Added()
    assert _prove(one, one, counter=counter).tensors == 1000
    assert counter.done == counter.total == 2000
    assert len(handed) < 10
    assert sum(handed) == 800  # an empty tensor has no bytes
    tensors["w999"] = ("U8", 4, b"\0\0\0\1")
    with pytest.raises(CorruptError, match="of w999 are not what"):
        _prove(one, _write(tmp_path / "two.safetensors", tensors))


def test_it_reads_no_faster_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = _write(tmp_path / "one.safetensors", {"w": ("U8", 1000, bytes(1000))})
    taken: list[int] = []
    monkeypatch.setattr(RateLimit, "take", lambda self, nbytes: taken.append(nbytes))
    _prove(one, one, limiter=RateLimit(1.0))
    assert sum(taken) == 2000


@settings(deadline=None, max_examples=40)
@given(checkpoints(), st.data())
def test_a_result_that_is_placed_in_any_way_is_compared_byte_by_byte(
    drawn: tuple[RawCheckpoint, dict[str, Array]], data: st.DataObject
) -> None:
    source, truth = drawn
    tensors = {key: (source.tensors[key].dtype, whole) for key, whole in truth.items()}
    result = data.draw(results(tensors))
    content = Content.of(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "_STEP", data.draw(st.sampled_from([128, 300, 1 << 20])))
        patch.setattr(proof, "_TASK", data.draw(st.sampled_from([128, 500, 1 << 20])))
        counter = Added()
        assert proof.prove(content, result, SameObject, counter=counter).tensors == len(truth)
        assert counter.done == counter.total == content.nbytes
        info = result.tensors[data.draw(st.sampled_from(sorted(truth)))]
        held = [p.extent for p in info.pieces if not p.replica and p.extent.length]
        extent = data.draw(st.sampled_from(held))
        store = result.source.store
        damaged = bytearray(store.read(extent.file))
        damaged[extent.offset + data.draw(st.integers(0, extent.length - 1))] ^= 1
        store.put(extent.file, bytes(damaged))
        with pytest.raises(CorruptError, match=f"of {info.name} are not what the source holds"):
            proof.prove(content, result, SameObject)


@st.composite
def results(draw: st.DrawFn, tensors: Mapping[str, tuple[DType, Array]]) -> RawCheckpoint:
    """Draw a result of the same tensors, cut and placed in another way."""
    return placed(draw, tensors, "raw-result")
