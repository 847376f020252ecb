from __future__ import annotations

import io
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.errors import UnsupportedError
from ftckpt.formats.pickles.unpickle import Ordered
from ftckpt.formats.torch_files.stream import parse_stream
from ftckpt.formats.torch_files.write_tree import CopiedTree, Storage, Tensor, names_of, save
from ftckpt.formats.torch_files.write_zip import ZipRecord, lay_out
from ftckpt.transfer.content import Shard, SourceBox
from ftckpt.transfer.layout import Checksums, Elements, Literal, OutputFile, Zeros
from tests.builders.checkpoints import open_checkpoint
from tests.builders.materialise import file_bytes
from tests.campaign import examples

TYPES = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "complex32",
]  # fmt: skip


def literal(value: torch.Tensor) -> Tensor:
    """Return a tensor whose bytes are known."""
    value = value.contiguous()
    raw = bytes(value.reshape(-1).view(torch.uint8).tolist()) if value.numel() else b""
    dtype = DTYPES[str(value.dtype).removeprefix("torch.")]
    return Tensor(Storage((Literal(raw),)), dtype, tuple(value.shape), value.stride())


def bytes_of(segments: Sequence[Any]) -> bytes:
    return file_bytes(OutputFile("x", segments), None)  # type: ignore[arg-type]


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def without_id(data: bytes) -> bytes:
    """Blank what torch makes of the order of an unordered set: the hash of the records' names."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        id_ = archive.read("archive/.data/serialization_id")
        crc = archive.getinfo("archive/.data/serialization_id").CRC.to_bytes(4, "little")
    return data.replace(id_[:20], b"-" * 20).replace(crc, b"CRC-")


def test_the_file_is_what_torch_writes() -> None:
    big = torch.arange(100_000, dtype=torch.float64)
    state = OrderedDict(w=torch.arange(6.0).reshape(2, 3), e=torch.zeros(0, 4), s=torch.tensor(3))
    ours = Ordered({k: literal(v) for k, v in state.items()})
    tree = {"model": state, "step": 7, "big": big, "lr": [0.1, None, True]}
    made = bytes_of(save({"model": ours, "step": 7, "big": literal(big), "lr": [0.1, None, True]}))
    assert without_id(made) == without_id(saved(tree))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", TYPES)
def test_every_type_of_torch_comes_back(name: str) -> None:
    raw = torch.arange(32, dtype=torch.uint8) % 2
    value = raw.view(getattr(torch, name))
    data = bytes_of(save([literal(value), literal(value.reshape(1, -1))]))
    back = torch.load(io.BytesIO(data), weights_only=True)
    assert back[0].dtype is value.dtype
    assert back[1].shape == (1, value.numel())
    assert back[0].view(torch.uint8).equal(raw)
    assert without_id(data) == without_id(saved([value, value.reshape(1, -1).clone()]))


@pytest.mark.parametrize("name", ["qint8", "quint4x2", "float6_e2m3", "float4_e2m1"])
def test_types_that_torch_cannot_hold_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        save(Tensor(Storage(()), DTYPES[name], (0,), (1,)))


@given(
    sizes=st.lists(st.integers(0, 300), max_size=6),
    base=st.integers(0, 1000),
    folder=st.sampled_from(["archive", "m", "model_world_size_4_rank_3"]),
)
@settings(deadline=None, max_examples=examples(25, 240))
def test_an_archive_may_begin_anywhere(sizes: list[int], base: int, folder: str) -> None:
    values = [torch.arange(n, dtype=torch.int16) for n in sizes]
    # Bytes that are only known later take the way through checksums.
    tensors = [literal(v) for v in values]
    for number, tensor in enumerate(tensors):
        if number % 2:
            tensor.storage = Storage((*tensor.storage.segments, Zeros(2)))
    segments = save({"t": tensors, "n": base}, folder=folder, base=base)
    data = bytes_of([Literal(b"x" * base), *segments])[base:]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        for info in archive.infolist():
            start = (
                info.header_offset
                + 30
                + int.from_bytes(data[info.header_offset + 26 : info.header_offset + 28], "little")
            )
            start += int.from_bytes(data[info.header_offset + 28 :][:2], "little")
            assert start % 64 == 0
            assert info.filename.startswith(f"{folder}/")
    back = torch.load(io.BytesIO(data), weights_only=True)
    assert back["n"] == base
    assert all(a.equal(b) for a, b in zip(back["t"], values, strict=True))
    stream = parse_stream(lambda at, n: data[at : at + n], len(data), file="x")
    assert [ref.shape for ref in stream.tree["t"]] == [tuple(v.shape) for v in values]


def test_storages_are_shared() -> None:
    whole = literal(torch.arange(12.0))
    view = Tensor(whole.storage, whole.dtype, (3, 2), (4, 1), 1)
    back = torch.load(io.BytesIO(bytes_of(save({"a": whole, "b": view, "c": whole}))))
    assert back["a"].data_ptr() == back["c"].data_ptr()
    assert back["a"].untyped_storage().data_ptr() == back["b"].untyped_storage().data_ptr()
    assert back["b"].equal(torch.arange(12.0).as_strided((3, 2), (4, 1), 1))


def test_a_source_tree_is_carried_with_its_storages(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.arange(4.0))
    base = torch.arange(10.0)
    tree: dict[str, Any] = {
        "view": base[2:8:2], "base": base, "p": parameter, "half": torch.ones(3, dtype=torch.half),
        "f8": torch.ones(3).to(torch.float8_e5m2), "conj": torch.tensor([1 + 2j]).conj(),
        "dtype": torch.bfloat16, "size": torch.Size([2, 3]),
        "storage": torch.ones(2).untyped_storage(),
        "device": torch.device("cuda", 1), "factory": list, "rng": torch.get_rng_state(),
    }  # fmt: skip
    torch.save(tree, tmp_path / "source.pt")
    checkpoint = open_checkpoint(tmp_path / "source.pt")
    data = (tmp_path / "source.pt").read_bytes()
    stream = parse_stream(lambda at, n: data[at : at + n], len(data), file="source.pt")
    segments = save([CopiedTree(stream.tree, stream.storages), 5])
    made = file_bytes(OutputFile("out.pt", segments), checkpoint)
    back, five = torch.load(io.BytesIO(made), weights_only=False)
    assert five == 5
    for name, value in tree.items():
        if isinstance(value, torch.Tensor):
            assert back[name].equal(value), name
            assert back[name].dtype is value.dtype
    assert back["view"].stride() == (2,)
    assert back["view"].untyped_storage().data_ptr() == back["base"].untyped_storage().data_ptr()
    # torch gives a typed storage back, whatever was saved.
    assert back["storage"]._untyped_storage.tolist() == tree["storage"].tolist()
    assert isinstance(back["p"], torch.nn.Parameter)
    assert back["conj"].is_conj()
    assert (back["dtype"], tuple(back["size"]), back["device"], back["factory"]) == (
        torch.bfloat16, (2, 3), torch.device("cuda", 1), list,
    )  # fmt: skip


def test_shards_are_elements() -> None:
    shard = Shard(
        (2, 3), DTYPES["float32"], (SourceBox(Box.whole((2, 3)), "w", Box.whole((2, 3))),)
    )
    segments = save(Tensor.of(shard))
    assert [s.shard for s in segments if isinstance(s, Elements)] == [shard]


def test_no_name_no_pickle() -> None:
    with pytest.raises(UnsupportedError, match="a object cannot be written"):
        names_of(object())


@pytest.mark.parametrize("sizes", [(5 << 30, 64), (64, 5 << 30, 3), ((1 << 32) - 1, 8)])
def test_headers_beyond_four_gigabytes_are_torchs(sizes: tuple[int, ...], tmp_path: Path) -> None:
    values = [torch.empty(n, dtype=torch.uint8) for n in sizes]
    with torch.serialization.skip_data():
        torch.save(values, tmp_path / "archive.pt")
    tensors = [Tensor(Storage((Zeros(n),)), DTYPES["uint8"], (n,), (1,)) for n in sizes]
    segments = save(tensors)
    at = 0
    size = sum(s.nbytes for s in segments)
    assert (tmp_path / "archive.pt").stat().st_size == size
    with (tmp_path / "archive.pt").open("rb") as file:
        for segment in segments:
            file.seek(at)
            at += segment.nbytes
            if isinstance(segment, Zeros):
                continue  # torch skipped them too: the pages of the file, and of `values`
            assert isinstance(segment, Literal | Checksums)
            ours = segment.data if isinstance(segment, Literal) else segment.build([0] * 9)
            theirs = file.read(segment.nbytes)
            if at == size:
                ours, theirs = _directory(ours), _directory(theirs)
            assert ours == theirs


def _directory(ending: bytes) -> bytes:
    """Return what follows the serialization id, without that record's CRC."""
    last = ending.rindex(b"PK\1\2")
    return ending[ending.index(b"PK\1\2") : last + 16] + ending[last + 20 :]


def test_records_of_no_bytes_have_no_descriptor() -> None:
    data = bytes_of(
        lay_out([ZipRecord("a", ()), ZipRecord("b", (Zeros(0),)), ZipRecord("c", (Zeros(1),))])
    )
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert [i.flag_bits for i in archive.infolist()] == [0x800, 0x800, 0x808, 0x808]
        assert archive.testzip() is None
