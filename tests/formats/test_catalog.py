"""The catalog of formats."""

from __future__ import annotations

import shutil
from inspect import signature
from pathlib import Path

import pytest

from ftckpt.checkpoint.sharding import Rules
from ftckpt.discovery.recognise import recognise
from ftckpt.errors import ExitCode
from ftckpt.formats.catalog import FORMATS, formats
from ftckpt.verification import verify
from tests.builders.checkpoints import open_checkpoint
from tests.conformance.formats import listing_of_path

DATA = Path(__file__).parents[1] / "data"
EXPORTED = DATA / "quantised" / "fp8-partial"


def test_a_users_rules_reach_every_format_that_cuts_by_rules() -> None:
    mine = Rules("mine", ())
    takes = {f.name for f in FORMATS if "rules" in signature(type(f)).parameters}
    given = {f.name for f in formats(mine) if getattr(f, "rules", None) is mine}
    assert takes == given
    assert takes


def test_without_rules_the_formats_are_as_they_are() -> None:
    assert formats(None) is FORMATS


def format_of(place: Path) -> str:
    found = recognise(FORMATS, listing_of_path(place))
    assert found is not None
    return found[0].name


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("deepspeed/z2/global_step2", "deepspeed"),
        ("deepspeed/off/global_step2", "deepspeed"),
        ("deepspeed/universal_z3/global_step2_universal", "deepspeed-universal"),
        ("orbax/adamw", "orbax"),
        ("dcp/tp/step-3", "dcp"),
        ("ranks/hsdp/actor", "ranks"),
        ("by_hand/entries", "ranks"),
    ],
)
def test_weights_that_were_exported_beside_hide_no_training_state(
    place: str, name: str, tmp_path: Path
) -> None:
    """Read as weights alone, all of the training state would be strays that nobody checks."""
    copied = Path(shutil.copytree(DATA / place, tmp_path / Path(place).name))
    shutil.copy(EXPORTED / "model.safetensors", copied)
    assert format_of(copied) == name


def test_damage_shows_beside_exported_weights(tmp_path: Path) -> None:
    place = Path(shutil.copytree(DATA / "deepspeed/z2/global_step2", tmp_path / "global_step2"))
    shutil.copytree(EXPORTED, place, dirs_exist_ok=True)
    file = next(place.glob("*_optim_states.pt"))
    file.write_bytes(file.read_bytes()[:-200])
    report = verify(open_checkpoint(place))
    assert report.code is ExitCode.CORRUPT
    assert file.name in {f.file for f in report.findings if f.code}


def test_a_release_beside_a_model_of_hugging_face(tmp_path: Path) -> None:
    """Mistral's and Meta's repositories hold both."""
    place = Path(shutil.copytree(EXPORTED, tmp_path / "model"))
    (place / "consolidated.00.pth").write_bytes(b"PK")
    assert format_of(place) == "safetensors"
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (place / name).unlink()
    assert format_of(place) == "ranks"


@pytest.mark.parametrize(
    ("weights", "state", "name"),
    [
        ("model.safetensors", ("rng_state_rank_0.pt", "optimizer_rank_0.pt"), "bundle"),
        ("diffusion_pytorch_model.safetensors", ("random_states_rank_0.pt",), "bundle"),
        ("model.safetensors", ("lr_scheduler_rank_0.pt", "rng_rank_0.pt"), "bundle"),
        ("a.safetensors", ("optim_world_size_1_rank_0.pt",), "bundle"),
        ("model.safetensors", ("rng_state_rank_0.pt", "model_rank_0.pt"), "ranks"),
        ("model.safetensors", ("optimizer_rank_0.pt", "rank_0.pt"), "ranks"),
        ("config.json", ("optimizer_rank_0.pt",), "ranks"),
    ],
)
def test_ranks_files_without_a_model_hide_no_weights(
    weights: str, state: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    """Read as files of ranks, the weights would be a stray that no verb carries."""
    shutil.copy(EXPORTED / "model.safetensors", tmp_path / weights)
    for file in state:
        (tmp_path / file).write_bytes(b"PK")
    assert format_of(tmp_path) == name
