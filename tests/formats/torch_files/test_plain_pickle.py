"""What `pickle.dump` wrote by itself: read where it lies, in bounded room, and nothing executed."""

from __future__ import annotations

import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.discovery.roots import _may_be_checkpoint
from ftckpt.errors import (
    CorruptError,
    ExitCode,
    FtckptError,
    NoResourceError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
    worst,
)
from ftckpt.formats.pickles import outline
from ftckpt.formats.torch_files.plain_pickle import parse_plain
from ftckpt.formats.torch_files.stream import TorchStream
from ftckpt.formats.torchsave import TorchSave
from ftckpt.storage import open_store
from tests.conformance.formats import FormatTests, Made, findings_of, listing_of_path, open_path
from tests.data.hostile.make_pickles import CANARY, PICKLES
from tests.formats.ranks.jobs import truth_file, truth_of
from tests.json_run import ftckpt_json

DATA = Path(__file__).parents[2] / "data" / "by_hand"
NAMES = ("latest.pkl", "ckpt_100.pkl", "step_100.pkl")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class TestPlainPickle(FormatTests):
    format = TorchSave()
    truncated = frozenset({"truncated-file"})
    empty = frozenset({"bad-zip"})

    def make(self, root: Path) -> list[Made]:
        truth = truth_file(DATA / "truth.safetensors")
        folder = Path(shutil.copytree(DATA / "pickled", root / "pickled"))
        return [Made(folder / name, truth) for name in NAMES]

    def victims(self, path: Path) -> list[str]:
        return [path.name]


def parsed(data: bytes) -> TorchStream:
    return parse_plain(lambda at, n: data[at : at + n], len(data), file="x.pkl")


def code_of(*arguments: str | Path) -> int:
    return int(ftckpt_json(*map(str, arguments))["result"]["code"])


def states() -> dict[str, Any]:
    weight = torch.randn(300, 300)
    return {
        "model": {
            "w": weight,
            "tied": weight,
            "turned": weight.t(),
            "row": weight[3:5, ::2],
            "half": torch.randn(5, dtype=torch.bfloat16),
            "parameter": torch.nn.Parameter(torch.randn(3)),
            "none": torch.empty(0),
            "array": np.arange(24.0).reshape(2, 3, 4),
            "fortran": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
            "read_only": np.frombuffer(b"abcdefgh", np.uint8),
        },
        "rng": {
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(),
            "generator": np.random.RandomState(3).get_state(legacy=False),
        },
        "text": "x" * 300_000,
        "blob": b"\1" * 300_000,
        "growing": bytearray(b"abc"),
        "scalar": np.float32(2.5),
        "step": 7,
    }


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_everything_reads_back(protocol: int, tmp_path: Path) -> None:
    state = states()
    Path("latest.pkl").write_bytes(pickle.dumps(state, protocol))
    checkpoint = open_path(TorchSave(), tmp_path / "latest.pkl")
    assert (checkpoint.format, checkpoint.step) == ("torchsave", 7)
    assert "pickle.dump" in checkpoint.dialect
    model = dict(state["model"])
    assert set(model) == {k for k, t in checkpoint.tensors.items() if t.component == "model"}
    for name, value in model.items():
        tensor = torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
        truth = truth_of(tensor.detach().contiguous())
        info = checkpoint.tensors[name]
        assert (info.dtype.name, info.shape) == (truth.dtype, truth.shape), name
        assert read_tensor(checkpoint, name) == truth.data, name
    assert checkpoint.aliases == {"tied": "w"}
    # The states of generators are what numpy takes back: no tensors.
    assert {k for k, t in checkpoint.tensors.items() if t.component == "extra:rng"} == {
        "extra:rng:torch"
    }
    rng = checkpoint.load_object("rng")
    assert rng["numpy"][1].qualname.startswith("numpy.")
    assert "bit_generator" in rng["generator"]
    assert checkpoint.load_object("blob") == state["blob"]
    assert checkpoint.load_object("growing") == state["growing"]
    assert checkpoint.load_object("text") == state["text"]
    assert findings_of(TorchSave(), tmp_path / "latest.pkl") == []


def test_bytes_of_tensors_are_not_read() -> None:
    data = pickle.dumps({"w": torch.zeros(1 << 22), "a": np.zeros(1 << 22)}, 4)
    taken = 0

    def read(at: int, length: int) -> bytes:
        nonlocal taken
        taken += length
        return data[at : at + length]

    parse_plain(read, len(data), file="x.pkl")
    assert taken < 2 << 20 < len(data)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_what_is_no_tensor_is_bounded(protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outline, "_MOST_REST", 1 << 20)
    for state in ({"b": bytes(2 << 20)}, {"t": "x" * (2 << 20)}, {"l": [*range(1 << 20)]}):
        with pytest.raises(NoResourceError):
            parsed(pickle.dumps(state, protocol))
    parsed(pickle.dumps({"w": torch.zeros(2 << 20), "a": np.zeros(2 << 20)}, protocol))


def test_every_verb_takes_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(DATA / "pickled", root)
    (root / "latest.pkl").rename(root / "ckpt_200.pkl")
    (root / "step_100.pkl").rename(root / "ckpt_50.pkl")
    for file in sorted(root.iterdir()):
        assert code_of("verify", file) == 0
        assert code_of("verify", file, "--level", "values") == 0
        assert code_of("verify", file, "--level", "content") == ExitCode.UNVERIFIED
    ours, theirs = root / "ckpt_200.pkl", root / "ckpt_100.pkl"
    assert ftckpt_json("inspect", str(ours))["format"] == "torchsave"
    assert code_of("diff", ours, theirs) == 0
    for number, file in enumerate((ours, theirs)):
        weights, whole = tmp_path / f"weights{number}", tmp_path / f"whole{number}.pt"
        assert code_of("convert", file, weights, "--to", "safetensors") == 0
        assert code_of("convert", file, whole, "--to", "torchsave") == 0
        assert code_of("verify", whole, "--level", "content") == 0
        assert code_of("diff", file, whole) == 0
        loaded = torch.load(whole, weights_only=True)
        with open(file, "rb") as stream:
            saved = pickle.load(stream)
        for name, value in saved["model"].items():
            assert torch.equal(loaded["model"][name], torch.as_tensor(value)), name
    assert ftckpt_json("latest", str(root))["step"] == 100
    assert code_of("seal", ours) == 0
    data = bytearray(ours.read_bytes())
    data[len(data) // 2] ^= 1
    ours.write_bytes(data)
    assert code_of("verify", ours, "--level", "content") == ExitCode.CORRUPT


# --- hostile ------------------------------------------------------------------------------------


class _Inside:
    """A tensor whose stream of bytes is another pickle."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.storage._load_from_bytes, (self._data,)


@pytest.mark.parametrize("name", sorted(n for n, case in PICKLES.items() if case.live))
def test_hostile_pickles_are_hostile_everywhere(name: str) -> None:
    content = PICKLES[name].content
    good = pickle.dumps({"w": torch.ones(20_000)}, 4)
    files = {
        "by itself": content,
        "with a tail": content + bytes(100),
        "in a tensor": pickle.dumps({"w": _Inside(content)}, 4),
        "in bytes": pickle.dumps({"w": torch.ones(3), "extra": content, "y": np.ones(3)}, 4),
        "behind a tensor": good[:-1] + b"0" + content[2 if content[:1] == b"\x80" else 0 :],
    }
    for how, data in files.items():
        if how == "in bytes" and not content.startswith((b"\x80", b"PK")):
            continue  # nobody unpickles bytes without a mark by mistake
        Path("latest.pkl").write_bytes(data)
        if listing_of_path(Path("latest.pkl")).head("latest.pkl", 1) != b"\x80":
            continue  # of an older protocol: no mark, and no checkpoint by this name
        found = findings_of(TorchSave(), Path("latest.pkl"))
        assert worst(f.code for f in found) is ExitCode.UNSAFE, how
    assert not Path(CANARY).exists()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x80\x04K\x01Q.", UnsafeError),  # a persistent id
        (b"\x80\x04P1\n.", UnsafeError),
        (b"\x80\x04C\x03abcJ\x00\x00\x00\x00Q.", UnsafeError),  # one that we write ourselves
        (b"\x80\x04N.N.", UnsafeError),  # something hidden behind
        (b"\x80\x04\x8e" + b"\xff" * 8 + b".", TruncatedError),
        (b"\x80\x04\x95" + b"\xff" * 8 + b"N.", TruncatedError),
        (b"\x80\x04\x95" + b"\x02" + bytes(7) + b"K\x01K\x01\x86.", None),
        (b"\x80\x04\x95" + b"\x03" + bytes(7) + b"K\x01K\x01\x86.", CorruptError),
        (b"\x80\x04\x95" + b"\x14" + bytes(7) + b"\x95" + b"\x01" + bytes(7) + b"N.", FtckptError),
        (b"\x80\x04]", TruncatedError),
        (b"\x80\x04\xff.", CorruptError),
        (b"\x80\x04\x80\x04N.", CorruptError),
        (b"\x80\x04c" + b"x" * 300 + b".", CorruptError),
    ],
)
def test_odd_opcodes(data: bytes, expected: type[FtckptError] | None) -> None:
    if expected is None:
        parsed(data)
        return
    with pytest.raises(expected):
        parsed(data)


def test_a_storage_of_another_size_is_damage() -> None:
    array = pickle.dumps({"a": np.arange(100_000, dtype=np.float32)}, 4)
    at = array.index((100_000).to_bytes(4, "little"))
    wrong = array[:at] + (100_001).to_bytes(4, "little") + array[at + 4 :]
    with pytest.raises(CorruptError, match="100001") as caught:
        parsed(wrong)
    assert caught.value.kind == "size-mismatch"


def test_arrays_of_other_types_stay_arrays() -> None:
    state = {"big": np.arange(4, dtype=">f4"), "text": np.array(["a", "bc"]),
             "objects": np.array([{}, None], dtype=object), "w": np.ones(2)}  # fmt: skip
    tree = parsed(pickle.dumps(state, 4)).tree
    assert [type(tree[k]).__name__ for k in state] == ["Inert", "Inert", "Inert", "TensorRef"]


def test_protocol_2_says_what_to_do() -> None:
    for state in ({"w": torch.ones(3)}, {"w": np.ones(3)}):
        with pytest.raises(UnsupportedError, match="protocol 2") as caught:
            parsed(pickle.dumps(state, 2))
        assert "protocol 4" in caught.value.hint
    assert parsed(pickle.dumps({"step": 3, "b": b"abc"}, 2)).tree == {"step": 3, "b": b"abc"}


@pytest.mark.parametrize("name", NAMES)
def test_every_flipped_bit_ends_in_a_verdict(name: str) -> None:
    good = (DATA / "pickled" / name).read_bytes()
    rng = random.Random(5)
    for _ in range(300):
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            parsed(bytes(data))
        except (CorruptError, UnsafeError, UnsupportedError, NoResourceError):
            continue


# --- what is taken for one ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("latest.pkl", True), ("ckpt_100.pickle", True), ("run7-step-5.pkl", True),
        ("rank_0.pkl", True), ("5.pkl", True), ("vocab.pkl", False), ("metrics.pkl", False),
    ],
)  # fmt: skip
def test_names(name: str, known: bool) -> None:
    Path(name).write_bytes(pickle.dumps({"w": np.ones(2)}))
    assert (TorchSave().recognise(listing_of_path(Path(name))) is not None) is known
    for lost in (b"", bytes(100)):
        Path(name).write_bytes(lost)
        assert (TorchSave().recognise(listing_of_path(Path(name))) is not None) is known
        if known:
            assert code_of("verify", Path(name).absolute()) == ExitCode.CORRUPT
    Path(name).write_bytes(b"\x00\x01 something else")
    assert TorchSave().recognise(listing_of_path(Path(name))) is None


def test_a_pt_file_that_pickle_wrote_is_read(tmp_path: Path) -> None:
    Path("model.pt").write_bytes(pickle.dumps({"model": {"w": torch.ones(3)}}, 4))
    assert set(open_path(TorchSave(), tmp_path / "model.pt").tensors) == {"w"}
    entry = open_store(str(tmp_path)).stat("model.pt")
    assert _may_be_checkpoint("model.pt", entry, None)


def test_ranks_that_pickled_their_state_are_merged(tmp_path: Path) -> None:
    for rank in range(2):
        entry = {"data": torch.full((2, 3), float(rank)), "dim": 0, "global_shape": [4, 3]}
        state = {"model": {"w": entry}, "world_size": 2, "rank": rank}
        (tmp_path / f"rank_{rank}.pt").write_bytes(pickle.dumps(state, 4))
    answer = ftckpt_json("verify", str(tmp_path))
    assert (answer["format"], answer["result"]["code"]) == ("ranks", 0)
    out = tmp_path.parent / f"{tmp_path.name}-out"
    assert code_of("reshard", tmp_path, out, "--tp", "1") == 0
    whole = torch.load(out / "rank_0.pt", weights_only=True)
    assert torch.equal(whole["model"]["w"]["data"][:, 0], torch.tensor([0.0, 0.0, 1.0, 1.0]))
