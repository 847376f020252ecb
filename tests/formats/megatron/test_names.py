"""Legacy Megatron: names of directories, of tensors, and of what a rank keeps for itself."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.checkpoint.sharding import parse_rules
from ftckpt.errors import ExitCode, UnsupportedError
from ftckpt.formats.megatron import Megatron
from ftckpt.formats.megatron.rank_files.grid import Coordinate
from ftckpt.inspection.resume import Presence, resume_check
from ftckpt.verification import VerifyOptions, verify
from tests.builders.megatron_files import altered, opened, require, write
from tests.builders.megatron_model import Job
from tests.conformance.formats import open_path


class TestNames:
    def test_one_number_more_is_what_the_arguments_say(self, tmp_path: Path) -> None:
        pipeline = write(tmp_path / "pp", Job(pp=2, layers=2))
        experts = write(tmp_path / "ep", Job(ep=2, dp=2, experts=2, layers=2))
        names = {p.name for p in pipeline.path.iterdir()}
        assert names == {p.name for p in experts.path.iterdir()}
        require(pipeline)
        require(experts)

    def test_without_arguments_one_number_is_the_tensor_rank(self, tmp_path: Path) -> None:
        made = write(tmp_path, Job(tp=2, gated=False))
        for name in ("mp_rank_00", "mp_rank_01"):
            altered(made, name, args=None)
        require(made)

    def test_without_arguments_two_numbers_are_refused(self, tmp_path: Path) -> None:
        made = write(tmp_path, Job(pp=2))
        for name in ("mp_rank_00_000", "mp_rank_00_001"):
            altered(made, name, args=None)
        with pytest.raises(UnsupportedError, match="pipeline or an expert rank"):
            opened(made.path)

    def test_unknown_names_are_refused_where_they_are_cut(self, tmp_path: Path) -> None:
        import torch

        for tp in (1, 2):
            made = write(tmp_path / str(tp), Job(tp=tp, layers=1))
            for place in sorted(made.path.iterdir()):
                state = torch.load(place / "model_optim_rng.pt", weights_only=False)
                state["model"]["decoder.layers.0.novel.weight"] = torch.ones(2, 3)
                torch.save(state, place / "model_optim_rng.pt")
            if tp == 1:
                assert opened(made.path).tensors["decoder.layers.0.novel.weight"].shape == (2, 3)
                continue
            with pytest.raises(UnsupportedError) as caught:
                opened(made.path)
            assert caught.value.kind == "unknown-rule"
            assert caught.value.tensor == "decoder.layers.0.novel.weight"
            assert "--rules" in caught.value.hint
            rules = parse_rules('[[rule]]\nnames = ["*.novel.weight"]\nsplit = 1', "mine")
            checkpoint = open_path(Megatron(rules), made.path)
            assert checkpoint.tensors["decoder.layers.0.novel.weight"].shape == (2, 6)

    def test_names_of_before_megatron_core(self, tmp_path: Path) -> None:
        """The nested dicts, with layers on two stages and a copy of the embedding on the last."""
        import torch

        made = write(tmp_path, Job(tp=2, pp=2, layers=2))
        whole = {
            "language_model.embedding.word_embeddings.weight": torch.randn(8, 4),
            "language_model.encoder.final_norm.weight": torch.randn(4),
        }
        for layer in range(2):
            prefix = f"language_model.encoder.layers.{layer}."
            whole[prefix + "input_norm.weight"] = torch.randn(4)
            whole[prefix + "self_attention.query_key_value.weight"] = torch.randn(12, 4)
            whole[prefix + "self_attention.dense.weight"] = torch.randn(4, 4)
            whole[prefix + "mlp.dense_h_to_4h.weight"] = torch.randn(16, 4)
            whole[prefix + "mlp.dense_4h_to_h.weight"] = torch.randn(4, 8)
        for t, p in product(range(2), range(2)):
            encoder: dict[str, Any] = {}
            prefix = f"language_model.encoder.layers.{p}."
            for name, value in whole.items():
                if name.startswith(prefix):
                    own = value
                    if "h_to_4h" in name:
                        own = torch.cat([half.chunk(2)[t] for half in value.chunk(2)])
                    elif value.dim() == 2:
                        axis = 1 if name.endswith(("dense.weight", "4h_to_h.weight")) else 0
                        own = value.chunk(2, axis)[t]
                    encoder[f"layers.0.{name.removeprefix(prefix)}"] = own.clone()
            embedding = whole["language_model.embedding.word_embeddings.weight"].chunk(2)[t]
            model: dict[str, Any] = {"language_model": {"encoder": encoder}}
            if p == 0:
                model["language_model"]["embedding"] = {"word_embeddings": {"weight": embedding}}
            else:
                encoder["final_norm.weight"] = whole["language_model.encoder.final_norm.weight"]
                model["word_embeddings_for_head"] = {"weight": embedding}
            altered(
                made,
                f"mp_rank_{t:02d}_{p:03d}",
                model=model,
                args__untie_embeddings_and_output_weights=False,
            )
        checkpoint = opened(made.path)
        assert {k for k in checkpoint.tensors if not k.startswith("extra:")} == set(whole)
        for name, value in whole.items():
            assert read_tensor(checkpoint, name) == value.numpy().tobytes(), name
        assert checkpoint.aliases == {
            "word_embeddings_for_head.weight": "language_model.embedding.word_embeddings.weight"
        }

    @pytest.mark.parametrize("version", [None, 0, 1.0, "3.0"])
    def test_an_old_order_of_queries_is_refused(self, version: Any, tmp_path: Path) -> None:
        made = write(tmp_path, Job())
        altered(made, "mp_rank_00", checkpoint_version=version)
        with pytest.raises(UnsupportedError, match="checkpoint_version"):
            opened(made.path)


class TestState:
    def test_objects_are_inert_and_by_rank(self, tmp_path: Path) -> None:
        checkpoint = opened(write(tmp_path, Job(tp=2, optimizer="distributed")).path)
        assert checkpoint.objects["rank_1.rng_state"].rank == 1
        assert checkpoint.load_object("rank_0.iteration") == 100
        assert checkpoint.load_object("rank_0.args").get("num_layers") == 4
        assert checkpoint.load_object("rank_1.rng_state")[0]["random_rng_state"] == (3, (1,), None)
        assert "rank_0.args.consumed_train_samples" in set(checkpoint.fields())

    def test_what_a_resume_finds(self, tmp_path: Path) -> None:
        job = Job(tp=2, optimizer="distributed")
        items = {i.key: i for i in resume_check(opened(write(tmp_path, job).path))}
        for key in ("weights", "moments", "masters", "scheduler", "data", "step", "rng-python"):
            assert items[key].presence is Presence.PRESENT, items[key]

    def test_a_writer_finds_the_layout(self, tmp_path: Path) -> None:
        checkpoint = opened(write(tmp_path, Job(pp=2, optimizer="fp32")).path)
        assert checkpoint.layout.args.count("padded_vocab_size") == 64
        tree = checkpoint.tree(Coordinate(0, 1, 0))
        assert next(iter(tree["model"])) == "decoder.layers.0.input_layernorm.weight"

    def test_extra_state_stays_its_ranks(self, tmp_path: Path) -> None:
        import torch

        made = write(tmp_path, Job(tp=2, layers=1))
        for number, place in enumerate(sorted(made.path.iterdir())):
            state = torch.load(place / "model_optim_rng.pt", weights_only=False)
            state["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.full(
                (5,), number, dtype=torch.uint8
            )
            torch.save(state, place / "model_optim_rng.pt")
        checkpoint = opened(made.path)
        key = "extra:rank1:model.decoder.layers.0.mlp.linear_fc1._extra_state"
        assert read_tensor(checkpoint, key) == b"\1" * 5

    def test_other_files_of_a_rank_belong_to_it(self, tmp_path: Path) -> None:
        import torch

        made = write(tmp_path, Job(layers=1))
        state = {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": [{"lr": 0.5}]}
        torch.save(state, made.path / "mp_rank_00" / "layer_wise_optimizer_0.pt")
        checkpoint = opened(made.path)
        assert "mp_rank_00/layer_wise_optimizer_0.pt" in set(checkpoint.members())
        key = "extra:rank0:layer_wise_optimizer_0.state.0.momentum_buffer"
        assert checkpoint.tensors[key].shape == (3,)
        assert checkpoint.load_object("layer_wise_optimizer_0.rank_0.param_groups") == [{"lr": 0.5}]

    def test_a_missing_part_of_a_layer_wise_optimizer_is_found(self, tmp_path: Path) -> None:
        import torch

        said = (("use_layer_wise_distributed_optimizer", True),)
        made = write(tmp_path, Job(dp=2, tp=2, layers=1, optimizer="masters", recorded=said))
        state = {0: {"optimizer": {"state": {0: {"momentum_buffer": torch.ones(3)}}}}}
        places = [
            made.path / f"mp_rank_0{t}/layer_wise_optimizer_{d}.pt" for t in (0, 1) for d in (0, 1)
        ]
        for place in places:
            torch.save(state, place)
        assert verify(opened(made.path), VerifyOptions()).code is ExitCode.OK
        for place in places:
            place.unlink()
            report = verify(opened(made.path), VerifyOptions())
            assert report.code is not ExitCode.OK
            name = place.relative_to(made.path).as_posix()
            assert [f.file for f in report.findings if f.kind == "missing-rank"] == [name]
            torch.save(state, place)

    def test_buffers_are_no_parameters(self, tmp_path: Path) -> None:
        import torch

        made = write(tmp_path, Job(experts=2, layers=1, optimizer="masters"))
        file = made.path / "mp_rank_00" / "model_optim_rng.pt"
        state = torch.load(file, weights_only=False)
        state["model"]["decoder.layers.0.mlp.router.expert_bias"] = torch.zeros(2)
        torch.save(state, file)
        tensor = opened(made.path).tensors["decoder.layers.0.mlp.router.expert_bias"]
        assert tensor.kind is Kind.BUFFER
