"""Weights from their masters, and that only the bytes of what is written are read."""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import ftckpt
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import NotFoundError
from ftckpt.storage.local.store import LocalStore
from ftckpt.transfer.request.change_dtype import from_masters
from ftckpt.transfer.request.narrowing import Only, only
from tests.faults.cli import here
from tests.transfer.contents import content_of

ROWS = 1 << 17  # 1 MiB of bfloat16 a weight: small beside it is what headers take


def test_a_float32_weight_stays_and_a_narrow_one_needs_its_master() -> None:
    single = content_of({"norm": ("model", "param", (3,), "float32")})
    made = from_masters(single)
    assert (made.masters, dict(made.content.tensors)) == (0, dict(single.tensors))
    with pytest.raises(NotFoundError, match="no master for 1 weight: w"):
        from_masters(content_of({"w": ("model", "param", (3,), "bfloat16")}))


ZERO_3 = Path(__file__).parents[2] / "data" / "deepspeed" / "z3" / "global_step2"


def test_weights_of_zero_3_are_made_from_their_masters_or_refused(tmp_path: Path) -> None:
    """Stage 3 stores buffers and what is frozen, which alone were "the model"."""
    with pytest.raises(NotFoundError, match="6 weights as masters alone") as caught:
        ftckpt.convert(str(ZERO_3), str(tmp_path / "refused"), "safetensors", only="model")
    assert "--from-master" in caught.value.hint
    assert not (tmp_path / "refused").exists()
    out = str(tmp_path / "out")
    ftckpt.convert(str(ZERO_3), out, "safetensors", only="model", from_master=True)
    source, made = ftckpt.open(str(ZERO_3)), ftckpt.open(out)
    frozen = {key: key for key, info in source.tensors.items() if info.component == "model"}
    trained = {
        key.removeprefix("master:"): key for key in source.tensors if key.startswith("master:")
    }
    assert set(made.tensors) == {*frozen, *trained}
    for key, of in (frozen | trained).items():
        assert read_tensor(made, key) == read_tensor(source, of), key
    assert dict(made.aliases) == {"head.weight": "embed.weight"}
    assert ftckpt.inspect(str(ZERO_3)).parameters == ftckpt.inspect(out).parameters == 79


def test_what_is_not_carried_is_not_called_checked(tmp_path: Path) -> None:
    words = ("convert", str(ZERO_3), str(tmp_path / "out"), "--to", "safetensors")
    said = here(*words, "--only", "model", "--from-master").stderr
    assert "every record matches its CRC-32 in what is carried" in said
    said = here(*words[:2], str(tmp_path / "all"), *words[3:]).stderr
    assert "every record matches its CRC-32\n" in said


def test_masters_that_have_numbers_name_no_weight() -> None:
    content = content_of(
        dict.fromkeys(("embed", "head", "7", "0.7"), ("optimizer", "master", (3,), "float32"))
        | {"weight": ("model", "param", (3,), "bfloat16")}
    )
    tied = replace(content, aliases={"master:head": "master:embed"})
    for one in (content, tied):
        with pytest.raises(NotFoundError, match="2 weights as masters alone: embed, head"):
            only(one, Only.MODEL)
    made = only(tied, Only.MODEL, masters=True)
    assert (list(made.tensors), dict(made.aliases)) == (
        ["weight", "embed", "head"], {"head": "embed"},
    )  # fmt: skip


def saved(folder: Path) -> dict[str, Any]:
    """Save a state of 14 bytes a parameter: bfloat16 weights, float32 masters and moments."""
    torch.manual_seed(3)
    master = {f"layers.{n}.weight": torch.randn(ROWS, 4) for n in range(4)}
    state = {
        name: {
            "master_param": value,
            "exp_avg": torch.randn(ROWS, 4),
            "exp_avg_sq": torch.rand(ROWS, 4),
        }
        for name, value in master.items()
    }
    weights = {name: (value * 1.5).bfloat16() for name, value in master.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        save({"model": weights, "optimizer": {"state": state}}, checkpoint_id=str(folder))
    return {"master": master, "weights": weights}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("state") / "step-1"
    return folder, saved(folder)


class Reads:
    """Counts the bytes that are read below a folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, below: Path) -> None:
        self.bytes: dict[str, int] = defaultdict(int)
        own = LocalStore.open

        def opened(store: LocalStore, path: str) -> Any:
            reader = own(store, path)
            full = str(store.describe(path))
            if full.startswith(str(below)) and full.endswith(".distcp"):
                inner, into = reader.read, reader.readinto

                def read(offset: int, length: int) -> bytes:
                    self.bytes[full] += length
                    return inner(offset, length)

                def readinto(offset: int, view: memoryview) -> None:
                    self.bytes[full] += len(view.cast("B"))
                    into(offset, view)

                reader.read, reader.readinto = read, readinto  # type: ignore[method-assign]
            return reader

        monkeypatch.setattr(LocalStore, "open", opened)

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@pytest.mark.parametrize("master", [False, True])
def test_only_the_bytes_of_the_weights_are_read(
    state: tuple[Path, dict[str, Any]],
    master: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, truth = state
    reads = Reads(monkeypatch, folder)
    ftckpt.convert(
        str(folder), str(tmp_path / "out"), "safetensors",
        only="model", dtype="bf16", from_master=master, no_proof=True, jobs=1,
    )  # fmt: skip
    weights = sum(w.numel() for w in truth["weights"].values()) * (4 if master else 2)
    assert weights <= reads.total <= 1.05 * weights
    made = ftckpt.open_checkpoint(str(tmp_path / "out"))
    for name, value in truth["master" if master else "weights"].items():
        want = value.bfloat16().view(torch.uint8).numpy().tobytes()
        assert read_tensor(made, name) == want


def test_a_check_of_the_source_reads_nothing_of_the_moments(
    state: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, truth = state
    reads = Reads(monkeypatch, folder)
    ftckpt.convert(
        str(folder), str(tmp_path / "out"), "safetensors", only="model", dtype="bf16", jobs=1
    )
    weights = sum(w.numel() for w in truth["weights"].values()) * 2
    assert reads.total <= 3.2 * weights  # checked, written, proven: each reads the weights once


def test_damage_in_a_weight_is_found_and_in_a_moment_it_is_not_read(
    state: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    import shutil

    from ftckpt.errors import CorruptError

    for key, bad in (("layers.1.weight", True), ("exp_avg:layers.1.weight", False)):
        copy = tmp_path / f"copy-{bad}"
        shutil.copytree(state[0], copy)
        opened = ftckpt.open_checkpoint(str(copy))
        (piece,) = opened.tensors[key].pieces
        payload = opened.payload(piece).extent
        with (copy / payload.file).open("r+b") as file:
            file.seek(payload.offset + 100)
            byte = file.read(1)
            file.seek(payload.offset + 100)
            file.write(bytes([byte[0] ^ 8]))
        arguments = (str(copy), str(tmp_path / f"out-{bad}"), "safetensors")
        if bad:
            with pytest.raises(CorruptError):
                ftckpt.convert(*arguments, only="model")
        else:
            ftckpt.convert(*arguments, only="model")
