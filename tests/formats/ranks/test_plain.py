"""Plain tensors in rank files: merged by a record, never by looking alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import CorruptError
from tests.formats.ranks.jobs import kinds, opened, truth_of, write_plain


class TestPlain:
    """Plain tensors are merged by a record, never by looking alike."""

    def test_without_a_record_each_rank_keeps_its_own(self, tmp_path: Path) -> None:
        import torch

        parts = [{"w": torch.full((2, 2), float(r))} for r in range(2)]
        checkpoint = opened(write_plain(tmp_path / "p", parts))
        assert set(checkpoint.tensors) == {"extra:rank0:w", "extra:rank1:w"}
        assert read_tensor(checkpoint, "extra:rank1:w") == truth_of(parts[1]["w"]).data
        assert {f.kind for f in checkpoint.notes} == {"note", "count-unknown"}
        assert any("nothing records how 1 tensors" in f.message for f in checkpoint.notes)

    def test_equal_values_are_no_proof_of_a_replica(self, tmp_path: Path) -> None:
        import torch

        parts = [{"w": torch.zeros(3)}] * 2
        checkpoint = opened(write_plain(tmp_path / "p", parts, {"world_size": 2}))
        assert set(checkpoint.tensors) == {"extra:rank0:w", "extra:rank1:w"}

    def test_one_rank_is_the_whole(self, tmp_path: Path) -> None:
        import torch

        names = "shard_{:05d}_of_{:05d}.pt"
        checkpoint = opened(write_plain(tmp_path / "p", [{"w": torch.ones(3)}], None, names))
        assert set(checkpoint.tensors) == {"w"}
        assert list(checkpoint.check()) == list(checkpoint.notes) == []

    def test_ranks_after_a_gap_have_no_place(self, tmp_path: Path) -> None:
        import torch

        record = {"world_size": 3, "tensors": {"w": {"shape": [6], "dim": 0}}}
        parts = [{"w": torch.arange(2.0) + 2 * r} for r in range(3)]
        folder = write_plain(tmp_path / "p", parts, record)
        (folder / "shard_00001.pt").unlink()
        checkpoint = opened(folder)
        assert [f.kind for f in checkpoint.check()] == ["missing-rank"]
        assert [p.rank for p in checkpoint.tensors["w"].pieces] == [0]

    def test_shapes_that_the_record_cannot_hold(self, tmp_path: Path) -> None:
        import torch

        record = {"world_size": 2, "tensors": {"w": {"shape": [4, 3], "dim": 0}}}
        parts = [{"w": torch.zeros(2, 3)}, {"w": torch.zeros(2, 2)}]
        folder = write_plain(tmp_path / "p", parts, record)
        assert kinds(folder) == {"shape-mismatch", "hole"}

    def test_types_that_disagree(self, tmp_path: Path) -> None:
        import torch

        record = {"tensors": {"w": {"shape": [4], "dim": 0}}}
        parts = [{"w": torch.zeros(2)}, {"w": torch.zeros(2, dtype=torch.float16)}]
        assert "dtype-mismatch" in kinds(write_plain(tmp_path / "p", parts, record))

    @pytest.mark.parametrize("split", [
        {"shape": [4], "dim": 1}, {"shape": [-1], "dim": 0}, {"shape": "4", "dim": 0},
        {"shape": [4], "dim": True},
    ])  # fmt: skip
    def test_a_record_that_cannot_be(self, tmp_path: Path, split: Any) -> None:
        folder = write_plain(tmp_path / "p", [{}], {"tensors": {"w": split}})
        with pytest.raises(CorruptError) as caught:
            opened(folder)
        assert caught.value.kind == "bad-index"

    def test_tied_weights_are_an_alias(self, tmp_path: Path) -> None:
        import torch

        weight = torch.ones(3)
        folder = write_plain(tmp_path / "p", [{"a": weight, "b": weight}])
        assert opened(folder).aliases == {"b": "a"}

    def test_unproven_ids_keep_their_numbers(self, tmp_path: Path) -> None:
        import torch

        state = {i: {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)} for i in range(2)}
        part = {
            "model": {"a": torch.ones(3), "b": torch.ones(3)},
            "optimizer": {"state": state, "param_groups": [{"params": [0]}, {"params": [1]}]},
        }
        checkpoint = opened(write_plain(tmp_path / "p", [part]))
        assert {"exp_avg:0.0", "exp_avg:1.0"} < set(checkpoint.tensors)

    def test_wrappers_are_taken_off_and_remembered(self, tmp_path: Path) -> None:
        import torch

        state = {"module.a": {"step": torch.tensor(1.0), "exp_avg": torch.ones(3)}}
        part = {
            "model": {"module._orig_mod.a": torch.ones(3), "module.b": torch.ones(2)},
            "optimizer": {
                "state": {"module._orig_mod.a": state["module.a"]},
                "param_groups": [{"params": ["module._orig_mod.a"]}],
            },
        }
        checkpoint = opened(write_plain(tmp_path / "p", [part]))
        assert set(checkpoint.tensors) == {"a", "b", "exp_avg:a", "optimizer:a.step"}
        assert checkpoint.tensors["a"].stored_name == "model.module._orig_mod.a"

    def test_names_that_the_optimizer_was_given(self, tmp_path: Path) -> None:
        import torch

        layer = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(list(layer.named_parameters())[::-1])
        layer(torch.ones(2)).sum().backward()
        optimizer.step()
        part = {"model": layer.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoint = opened(write_plain(tmp_path / "p", [part]))
        assert checkpoint.tensors["exp_avg:bias"].shape == (2,)
        assert checkpoint.tensors["exp_avg:weight"].shape == (2, 2)


def test_a_name_that_stands_twice_in_a_file(tmp_path: Path) -> None:
    import torch

    part = {"model": {"w": torch.ones(2)}, "state_dict": {"w": torch.ones(3)}}
    assert kinds(write_plain(tmp_path / "p", [part])) == {"duplicate-tensor"}
