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

import ftckpt.transfer.prove.against_source as proof
from ftckpt import open_checkpoint
from ftckpt.checkpoint import Checkpoint, Piece
from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.digests.tensors import digest_tensor
from ftckpt.errors import CorruptError
from ftckpt.extents import Box, Extent
from ftckpt.formats.state.same_object import SameObject
from ftckpt.transfer.content import Content, Known
from ftckpt.transfer.prove.against_digests import DigestProof
from ftckpt.workers import Work
from ftckpt.workers.limits import RateLimit
from tests.builders.raw_checkpoint import RawCheckpoint, checkpoints, placed
from tests.campaign import examples
from tests.counting import Added

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


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
    return proof.prove(content, open_checkpoint(str(two)), SameObject, Work(threads=2, **more))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compare in steps of a hundred bytes; return what is asked of memory."""
    sizes: list[int] = []
    real = proof.__dict__["buffer"]

    def buffer(nbytes: int, slot: int = 0) -> memoryview:
        sizes.append(nbytes)
        return real(nbytes, slot)  # type: ignore[no-any-return]

    monkeypatch.setattr(proof, "buffer", buffer)
    monkeypatch.setattr(proof, "_STEP", 100)
    monkeypatch.setattr(proof, "_TASK", 1000)
    return sizes


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "U8", "F32"])
def test_every_type_is_compared_in_steps(tmp_path: Path, asked: list[int], dtype: str) -> None:
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


def _repeating(path: Path, **more: Any) -> Checkpoint:
    """Open a file whose tensor `again` is a replica of `w` and none of its own."""
    result = open_checkpoint(str(path))
    w, again = result.tensors["w"], result.tensors["again"]
    (piece,) = again.pieces
    repeated = w._replace(pieces=(*w.pieces, piece._replace(replica=1, **more)))
    rest = {key: info for key, info in result.tensors.items() if key != "again"}
    result.tensors = rest | {"w": repeated}
    return result


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "U8", "F32"])
def test_replicas_of_every_type_are_compared_in_steps(
    tmp_path: Path, asked: list[int], dtype: str
) -> None:
    count = 4096
    nbytes = count * {"F4": 4, "F6_E2M3": 6, "U8": 8, "F32": 32}[dtype] // 8
    data = bytes(i * 7 % 251 for i in range(nbytes))
    w = (dtype, count, data)
    content = Content.of(open_checkpoint(str(_write(tmp_path / "one.safetensors", {"w": w}))))
    digest = digest_tensor(content.checkpoint, content.checkpoint.tensors["w"])
    for prover in (proof.prove, DigestProof({"w": digest})):
        two = _repeating(_write(tmp_path / "two.safetensors", {"w": w, "again": w}))
        counter = Added()
        assert prover(content, two, SameObject, Work(counter=counter)).nbytes == 2 * nbytes
        assert counter.done == counter.total == 2 * nbytes
        for at in (0, nbytes // 2, nbytes - 1):
            damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            tensors = {"w": w, "again": (dtype, count, damaged)}
            two = _repeating(_write(tmp_path / "two.safetensors", tensors))
            with pytest.raises(CorruptError, match=r"of w, as .* repeats them, are not what"):
                prover(content, two, SameObject)
    assert max(asked) <= 100


def test_a_replica_without_a_place_fails(tmp_path: Path) -> None:
    w = ("U8", 8, bytes(8))
    content = Content.of(open_checkpoint(str(_write(tmp_path / "one.safetensors", {"w": w}))))
    two = _write(tmp_path / "two.safetensors", {"w": w, "again": w})
    digests = {"w": digest_tensor(content.checkpoint, content.checkpoint.tensors["w"])}
    for more, says in (
        ({"box": Box((1,), (8,))}, r"replica \[1:9\] leaves \[8\]"),
        ({"box": Box((), ())}, "leaves"),
        ({"flat": (4, 9)}, r"range \[4, 9\) of a replica leaves"),
        ({"extent": Extent("two.safetensors", 0, 7)}, "has 7 bytes and needs 8"),
    ):
        for prover in (proof.prove, DigestProof(digests)):
            with pytest.raises(CorruptError, match=says):
                prover(content, _repeating(two, **more), SameObject)


def test_replicas_of_what_was_an_object_are_compared(tmp_path: Path) -> None:
    data = b"\x00\x00\x80?"
    one = _write(tmp_path / "one.safetensors", {"v": ("F32", 1, data)})
    known = {"w": Known((1,), DTYPES["float32"], data)}
    content = replace(Content.of(open_checkpoint(str(one))), known=known)
    for again, holds in ((data, True), (bytes(4), False)):
        tensors = {"v": ("F32", 1, data), "w": ("F32", 1, data), "again": ("F32", 1, again)}
        result = _repeating(_write(tmp_path / "two.safetensors", tensors))
        if holds:
            counter = Added()
            assert proof.prove(content, result, SameObject, Work(counter=counter)).nbytes == 12
            assert counter.done == counter.total == 12
        else:
            with pytest.raises(CorruptError, match=r"of w, as .* are not what the main"):
                proof.prove(content, result, SameObject)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("said", [True, False])
def test_tied_weights_that_are_stored_apart_are_compared_apart(
    tmp_path: Path, named: bool, said: bool
) -> None:
    """The source may name both or one, and the result's reader may say that they are tied."""
    w, other = ("U8", 4, b"same"), ("U8", 4, b"sane")
    one = _write(tmp_path / "one.safetensors", {"w": w, "head": w} if named else {"w": w})
    content = replace(Content.of(open_checkpoint(str(one))), aliases={"head": "w"})
    digests = {key: digest_tensor(content.checkpoint, content.checkpoint.tensors["w"])
               for key in content.tensors}  # fmt: skip
    for head, holds in ((w, True), (other, False)):
        result = open_checkpoint(str(_write(tmp_path / "two.safetensors", {"w": w, "head": head})))
        result.aliases = {"head": "w"} if said else {}
        for prover in (proof.prove, DigestProof(digests)):
            if holds:
                assert prover(content, result, SameObject).nbytes == 8
                continue
            with pytest.raises(CorruptError, match="head") as caught:
                prover(content, result, SameObject)
            assert caught.value.tensor == "head"


def test_what_tensors_share_is_compared_once(tmp_path: Path) -> None:
    step = ("F32", 1, b"\x00\x00\x80?")
    one = dict.fromkeys(("w", "v", "other"), step)
    content = Content.of(open_checkpoint(str(_write(tmp_path / "one.safetensors", one))))
    two = _write(tmp_path / "two.safetensors", one | {"again": step})
    result = _repeating(two)
    shared = result.tensors["w"].pieces
    result.tensors = {
        key: info if key == "other" else info._replace(pieces=shared)
        for key, info in result.tensors.items()
    }
    counter = Added()
    assert proof.prove(content, result, SameObject, Work(counter=counter)).nbytes == 4 * 4
    assert counter.done == counter.total == 4 * 4
    other = _write(tmp_path / "one.safetensors", one | {"v": ("F32", 1, bytes(4))})
    with pytest.raises(CorruptError, match="of v are not what the source holds"):
        proof.prove(Content.of(open_checkpoint(str(other))), result, SameObject)


def test_many_tensors_share_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"w{i}": ("U8", i % 5, bytes(i % 5)) for i in range(1000)}
    one = _write(tmp_path / "one.safetensors", tensors)
    handed: list[int] = []
    real = Work.spread

    def spread(work: Work, tasks: Any, do: Any) -> Any:
        whole = list(tasks)
        handed.extend(map(len, whole))
        return real(work, whole, do)

    monkeypatch.setattr(Work, "spread", spread)
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


@settings(deadline=None, max_examples=examples(20, 160))
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
        found = proof.prove(content, result, SameObject, Work(counter=counter))
        assert found.tensors == len(truth)
        assert counter.done == counter.total == found.nbytes == _held(result)
        key, piece = _damage(result, data)
        says = f", as {piece.extent.file} repeats them, are" if piece.replica else " are"
        with pytest.raises(CorruptError, match=f"of {key}{says} not what the source holds"):
            proof.prove(content, result, SameObject)


@settings(deadline=None, max_examples=examples(20, 160))
@given(checkpoints(), st.data())
def test_replicas_must_equal_what_a_digest_has_proven(
    drawn: tuple[RawCheckpoint, dict[str, Array]], data: st.DataObject
) -> None:
    source, truth = drawn
    tensors = {key: (source.tensors[key].dtype, whole) for key, whole in truth.items()}
    result = data.draw(results(tensors))
    content = Content.of(source)
    digests = {key: digest_tensor(source, info) for key, info in source.tensors.items()}
    counter = Added()
    found = DigestProof(digests)(content, result, SameObject, Work(counter=counter))
    assert counter.done == counter.total == found.nbytes == _held(result)
    alone = DigestProof(digests, replicas=False)
    assert alone(content, result, SameObject).nbytes == content.nbytes
    key, piece = _damage(result, data)
    says = f"of {key}, as {piece.extent.file} repeats them, are not what the main piece"
    with pytest.raises(CorruptError, match=says if piece.replica else f"{key} .* has the digest"):
        DigestProof(digests)(content, result, SameObject)
    if piece.replica:
        alone(content, result, SameObject)


def _held(result: RawCheckpoint) -> int:
    """Return the bytes of all pieces."""
    return sum(p.extent.length for info in result.tensors.values() for p in info.pieces)


def _damage(result: RawCheckpoint, data: st.DataObject) -> tuple[str, Piece]:
    """Draw a piece and change one of its bits; return its tensor's key too."""
    info = result.tensors[data.draw(st.sampled_from(sorted(result.tensors)))]
    piece = data.draw(st.sampled_from([p for p in info.pieces if p.extent.length]))
    file, offset, length = piece.extent
    damaged = bytearray(result.source.store.read(file))
    damaged[offset + data.draw(st.integers(0, length - 1))] ^= 1
    result.source.store.put(file, bytes(damaged))
    return info.key, piece


@st.composite
def results(draw: st.DrawFn, tensors: Mapping[str, tuple[DType, Array]]) -> RawCheckpoint:
    """Draw a result of the same tensors, cut and placed in another way, some of it repeatedly."""
    return placed(draw, tensors, "raw-result", replicas=True)
