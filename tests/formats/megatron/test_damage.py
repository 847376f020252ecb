"""Legacy Megatron: ranks that are missing, of another job, or cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.errors import (
    CorruptError,
    ExitCode,
    IncompleteError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.formats.megatron import Megatron
from tests.builders.megatron_files import altered, arguments, opened, require, write
from tests.builders.megatron_model import Job
from tests.campaign import examples
from tests.conformance.formats import findings_of


class TestDamage:
    def errors(self, path: Path) -> set[str]:
        return {f.kind for f in findings_of(Megatron(), path) if f.code is not ExitCode.OK}

    def test_a_whole_stage_is_missing(self, tmp_path: Path) -> None:
        """The layers after it keep their numbers, by the arguments."""
        made = write(tmp_path, Job(pp=4))
        shutil.rmtree(made.path / "mp_rank_00_001")
        checkpoint = opened(made.path)
        assert "decoder.layers.3.input_layernorm.weight" in checkpoint.tensors
        assert "decoder.layers.1.input_layernorm.weight" not in checkpoint.tensors
        (lost,) = (f for f in checkpoint.check() if f.code is not ExitCode.OK)
        assert (lost.kind, lost.file, lost.rank) == (
            "missing-rank", "mp_rank_00_001/model_optim_rng.pt", 1
        )  # fmt: skip

    def test_a_missing_stage_that_the_arguments_do_not_tell(self, tmp_path: Path) -> None:
        made = write(tmp_path, Job(pp=4, stages=(1, 2, 1, 0), recorded=(("num_layers", 5),)))
        shutil.rmtree(made.path / "mp_rank_00_002")
        with pytest.raises(CorruptError) as caught:
            opened(made.path)
        assert caught.value.kind == "missing-rank"

    def test_more_layers_than_recorded(self, tmp_path: Path) -> None:
        made = write(tmp_path, Job(pp=2))
        for name in ("mp_rank_00_000", "mp_rank_00_001"):
            altered(made, name, args__num_layers=2)
        assert self.errors(made.path) == {"bad-metadata"}

    def test_a_directory_of_no_rank(self, tmp_path: Path) -> None:
        made = write(tmp_path, Job(tp=2))
        shutil.copytree(made.path / "mp_rank_01", made.path / "mp_rank_02")
        assert self.errors(made.path) == {"world-size"}

    @pytest.mark.parametrize("moved", [("00_000", "01_000"), ("01_000", "01_001")])
    def test_ranks_in_each_others_place(self, moved: tuple[str, str], tmp_path: Path) -> None:
        """Shapes are the same in both: the arguments say which rank saved them."""
        made = write(tmp_path, Job(tp=2, pp=2))
        one, two = (made.path / f"mp_rank_{name}" for name in moved)
        for tp, pp, rank in ((0, 0, 0), (1, 0, 1), (0, 1, 2), (1, 1, 3)):
            altered(made, f"mp_rank_{tp:02d}_{pp:03d}", args__rank=rank)
        assert self.errors(made.path) == set()
        one.rename(tmp_path / "aside")
        two.rename(one)
        (tmp_path / "aside").rename(two)
        found = [f for f in opened(made.path).check() if f.kind == "wrong-rank"]
        assert {f.file for f in found} == {f"{d.name}/model_optim_rng.pt" for d in (one, two)}
        # Megatron's converter saves all directories as one process.
        for tp, pp in ((0, 0), (1, 0), (0, 1), (1, 1)):
            altered(made, f"mp_rank_{tp:02d}_{pp:03d}", args__rank=0)
        assert "wrong-rank" not in self.errors(made.path)

    def test_a_file_of_one_rank_copied_over_that_of_another(self, tmp_path: Path) -> None:
        """Its arguments do not tell it where no third rank shows that ranks have numbers."""
        made = write(tmp_path, Job(tp=2))
        one, other = (made.path / f"mp_rank_0{tp}" / "model_optim_rng.pt" for tp in (0, 1))
        shutil.copyfile(one, other)
        (found,) = (f for f in opened(made.path).check() if f.kind == "wrong-rank")
        assert found.file == "mp_rank_01/model_optim_rng.pt"
        assert "mp_rank_00/model_optim_rng.pt holds" in found.message

    @pytest.mark.parametrize("name", ["{} (1).pt", "{} - Copy.pt", "{} copy 2.pt", "{}.old.pt"])
    @pytest.mark.parametrize("stem", ["model_optim_rng", "distrib_optim"])
    def test_a_copy_beside_a_file_is_passed_over(
        self, stem: str, name: str, tmp_path: Path
    ) -> None:
        """It is not another rank's, and does not hide that a file of the optimizer is lost."""
        made = write(tmp_path, Job(tp=2, optimizer="distributed"))
        one = made.path / "mp_rank_01" / f"{stem}.pt"
        shutil.copyfile(one, one.with_name(name.format(stem)))
        require(made)
        assert str(one.with_name(name.format(stem)).name) not in str(
            list(opened(made.path).members())
        )
        for optimizer in made.path.glob("mp_rank_*/distrib_optim.pt"):
            optimizer.unlink()
        assert "missing-rank" in self.errors(made.path)

    def test_a_damaged_copy_is_nobodys_damage(self, tmp_path: Path) -> None:
        made = write(tmp_path, Job(tp=2))
        (made.path / "mp_rank_01" / "model_optim_rng (1).pt").write_bytes(b"half")
        require(made)

    def test_a_rank_of_another_job(self, tmp_path: Path) -> None:
        made = write(tmp_path / "a", Job(tp=2))
        other = write(tmp_path / "b", Job(tp=2, dp=4))
        shutil.copytree(other.path / "mp_rank_01", made.path / "mp_rank_01", dirs_exist_ok=True)
        assert "bad-metadata" in self.errors(made.path)

    def test_a_rank_of_a_job_of_another_world(self, tmp_path: Path) -> None:
        """Converters keep the data ranks of the source, so that the groups alone do not tell."""
        made = write(tmp_path, Job(tp=2))
        for directory, world in (("mp_rank_00", 2), ("mp_rank_01", 4)):
            altered(made, directory, args__world_size=world)
        assert "world-size" in self.errors(made.path)

    def test_a_part_of_another_shape_leaves_a_hole(self, tmp_path: Path) -> None:
        import torch

        made = write(tmp_path, Job(tp=2, layers=1))
        file = made.path / "mp_rank_01" / "model_optim_rng.pt"
        state = torch.load(file, weights_only=False)
        state["model"]["output_layer.weight"] = torch.zeros(31, 12, dtype=torch.bfloat16)
        torch.save(state, file)
        assert self.errors(made.path) == {"shape-mismatch", "hole"}

    def test_a_gate_of_an_odd_size_cannot_be(self, tmp_path: Path) -> None:
        import torch

        made = write(tmp_path, Job(tp=2, layers=1))
        for place in made.path.iterdir():
            state = torch.load(place / "model_optim_rng.pt", weights_only=False)
            state["model"]["decoder.layers.0.mlp.linear_fc1.weight"] = torch.zeros(19, 12)
            torch.save(state, place / "model_optim_rng.pt")
        assert self.errors(made.path) == {"shape-mismatch"}

    def test_ranks_that_share_a_directory_are_refused(self, tmp_path: Path) -> None:
        made = write(tmp_path, Job(experts=2, dp=2, recorded=()))
        altered(made, "mp_rank_00", args__expert_tensor_parallel_size=2)
        with pytest.raises(UnsupportedError, match="hold different parts"):
            opened(made.path)

    def test_one_model_and_chunks_of_one(self, tmp_path: Path) -> None:
        made = write(tmp_path, Job())
        altered(made, "mp_rank_00", model0={})
        with pytest.raises(UnsafeError):
            opened(made.path)

    def test_no_file_at_all(self, tmp_path: Path) -> None:
        (tmp_path / "a" / "mp_rank_00").mkdir(parents=True)
        with pytest.raises(IncompleteError):
            opened(tmp_path / "a")
        (tmp_path / "b" / "mp_rank_00").mkdir(parents=True)
        (tmp_path / "b" / "mp_rank_00" / "model_weights.ckpt").write_bytes(b"")
        with pytest.raises(UnsupportedError, match=r"model_weights\.ckpt"):
            opened(tmp_path / "b")

    def test_a_file_that_holds_no_dict(self, tmp_path: Path) -> None:
        import torch

        made = write(tmp_path, Job())
        torch.save([1], made.path / "mp_rank_00" / "model_optim_rng.pt")
        assert self.errors(made.path) == {"newer-writer"}

    @pytest.mark.parametrize(
        "arguments",
        [
            {"tensor_model_parallel_size": 1 << 19, "pipeline_model_parallel_size": 1 << 19},
            {"expert_model_parallel_size": 999_983, "expert_tensor_parallel_size": 999_979},
        ],
    )
    def test_more_ranks_than_any_cluster_has(
        self, arguments: dict[str, int], tmp_path: Path
    ) -> None:
        made = write(tmp_path, Job())
        altered(made, "mp_rank_00", **{f"args__{k}": v for k, v in arguments.items()})
        assert self.errors(made.path) == {"bad-metadata"}

    def test_many_missing_ranks_are_told_in_one_sentence(self, tmp_path: Path) -> None:
        made = write(tmp_path, Job())
        altered(made, "mp_rank_00", args__tensor_model_parallel_size=1000)
        found = [f for f in opened(made.path).check() if f.kind == "missing-rank"]
        assert len(found) == 65
        assert "935 more" in found[-1].message

    @pytest.mark.parametrize("chunks", [("model1",), ("model0", "model9999")])
    def test_chunks_that_are_not_all_there(self, chunks: tuple[str, ...], tmp_path: Path) -> None:
        made = write(tmp_path, Job())
        altered(made, "mp_rank_00", model=None, **{key: {} for key in chunks})
        assert self.errors(made.path) == {"bad-metadata"}

    def test_a_name_beyond_reason(self, tmp_path: Path) -> None:
        import torch

        made = write(tmp_path, Job())
        altered(made, "mp_rank_00", model={"layers.0." * 1000: torch.ones(1)})
        with pytest.raises(UnsafeError, match="longer"):
            opened(made.path)

    @settings(max_examples=examples(25, 240), deadline=None)
    @given(
        changes=st.dictionaries(
            st.sampled_from(sorted(vars(arguments(Job())))),
            st.none() | st.booleans() | st.integers(-3, 9) | st.just(1 << 70) | st.floats()
            | st.sampled_from(("Et|(t|)*2,L", "((", [["decoder"]], [1], {})),
            min_size=1, max_size=4,
        )
    )  # fmt: skip
    def test_arguments_of_any_kind_have_a_verdict(self, changes: dict[str, Any]) -> None:
        with TemporaryDirectory() as place:
            job = Job(pp=2, vp=2, optimizer="distributed", recorded=tuple(changes.items()))
            path = write(Path(place), job).path
            codes = {finding.code for finding in findings_of(Megatron(), path)}
            assert codes <= {ExitCode.OK, ExitCode.CORRUPT, ExitCode.UNSUPPORTED}


class TestDistributedOptimizer:
    """Its state lies in files of their own, and the others say that it was saved."""

    JOB = Job(dp=2, optimizer="distributed")

    def test_its_only_file_is_lost(self, tmp_path: Path) -> None:
        made = write(tmp_path, self.JOB)
        (made.path / "mp_rank_00" / "distrib_optim.pt").unlink()
        lost = [f for f in findings_of(Megatron(), made.path) if f.code is not ExitCode.OK]
        assert {(f.kind, f.file) for f in lost} == {("missing-rank", "mp_rank_00/distrib_optim.pt")}

    def test_it_was_not_saved(self, tmp_path: Path) -> None:
        made = write(tmp_path, self.JOB)
        (made.path / "mp_rank_00" / "distrib_optim.pt").unlink()
        altered(made, "mp_rank_00", optimizer=None)
        assert all(f.code is ExitCode.OK for f in findings_of(Megatron(), made.path))
