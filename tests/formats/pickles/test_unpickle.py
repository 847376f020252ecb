"""The one unpickler: builds inert data from anything, runs nothing, survives everything."""

from __future__ import annotations

import argparse
import collections
import copyreg
import datetime
import decimal
import enum
import io
import os
import pathlib
import pickle
import random
import signal
import subprocess
import sys
import threading
import tracemalloc
import types
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.errors import CorruptError, FtckptError, UnsafeError, worst
from ftckpt.formats.pickles.unpickle import BUILTINS, Inert, Loaded, load
from ftckpt.formats.torch_files.stream import parse_stream
from ftckpt.formats.torch_files.table import TABLE
from ftckpt.formats.torchsave import TorchSave
from tests.campaign import examples
from tests.conformance.formats import findings_of
from tests.data.hostile.make_pickles import CANARY, DATA_ONLY, HERE, PICKLES, files
from tests.data.hostile.make_zips import wrapped
from tests.workers import forked

# Beside reading, tracemalloc sees imports on first use and the memo of a bomb below the bound.
MEMORY = 96 << 20


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loaded(data: bytes, **options: Any) -> Loaded:
    return load(data, file="x", table=TABLE, **options)


def refused(data: bytes) -> FtckptError:
    tracemalloc.start()
    try:
        with pytest.raises(FtckptError) as caught:
            loaded(data)
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()
    assert caught.value.file == "x"
    assert len(caught.value.message) < 300
    return caught.value


# --- the hostile corpus -------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in PICKLES if n not in DATA_ONLY])
def test_a_hostile_pickle_is_refused(name: str) -> None:
    case = PICKLES[name]
    error = refused((HERE / "pickle" / f"{name}.pkl").read_bytes())
    assert (error.kind, error.exit_code) == (case.kind, case.code)
    assert os.listdir() == []


@pytest.mark.parametrize("name", PICKLES)
def test_a_hostile_pickle_is_refused_inside_a_checkpoint(name: str) -> None:
    case = PICKLES[name]
    Path("model.pt").write_bytes(wrapped(case.content))
    found = findings_of(TorchSave(), Path("model.pt"))
    assert worst(f.code for f in found) == case.code, found
    assert case.kind in {f.kind for f in found}
    assert os.listdir() == ["model.pt"]


def test_the_payloads_are_real(tmp_path: Path) -> None:
    """What is marked live does create the canary when Python's own unpickler reads it."""
    program = (
        "import os, pickle, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "from tests.data.hostile.make_pickles import CANARY, PICKLES\n"
        "for name, case in PICKLES.items():\n"
        "    if not case.live: continue\n"
        "    os.mkdir(name); os.chdir(name)\n"
        "    try: pickle.loads(case.content)\n"
        "    except Exception: pass\n"
        "    os.chdir('..')\n"
    )
    root = str(Path(__file__).parents[3])
    subprocess.run(
        [sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": root}
    )
    live = {name for name, case in PICKLES.items() if case.live}
    assert len(live) > 30
    assert {p.name for p in tmp_path.iterdir() if (p / CANARY).exists()} == live


def test_the_kept_files_are_what_the_script_writes() -> None:
    kept = {f"pickle/{p.name}": p.read_bytes() for p in (HERE / "pickle").iterdir()}
    assert kept == files()
    assert len(PICKLES) >= 80


# --- shared stand-ins stay as they are ----------------------------------------------------------


def test_no_load_leaves_a_trace_for_the_next() -> None:
    probe = pickle.dumps({"b": b"\xff", "n": np.arange(2), "o": collections.OrderedDict(a=1)}, 2)
    before = loaded(probe)
    for case in PICKLES.values():
        with pytest.raises(FtckptError):
            loaded(case.content + b"\0")
    after = loaded(probe)
    assert after.value["b"] == before.value["b"] == b"\xff"
    assert after.value["o"] == {"a": 1}
    assert after.opaque == before.opaque == ()


def test_a_registered_extension_is_refused() -> None:
    copyreg.add_extension("os", "system", 77)
    try:
        with pytest.raises(UnsafeError, match="extension registry"):
            loaded(b"\x80\x02\x82\x4d.")
        # A cache that another unpickler filled would hand out the real function.
        assert pickle.loads(b"\x80\x02\x82\x4d.") is os.system
        with pytest.raises(UnsafeError, match="extension registry"):
            loaded(b"\x80\x02\x82\x4d.")
    finally:
        copyreg.remove_extension("os", "system", 77)
        copyreg.clear_extension_cache()


def test_an_instance_cannot_shadow_the_methods_of_a_dict() -> None:
    data = pickle.dumps(collections.OrderedDict(a=1), 2)[:-1] + (
        b"(N}X\x05\0\0\0itemscos\nsystem\nstb."
    )
    value = loaded(data).value
    assert dict(value.items()) == {"a": 1}


# --- depth and size -----------------------------------------------------------------------------

DEEP = {
    "list": b"\x80\x04" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "tuple": b"\x80\x04N" + b"\x85" * 1_000_000 + b".",
    "tuple-key": b"\x80\x04})" + b"\x85" * 1_000_000 + b"Ns.",
    "tuple-in-set": b"\x80\x04\x8f()" + b"\x85" * 1_000_000 + b"\x90.",
    "dict": b"\x80\x04" + b"}N" * 500_000 + b"N" + b"s" * 500_000 + b".",
    "optimizer-key": b"\x80\x04}X\x05\0\0\0state})" + b"\x85" * 1_000_000
        + b"}ssX\x0c\0\0\0param_groups]s.",
    "calls": b"\x80\x02" + b"cargparse\nNamespace\nq\x000" + b"h\x00" * 300_000 + b"N" + b"\x85R" * 300_000 + b".",  # noqa: E501
    "state": b"\x80\x02" + b"cargparse\nNamespace\nq\x000" + b"h\x00)R" * 300_000 + b"N" + b"b" * 300_000 + b".",  # noqa: E501
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(DEEP))
def test_a_million_levels_do_not_crash(name: str) -> None:
    """In a process of its own: what goes wrong here is a segmentation fault, also on release."""
    Path("deep.pkl").write_bytes(DEEP[name])
    Path("deep.pt").write_bytes(wrapped(DEEP[name]))
    program = (
        "import sys\n"
        "from ftckpt.errors import UnsafeError\n"
        "from ftckpt.formats.pickles.unpickle import load\n"
        "from ftckpt.formats.torch_files.table import TABLE\n"
        "from ftckpt.errors import FtckptError\n"
        "from ftckpt.formats.torchsave import TorchSave\n"
        "from ftckpt.storage import open_store\n"
        "from ftckpt.storage.source import Source\n"
        "data = open('deep.pkl', 'rb').read()\n"
        "try:\n"
        "    found = load(data, file='x', table=TABLE)\n"
        "    assert not sys.argv[1:]\n"
        "    del found\n"
        "except UnsafeError:\n"
        "    assert sys.argv[1:], 'only keys are refused'\n"
        "store = open_store('.')\n"
        "try:\n"
        "    found = TorchSave().open(Source.file(store, store.stat('deep.pt')))\n"
        "    print([f.kind for f in (*found.notes, *found.check())])\n"
        "except FtckptError as error:\n"
        "    print(error.kind)\n"
    )
    keys = ["keys"] if name in ("tuple-key", "tuple-in-set", "optimizer-key") else []
    done = forked.run(keys, os.environ, program=program)
    assert done.returncode == 0, done.stderr[-500:]


def test_memory_stays_bounded() -> None:
    program = (
        "import resource\n"
        "from ftckpt.errors import UnsafeError\n"
        "from ftckpt.formats.pickles.unpickle import load, BUILTINS\n"
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for data in (b'\\x80\\x02Nr\\x80\\xf0\\xfa\\x02.', b'\\x80\\x02Nr\\xff\\xff\\xff\\x7f.',\n"
        "             b'\\x80\\x05\\x96' + b'\\0' * 6 + b'\\1\\0.'):\n"
        "    try: load(data, file='x', table=BUILTINS)\n"
        "    except UnsafeError: continue\n"
        "    raise SystemExit('not refused')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert int(done.stdout) < 64 << 10  # KiB


def test_wide_data_needs_no_list_of_its_own_size() -> None:
    tracemalloc.start()
    try:
        value = loaded(pickle.dumps(list(range(100_000)))).value
        assert len(value) == 100_000
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=60))
@settings(max_examples=examples(100, 1600), deadline=None)
def test_any_bytes_end_in_a_named_error_or_data(noise: bytes) -> None:
    for data in (noise, b"\x80\x04" + noise, noise + b"."):
        assert outcome(data) in (0, 4, 7)


@given(
    st.sampled_from(sorted(PICKLES)),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4),
)
@settings(max_examples=examples(100, 1600), deadline=None)
def test_mutated_attacks_execute_nothing(name: str, edits: list[tuple[int, int]]) -> None:
    data = bytearray(PICKLES[name].content) or bytearray(b".")
    for at, byte in edits:
        data[at % len(data)] = byte
    assert outcome(bytes(data)) in (0, 4, 7)
    assert not Path(CANARY).exists()


def outcome(data: bytes) -> int:
    try:
        loaded(data)
    except FtckptError as error:
        return error.exit_code
    return 0


def test_threads_may_load_at_once() -> None:
    data = pickle.dumps({f"layer.{i}": (i, [i] * 3) for i in range(3000)})
    results: list[object] = []

    def work() -> None:
        results.append(loaded(data).value == pickle.loads(data))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


# --- what real files hold -----------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 1


class Ours:
    def __init__(self) -> None:
        self.depth = 3


BENIGN: dict[str, Callable[[], object]] = {
    "plain": lambda: {"a": [1, 2.5, None, True, "x", b"y", (1,), {2}, frozenset({3})]},
    "big-int": lambda: [1 << 80, -(1 << 80), 1 << 5000],
    "python-rng": random.getstate,
    "numpy-rng": lambda: np.random.RandomState(1).get_state(),
    "numpy-generator": lambda: np.random.RandomState(1).get_state(legacy=False),
    "numpy-array": lambda: np.arange(6.0).reshape(2, 3),
    "numpy-scalar": lambda: [np.float32(1.5), np.int64(3), np.bool_(True)],
    "namespace": lambda: argparse.Namespace(lr=0.1, layers=[1, 2]),
    "simple-namespace": lambda: types.SimpleNamespace(a=1),
    "ordered": lambda: collections.OrderedDict([("b", 1), ("a", 2)]),
    "default-dict": lambda: collections.defaultdict(list, {"a": [1]}),
    "counter": lambda: collections.Counter("abca"),
    "deque": lambda: collections.deque([1, 2], maxlen=4),
    "path": lambda: pathlib.PurePosixPath("/a/b"),
    "path-real": lambda: pathlib.Path("a"),
    "signals": lambda: signal.Signals.SIGTERM,
    "timedelta": lambda: datetime.timedelta(seconds=3),
    "datetime": lambda: datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
    "decimal": lambda: decimal.Decimal("1.5"),
    "uuid": lambda: uuid.UUID(int=5),
    "bytes-io": lambda: io.BytesIO(b"extra state"),
    "bytearray": lambda: bytearray(b"abc"),
    "complex": lambda: 1 + 2j,
    "slice": lambda: slice(1, 5, 2),
    "range": lambda: range(3),
}  # fmt: skip
BENIGN_TORCH: dict[str, Callable[[], object]] = {
    "state-dict": lambda: torch.nn.Linear(2, 3).state_dict(),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "module": lambda: torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3)),
    "transformer": lambda: torch.nn.TransformerEncoderLayer(4, 2),
    "optimizer": lambda: torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).state_dict(),
    "size": lambda: torch.Size([1, 2]),
    "dtype": lambda: [torch.float32, torch.bfloat16, torch.float8_e4m3fn],
    "device": lambda: torch.device("cpu"),
    "rng": torch.get_rng_state,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "nested-namespace": lambda: {"args": argparse.Namespace(dtype=torch.float16)},
    "version": lambda: torch.torch_version.TorchVersion("2.6.0"),
    "meta": lambda: torch.empty(3, device="meta"),
    "layout": lambda: torch.strided,
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", sorted(BENIGN))
def test_what_real_files_hold_passes_without_a_note(name: str, protocol: int) -> None:
    found = load(pickle.dumps(BENIGN[name](), protocol), file="x", table=BUILTINS)
    assert found.opaque == ()


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", sorted(BENIGN | BENIGN_TORCH))
def test_what_torch_saves_passes_without_a_note(name: str, legacy: bool) -> None:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(
            (BENIGN | BENIGN_TORCH)[name](), buffer, _use_new_zipfile_serialization=not legacy
        )
    data = buffer.getvalue()
    stream = parse_stream(lambda o, n: data[o : o + n], len(data), file="x")
    assert stream.opaque == ()


def test_plain_data_comes_back_equal() -> None:
    for protocol in range(6):
        obj = BENIGN["plain"]()
        assert loaded(pickle.dumps(obj, protocol)).value == obj


def test_third_party_classes_are_kept_with_their_state() -> None:
    found = loaded(pickle.dumps({"ours": Ours(), "colour": Colour.RED}))
    assert isinstance(found.value["ours"], Inert)
    assert found.value["ours"].get("depth") == 3
    assert found.value["colour"].args == (1,)
    assert [name.rpartition(".")[2] for name in found.opaque] == ["Ours", "Colour"]


def test_a_name_that_is_only_named_is_a_note() -> None:
    found = loaded(b"\x80\x02cos\nsystem\n.")
    assert found.opaque == ("os.system",)


def test_a_pickle_inside_longer_data() -> None:
    one, two = pickle.dumps([1], 2), pickle.dumps([2], 2)
    found = loaded(one + two, exact=False)
    assert found.value == [1]
    assert found.consumed == len(one)
    with pytest.raises(UnsafeError, match="after its end"):
        loaded(one + two)
    with pytest.raises(CorruptError):
        loaded(one[:-1])
