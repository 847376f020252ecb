"""What Megatron-Bridge keeps beside a torch_dist store, and its pointers in the root."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ftckpt
from ftckpt.errors import RefusedError
from tests.formats.megatron.torch_dist.test_reader import of_data
from tests.json_run import ftckpt_json

STATE, CONFIG, TRACKER = "train_state.pt", "run_config.yaml", "latest_checkpointed_iteration.txt"
POINTER = f"latest_{STATE}"


def save_state(checkpoint: Path, step: int) -> None:
    """Add what Bridge's `save_checkpoint` writes after the store, in its order.

    The entries of `TrainState.state_dict` in src/megatron/bridge/training/state.py (August 2026).
    """
    counts = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
    state = {
        "step": torch.tensor(step, dtype=torch.int64),
        **{name: torch.tensor(8 * step, dtype=torch.int64) for name in counts},
        "floating_point_operations_so_far": torch.tensor(1e15, dtype=torch.float32),
        **{name: torch.tensor(True) for name in ("do_train", "do_valid", "do_test")},
    }
    torch.save(state, checkpoint / STATE)
    shutil.copy(checkpoint / STATE, checkpoint.parent / POINTER)
    (checkpoint.parent / TRACKER).write_text(str(step))
    (checkpoint / CONFIG).write_text("_target_: megatron.bridge.training.config.ConfigContainer\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a root with steps 2 and 4, of which 4 is the newest by both pointers."""
    source = of_data("singleton", tmp_path / "made").path
    root = tmp_path / "root"
    for step in (2, 4):
        shutil.copytree(source, root / f"iter_{step:07d}")
        save_state(root / f"iter_{step:07d}", step)
    return root


def test_the_side_files_belong_to_the_checkpoint(root: Path, tmp_path: Path) -> None:
    source = root / "iter_0000002"
    assert ftckpt_json("copy", str(source), str(tmp_path / "copy"))["result"]["code"] == 0
    made = ftckpt_json("reshard", str(source), str(tmp_path / "resharded"), "--tp", "1")
    assert made["result"]["code"] == 0
    for name in (STATE, CONFIG):
        for place in ("copy", "resharded"):
            assert (tmp_path / place / name).read_bytes() == (source / name).read_bytes()


def test_a_flipped_bit_in_the_state_is_found(root: Path) -> None:
    path = root / "iter_0000004" / STATE
    raw = bytearray(path.read_bytes())
    at = raw.index((32).to_bytes(8, "little"))  # consumed_train_samples
    raw[at] ^= 1
    path.write_bytes(raw)
    answer = ftckpt_json("verify", str(path.parent))
    assert [f["file"] for f in answer["findings"] if f["kind"] == "bad-crc"] == [STATE]
    assert answer["result"]["code"] == 4


@pytest.mark.parametrize(
    ("lost", "kind", "code"), [(STATE, "missing-file", 4), (CONFIG, "state-unknown", 0)]
)
def test_a_lost_side_file_is_named(root: Path, lost: str, kind: str, code: int) -> None:
    (root / "iter_0000004" / lost).unlink()
    answer = ftckpt_json("verify", str(root / "iter_0000004"))
    assert [f["kind"] for f in answer["findings"] if f["file"] == lost] == [kind]
    assert answer["result"]["code"] == code


def test_the_pointers_of_a_root(root: Path) -> None:
    answer = ftckpt_json("latest", str(root))
    assert answer["path"].endswith("iter_0000004")
    assert {p["name"]: p["target"] for p in answer["pointers"]} == dict.fromkeys(
        (POINTER, TRACKER), "iter_0000004"
    )
    listed = ftckpt_json("gc", str(root), "--keep-last", "5")
    assert [e["name"] for e in listed["plan"]["decisions"]] == ["iter_0000004", "iter_0000002"]


def test_promote_moves_both_pointers(root: Path) -> None:
    ftckpt.promote(str(root / "iter_0000002"), backwards=True)
    assert (root / TRACKER).read_text() == "2"
    assert (root / POINTER).read_bytes() == (root / "iter_0000002" / STATE).read_bytes()


def test_promote_refuses_a_checkpoint_without_the_state(root: Path) -> None:
    (root / "iter_0000002" / STATE).unlink()
    (root / "iter_0000002" / CONFIG).unlink()
    before = (root / POINTER).read_bytes()
    with pytest.raises(RefusedError, match="iter_0000002 has none"):
        ftckpt.promote(str(root / "iter_0000002"), backwards=True)
    assert (root / TRACKER).read_text() == "4"
    assert (root / POINTER).read_bytes() == before


def test_a_pointer_that_cannot_be_read_leads_nowhere(root: Path) -> None:
    (root / POINTER).write_bytes(b"PK\x03\x04")
    pointers = {p["name"]: p for p in ftckpt_json("latest", str(root))["pointers"]}
    assert pointers[POINTER]["target"] is None
    assert pointers[TRACKER]["target"] == "iter_0000004"
