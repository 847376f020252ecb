"""Keys chosen to collide are refused before they are compared; honest keys load as they did."""

from __future__ import annotations

import collections
import itertools
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import FtckptError, UnsafeError
from ftckpt.formats.pickles import unpickle
from ftckpt.formats.pickles.key_collisions import MOST, Keys
from ftckpt.formats.pickles.keys import _LARGE, FEW, check_keys, key_opcodes
from ftckpt.formats.pickles.numbers import MORE, THREE, TWO
from ftckpt.formats.pickles.repeated_records import find_run
from ftckpt.formats.pickles.unpickle import load
from ftckpt.formats.torch_files.table import TABLE
from tests.data.hostile.make_pickles import PICKLES

PRIME = 2**61 - 1
MANY = 6000
LONG = 60_000  # makes a pickle so large that runs are passed over


def number(k: int) -> bytes:
    """LONG1 of a number whose hash is 0."""
    value = (k * PRIME).to_bytes((k * PRIME).bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(value)]) + value


def line(k: int) -> bytes:
    return b"L%dL\n" % (k * PRIME)


def pair(k: int) -> bytes:
    return number(k % 250) + number(k // 250) + b"\x86"


def signs(k: int) -> bytes:
    """A tuple of -1 and -2, which have one hash."""
    members = (b"J\xff\xff\xff\xff", b"J\xfe\xff\xff\xff")
    return b"(" + b"".join(members[k >> bit & 1] for bit in range(17)) + b"t"


def size(k: int) -> bytes:
    """The same as a torch.Size."""
    return b"ctorch\nSize\n" + signs(k) + b"\x85R"


KEYS = {"numbers": number, "lines": line, "pairs": pair, "signs": signs, "sizes": size}
CONTAINERS = {
    "setitems": (b"}(", b"N", b"u."),
    "batches": (b"}(", b"N", b"u."),
    "setitem": (b"}", b"Ns", b"."),
    "dict": (b"(", b"N", b"d."),
    "additems": (b"\x8f(", b"", b"\x90."),
    "frozenset": (b"(", b"", b"\x91."),
    "set of a list": (b"cbuiltins\nset\n(", b"", b"l\x85R."),
}


def flood(key: str, container: str, many: int = MANY) -> bytes:
    start, after, end = CONTAINERS[container]
    each = [KEYS[key](k) + after for k in range(1, many + 1)]
    if container == "batches":
        each = [one + b"u(" if n % 500 == 499 else one for n, one in enumerate(each)]
    return b"\x80\x04" + start + b"".join(each) + end


LOADING = """
import pathlib, sys
from ftckpt.errors import UnsafeError
from ftckpt.formats.torch_files.table import TABLE
from ftckpt.formats.pickles.unpickle import load
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    try:
        load(path.read_bytes(), file="x", table=TABLE)
    except UnsafeError as error:
        assert "keys of one hash" in error.message, (path, error)
    else:
        raise AssertionError(f"{path} was loaded")
"""


def test_a_flood_is_refused(tmp_path: Path) -> None:
    """In a process that is killed: one of these alone keeps the C unpickler for minutes."""
    for key, container in itertools.product(KEYS, CONTAINERS):
        (tmp_path / f"{key}-{container}").write_bytes(flood(key, container))
    command = [sys.executable, "-c", LOADING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("key", KEYS)
def test_a_few_are_loaded(key: str, container: str) -> None:
    found = load(flood(key, container, MOST), file="x", table=TABLE).value
    assert len(found) == MOST


HONEST: dict[str, Any] = {
    "pairs": {(a, b): a * b for a in range(60) for b in range(60)},
    "offsets": dict.fromkeys(itertools.product(range(-8, 8), repeat=3), 0),
    "large numbers": {(k << 40) + 2**62: k for k in range(5000)},
    "sets": [{(a, b) for a in range(60) for b in range(60)}, {frozenset({k}) for k in range(2000)}],
    "many small": [{(0, "step"): k, (k, 1): {-1: 0, -2: 1}} for k in range(3000)],
    "ordered": collections.OrderedDict({(k, k): {"a": (k,)} for k in range(2000)}),
    "nested": {("x", (k, 2.5, None, b"b")): {1: {2: k}} for k in range(2000)},
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", HONEST)
def test_honest_keys_pass(name: str, protocol: int) -> None:
    data = pickle.dumps(HONEST[name], protocol)
    if name != "sets" or protocol >= 4:  # before, a set is made by a call
        assert check_keys(data).suspects > FEW
    assert load(data, file="x", table=TABLE).value == HONEST[name]


@pytest.mark.parametrize("name", PICKLES)
def test_written_anew_a_pickle_is_what_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome() -> tuple[str, str]:
        try:
            loaded = load(PICKLES[name].content, file="x", table=TABLE, persistent=repr)
        except FtckptError as error:
            return type(error).__name__, error.kind
        return repr(loaded.value)[:10_000].partition(" at 0x")[0], repr(loaded.opaque)

    before = outcome()
    monkeypatch.setattr(unpickle, "FEW", -1)
    assert outcome() == before


def test_an_object_that_holds_itself_is_one_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpickle, "FEW", -1)
    ring: dict[Any, Any] = {}
    ring["self"], ring[(1,)] = ring, [ring]
    for protocol in range(6):
        found = load(pickle.dumps(ring, protocol), file="x", table=TABLE).value
        assert found["self"] is found
        assert found[(1,)][0] is found


def test_a_pickle_with_storages_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b"}((K\1K\2tX\1\0\0\0aQ(K\3K\4tX\1\0\0\0bQu."
    asked: list[str] = []

    def resolve(pid: str) -> str:
        asked.append(pid)
        return pid

    data = b"\x80\x02" + body
    assert len(key_opcodes(data)) == 3
    for few in (FEW, -1):
        monkeypatch.setattr(unpickle, "FEW", few)
        found = load(data, file="x", table=TABLE, persistent=resolve)
        assert found.value == {(1, 2): "a", (3, 4): "b"}
    assert asked == ["a", "b"] * 2


def test_an_odd_number_of_items_is_damage() -> None:
    many = b"".join(b"K\1M" + k.to_bytes(2, "little") + b"\x86" for k in range(2001))
    with pytest.raises(FtckptError) as caught:
        load(b"\x80\x04}(" + many + b"u.", file="x", table=TABLE)
    assert caught.value.exit_code == 4


def test_the_same_key_may_come_any_number_of_times() -> None:
    keys = Keys()
    for _ in range(10 * MOST):
        keys.check([(-1, 5), (-2, 5), 2**80])
    with pytest.raises(UnsafeError):
        keys.check([PRIME * k for k in range(1, MOST + 2)])


def taken_from_the_memo(key: Callable[[int], bytes]) -> bytes:
    """A pickle that makes its keys first, and then a run of paths that have them as names."""
    made = b"".join(key(k) + b"\x94" for k in range(1, LONG))
    paths = b"".join(b"j" + k.to_bytes(4, "little") + b"K\x01\x85\x94" for k in range(LONG - 1))
    return b"\x80\x04(" + made + b"1}(" + paths + b"u."


@pytest.mark.parametrize("key", [number, pair])
def test_a_run_is_judged(key: Callable[[int], bytes]) -> None:
    data = taken_from_the_memo(key)
    assert len(data) >= _LARGE
    assert find_run(data, data.index(b"1}(") + 3) is not None
    assert check_keys(data).suspects == LONG - 1
    with pytest.raises(UnsafeError, match="keys of one hash"):
        load(data, file="x", table=TABLE)


def test_tuples_that_are_passed_over_cannot_collide_in_number() -> None:
    """There are not more of them than hashes: their numbers have eight bytes at most."""
    spelled = {1: b"Kx", 2: b"Mxx", 4: b"Jxxxx", 5: b"\x8a\x05xxxxx", 6: b"\x8a\x06xxxxxx"}
    for pattern, length in ((TWO, 2), (THREE, 3), *((MORE, n) for n in range(4, 9))):
        for sizes in itertools.product(spelled, repeat=length):
            text = b"".join(spelled[size] for size in sizes)
            if re.match(pattern + b"t", text + b"t"):
                assert sum(sizes) <= 8


def test_records_are_no_suspects() -> None:
    """The places of a small metadata are keyed by objects, which have hashes of their own."""
    places = pickle.dumps({Index(k): k for k in range(2 * FEW)}, 4)
    assert check_keys(places).suspects == 0


class Index:
    def __init__(self, number: int) -> None:
        self.number = number
