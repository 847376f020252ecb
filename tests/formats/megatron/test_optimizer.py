"""Legacy Megatron: state that no name is stored with, given to parameters or kept by rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders.megatron_files import altered, opened, require, write
from tests.builders.megatron_model import Job, truth


class TestOptimizer:
    def test_groups_of_an_unknown_rule_are_kept_by_rank(self, tmp_path: Path) -> None:
        """Two vectors swapped between groups leave several orders with the same shapes."""
        import torch

        made = write(tmp_path, Job(optimizer="masters"))
        file = made.path / "mp_rank_00" / "model_optim_rng.pt"
        state = torch.load(file, weights_only=False)
        groups = state["optimizer"]["optimizer"]["param_groups"]
        groups[0]["params"].append(groups[1]["params"].pop())
        torch.save(state, file)
        checkpoint = opened(made.path)
        assert not [t for t in checkpoint.tensors.values() if t.component == "optimizer"]
        kept = [k for k in checkpoint.tensors if k.startswith("extra:rank0:optimizer.")]
        assert len(kept) == 4 * len(truth(Job()))
        (note,) = (n for n in checkpoint.notes if n.kind == "note")
        assert "kept by rank" in note.message

    def test_masters_of_other_shapes_are_kept_by_rank(self, tmp_path: Path) -> None:
        import torch

        made = write(tmp_path, Job(optimizer="masters"))
        file = made.path / "mp_rank_00" / "model_optim_rng.pt"
        state = torch.load(file, weights_only=False)
        masters = state["optimizer"]["fp32_from_fp16_params"][0]
        masters[1], masters[2] = masters[2], masters[1]
        torch.save(state, file)
        assert "kept by rank" in " ".join(n.message for n in opened(made.path).notes)

    def test_old_groups_without_names_of_their_kind(self, tmp_path: Path) -> None:
        """Before 2022 a group recorded its weight decay alone; a dict numbered the optimizers."""
        import torch

        made = write(tmp_path, Job(optimizer="masters"))
        file = made.path / "mp_rank_00" / "model_optim_rng.pt"
        state = torch.load(file, weights_only=False)
        for group in state["optimizer"]["optimizer"]["param_groups"]:
            group["weight_decay"] = 0.1 * group.pop("wd_mult")
            del group["is_expert_parallel"]
        state["optimizer"] = {0: state["optimizer"]}
        torch.save(state, file)
        require(made)

    def test_a_rate_of_its_own_for_the_embedding(self, tmp_path: Path) -> None:
        """`--decoupled-lr` puts embedding and output layer into a group of their own."""
        import torch

        made = write(tmp_path, Job(optimizer="masters", recorded=(("decoupled_lr", 0.5),)))
        file = made.path / "mp_rank_00" / "model_optim_rng.pt"
        state = torch.load(file, weights_only=False)
        one = state["optimizer"]
        groups = one["optimizer"]["param_groups"]
        ids = groups[0]["params"]
        apart = dict(groups[0], max_lr=0.5, params=[ids[0], ids[-1]])
        groups[0]["params"] = ids[1:-1]
        masters = one["fp32_from_fp16_params"]
        one["fp32_from_fp16_params"] = [
            masters[0][1:-1],
            masters[1],
            [masters[0][0], masters[0][-1]],
        ]
        groups.append(apart)
        torch.save(state, file)
        require(made)

    @pytest.mark.parametrize(
        "recorded", [{"ddp_bucket_size": 1000}, {"data_parallel_size": 96}, {"swap": 1}]
    )
    def test_buffers_that_no_layout_fits_are_kept_by_rank(
        self, recorded: dict[str, int], tmp_path: Path
    ) -> None:
        """Another bucket size, another padding, or two equal weights that lie the other way."""
        import torch

        made = write(tmp_path, Job(dp=2, optimizer="distributed", bucket=1500))
        altered(made, "mp_rank_00", **{f"args__{k}": v for k, v in recorded.items()})
        if "swap" in recorded:
            file = made.path / "mp_rank_00" / "model_optim_rng.pt"
            state = torch.load(file, weights_only=False)
            names = [f"decoder.layers.{n}.input_layernorm.weight" for n in (0, 1)]
            first, second = (state["model"][name] for name in names)
            state["model"] |= dict(zip(names, (second, first), strict=True))
            torch.save(state, file)
        checkpoint = opened(made.path)
        assert not [t for t in checkpoint.tensors.values() if t.component == "optimizer"]
        assert "no layout" in " ".join(n.message for n in checkpoint.notes)
        kept = {k for k in checkpoint.tensors if k.startswith("extra:rank0:distrib_optim.")}
        assert len(kept) == 3

    def test_weights_that_were_copied_prove_nothing_and_the_size_does(self, tmp_path: Path) -> None:
        import torch

        made = write(tmp_path, Job(dp=2, optimizer="distributed", bucket=1500))
        file = made.path / "mp_rank_00" / "model_optim_rng.pt"
        state = torch.load(file, weights_only=False)
        state["model"] = {k: v if v is None else v.clone() for k, v in state["model"].items()}
        torch.save(state, file)
        require(made)

    def test_buckets_of_before_2024_are_kept_by_rank(self, tmp_path: Path) -> None:
        import torch

        made = write(tmp_path, Job(dp=2, optimizer="distributed"))
        file = made.path / "mp_rank_00" / "distrib_optim.pt"
        state = torch.load(file, weights_only=False)
        del state["buckets_coalesced"]
        torch.save(state, file)
        assert "before 2024" in " ".join(n.message for n in opened(made.path).notes)

    def test_experts_of_one_group_of_ranks_have_no_optimizer_of_their_own(
        self, tmp_path: Path
    ) -> None:
        require(write(tmp_path, Job(tp=2, experts=2, layers=2, optimizer="distributed")))

    def test_dense_state_that_another_rank_saves_too(self, tmp_path: Path) -> None:
        """Expert rank 1 saves the experts' state alone: the dense optimizer's place holds None."""
        import torch

        made = write(tmp_path, Job(ep=2, dp=2, experts=4, layers=2, optimizer="distributed"))
        dense, _ = torch.load(made.path / "mp_rank_00_000" / "distrib_optim.pt")
        file = made.path / "mp_rank_00_001" / "distrib_optim.pt"
        nothing, experts = torch.load(file, weights_only=False)
        assert nothing is None
        torch.save([dense, experts], file)
        require(made)

    def test_masters_before_the_first_step(self, tmp_path: Path) -> None:
        import torch

        made = write(tmp_path, Job(tp=2, optimizer="masters"))
        for place in made.path.iterdir():
            state = torch.load(place / "model_optim_rng.pt", weights_only=False)
            state["optimizer"]["optimizer"]["state"] = {}
            torch.save(state, place / "model_optim_rng.pt")
        kept = {k: v for k, v in made.truth.items() if not k.startswith(("exp_avg", "optimizer:"))}
        require(made._replace(truth=kept))

    @pytest.mark.parametrize("how", ["factors", "stranger", "form"])
    def test_other_optimizers_are_kept_by_rank(self, how: str, tmp_path: Path) -> None:
        """Adafactor's factors; state of a parameter in no group; a form that is not torch's."""
        import torch

        made = write(tmp_path, Job(optimizer="fp32"))
        file = made.path / "mp_rank_00" / "model_optim_rng.pt"
        tree = torch.load(file, weights_only=False)
        state = tree["optimizer"]["state"]
        if how == "factors":
            state[0]["exp_avg_sq_row"] = torch.ones(64)
        elif how == "stranger":
            state[999] = {"exp_avg": torch.ones(2)}
        else:
            tree["optimizer"]["state"] = list(state.values())
        torch.save(tree, file)
        checkpoint = opened(made.path)
        assert "kept by rank" in " ".join(n.message for n in checkpoint.notes)
        own = [t for t in checkpoint.tensors.values() if t.component == "extra:rank0"]
        assert len(own) == 1 + sum(map(len, state.values()))  # and the state of one RNG
