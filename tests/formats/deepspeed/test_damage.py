"""DeepSpeed checkpoints that are damaged, of another job, of another version, or refused."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.checkpoint.sharding import parse_rules
from ftckpt.checkpoint.steps import SCALARS_A_FILE, mixed_steps
from ftckpt.errors import (
    CorruptError,
    ExitCode,
    NewerWriterError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
    worst,
)
from ftckpt.formats.deepspeed import DeepSpeed
from ftckpt.inspection.resume import Presence, resume_check
from ftckpt.inspection.training_state import WEIGHTS
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from tests.conformance.formats import findings_of
from tests.formats.deepspeed.sets import copied, opened, tag, truth_of, unpacked

FORM = DeepSpeed()


def edit(file: Path, change: Callable[[Any], Any]) -> None:
    """Load what torch saved, change it, save it again; DeepSpeed's classes are not needed."""
    import sys
    import types

    import torch

    names = {
        "deepspeed.runtime.fp16.loss_scaler": "LossScaler",
        "deepspeed.runtime.zero.config": "ZeroStageEnum",
        "deepspeed.utils.tensor_fragment": "fragment_address",
    }
    modules: dict[str, Any] = {}
    for name, attribute in names.items():
        module = types.ModuleType(name)
        made = int if attribute == "ZeroStageEnum" else type(attribute, (), {"__module__": name})
        setattr(module, attribute, made)
        parts = name.split(".")
        for depth in range(1, len(parts)):
            modules.setdefault(".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
        modules[name] = module
    sys.modules.update(modules)
    try:
        state = torch.load(file, weights_only=False)
        change(state)
        torch.save(state, file)
    finally:
        for name in modules:
            del sys.modules[name]


def errors(path: Path) -> list[tuple[str, str | None]]:
    found = [f for f in findings_of(FORM, path) if f.code is not ExitCode.OK]
    return [(f.kind, f.file) for f in found]


def optimizer_file(path: Path, dp: int, mp: int = 0) -> Path:
    (file,) = path.glob(f"*zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt")
    return file


class TestSets:
    def test_a_missing_partition_is_a_hole(self, tmp_path: Path) -> None:
        path = copied("z1", tmp_path)
        lost = optimizer_file(path, 1)
        lost.unlink()
        found = findings_of(FORM, path)
        assert ("missing-rank", lost.name) in {(f.kind, f.file) for f in found}
        assert "hole" in {f.kind for f in found}
        assert worst(f.code for f in found) is ExitCode.CORRUPT

    @pytest.mark.parametrize("name", ["z1", "z3"])
    def test_a_parameter_that_the_file_lists_is_in_it(self, name: str, tmp_path: Path) -> None:
        path = copied(name, tmp_path)
        file = next(path.glob("*model_states.pt"))
        edit(file, lambda s: s["module"].pop("up.weight"))
        assert errors(path) == [("missing-tensor", file.name)]
        edit(file, lambda s: s.update(module={"a tree": s["module"]}))  # a trainer's own
        assert errors(path) == []

    @pytest.mark.parametrize("name", ["lora_z2", "lora_z3"])
    def test_what_the_fragments_hold_is_not_lost(self, name: str, tmp_path: Path) -> None:
        path = copied(name, tmp_path)
        for file in path.glob("*model_states.pt"):
            edit(file, lambda s: [s["module"].pop(n) for n in s["frozen_param_shapes"]])
        kinds = {f.kind for f in findings_of(FORM, path)}
        assert not errors(path)
        assert "state-unknown" not in kinds

    @pytest.mark.parametrize("name", ["z2", "z3"])
    def test_a_hook_of_the_module_may_rename_or_leave_out(self, name: str, tmp_path: Path) -> None:
        def renamed(state: Any) -> None:
            for old in ("up.weight", "down.weight"):
                state["module"][f"layer.{old}"] = state["module"].pop(old)

        def without_group(state: Any) -> None:
            for old in ("gain", "up.bias"):
                state["module"].pop(old)

        for change in (renamed, without_group):
            path = copied(name, tmp_path / change.__name__)
            file = min(path.glob("*model_states.pt"))
            edit(file, change)
            assert errors(path) == []
            assert ("state-unknown", file.name) in {
                (f.kind, f.file) for f in findings_of(FORM, path)
            }

    def test_a_tensor_of_another_shape_is_not_the_renamed_one(self, tmp_path: Path) -> None:
        path = copied("z2", tmp_path)
        file = path / "mp_rank_00_model_states.pt"
        edit(file, lambda s: s["module"].update(other=s["module"].pop("up.weight")[:2]))
        assert errors(path) == [("missing-tensor", file.name)]

    def test_a_buffer_that_the_file_lists_is_told_of(self, tmp_path: Path) -> None:
        path = copied("z1", tmp_path)
        edit(path / "mp_rank_00_model_states.pt", lambda s: s["module"].pop("rope"))
        assert errors(path) == []
        assert "state-unknown" in {f.kind for f in findings_of(FORM, path)}

    def test_the_last_partition_cannot_be_lost_unseen(self, tmp_path: Path) -> None:
        path = copied("z1", tmp_path)
        lost = optimizer_file(path, 3)
        lost.unlink()
        assert ("missing-rank", lost.name) in errors(path)

    def test_files_of_a_larger_job_are_left_over(self, tmp_path: Path) -> None:
        path = copied("z1", tmp_path)
        left = path / "bf16_zero_pp_rank_4_mp_rank_00_optim_states.pt"
        left.write_bytes(optimizer_file(path, 0).read_bytes())
        assert errors(path) == [("world-size", left.name)]
        assert opened(path).topology.dp == 4

    def test_a_partition_of_another_job(self, tmp_path: Path) -> None:
        path = copied("z1", tmp_path)
        file = optimizer_file(path, 2)
        edit(file, lambda s: s["optimizer_state_dict"].update(partition_count=[8, 8]))
        assert ("world-size", file.name) in errors(path)

    @pytest.mark.parametrize(
        "sizes",
        [
            {"dp_world_size": 4},
            {"mp_world_size": 4},
            {"checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 2}},
        ],
    )
    def test_a_models_file_of_another_job(self, sizes: dict[str, Any], tmp_path: Path) -> None:
        path = copied("pipe", tmp_path)
        file = path / "mp_rank_01_model_states.pt"
        edit(file, lambda s: s.update(sizes))
        assert ("world-size", file.name) in errors(path)

    def test_all_files_of_the_last_stage_are_lost(self, tmp_path: Path) -> None:
        """Versions that record no degrees record how many model-parallel ranks there are."""
        path = copied("pipe", tmp_path)
        for file in path.glob("mp_rank_*"):
            edit(file, lambda s: s.pop("checkpoint_parallel_dimensions"))
        assert errors(path) == []
        for file in path.glob("*mp_rank_01_*"):
            file.unlink()
        assert ("missing-rank", "mp_rank_01_model_states.pt") in errors(path)
        # A number that is smaller than that of the files is of a mode that does not count them.
        path = copied("pipe", tmp_path / "other")
        for file in path.glob("mp_rank_*"):
            edit(file, lambda s: s.pop("checkpoint_parallel_dimensions"))
            edit(file, lambda s: s.update(mp_world_size=1))
        assert errors(path) == []

    def test_absurd_numbers_cost_nothing(self, tmp_path: Path) -> None:
        path = copied("z1", tmp_path)
        file = path / "mp_rank_00_model_states.pt"
        edit(file, lambda s: s.update(dp_world_size=1 << 40))
        found = [f for f in opened(path).check() if f.kind == "missing-rank"]
        assert f"{(1 << 40) - 4 - (len(found) - 1)} more ranks" in found[-1].message
        edit(file, lambda s: s.update(checkpoint_parallel_dimensions={
            "pp_degree": 1, "tp_degree": 1 << 40}))  # fmt: skip
        with pytest.raises(CorruptError, match="none that trains"):
            opened(path)

    def test_one_rank_lists_other_parameters(self, tmp_path: Path) -> None:
        path = copied("z3", tmp_path)
        file = path / "zero_pp_rank_1_mp_rank_00_model_states.pt"
        edit(file, lambda s: s["param_shapes"][0].update(x=(3,)))
        assert ("bad-metadata", file.name) in errors(path)

    def test_without_the_models_files_nothing_has_a_name(self, tmp_path: Path) -> None:
        path = copied("z1", tmp_path)
        (path / "mp_rank_00_model_states.pt").unlink()
        with pytest.raises(CorruptError, match="which parameters there are") as caught:
            opened(path)
        assert caught.value.kind == "missing-rank"

    def test_a_stage_that_lost_its_models_file(self, tmp_path: Path) -> None:
        path = copied("pipe", tmp_path)
        (path / "mp_rank_01_model_states.pt").unlink()
        assert errors(path) == [("missing-rank", "mp_rank_01_model_states.pt")]
        assert "master:1.weight" in opened(path).tensors
        assert "master:3.weight" not in opened(path).tensors

    def test_a_layer_that_is_lost(self, tmp_path: Path) -> None:
        path = copied("pipe", tmp_path)
        (path / "layer_03-model_states.pt").unlink()
        assert errors(path) == [("missing-file", "layer_03-model_states.pt")]

    def test_a_tied_layer_that_is_lost(self, tmp_path: Path) -> None:
        path = copied("pipe", tmp_path)
        (path / "layer_00-model_states.pt").unlink()
        assert errors(path) == [("missing-file", None)]

    def test_a_folder_of_something_else(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"")
        with pytest.raises(NotFoundError):
            opened(tmp_path)


class TestContents:
    def test_a_short_partition_leaves_a_hole(self, tmp_path: Path) -> None:
        path = copied("z1", tmp_path)
        file = optimizer_file(path, 0)

        def cut(state: Any) -> None:
            flats = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
            flats[0] = flats[0][:-1].clone()

        edit(file, cut)
        found = findings_of(FORM, path)
        assert ("size-mismatch", file.name) in {(f.kind, f.file) for f in found}
        assert any(f.kind == "hole" and f.tensor == "master:embed.weight" for f in found)

    def test_a_slice_too_few_in_stage_3(self, tmp_path: Path) -> None:
        path = copied("z3", tmp_path)
        file = optimizer_file(path, 1)
        edit(file, lambda s: s["optimizer_state_dict"]["fp32_flat_groups"].pop())
        assert ("size-mismatch", file.name) in errors(path)

    def test_moments_of_another_type(self, tmp_path: Path) -> None:
        path = copied("z1", tmp_path)
        file = optimizer_file(path, 1)

        def halve(state: Any) -> None:
            base = state["optimizer_state_dict"]["base_optimizer_state"]["state"]
            base[0]["exp_avg"] = base[0]["exp_avg"].half()

        edit(file, halve)
        assert ("dtype-mismatch", file.name) in errors(path)

    def test_a_partition_of_another_save_is_no_note(self, tmp_path: Path) -> None:
        path = unpacked("ds_pp2dp2_z1_bf16", tmp_path) / "ckpt" / "global_step2"
        file = optimizer_file(path, 1, 1)

        def older(state: Any) -> None:
            for group in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
                group["step"] -= 1

        edit(file, older)
        (found,) = (f for f in opened(path).check() if f.code is not ExitCode.OK)
        assert (found.kind, found.file) == ("mixed-steps", file.name)

    @pytest.mark.parametrize("name", ["z2", "moe_z1"])
    @pytest.mark.parametrize("copy", [False, True])
    def test_a_partition_in_anothers_place(self, name: str, copy: bool, tmp_path: Path) -> None:
        """Sizes and CRC-32s are right: its own list of elements tells."""
        path = copied(name, tmp_path)
        first, second = optimizer_file(path, 0), optimizer_file(path, 1)
        held = first.read_bytes()
        first.write_bytes(second.read_bytes())
        if not copy:
            second.write_bytes(held)
        moved = {first.name} if copy else {first.name, second.name}
        told = {f.file for f in opened(path).open_findings if f.kind == "wrong-rank"}
        assert told == moved
        checkpoint = opened(path)
        read = {p.extent.file for key in checkpoint.tensors if key.startswith("exp_avg:")
                for p in checkpoint.tensors[key].pieces}  # fmt: skip
        assert not read & moved

    @pytest.mark.parametrize(
        ("name", "one", "two", "kind", "code"),
        [
            ("z3", "zero_pp_rank_0_*_optim_states.pt", "zero_pp_rank_2_*_optim_states.pt",
             "wrong-rank", ExitCode.CORRUPT),
            ("z3", "zero_pp_rank_0_*_model_states.pt", "zero_pp_rank_1_*_model_states.pt",
             "wrong-rank", ExitCode.CORRUPT),
            ("tp", "mp_rank_00_*", "mp_rank_01_*", "wrong-rank", ExitCode.CORRUPT),
            ("moe_off", "expp_rank_0_*", "expp_rank_1_*", "wrong-rank", ExitCode.CORRUPT),
            ("moe_off", "layer_0_expert_0_*", "layer_0_expert_1_*", "renamed-file", ExitCode.OK),
        ],
    )  # fmt: skip
    def test_a_file_says_under_which_name_it_was_saved(
        self, name: str, one: str, two: str, kind: str, code: ExitCode, tmp_path: Path
    ) -> None:
        path = copied(name, tmp_path)
        (first,), (second,) = path.glob(one), path.glob(two)
        first.rename(path / "aside")
        second.rename(first)
        (path / "aside").rename(second)
        found = [f for f in opened(path).check() if f.kind == kind]
        assert {f.file for f in found} == {first.name, second.name}
        assert {f.code for f in found} == {code}

    def test_two_groups_of_another_save_are_told_once(self, tmp_path: Path) -> None:
        path = copied("z1", tmp_path)
        file = optimizer_file(path, 1)

        def older(state: Any) -> None:
            for group in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
                group["step"] -= 1

        edit(file, older)
        checkpoint = opened(path)
        found = [*checkpoint.check(), *mixed_steps(checkpoint.scalars(SCALARS_A_FILE), [])]
        assert [(f.kind, f.file) for f in found] == [("mixed-steps", file.name)]

    def test_tied_embeddings_are_copies_of_one_tensor(self) -> None:
        checkpoint = opened(tag("pipe"))
        master = checkpoint.tensors["master:tied_modules.embed.weight"]
        assert {piece.replica for piece in master.pieces} == {0, 1}
        weight = checkpoint.tensors["tied_modules.embed.weight"]
        assert [p.extent.file for p in weight.pieces] == ["layer_00-model_states.pt"]
        assert "0.weight" not in checkpoint.tensors

    def test_stage_3_has_no_weights_but_masters(self) -> None:
        checkpoint = opened(tag("z3"))
        weights = {n for n, t in checkpoint.tensors.items() if t.kind is Kind.PARAM}
        assert weights == {"frozen.weight"}
        assert checkpoint.aliases == {"master:head.weight": "master:embed.weight"}

    def test_a_restart_has_weights_where_it_has_masters(self) -> None:
        for name, reason in (("z1", "7 tensors"), ("z3", "7 tensors, 6 as masters alone")):
            (weights,) = (i for i in resume_check(opened(tag(name))) if i.key == WEIGHTS.key)
            assert (weights.presence, weights.reason) == (Presence.PRESENT, reason)

    def test_state_that_is_no_tensor(self) -> None:
        checkpoint = opened(tag("z1"))
        assert checkpoint.load_object("note") == "tiny"
        assert checkpoint.load_object("optimizer.param_groups")[0]["weight_decay"] == 0.1
        assert checkpoint.load_object("rank_2.optimizer.loss_scaler").get("cur_scale") == 1.0
        assert not {"param_shapes", "buffer_names", "optimizer.partition_count"} & {
            *checkpoint.objects
        }
        assert checkpoint.groups[0][1] == {"up.bias": (3,), "gain": (2,)}
        assert checkpoint.tree("mp_rank_00_model_states.pt")["global_steps"] == 2

    def test_a_hostile_file_among_good_ones(self, tmp_path: Path) -> None:
        import torch

        path = copied("z1", tmp_path)
        canary = tmp_path / "canary"

        class Touch:
            def __reduce__(self) -> Any:
                import os

                return os.system, (f"touch {canary}",)

        torch.save({"optimizer_state_dict": Touch()}, optimizer_file(path, 1))
        with pytest.raises(UnsafeError):
            opened(path)
        assert not canary.exists()

    @pytest.mark.parametrize(
        "content",
        [
            [],
            {},
            {"module": 3, "param_shapes": []},
            {"module": {}, "param_shapes": [{"a": "b"}]},
            {"module": {}, "param_shapes": [{"a": (-1,)}]},
            {"module": {}, "shared_params": {"a": 1}},
        ],
    )
    def test_a_models_file_that_is_none(self, content: Any, tmp_path: Path) -> None:
        import torch

        torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
        with pytest.raises((CorruptError, NewerWriterError)) as caught:
            opened(tmp_path)
        negative = "(-1,)" in str(content)  # what a known form cannot hold is damage
        assert caught.value.kind == ("bad-metadata" if negative else "newer-writer")
        assert caught.value.file == "mp_rank_00_model_states.pt"


class TestVersions:
    def test_without_recorded_dimensions_the_names_tell(self, tmp_path: Path) -> None:
        for name, grid in (("pipe", (2, 1, 1)), ("tp", (1, 2, 2)), ("z1", (1, 1, 4))):
            path = copied(name, tmp_path)
            for file in path.glob("mp_rank_*"):
                edit(file, lambda s: s.pop("checkpoint_parallel_dimensions"))
            topology = opened(path).topology
            assert (topology.pp, topology.tp, topology.dp) == grid
            assert topology.evidence == "the files' names"
            assert errors(path) == []

    def test_sub_groups_listed_as_one_group(self, tmp_path: Path) -> None:
        path = copied("z3", tmp_path)
        for file in path.glob("*model_states.pt"):
            edit(file, lambda s: s.update(param_shapes=joined(s["param_shapes"])))
        checkpoint = opened(path)
        for key, (_, _, data) in truth_of("z3").items():
            assert read_tensor(checkpoint, key) == data

    def test_one_list_of_shapes_for_several_groups_is_refused(self, tmp_path: Path) -> None:
        path = copied("z1", tmp_path)
        edit(path / "mp_rank_00_model_states.pt",
             lambda s: s.update(param_shapes=joined(s["param_shapes"])))  # fmt: skip
        with pytest.raises(UnsupportedError, match="as one group"):
            opened(path)

    def test_an_fp16_wrapper_without_zero_keeps_its_flat_masters(self, tmp_path: Path) -> None:
        import torch

        path = copied("off", tmp_path)
        wrapper = {"cur_scale": 8, "fp32_groups_flat": [torch.arange(5.0)],
                   "optimizer_state_dict": {"state": {0: {"exp_avg": torch.ones(5)}}}}  # fmt: skip
        edit(path / "mp_rank_00_model_states.pt", lambda s: s.update(optimizer=wrapper))
        checkpoint = opened(path)
        flat = read_tensor(checkpoint, "extra:rank0:optimizer.fp32_groups_flat.0")
        assert flat == torch.arange(5.0).numpy().tobytes()
        assert checkpoint.load_object("optimizer.cur_scale") == 8
        assert any("no list of what lies where" in note.message for note in checkpoint.notes)


def joined(groups: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: shape for group in groups for name, shape in group.items()}


class TestSlices:
    def test_copies_that_differ_are_not_averaged(self, tmp_path: Path) -> None:
        path = copied("tp", tmp_path)

        def change(state: Any) -> None:
            state["optimizer_state_dict"]["single_partition_of_fp32_groups"][1].data[-1] += 1

        edit(optimizer_file(path, 1, 1), change)
        checkpoint = opened(path)
        with pytest.raises(UnsupportedError, match="averaged"):
            read_tensor(checkpoint, "master:mean")
        assert read_tensor(checkpoint, "exp_avg:mean") == truth_of("tp")["exp_avg:mean"].data
        assert read_tensor(checkpoint, "master:norm") == truth_of("tp")["master:norm"].data

    def bare(self, tmp_path: Path, **more: Any) -> Path:
        """Return the sliced set without its own record of how it is cut."""
        path = copied("tp", tmp_path)
        for file in path.glob("mp_rank_*"):
            edit(file, lambda s: (s.pop("universal_checkpoint_info"), s.update(more)))
        return path

    def test_a_name_that_no_rule_knows_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedError, match="embed") as caught:
            opened(self.bare(tmp_path))
        assert (caught.value.kind, caught.value.tensor) == ("unknown-rule", "embed")
        assert "--rules" in caught.value.hint

    def test_the_users_rules(self, tmp_path: Path) -> None:
        text = """
            rule = [
              {names = ["norm", "mean"], split = "replicated"},
              {names = ["fc1"], split = 0, blocks = [1, 1]},
              {names = ["down"], split = 1},
              {names = ["*"], split = 0},
            ]
        """
        form = DeepSpeed(parse_rules(text, "mine.toml"))
        source = Source.directory(open_store(str(self.bare(tmp_path))))
        checkpoint = form.open(source)
        for key, (_, shape, data) in truth_of("tp").items():
            assert checkpoint.tensors[key].shape == shape
            assert read_tensor(checkpoint, key) == data

    def test_the_names_of_megatron_deepspeed(self, tmp_path: Path) -> None:
        names = {"embed": "word_embeddings.weight", "column": "query_key_value.weight",
                 "fc1": "mlp.dense_h_to_4h.weight", "down": "mlp.dense_4h_to_h.weight",
                 "norm": "input_layernorm.weight", "mean": "final_layernorm.bias"}  # fmt: skip
        path = self.bare(tmp_path, args=argparse.Namespace(swiglu=True))
        for file in path.glob("mp_rank_*"):
            edit(file, lambda s: renamed(s, names))
        checkpoint = opened(path)
        truth = truth_of("tp")
        for old, new in names.items():
            for kind in ("", "master:", "exp_avg:"):
                assert read_tensor(checkpoint, kind + new) == truth[kind + old].data

    @pytest.mark.parametrize(
        ("info", "why"),
        [
            ({"autotp_unsupported_parameter_patterns": {"down": "fused"}}, "no way to merge"),
            ({"expert_parameter_patterns": ["down"]}, "experts"),
            ({"affine_map": {"params": {"down": {}}}}, "affine"),
            ({"affine_map": {"version": 2, "params": {}}}, "affine maps of version 2"),
            ({"tp_replicated_parameter_patterns": ["(a+)+"]}, "regular expression"),
            ({"tp_replicated_parameter_patterns": ["("]}, "regular expression"),
            ({"tp_replicated_parameter_patterns": [7]}, "regular expression"),
            ({"parameter_with_sub_params": [{"patterns": ["down"], "partition_dim": 0}]}, "shape"),
            (
                {
                    "parameter_with_sub_params": [
                        {"patterns": ["down"], "shape": ((3, 5), 3), "partition_dim": 0}
                    ]
                },
                "evenly",
            ),
        ],
    )
    def test_what_cannot_be_merged_says_why(self, info: Any, why: str, tmp_path: Path) -> None:
        path = self.bare(tmp_path, universal_checkpoint_info=info)
        with pytest.raises(UnsupportedError, match=why):
            opened(path)

    @pytest.mark.parametrize(
        "more",
        [
            {"parameter_with_sub_params": [
                {"patterns": ["fc1"], "shape": ((6, 6), 4), "partition_dim": 0}]},
            {"parameter_with_sub_params": [
                {"patterns": ["fc1"], "shape": (2, -1), "partition_dim": 0}]},
            {"parameter_with_sub_params": [
                {"patterns": ["fc1"], "shape": ((6, 6), 4), "partition_dim": 0}],
             "sub_param_shard_widths": {"fc1": [[3, 3], [3, 3]]}},
        ],
    )  # fmt: skip
    def test_sub_parameters(self, more: Any, tmp_path: Path) -> None:
        info = {"parameter_with_row_parallelism_patterns": ["down"],
                "tp_replicated_parameter_patterns": ["norm", "mean"], **more}  # fmt: skip
        checkpoint = opened(self.bare(tmp_path, universal_checkpoint_info=info))
        for key in ("fc1", "master:fc1", "exp_avg_sq:fc1"):
            assert read_tensor(checkpoint, key) == truth_of("tp")[key].data


def renamed(state: Any, names: dict[str, str]) -> None:
    state["module"] = {names[k]: v for k, v in state["module"].items()}
    state["param_shapes"] = [
        {names[k]: v for k, v in group.items()} for group in state["param_shapes"]
    ]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("expert_3_mp_rank_00_model_states.pt", "of which layer"),
        ("offloaded_tensors/rank00/0.tensor.swp", "NVMe"),
    ],
)
def test_state_in_other_files_is_refused_by_name(name: str, why: str, tmp_path: Path) -> None:
    path = copied("z1", tmp_path)
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(b"")
    with pytest.raises(UnsupportedError, match=why) as caught:
        opened(path)
    assert caught.value.file == name


def test_the_script_beside_the_data_is_a_stray(tmp_path: Path) -> None:
    path = copied("z1", tmp_path)
    (path / "zero_to_fp32.py").write_text("print()")
    assert [(f.kind, f.file) for f in findings_of(FORM, path)] == [
        ("stray-file", "zero_to_fp32.py")
    ]
