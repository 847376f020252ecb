"""Muon in files of ranks: which state is whose, in other layouts and in other formats.

The sample is of megatron-core 0.16.1 (tests/data/megatron_dist/make_muon.py). Megatron loaded what
was written here, and on the same tensor ranks trained on with the same bits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ftckpt as api
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import UnsupportedError
from ftckpt.formats.megatron.job.optimizer_tree import is_muon
from ftckpt.formats.megatron.job.trained import muons_of
from ftckpt.formats.megatron.rank_files.grid import Arguments
from tests.builders.checkpoints import open_checkpoint
from tests.conformance.formats import Made
from tests.formats.megatron.torch_dist.test_reader import of_data

FILE = "model_optim_rng.pt"


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return of_data("muon_files", tmp_path / "of")


def assert_whole(path: Path, made: Made) -> None:
    result = open_checkpoint(path)
    assert result.tensors.keys() == made.truth.keys()
    for key, (_, shape, data) in made.truth.items():
        assert (result.tensors[key].shape, read_tensor(result, key)) == (shape, data), key


def optimizers_in(path: Path, tensor_rank: int = 0) -> list[dict[str, dict[str, object]]]:
    state = torch.load(path / f"mp_rank_{tensor_rank:02d}" / FILE, weights_only=False)
    found: list[dict[str, dict[str, object]]] = state["optimizer"]
    return found


def test_other_tensor_ranks_get_their_part(made: Made, tmp_path: Path) -> None:
    api.reshard(str(made.path), str(tmp_path / "out"), tp=1)
    assert_whole(tmp_path / "out", made)


def test_it_comes_back_from_torch_dist_as_the_job_saved_it(made: Made, tmp_path: Path) -> None:
    api.convert(str(made.path), str(tmp_path / "dist"), "megatron-dist")
    api.convert(str(tmp_path / "dist"), str(tmp_path / "alone"), "megatron")
    api.convert(str(tmp_path / "dist"), str(tmp_path / "like"), "megatron", like=str(made.path))
    for rank in (0, 1):
        own = optimizers_in(made.path, rank)
        assert "momentum_buffer" in own[0]["optimizer"]["state"][0]  # type: ignore[index]
        for out in ("alone", "like"):
            assert_whole(tmp_path / out, made)
            for before, after in zip(own, optimizers_in(tmp_path / out, rank), strict=True):
                same(before, after)


def same(one: object, other: object) -> None:
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert isinstance(other, dict)
        assert one.keys() == other.keys()
        for key, value in one.items():
            same(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert isinstance(other, (list, tuple))
        for value, theirs in zip(one, other, strict=True):
            same(value, theirs)
    else:
        assert one == other


def test_a_step_that_a_store_counts_once_is_no_shared_tensor(made: Made, tmp_path: Path) -> None:
    """torch counts in place: a tensor of all parameters would count once for each of them."""
    api.convert(str(made.path), str(tmp_path / "dist"), "megatron-dist")
    api.convert(str(tmp_path / "dist"), str(tmp_path / "out"), "megatron")
    state = optimizers_in(tmp_path / "out")[1]["optimizer"]["state"]
    assert isinstance(state, dict)
    steps = [one["step"].data_ptr() for one in state.values()]
    assert len(steps) == len(set(steps)) == 7


def test_state_that_does_not_fit_stays_with_its_rank(made: Made, tmp_path: Path) -> None:
    for rank in (0, 1):
        file = made.path / f"mp_rank_{rank:02d}" / FILE
        state = torch.load(file, weights_only=False)
        state["optimizer"][0]["optimizer"]["state"][0]["momentum_buffer"] = torch.zeros(3, 3)
        torch.save(state, file)
    changed = open_checkpoint(made.path)
    assert not any(t.component == "optimizer" for t in changed.tensors.values())
    assert sum("kept by rank" in note.message for note in changed.notes) == 2
    with pytest.raises(UnsupportedError, match="kept by rank"):
        api.reshard(str(made.path), str(tmp_path / "out"), tp=1)


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adam"])
def test_a_momentum_alone_is_not_muon(name: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    tree = getattr(torch.optim, name)([weight], lr=0.1).state_dict()
    assert not is_muon(tree)
    assert not is_muon({"optimizer": tree})
    with pytest.raises(UnsupportedError, match="optimizer is sgd"):
        muons_of(Arguments({"optimizer": "sgd"}), [tree])


@pytest.mark.parametrize("spelled", ["momentum_beta", "momentum"])
def test_muon_is_known_by_its_settings(spelled: str) -> None:
    group = {"params": [0], "lr": 0.1, "weight_decay": 0.1, spelled: 0.95}
    assert is_muon({"state": {}, "param_groups": [group]})
