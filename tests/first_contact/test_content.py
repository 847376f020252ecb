"""What a save has and lacks is judged by its content: states as public trainers lay them out."""

from __future__ import annotations

import argparse
import copy
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ftckpt
from ftckpt.discovery.conditions import Part
from ftckpt.errors import ExitCode
from ftckpt.formats.state.fields import state_contents
from ftckpt.formats.state.stored_names import AVERAGE as AVERAGE_KEYS
from ftckpt.formats.state.stored_names import MODEL, NETWORK, OPTIMIZER
from ftckpt.inspection.resume import Presence, resume_check
from ftckpt.inspection.training_state import TABLE

RNG = ("rng-python", "rng-numpy", "rng-torch", "rng-cuda")
PRESENT, ABSENT, UNKNOWN = Presence.PRESENT, Presence.ABSENT, Presence.CANNOT_TELL


class Job:
    """A training of a few steps."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))
        self.adam = torch.optim.AdamW(self.net.parameters())
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.adam, 10)
        for _ in range(3):
            self.net(torch.randn(2, 4)).sum().backward()
            self.adam.step()
            self.schedule.step()

    @property
    def weights(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.net.state_dict().items()}

    @property
    def moments(self) -> dict[str, Any]:
        return copy.deepcopy(self.adam.state_dict())

    @property
    def rates(self) -> dict[str, Any]:
        return dict(self.schedule.state_dict())


JOB, OTHER = Job(), Job(1)
SCALER = {"scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000,
          "_growth_tracker": 0}  # fmt: skip
AVERAGE = {name: value.double() for name, value in JOB.weights.items()}
NO_RNG = dict.fromkeys(RNG, ABSENT)

# Layout -> what torch.save was given, and the right answers.
SAVES: dict[str, tuple[dict[str, Any], dict[str, Presence]]] = {
    # fairseq/checkpoint_utils.py, trainer.py
    "fairseq": (
        {"args": None, "cfg": {"lr_scheduler": {"_name": "fixed"}, "common": {"seed": 1}},
         "model": JOB.weights, "criterion": None, "task_state": {},
         "optimizer_history": [{"lr_scheduler_state": {"best": 1.0}, "num_updates": 3}],
         "extra_state": {"train_iterator": {"epoch": 2, "iterations_in_epoch": 0}, "metrics": {}},
         "last_optimizer_state": JOB.moments},
        {"moments": PRESENT, "scheduler": PRESENT, "data": PRESENT, "step": PRESENT, **NO_RNG}),
    "fairseq, without its history": (
        {"cfg": {"lr_scheduler": {"_name": "fixed", "warmup_updates": 4}}, "model": JOB.weights,
         "last_optimizer_state": JOB.moments},
        {"moments": PRESENT, "scheduler": ABSENT, "step": UNKNOWN, **NO_RNG}),
    # timm/utils/checkpoint_saver.py; GradScaler(enabled=False).state_dict() is {}
    "timm": (
        {"epoch": 1, "arch": "x", "state_dict": JOB.weights, "optimizer": JOB.moments, "version": 2,
         "args": argparse.Namespace(sched="cosine", lr=0.1), "amp_scaler": {}, "metric": 0.5,
         "state_dict_ema": AVERAGE},
        {"moments": PRESENT, "scheduler": ABSENT, "scaler": ABSENT, "step": UNKNOWN, **NO_RNG}),
    # fvcore/common/checkpoint.py
    "detectron2": (
        {"model": JOB.weights, "optimizer": JOB.moments, "scheduler": JOB.rates, "iteration": 4},
        {"moments": PRESENT, "scheduler": PRESENT, "step": PRESENT, "data": ABSENT, **NO_RNG}),
    # icefall/checkpoint.py
    "icefall": (
        {"model": JOB.weights, "optimizer": JOB.moments, "scheduler": JOB.rates, "lr": 0.01,
         "grad_scaler": SCALER, "sampler": {"epoch": 1, "diagnostics": {}}, "model_avg": AVERAGE,
         "batch_idx_train": 30, "cur_epoch": 1, "best_train_loss": 0.5},
        {"moments": PRESENT, "scaler": PRESENT, "data": PRESENT, "step": PRESENT, **NO_RNG}),
    # espnet2/train/trainer.py
    "espnet": (
        {"model": JOB.weights, "optimizers": [JOB.moments], "schedulers": [JOB.rates],
         "scaler": None, "reporter": {"epoch": 1}},
        {"moments": PRESENT, "scheduler": PRESENT, "scaler": ABSENT, "step": UNKNOWN, **NO_RNG}),
    # mmengine/runner/runner.py
    "mmengine": (
        {"meta": {"epoch": 1, "iter": 5, "cfg": "x"}, "state_dict": JOB.weights,
         "optimizer": JOB.moments,
         "param_schedulers": [{"last_step": 3, "base_values": [0.1], "_global_step": 4,
                               "_last_value": [0.1]}]},
        {"moments": PRESENT, "scheduler": PRESENT, **NO_RNG}),
    # composer/core/state.py: the whole state below one key
    "composer": (
        {"state": {"model": JOB.weights, "optimizers": {"AdamW": JOB.moments},
                   "schedulers": {"LambdaLR": JOB.rates}, "timestamp": {"batch": 3},
                   "dataset_state": {"train": {"epoch": 0, "sample_in_epoch": 8}}},
         "rng": [{"python": random.getstate(), "numpy": np.random.get_state(),
                  "torch": torch.get_rng_state(), "cuda": torch.zeros(16, dtype=torch.uint8)}]},
        {"moments": PRESENT, "scheduler": PRESENT, "data": PRESENT, "step": PRESENT,
         **dict.fromkeys(RNG, PRESENT)}),
    # one's own: short names, nothing of the table
    "short names": (
        {"m": JOB.weights, "o": JOB.moments, "sched": JOB.rates, "n": 3,
         "r": torch.get_rng_state(), "p": random.getstate()},
        {"weights": PRESENT, "moments": PRESENT, "scheduler": PRESENT, "rng-torch": PRESENT,
         "rng-python": PRESENT, "rng-numpy": ABSENT, "step": UNKNOWN}),
    "sched and rng": (
        {"model": JOB.weights, "optimizer": JOB.moments, "sched": JOB.rates, "step": 3,
         "rng": {"torch": torch.get_rng_state(), "np": np.random.get_state()}},
        {"scheduler": PRESENT, "rng-torch": PRESENT, "rng-numpy": PRESENT, "rng-python": ABSENT}),
    "a plateau and a generator": (
        {"model": JOB.weights,
         "s": torch.optim.lr_scheduler.ReduceLROnPlateau(JOB.adam).state_dict(),
         "g": np.random.default_rng(0).bit_generator.state},
        {"scheduler": PRESENT, "rng-numpy": PRESENT, "rng-torch": ABSENT, "moments": ABSENT}),
    "what nobody understands": (
        {"model": JOB.weights, "blob": b"\0" * 2500},
        {"scheduler": UNKNOWN, "rng-torch": UNKNOWN, "data": UNKNOWN}),
    "settings are no state": (
        {"model": JOB.weights, "config": {"lr_scheduler": {"name": "cosine", "warmup_steps": 3},
                                          "rng": {"torch": 7}, "grad_scaler": True}},
        {"scheduler": ABSENT, "rng-torch": ABSENT, "scaler": ABSENT}),
    "no schedule and no generator": (
        {"model": JOB.weights, "lr_scheduler": None, "rng": {"torch": None, "python": None}},
        {"scheduler": ABSENT, "rng-torch": ABSENT, "rng-python": ABSENT}),
}  # fmt: skip


@pytest.mark.parametrize("layout", SAVES)
def test_a_save_has_and_lacks_what_its_content_shows(layout: str, tmp_path: Path) -> None:
    state, expected = SAVES[layout]
    torch.save(state, tmp_path / "saved.pt")
    checkpoint = ftckpt.open_checkpoint(str(tmp_path / "saved.pt"))
    found = {item.key: item for item in resume_check(checkpoint, state_contents)}
    assert list(found) == [row.key for row in TABLE]
    assert {key: found[key].presence for key in expected} == expected
    assert found["weights"].presence is PRESENT


@pytest.mark.parametrize("layout", ["fairseq", "timm", "sched and rng", "composer"])
def test_inspect_latest_and_audit_judge_alike(layout: str, tmp_path: Path) -> None:
    torch.save({"global_step": 3, **SAVES[layout][0]}, tmp_path / "step-3.pt")
    path = str(tmp_path / "step-3.pt")
    shown = ftckpt.inspect(path).resume
    assert shown == ftckpt.replay_audit(path).resume
    present = {item.key for item in shown if item.presence is PRESENT}
    for part, key in ((Part.SCHEDULER, "scheduler"), (Part.RNG, "rng-torch"), (Part.STEP, "step")):
        chosen = ftckpt.latest(str(tmp_path), require=part.value)
        assert (chosen.path is not None) is (key in present), part


def test_an_empty_scaler_is_none_that_is_missing(tmp_path: Path) -> None:
    torch.save(SAVES["timm"][0], tmp_path / "saved.pt")
    items = {item.key: item for item in ftckpt.inspect(str(tmp_path / "saved.pt")).resume}
    assert (items["scaler"].needed, items["scaler"].reason) == (False, "amp_scaler is empty")
    assert items["scheduler"].needed


def test_a_file_that_the_format_does_not_open_may_hold_what_is_not_found(tmp_path: Path) -> None:
    from tests.builders.checkpoints import save_dcp

    save_dcp(tmp_path / "step-3")
    lacking = {i.key for i in ftckpt.inspect(str(tmp_path / "step-3")).resume
               if i.presence is ABSENT and i.needed}  # fmt: skip
    torch.save({"iter_num": 3}, tmp_path / "step-3" / "further.pt")
    items = {item.key: item for item in ftckpt.inspect(str(tmp_path / "step-3")).resume}
    assert lacking
    assert {items[key].presence for key in lacking} == {UNKNOWN}
    assert all("further.pt" in items[key].reason for key in lacking)


# --- what is the model ----------------------------------------------------------------------------


def weights_in(path: Path) -> set[str]:
    tensors = ftckpt.open_checkpoint(str(path)).tensors.values()
    return {info.name for info in tensors if info.component == "model"}


@pytest.mark.parametrize(
    "state",
    [
        {"model": JOB.weights, "rng": torch.get_rng_state()},
        {**JOB.weights, "rng": torch.get_rng_state()},
        {**JOB.weights, "generators": {"cpu": torch.get_rng_state()}},
        {"m": JOB.weights, "o": JOB.moments, "r": torch.get_rng_state(), "loss": torch.ones(())},
    ],
)
@pytest.mark.parametrize("distributed", [False, True])
def test_a_generator_is_no_weight(state: dict[str, Any], distributed: bool, tmp_path: Path) -> None:
    source, out = tmp_path / "step-3", tmp_path / "out"
    if distributed and "m" in state:
        state = {"model": state["m"], "r": state["r"], "loss": state["loss"]}
    if distributed:
        dcp_save(state, source)
    else:
        source = source.with_suffix(".pt")
        torch.save(state, source)
    assert weights_in(source) == set(JOB.weights)
    ftckpt.convert(str(source), str(out), to="torchsave", only="model")
    file = out if out.is_file() else next(one for one in out.rglob("*") if one.suffix != ".json")
    loaded = torch.load(file, weights_only=True)
    Job(5).net.load_state_dict(loaded.get("model", loaded.get("m", loaded)))


def dcp_save(state: dict[str, Any], place: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process saves is what is meant
        save(state, checkpoint_id=str(place), no_dist=True)


def named_moments(job: Job) -> dict[str, Any]:
    """Return the optimizer's state by names, as torch's `get_optimizer_state_dict` gives it."""
    names = list(job.weights)
    moments = job.moments
    groups = [{**group, "params": names} for group in moments["param_groups"]]
    state = {names[number]: entry for number, entry in moments["state"].items()}
    return {"state": state, "param_groups": groups}


def keys_of(path: Path) -> set[str]:
    return set(ftckpt.open_checkpoint(str(path)).tensors)


def test_one_state_has_one_name_in_every_format(tmp_path: Path) -> None:
    """Which of the known keys a state stands under decides nothing: the same tensors are found."""
    known = tmp_path / "known.pt"
    torch.save({"model": JOB.weights, "optimizer": named_moments(JOB)}, known)
    for number, key in enumerate([*MODEL, *NETWORK]):
        optimizer = OPTIMIZER[number % len(OPTIMIZER)]
        places = [tmp_path / f"{number}.pt", tmp_path / f"{number}"]
        torch.save({key: JOB.weights, optimizer: named_moments(JOB)}, places[0])
        dcp_save({key: JOB.weights, optimizer: named_moments(JOB)}, places[1])
        for place in places:
            assert keys_of(place) == keys_of(known), (place, key, optimizer)
        if number % 8 == 0:
            report = ftckpt.diff(str(places[0]), str(places[1]))
            assert report.code is ExitCode.OK, (key, optimizer, report.tensors, report.state)


@pytest.mark.parametrize("key", ["params", *MODEL[:4], *NETWORK[:2]])
def test_a_converted_state_has_the_names_of_its_source(key: str, tmp_path: Path) -> None:
    torch.save({key: JOB.weights, "opt": named_moments(JOB)}, tmp_path / "saved.pt")
    for to in ("dcp", "safetensors", "orbax"):
        ftckpt.convert(str(tmp_path / "saved.pt"), str(tmp_path / to), to=to)
        report = ftckpt.diff(str(tmp_path / "saved.pt"), str(tmp_path / to))
        assert not report.tensors, to


def test_several_models_keep_their_keys(tmp_path: Path) -> None:
    """As in a GAN and in reinforcement learning; a model as a whole is not renamed by others."""
    pair = {"generator": JOB.weights, "discriminator": OTHER.weights}
    torch.save({**pair, "optim_g": JOB.moments, "optim_d": OTHER.moments}, tmp_path / "gan.pt")
    dcp_save(pair, tmp_path / "dcp")
    both = {f"{key}.{name}" for key in pair for name in JOB.weights}
    assert weights_in(tmp_path / "gan.pt") == weights_in(tmp_path / "dcp") == both
    agents = {"actor": {"model": JOB.weights, "optimizer": JOB.moments},
              "critic": {"model": OTHER.weights, "optimizer": OTHER.moments}}  # fmt: skip
    torch.save(agents, tmp_path / "rl.pt")
    names = {f"{key}.{name}" for key in agents for name in JOB.weights}
    assert weights_in(tmp_path / "rl.pt") == names
    torch.save({"model": JOB.weights, "discriminator": OTHER.weights}, tmp_path / "whole.pt")
    assert weights_in(tmp_path / "whole.pt") == set(JOB.weights)


def test_a_bare_state_dict_is_the_model_whatever_its_names(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")  # `weight` names a tensor here
    assert weights_in(tmp_path / "layer.pt") == {"weight", "bias"}
    torch.save({**JOB.weights, "epoch": 3}, tmp_path / "counted.pt")
    assert weights_in(tmp_path / "counted.pt") == set(JOB.weights)


def test_the_page_of_formats_has_the_table_of_keys() -> None:
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    for keys in (MODEL, NETWORK, OPTIMIZER, AVERAGE_KEYS):
        assert f"| {', '.join(f'`{key}`' for key in keys)} |" in text
