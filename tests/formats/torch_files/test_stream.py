"""torch.save streams of every shape, against torch's own tensors."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.errors import CorruptError, FtckptError, UnsafeError, UnsupportedError
from ftckpt.formats.pickles.unpickle import Inert
from ftckpt.formats.torch_files.stream import TorchStream, parse_stream
from ftckpt.formats.torch_files.table import TABLE
from ftckpt.formats.torch_files.values import (
    Composite,
    StoredStorage,
    SubclassRef,
    TensorRef,
    is_dense,
    reach,
)
from tests.campaign import examples


def saved(obj: object, *, legacy: bool = False) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(obj, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def parsed(data: bytes, base: int = 0) -> TorchStream:
    return parse_stream(
        lambda offset, length: data[offset : offset + length], len(data), file="x.pt", base=base
    )


def gathered(ref: TensorRef, stream: TorchStream, data: bytes) -> bytes:
    """Return the dense bytes of a view, element by element: slow, independent, obvious."""
    stored = stream.storages[ref.key]
    raw = stored.inline
    if raw is None:
        raw = data[stored.extent.offset : stored.extent.offset + stored.extent.length]
    size = ref.dtype.itemsize
    out = []

    def walk(dim: int, at: int) -> None:
        if dim == len(ref.shape):
            out.append(raw[at * size : (at + 1) * size])
            return
        for i in range(ref.shape[dim]):
            walk(dim + 1, at + i * ref.strides[dim])

    walk(0, ref.storage_offset)
    return b"".join(out)


def expected(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex32,
]  # fmt: skip


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype, legacy: bool) -> None:
    raw = torch.arange(96, dtype=torch.uint8)
    tensor = (raw % 2).to(torch.bool) if dtype is torch.bool else raw.view(dtype)
    tensor = tensor.reshape(2, -1)
    data = saved({"t": tensor, "part": tensor[1]}, legacy=legacy)
    stream = parsed(data)
    ref = stream.tree["t"]
    assert f"torch.{ref.dtype.name}" == str(dtype)
    assert ref.shape == tuple(tensor.shape)
    assert gathered(ref, stream, data) == expected(tensor)
    assert gathered(stream.tree["part"], stream, data) == expected(tensor[1])
    assert stream.tree["part"].key == ref.key
    assert stream.legacy is legacy


@pytest.mark.parametrize("legacy", [False, True])
def test_views_share_a_storage(legacy: bool) -> None:
    base = torch.arange(60.0).reshape(3, 4, 5)
    views = {
        "base": base,
        "t": base.permute(2, 0, 1),
        "slice": base[1:, ::2, 1],
        "expand": base[0, 0, :1].expand(7),
        "scalar": base[2, 3, 4],
        "empty": base[:0],
    }
    data = saved(views, legacy=legacy)
    stream = parsed(data)
    assert len({ref.key for ref in stream.tree.values()}) == 1
    for name, tensor in views.items():
        ref = stream.tree[name]
        assert gathered(ref, stream, data) == expected(tensor), name
        assert ref.dense is tensor.is_contiguous(), name
        span = ref.span(stream.storages)
        assert span.length == 4 * reach(ref.shape, ref.strides)
        assert stream.storages[ref.key].extent.offset <= span.offset


def test_base_moves_extents() -> None:
    data = saved(torch.arange(4.0))
    plain, moved = parsed(data), parsed(data, base=500)
    a, b = plain.storages["0"].extent, moved.storages["0"].extent
    assert b == a._replace(offset=a.offset + 500)
    assert [e.offset + 500 for _, e, _ in plain.records] == [e.offset for _, e, _ in moved.records]


def test_records_carry_the_crc_of_their_bytes() -> None:
    import zlib

    data = saved({"a": torch.arange(9.0), "b": "text"})
    stream = parsed(data)
    names = [name for name, _, _ in stream.records]
    assert names[0] == "data.pkl"
    assert {"data/0", "version", "byteorder", ".data/serialization_id"} < set(names)
    for _, extent, crc in stream.records:
        assert zlib.crc32(data[extent.offset : extent.offset + extent.length]) == crc


def test_parameters_conj_neg_and_flags() -> None:
    c = torch.arange(4.0).to(torch.complex64)
    p = torch.nn.Parameter(torch.ones(2))
    tree = parsed(saved({"p": p, "c": c.conj(), "n": c.clone().conj().imag})).tree
    assert tree["p"].parameter
    assert tree["p"].requires_grad
    assert tree["c"].conj
    assert not tree["c"].neg
    assert tree["n"].neg


def test_plain_python_values_come_back_equal() -> None:
    obj = {
        "int": 3, "big": 1 << 200, "float": 0.5, "none": None, "text": "é", "bytes": b"\0\xff",
        "list": [1, (2, 3)], "set": {1, 2}, "size": torch.Size([2, 3]), "complex": 1 + 2j,
        "ordered": OrderedDict(a=1, b=2), "array": bytearray(b"abc"), 7: "int key",
    }  # fmt: skip
    for legacy in (False, True):
        tree = parsed(saved(obj, legacy=legacy)).tree
        assert tree == {**obj, "size": (2, 3), "ordered": {"a": 1, "b": 2}}


def test_dtypes_and_devices_are_values() -> None:
    tree = parsed(saved({"dtype": torch.bfloat16, "device": torch.device("cpu")})).tree
    assert tree["dtype"].name == "bfloat16"
    assert isinstance(tree["device"], Inert)
    assert tree["device"].args == ("cpu",)


def test_sparse_quantized_and_meta_tensors_are_composites() -> None:
    dense = torch.eye(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = {
            "coo": dense.to_sparse(),
            "csr": dense.to_sparse_csr(),
            "q": torch.quantize_per_tensor(dense, 0.1, 3, torch.qint8),
            "qc": torch.quantize_per_channel(dense, torch.ones(3), torch.zeros(3), 0, torch.qint8),
        }
    made["meta"] = torch.empty(2, 3, device="meta")
    data = saved(made)
    stream = parsed(data)
    tree = stream.tree
    assert {k: v.how for k, v in tree.items()} == {
        "coo": "sparse", "csr": "sparse", "q": "quantized", "qc": "quantized", "meta": "meta",
    }  # fmt: skip
    values = tree["coo"].parts["values"]
    assert gathered(values, stream, data) == expected(torch.ones(3))
    assert tree["csr"].parts["layout"] == "torch.sparse_csr"
    assert tree["q"].parts["scale"] == 0.1
    assert tree["q"].parts["scheme"] == "torch.per_tensor_affine"
    assert tree["meta"].parts["shape"] == (2, 3)
    assert stream.opaque == ()


class Marked(torch.Tensor):
    pass


def test_a_subclass_is_a_reference_with_its_base() -> None:
    tensor = torch.arange(3.0).as_subclass(Marked)
    tensor.note = "x"  # type: ignore[attr-defined]
    stream = parsed(saved(tensor))
    ref = stream.tree
    assert isinstance(ref, SubclassRef)
    assert ref.type_name.endswith("Marked")
    assert isinstance(ref.base, TensorRef)
    assert ref.state["note"] == "x"
    assert stream.opaque == (ref.type_name,)


def test_a_tensor_with_attributes_is_a_tensor() -> None:
    tensor = torch.arange(3.0)
    tensor.partition_dim = 1  # type: ignore[attr-defined]
    assert isinstance(parsed(saved(tensor)).tree, TensorRef)


def test_a_pickled_tensor_keeps_its_bytes_inside() -> None:
    tensor = torch.arange(5.0)
    inner = pickle.dumps({"t": tensor, "same": tensor})
    assert b"_load_from_bytes" in inner
    data = rewrapped(inner)
    stream = parsed(data)
    ref = stream.tree["t"]
    stored = stream.storages[ref.key]
    assert stored.inline == expected(tensor)
    assert gathered(ref, stream, data) == expected(tensor)
    with pytest.raises(ValueError, match="no bytes of its own"):
        ref.span(stream.storages)


def test_whole_modules_are_inert() -> None:
    for legacy in (False, True):
        stream = parsed(saved(torch.nn.Linear(2, 3), legacy=legacy))
        assert isinstance(stream.tree, Inert)
        assert stream.opaque == ()
        weight = stream.tree.get("_parameters")["weight"]
        assert weight.shape == (3, 2)


def test_reads_of_a_small_stream_are_two() -> None:
    data = saved({"w": torch.zeros(200_000)})
    reads: list[int] = []

    def read(offset: int, length: int) -> bytes:
        reads.append(length)
        return data[offset : offset + length]

    parse_stream(read, len(data), file="x.pt", tail=4096)
    assert len(reads) == 2
    assert sum(reads) < 6000


# --- refused ------------------------------------------------------------------------------------


def refused(data: bytes) -> FtckptError:
    with pytest.raises(FtckptError) as caught:
        parsed(data)
    assert caught.value.file == "x.pt"
    return caught.value


def rewrapped(pickled: bytes, **records: bytes) -> bytes:
    """Return a torch.save zip with another pickle, written by torch's own writer."""
    buffer = io.BytesIO()
    with torch.serialization._open_zipfile_writer_buffer(buffer) as writer:
        writer.write_record("data.pkl", pickled, len(pickled))
        for name, data in {"byteorder": b"little", **records}.items():
            writer.write_record(name.replace("__", "/"), data, len(data))
    return buffer.getvalue()


def tensor_pickle(
    numel: int, offset: int, shape: tuple[Any, ...], strides: tuple[Any, ...]
) -> bytes:
    """Return the pickle of a float tensor with any arguments, as text opcodes."""

    def items(values: tuple[Any, ...]) -> bytes:
        return b"(" + b"".join(pickle.dumps(v, 2)[2:-1] for v in values) + b"t"

    pid = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu" + (
        pickle.dumps(numel, 2)[2:-1] + b"tQ"
    )
    args = b"(" + pid + pickle.dumps(offset, 2)[2:-1] + items(shape) + items(strides) + b"\x89}t"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + args + b"R."


def test_the_handmade_pickle_is_what_torch_reads() -> None:
    data = rewrapped(tensor_pickle(6, 1, (2, 2), (2, 1)), data__0=struct.pack("<6f", *range(6)))
    stream = parsed(data)
    assert gathered(stream.tree, stream, data) == struct.pack("<4f", 1, 2, 3, 4)
    assert torch.load(io.BytesIO(data)).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ((6, 0, (7,), (1,)), "size-mismatch"),
        ((6, 3, (4,), (1,)), "size-mismatch"),
        ((6, 0, (2, 2), (5, 1)), "size-mismatch"),
        ((6, 0, (1 << 62, 1 << 62), (1, 1)), "size-mismatch"),
        ((5, 0, (5,), (1,)), "size-mismatch"),
        ((1 << 62, 0, (5,), (1,)), "size-mismatch"),
        ((6, -1, (2,), (1,)), "unsafe-pickle"),
        ((6, 0, (-2,), (1,)), "unsafe-pickle"),
        ((6, 0, (2,), (-1,)), "unsafe-pickle"),
        ((6, 0, (2, 3), (1,)), "unsafe-pickle"),
        ((6, 0, (2.0,), (1,)), "unsafe-pickle"),
        ((6, 0, (True,), (1,)), "unsafe-pickle"),
        ((6, 0, ("2",), (1,)), "unsafe-pickle"),
        ((6, 0, (1,) * 65, (1,) * 65), "unsafe-pickle"),
        ((-6, 0, (1,), (1,)), "unsafe-pickle"),
    ],
)
def test_a_tensor_outside_its_storage_is_refused(arguments: Any, kind: str) -> None:
    data = rewrapped(tensor_pickle(*arguments), data__0=bytes(24))
    assert refused(data).kind == kind


def test_a_missing_record_is_damage() -> None:
    error = refused(rewrapped(tensor_pickle(6, 0, (6,), (1,))))
    assert error.kind == "bad-zip"
    assert "data/0" in error.message.replace("'", "")


def test_an_unreferenced_record_is_listed() -> None:
    data = rewrapped(tensor_pickle(6, 0, (6,), (1,)), data__0=bytes(24), data__1=b"hidden")
    assert parsed(data).unreferenced == ("data/1",)
    assert parsed(saved(torch.ones(2))).unreferenced == ()


def test_byte_orders() -> None:
    pickled = tensor_pickle(1, 0, (1,), (1,))
    big = refused(rewrapped(pickled, byteorder=b"big", data__0=bytes(4)))
    assert isinstance(big, UnsupportedError)
    other = refused(rewrapped(pickled, byteorder=b"medium", data__0=bytes(4)))
    assert isinstance(other, UnsafeError)


def test_a_flipped_bit_in_the_pickle_is_found_at_once() -> None:
    data = bytearray(saved({"weight": torch.ones(2)}))
    data[data.index(b"weight")] ^= 1
    error = refused(bytes(data))
    assert error.kind == "bad-crc"
    assert error.offset == 64


def test_torchscript_and_exports_are_named(tmp_path: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        buffer = io.BytesIO()
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), buffer)
    error = refused(buffer.getvalue())
    assert isinstance(error, UnsupportedError)
    assert "TorchScript" in error.message


def test_a_tar_is_unsupported_and_noise_is_damage() -> None:
    tar = bytearray(600)
    tar[257:262] = b"ustar"
    assert isinstance(refused(bytes(tar)), UnsupportedError)
    assert refused(b"not a checkpoint" * 10).kind == "bad-zip"
    assert isinstance(refused(b"not a checkpoint\n" * 10), UnsupportedError)  # text
    assert refused(b"").kind == "bad-zip"
    assert refused(bytes(5000)).kind == "bad-zip"


def test_a_legacy_stream_with_a_zip_behind_it_is_refused() -> None:
    legacy, zipped = saved({"a": 1}, legacy=True), saved({"a": 2})
    assert refused(legacy + zipped).exit_code in (4, 7)
    assert refused(zipped + legacy).exit_code == 7
    # A zip whose head was overwritten by the legacy magic: torch reads the head, we read the end.
    polyglot = legacy[:40] + zipped[40:]
    assert refused(polyglot).exit_code == 7


@pytest.mark.parametrize("cut", [1, 4, 9, 100])
def test_a_cut_legacy_stream_is_truncated(cut: int) -> None:
    data = saved({"w": torch.arange(100.0), "v": torch.ones(3)}, legacy=True)
    error = refused(data[:-cut])
    assert error.kind == "truncated-file"
    assert refused(data + b"x").kind == "trailing-bytes"


def test_every_truncation_of_a_legacy_stream_is_damage() -> None:
    data = saved({"w": torch.arange(3.0)}, legacy=True)
    for length in range(len(data)):
        assert isinstance(refused(data[:length]), CorruptError)


def test_a_legacy_index_longer_than_the_first_read() -> None:
    state = {f"layer.{i}.weight": torch.full((2,), float(i)) for i in range(4000)}
    data = saved(state, legacy=True)
    stream = parsed(data)
    assert gathered(stream.tree["layer.3999.weight"], stream, data) == struct.pack(
        "<2f", 3999, 3999
    )


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), min_size=1, max_size=5))
@settings(max_examples=examples(75, 1200), deadline=None)
def test_mutated_streams_end_in_a_named_error_or_parse(edits: list[tuple[int, int]]) -> None:
    for original in (MUTATED_ZIP, MUTATED_LEGACY):
        data = bytearray(original)
        for at, value in edits:
            data[at % len(data)] = value
        assert outcome(bytes(data)) in (0, 4, 7, 12, 13)


def outcome(data: bytes) -> int:
    try:
        parsed(data)
    except FtckptError as error:
        return error.exit_code
    return 0


MUTATED_ZIP = saved({"w": torch.arange(3.0), "n": [1, None, "x"], "s": {1}})
MUTATED_LEGACY = saved({"w": torch.arange(3.0), "n": [1, None, "x"], "s": {1}}, legacy=True)


# --- the table ----------------------------------------------------------------------------------


def _writable(value: object) -> bool:
    """Say whether a pickle could change `value` for the loads that follow."""
    if isinstance(value, tuple | str | int):
        return False
    try:
        value.__dict__["probe"] = 1
        del value.__dict__["probe"]
    except (AttributeError, TypeError):
        pass
    else:
        return True
    try:
        value.probe = 1  # type: ignore[attr-defined]
    except (AttributeError, TypeError, UnsafeError):
        return False
    return True


@pytest.mark.parametrize("name", sorted(TABLE))
def test_no_stand_in_can_be_changed(name: str) -> None:
    value = TABLE[name]
    looked_up: Callable[[], object] = lambda: value  # noqa: E731
    from ftckpt.formats.pickles.unpickle import _Unpickler

    module, _, attribute = name.rpartition(".")
    found = _Unpickler(io.BytesIO(), TABLE, None).find_class(module, attribute)
    assert looked_up() is value
    assert not _writable(found)


def test_torch_agrees_on_density() -> None:
    for shape in ((2, 3), (1, 3), (3, 1), (2, 0, 3), (), (5,)):
        tensor = torch.zeros(shape)
        for dims in (tuple(range(len(shape))), tuple(reversed(range(len(shape))))):
            view = tensor.permute(dims)
            assert is_dense(tuple(view.shape), view.stride()) is view.is_contiguous()


def test_storages_know_their_place() -> None:
    data = saved(torch.arange(4.0))
    stored = parsed(data).storages["0"]
    assert isinstance(stored, StoredStorage)
    assert not isinstance(stored, Composite)
    assert stored.numel * stored.dtype.itemsize == stored.extent.length
