"""Keys are weighed before they are hashed: what is let through takes little time, always."""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
import re
import zipfile
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.errors import FtckptError, UnsafeError
from ftckpt.formats.pickles import keys
from ftckpt.formats.pickles.keys import LIMIT, check_key, check_keys, limited
from ftckpt.formats.pickles.unpickle import load
from ftckpt.formats.torch_files.table import TABLE
from tests.campaign import examples
from tests.data.hostile.make_pickles import PICKLES

GOOD: dict[str, Any] = {
    "texts": {"a": 1, "b": {2: 3}},
    "tuples": {(1, "layer", (2, 3)): 0, ("x",) * 8: 1},
    "sets": [{1, 2.5, None, "x", b"y", (1, (2,))}, frozenset({frozenset({1}), (2, 3)})],
    "shapes": {(2,) * 64: "as torch.Size has"},
    "numbers": {1 << 80: 1, -(1 << 1000): 2},
    "random state": (3, tuple(range(625)), None),
    "ordered": collections.OrderedDict({(i, i): i for i in range(50)}),
    "shared": [t := (1, 2), {t: t, (t, t): (t, t, t)}],
}


@pytest.fixture(autouse=True)
def passed_over(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass over tensors at once in small pickles too, or walk each."""
    walked = getattr(request, "param", "") == "walked"
    monkeypatch.setattr(keys, "_FOR_TENSORS", 1 << 40 if walked else 0)
    keys._known.cache_clear()


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", GOOD)
def test_what_real_files_use_as_keys_passes(name: str, protocol: int) -> None:
    data = pickle.dumps(GOOD[name], protocol)
    assert check_keys(data)[:3] == (len(data), True, ())
    assert load(data, file="x", table=TABLE).value == GOOD[name]


@pytest.mark.parametrize("passed_over", ["passed over", "walked"], indirect=True)
def test_a_pickle_of_torch_is_walked_to_its_end(tmp_path: Any) -> None:
    """Most tensors are passed over at once: with many, and few, and odd ones among them."""
    import zipfile

    tree: dict[str, Any] = {f"w{i}": torch.zeros((2,) * (i % 7)) for i in range(300)}
    tree["odd"] = [torch.zeros(3, 4).t(), torch.nn.Parameter(torch.ones(2)), (1, (2, "x"))]
    tree["key"] = {tuple(f"w{i}" for i in range(8)): 1}
    torch.save(tree, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        data = archive.read("a/data.pkl")
    assert check_keys(data)[:3] == (len(data), True, ())


@pytest.mark.parametrize("name", [n for n in PICKLES if n.startswith("key-")])
def test_a_key_that_takes_for_ever_is_refused(name: str) -> None:
    with pytest.raises(UnsafeError) as caught:
        load(PICKLES[name].content, file="x", table=TABLE)
    assert caught.value.kind == "unsafe-pickle"


@pytest.mark.parametrize("passed_over", ["passed over", "walked"], indirect=True)
def test_tensors_that_are_passed_over_hide_no_weight(tmp_path: Any) -> None:
    """Their slots of the memo may be overwritten, and hold what is heavier than it was."""
    from tests.data.hostile.make_pickles import named, text, whole

    put, get = b"r\x2c\1\0\0", b"j\x2c\1\0\0"
    size = b"K\1K\1\x86" + put
    tensor = (
        b"((h\1h\2X\1\0\0\x000" + put + b"h\3K\1t" + put + b"QK\0" + size + size
        + b"\x89h\4)R" + put + b"t" + put + b"R0"
    )  # fmt: skip
    names = text("storage") + b"q\x010" + named("torch", "FloatStorage") + b"q\x020" + text("cpu")
    start = names + b"q\x030" + named("collections", "OrderedDict") + b"q\x040"
    rebuild = named("torch._utils", "_rebuild_tensor_v2")
    # The walk knows the slot as one number; then tensors put tuples there, again and again.
    body = start + b"K\1" + put + b"0" + b")q\x010" + (rebuild + tensor + get + b"q\x010") * 40
    with pytest.raises(FtckptError) as caught:
        load(whole(body + b"}" + get + get + b"\x86Ns"), file="x", table=TABLE)
    assert caught.value.exit_code in (4, 7)


def test_what_stand_ins_hash_and_return_is_weighed() -> None:
    value: tuple[Any, ...] = ()
    for _ in range(60):
        value = (value, value)
    for heavy in (value, (value,), 1 << 64 * (LIMIT + 2)):
        with pytest.raises(UnsafeError):
            check_key(heavy)
    with pytest.raises(UnsafeError):
        limited(value)
    assert limited((1, (2, 3))) == (1, (2, 3))
    check_key(("a", (1, 2)))


class _Weighing(pickle._Unpickler):
    """Python's own unpickler in Python: weighs each key instead of trusting the walk."""

    def find_class(self, module: str, name: str) -> Any:
        return tuple if name in ("tuple", "Size") else collections.OrderedDict


def _weight(value: Any) -> int:
    return 1 + sum(map(_weight, value)) if isinstance(value, (tuple, frozenset)) else 1


_OPS = [b")", b"2", b"\x85", b"\x86", b"\x87", b"q\0", b"q\1", b"h\0", b"h\1", b"K\1", b"(", b"t",
        b"N", b"]", b"}", b"0", b"a", b"\x8f"]  # fmt: skip


@given(st.lists(st.sampled_from(_OPS), max_size=60))
@settings(max_examples=examples(75, 1200), deadline=None)
def test_a_weight_is_never_less_than_the_truth(ops: list[bytes]) -> None:
    data = b"\x80\x04" + b"".join(ops) + b"."
    try:
        value = _Weighing(io.BytesIO(data)).load()
    except Exception:
        return
    keyed = data[:-1] + b"q\x09}h\x09Ns."
    known = True
    try:
        check_keys(keyed)
    except UnsafeError:
        known = False
    if known and isinstance(value, tuple):
        # Bounded before it is computed: a walk that lets a heavy key through hangs here.
        assert _weight(value) <= LIMIT


def test_every_opcode_is_followed_or_refused() -> None:
    """A new opcode of a later Python ends the walk, and so the unpickler, which got no further."""
    for opcode in pickletools.opcodes:
        code = opcode.code.encode("latin1")
        data = b"\x80\x04" + b"(NNN" + code + b"0\n0\n" + b"\0" * 16
        # A bytearray of nearly a gigabyte; a memo of as many slots.
        if opcode.name in ("BYTEARRAY8", "LONG_BINPUT"):
            with pytest.raises(MemoryError):
                check_keys(data)
            continue
        end, stopped, *_ = check_keys(data)
        assert end > 2 or stopped, opcode.name
    assert check_keys(b"\x80\x04N\xff.")[:3] == (3, False, ())


@pytest.mark.parametrize("passed_over", ["passed over", "walked"], indirect=True)
def test_a_slot_far_above_the_pickle_is_refused_inside_a_tensor_too() -> None:
    """The walk passes over a tensor's arguments in one step, and looks at their slots there."""
    save = io.BytesIO()
    torch.save({f"w{n}": torch.zeros(2, 3) for n in range(90)}, save)
    with zipfile.ZipFile(save) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        data = archive.read(name)
    assert check_keys(data).stopped
    late = [m.start() for m in re.finditer(rb"r[\x00-\xff]\x02\x00\x00", data)]
    assert len(late) > 20
    for at in late[:20]:
        bomb = data[: at + 1] + (100_000_000).to_bytes(4, "little") + data[at + 5 :]
        with pytest.raises(MemoryError):
            check_keys(bomb)
