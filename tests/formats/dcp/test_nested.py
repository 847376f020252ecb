"""Models and optimizers below wrappers: found by what lies below, written back where they stood."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
)

from ftckpt.checkpoint import Checkpoint, Kind
from ftckpt.digests.tensors import digest_tensor
from ftckpt.errors import ExitCode
from ftckpt.formats.dcp.writer import DcpWriter
from ftckpt.formats.safetensors.writer import SafetensorsWriter
from ftckpt.formats.torchsave.writer import TorchSaveWriter
from ftckpt.inspection.resume import Presence, resume_check
from ftckpt.transfer.content import Content
from ftckpt.transfer.request.narrowing import Only, only
from ftckpt.verification import Level, VerifyOptions, verify
from tests import campaign
from tests.builders.checkpoints import open_checkpoint
from tests.builders.jobs import run_job
from tests.conformance.writers import assert_sound, write
from tests.formats.dcp.writing import DATA, save

State = dict[str, Any]
PAIRS = {"exp_avg": Kind.EXP_AVG, "exp_avg_sq": Kind.EXP_AVG_SQ}


def trained(seed: int, width: int = 4) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def state_of(seed: int, width: int = 4, *, flat: bool = False,
             keys: tuple[str, str] = ("model", "optim")) -> State:  # fmt: skip
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    return dict(zip(keys, get_state_dict(*trained(seed, width), options=how), strict=True))


def weights_of(seed: int, width: int = 4) -> State:
    return get_model_state_dict(trained(seed, width)[0])


def gan(left: int, right: int) -> State:
    one, other = state_of(1, left), state_of(2, right)
    return {
        "generator": one["model"], "discriminator": other["model"],
        "g_opt": one["optim"], "d_opt": other["optim"], "step": 3,
    }  # fmt: skip


# Each with the names that its models have in front of their tensors' names.
STATES: dict[str, tuple[Callable[[], State], tuple[str, ...]]] = {
    "app": (lambda: {"app": state_of(1)}, ("",)),
    "flattened": (lambda: {"fsdp_checkpoint": state_of(1, flat=True)}, ("",)),
    "deep": (lambda: {"trainer": {"state": state_of(1), "step": 3}}, ("",)),
    "any-key": (lambda: {"mine": state_of(1, keys=("policy", "adam"))}, ("",)),
    "any-key-flat": (lambda: {"mine": state_of(1, keys=("a.b", "c"), flat=True)}, ("",)),
    "module": (lambda: {"module": state_of(1)}, ("",)),
    "ema": (lambda: {"app": {**state_of(1), "ema": weights_of(2)}}, ("",)),
    "actor-critic": (lambda: {"actor": state_of(1), "critic": state_of(2)}, ("actor.", "critic.")),
    "reference": (
        lambda: {"rl": {"actor": state_of(1), "ref": {"model": weights_of(1)}}},
        ("actor.",),
    ),
    "gan": (lambda: gan(3, 5), ("generator.", "discriminator.")),
    "by-name": (
        lambda: {
            "actor_model": weights_of(1), "critic_model": weights_of(2),
            "actor_optim": state_of(1)["optim"], "critic_optim": state_of(2)["optim"],
        },
        ("actor_model.", "critic_model."),
    ),
    "beside": (lambda: {**state_of(1), "critic": state_of(2)}, ("model.", "critic.")),
}  # fmt: skip


@pytest.fixture(params=STATES)
def state(request: pytest.FixtureRequest) -> tuple[State, tuple[str, ...]]:
    make, names = STATES[request.param]
    return make(), names


def by_kind(checkpoint: Checkpoint, component: str, kind: Kind) -> set[str]:
    return {
        info.name
        for info in checkpoint.tensors.values()
        if (info.component, info.kind) == (component, kind)
    }


PARAMETERS = ("0.weight", "0.bias", "1.weight", "1.bias")


def test_parameters_and_moments_are_found(
    state: tuple[State, tuple[str, ...]], tmp_path: Path
) -> None:
    tree, models = state
    checkpoint = open_checkpoint(save(tree, tmp_path / "step-3"))
    wanted = {model + name for model in models for name in PARAMETERS}
    assert by_kind(checkpoint, "model", Kind.PARAM) >= wanted
    for kind in PAIRS.values():
        assert by_kind(checkpoint, "optimizer", kind) == wanted
    assert not any(info.component.startswith("extra:") for info in checkpoint.tensors.values())
    assert checkpoint.step == (3 if "'step': 3" in str(tree) else None)
    report = verify(checkpoint, VerifyOptions(level=Level.VALUES))
    assert report.code is ExitCode.OK, report


@pytest.mark.parametrize("writer", [DcpWriter(), SafetensorsWriter(), TorchSaveWriter()])
def test_every_tensor_comes_back(
    state: tuple[State, tuple[str, ...]], tmp_path: Path, writer: Any
) -> None:
    source = open_checkpoint(save(state[0], tmp_path / "source"))
    for part in (None, Only.MODEL, Only.OPTIMIZER):
        content = Content.of(source) if part is None else only(Content.of(source), part)
        where = tmp_path / str(part)
        where.mkdir()
        result = write(writer, content, where, **({"dp": 2} if writer.name == "dcp" else {}))
        assert set(result.tensors) == set(content.tensors)
        for key in content.tensors:
            want = digest_tensor(source, source.tensors[key])
            assert digest_tensor(result, result.tensors[key]) == want, key
        if writer.name != "safetensors":  # it has no checksums before it is sealed
            assert_sound(result)
        if writer.name == "dcp" and part is None:
            assert set(result.recorded_paths().tensors.values()) == set(  # type: ignore[attr-defined]
                source.recorded_paths().tensors.values()  # type: ignore[attr-defined]
            )


def test_models_that_fit_equally_well_are_not_guessed(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(gan(4, 4), tmp_path / "step-3"))
    weights = by_kind(checkpoint, "model", Kind.PARAM)
    assert {name.partition(".")[0] for name in weights} == {"generator", "discriminator"}
    rows = {item.key: item for item in resume_check(checkpoint)}
    assert rows["weights"].presence is Presence.PRESENT
    assert rows["moments"].presence is Presence.CANNOT_TELL  # whose optimizer is whose


def test_tensors_that_nobody_knows_are_named_and_never_called_absent(tmp_path: Path) -> None:
    state = {"mine": {"x": torch.ones(2, 3), "bytes": torch.zeros(16, dtype=torch.uint8)}}
    rows = {i.key: i for i in resume_check(open_checkpoint(save(state, tmp_path / "step-3")))}
    for key in ("weights", "moments", "masters", "rng-torch", "rng-cuda"):
        assert rows[key].presence is Presence.CANNOT_TELL, key
        assert "extra:mine:" in rows[key].reason
    assert rows["scheduler"].presence is Presence.ABSENT


@pytest.mark.parametrize(
    ("before", "after", "form"),
    [(1, 2, "nested"), (2, 1, "flat"), (2, 4, "flat"), (4, 1, "nested")][: campaign.examples(2, 4)],
)
def test_a_job_resumes_at_another_size(
    before: int, after: int, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    program = Path(__file__).with_name("nested_training.py")
    first = run_job(before, program, "save", tmp_path / "source", form)[0]
    source = open_checkpoint(tmp_path / "source")
    assert by_kind(source, "model", Kind.PARAM) == by_kind(source, "optimizer", Kind.EXP_AVG)
    write(DcpWriter(), source, tmp_path / "out", dp=after)
    again = run_job(after, program, "load", tmp_path / "out", form)[0]
    assert "losses" in first
    assert again.splitlines()[-1] == first.splitlines()[-1]


def damaged(kind: str, path: Path) -> None:
    """Do to a checkpoint what disks and people do."""
    first = path / "__0_0.distcp"
    if kind == "flip":
        data = bytearray(first.read_bytes())
        tensor = open_checkpoint(path).tensors["actor.weight"]
        payload = open_checkpoint(path).payload(tensor.pieces[0])
        data[payload.extent.offset] ^= 1
        first.write_bytes(data)
    else:
        first.unlink()


@pytest.mark.parametrize("kind", ["flip", "missing"])
def test_damage_is_found(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "step-3"
    shutil.copytree(DATA / "actors" / "step-3", path)
    assert verify(open_checkpoint(path), VerifyOptions(level=Level.CONTENT)).code is ExitCode.OK
    damaged(kind, path)
    report = verify(open_checkpoint(path), VerifyOptions(level=Level.CONTENT))
    assert report.code is ExitCode.CORRUPT


HOSTILE: dict[str, Callable[[str, tuple[Any, ...]], Any]] = {
    "endless": lambda name, path: (*path[:1], *["x"] * 10_000, *path[1:]),
    "all-words": lambda name, path: ("model", "optimizer", "ema") * 40 + path,
    "groups-everywhere": lambda name, path: ("param_groups",) * 20 + path,
    "one-place": lambda name, path: ("model", "w"),
    "numbers": lambda name, path: tuple(range(9)),
    "huge-numbers": lambda name, path: (10**4000, *path),
    "empty-keys": lambda name, path: ("", "", *path),
    "empty": lambda name, path: (),
    "no-path": lambda name, path: {"a": 1},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_paths_lose_nothing_and_are_reported(kind: str, tmp_path: Path) -> None:
    path = save({"app": state_of(1), "b": state_of(2)}, tmp_path / "step-3")
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    paths = metadata.planner_data
    metadata.planner_data = {name: HOSTILE[kind](name, keys) for name, keys in paths.items()}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    checkpoint = open_checkpoint(path)
    assert len(checkpoint.tensors) == len(metadata.state_dict_metadata) - len(checkpoint.objects)
    report = verify(checkpoint, VerifyOptions(level=Level.CONTENT))
    assert report.code is ExitCode.CORRUPT
