"""Which tensor, value or setting a job's name means."""

from __future__ import annotations

import pytest

from ftckpt.errors import NotFoundError, UnsupportedError, UsageError
from ftckpt.formats.pickles.walk import Path, dotted
from ftckpt.formats.state.job_names import AskedNames, TensorRow, bare, setting_of, similar
from ftckpt.formats.state.job_settings import LoadedSettings


def names(*paths: Path, objects: tuple[str, ...] = ()) -> AskedNames:
    rows = [TensorRow(dotted(p), dotted(p), p, (2,), "float32") for p in paths]
    return AskedNames(rows, objects)


W, V = "layers.0.weight", "layers.1.weight"
USUAL = names(
    ("model", W), ("model", V), ("optimizer", "state", W, "exp_avg"),
    ("optimizer", "state", V, "exp_avg"), ("optimizer", "state", W, "step"), ("ema", W),
    ("optimizer", "state", V, "master_param"), ("rng", "rank_0"),
    objects=("lr_scheduler.last_epoch", "train.step"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("model.layers.0.weight", f"model.{W}"),
        ("layers.0.weight", f"model.{W}"),
        ("app.model.layers.0.weight", f"model.{W}"),
        ("model.module.layers.0.weight", f"model.{W}"),
        ("module.layers.0.weight", f"model.{W}"),
        ("model._orig_mod.layers.0._checkpoint_wrapped_module.weight", f"model.{W}"),
        ("state_dict.layers.1.weight", f"model.{V}"),
        ("optim.state.layers.0.weight.exp_avg", f"optimizer.state.{W}.exp_avg"),
        ("optimizer.state.module.layers.0.weight.exp_avg", f"optimizer.state.{W}.exp_avg"),
        ("app.optim.state.layers.0.weight.step", f"optimizer.state.{W}.step"),
        ("ema.layers.0.weight", f"ema.{W}"),
        ("ema_model.layers.0.weight", f"ema.{W}"),
        ("rng.rank_0", "rng.rank_0"),
        ("rng.rank_1", None),
        ("layers.2.weight", None),
        ("optim.state.layers.0.weight.max_exp_avg", None),
        ("model.layers.0.weight.exp_avg", None),
    ],
)
def test_a_name_is_found(asked: str, meant: str | None) -> None:
    assert USUAL.find(asked) == meant
    assert (asked in USUAL) == (meant is not None)


def test_a_weight_that_is_its_master_alone_is_found() -> None:
    held = names(("optimizer", "state", W, "master_param"), ("model", "seen"))
    assert held.find(f"model.{W}") == f"optimizer.state.{W}.master_param"
    assert USUAL.find(f"model.{V}") == f"model.{V}"  # where there is a weight, it is meant
    assert held.find("model.other") is None


def test_a_prefix_that_all_names_have_may_be_left_out() -> None:
    """Lightning's module keeps the network as an attribute."""
    inner = names(("model", "model.gain"), ("model", "model.embed.weight"),
                  ("optimizer", "state", "model.gain", "exp_avg"))  # fmt: skip
    assert inner.find("model.gain") == "model.model.gain"
    assert inner.find("gain") == "model.model.gain"
    assert inner.find("optim.state.gain.exp_avg") == "optimizer.state.model.gain.exp_avg"
    assert inner.parameter("gain") == "model.gain"
    outer = names(("model", "model.gain"), ("model", "lm_head.weight"))
    assert outer.find("gain") is None


def test_two_that_may_be_meant_are_an_error() -> None:
    both = names(("model", "w"), ("model", "model.w"))
    assert both.find("model.w") == "model.w"  # as it is listed
    with pytest.raises(UsageError, match=r"may mean model\.\S+ and model\."):
        both.find("app.model.model.w")


def test_values_are_found_by_their_words() -> None:
    assert USUAL.find_object("scheduler.last_epoch") == "lr_scheduler.last_epoch"
    assert USUAL.find_object("app.train.step") == "train.step"
    assert USUAL.find_object("app.train.epoch") is None
    assert USUAL.find_object("train.last_epoch") is None


def test_a_step_is_of_a_parameter() -> None:
    assert USUAL.step_of("optim.state.layers.1.weight.step") == V
    assert USUAL.step_of("optim.state.layers.7.weight.step") is None
    assert USUAL.step_of("model.layers.1.weight.step") is None


@pytest.mark.parametrize(
    ("asked", "owner", "group", "field"),
    [
        ("optimizer.param_groups.0.lr", "optimizer", "0", "lr"),
        ("param_groups.layers.0.weight.betas", "", "layers.0.weight", "betas"),
        ("app.optim.param_groups.1.params", "app.optim", "1", "params"),
    ],
)
def test_a_setting_is_taken_apart(asked: str, owner: str, group: str, field: str) -> None:
    assert setting_of(asked) == (owner, group, field)
    assert setting_of("model.layers.0.weight") is None


def test_the_members_of_a_jobs_group_must_agree() -> None:
    settings = LoadedSettings([{"lr": b"1", "wd": b"0"}, {"lr": b"1", "wd": b"1"}],
                              {"a": 0, "b": 1}, [])  # fmt: skip
    both = setting_of("optim.param_groups.0.lr")
    decay = setting_of("optim.param_groups.0.wd")
    more = setting_of("optim.param_groups.0.eps")
    assert both is not None
    assert decay is not None
    assert more is not None
    assert settings.value(both, ["a", "b"]) == b"1"
    assert settings.value(decay, ["b"]) == b"1"
    with pytest.raises(UnsupportedError, match="a has another one than b"):
        settings.value(decay, ["a", "b"])
    with pytest.raises(NotFoundError, match="no group of the checkpoint has eps"):
        settings.value(more, ["a"])
    with pytest.raises(NotFoundError, match="no settings of c"):
        settings.value(both, ["a", "c"])
    unknown = LoadedSettings([{"lr": b"1", "wd": b"0"}, {"lr": b"1", "wd": b"1"}], {}, [0, 1])
    assert unknown.value(both, ["c"]) == b"1"
    with pytest.raises(UnsupportedError):
        unknown.value(decay, ["c"])


def test_prefixes_of_wrappers_are_taken_off() -> None:
    assert bare("module.module._orig_mod.a._fsdp_wrapped_module.b") == "a.b"
    assert bare("module.") == "module."
    assert similar("model.layers.0.wight.weight", USUAL)[0].endswith("weight")
