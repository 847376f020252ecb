"""What two folders say of the model is compared where both say it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import ftckpt as api
from ftckpt.comparison import DiffReport
from ftckpt.errors import ExitCode
from ftckpt.formats.huggingface.model_settings import shared_settings
from tests.faults.test_semantic import placed

Change = Callable[[dict[str, Any]], object]


def diff(first: Path, second: Path, component: Sequence[str] = ()) -> DiffReport:
    return api.diff(str(first), str(second), component=component)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return placed("trainer_dirs/trainer_peft", tmp_path_factory.mktemp("adapter"))


def _changed(path: Path, to: Path, change: Change | None) -> Path:
    place = to / path.name
    place.mkdir()
    for file in path.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    config = place / "adapter_config.json"
    said = json.loads(config.read_text())
    if change is not None:
        change(said)
        config.write_text(json.dumps(said))
    return place


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("lora_alpha", lambda said: said.update(lora_alpha=said["lora_alpha"] * 2)),
        ("target_modules", lambda said: said["target_modules"].pop()),
    ],
)
def test_equal_tensors_of_other_settings_are_not_equal(
    adapter: Path, tmp_path: Path, name: str, change: Change
) -> None:
    report = diff(adapter, _changed(adapter, tmp_path, change))
    assert report.code is ExitCode.DIFFERENT
    assert [(d.name, d.about) for d in report.state] == [
        (f"adapter_config.json.{name}", "settings")
    ]
    assert diff(adapter, tmp_path / adapter.name, component=["model"]).code is ExitCode.OK


@pytest.mark.parametrize(
    "change",
    [
        None,
        lambda said: said["target_modules"].reverse(),
        lambda said: said.update(base_model_name_or_path="/elsewhere", peft_version="99"),
        lambda said: said.update(of_a_later_version=True),
        lambda said: said.pop("lora_dropout"),
    ],
)
def test_what_one_side_says_alone_and_where_it_lay_make_no_difference(
    adapter: Path, tmp_path: Path, change: Change | None
) -> None:
    assert diff(adapter, _changed(adapter, tmp_path, change)).code is ExitCode.OK


def test_the_type_of_the_weights_is_no_setting(tmp_path: Path) -> None:
    sample = placed("trainer_dirs/trainer", tmp_path)
    other = tmp_path / "other" / sample.name
    shutil.copytree(sample, other)
    for place, dtype in ((sample, "bfloat16"), (other, "float32")):
        said = json.loads((place / "config.json").read_text())
        said |= {"torch_dtype": dtype, "text_config": {"dtype": dtype, "hidden_size": 8}}
        (place / "config.json").write_text(json.dumps(said))
    assert diff(sample, other).code is ExitCode.OK
    said["text_config"]["hidden_size"] = 16
    (other / "config.json").write_text(json.dumps(said))
    assert [d.name for d in diff(sample, other).state] == ["config.json.text_config.hidden_size"]


def test_a_damaged_config_is_told(adapter: Path, tmp_path: Path) -> None:
    place = _changed(adapter, tmp_path, None)
    (place / "adapter_config.json").write_text('{"r": ')
    for pair in ((adapter, place), (place, adapter)):
        assert diff(*pair).code is ExitCode.CORRUPT


def compared(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return the settings that differ, asked from both sides."""
    one, other = dict(shared_settings(mine, theirs)), dict(shared_settings(theirs, mine))
    assert one.keys() == other.keys()
    return [name for name, text in one.items() if text != other[name]]


YARN = {"type": "yarn", "factor": 4.0}
NEW = {"rope_theta": 1e4, "rope_type": "default"}


@pytest.mark.parametrize(
    ("mine", "theirs", "name"),
    [
        ({"rope_scaling": None}, {"rope_scaling": YARN}, "rope_parameters.rope_type"),
        ({"rope_theta": 1e4}, {"rope_parameters": NEW | {"rope_theta": 5e5}},
         "rope_parameters.rope_theta"),
        ({"rope_scaling": YARN}, {"rope_scaling": {"rope_type": "linear"}},
         "rope_parameters.rope_type"),
        ({"rope_theta": 1e4, "rope_local_base_freq": 1e4},
         {"rope_parameters": {"full_attention": NEW, "sliding_attention": NEW | {"rope_theta": 1}}},
         "rope_parameters.sliding_attention.rope_theta"),
        ({"rope_theta": 5e5}, {"rope_parameters": {"full_attention": NEW}},
         "rope_parameters.full_attention.rope_theta"),
        ({"text_config": {"rope_theta": 5e5}}, {"text_config": {"rope_parameters": NEW}},
         "text_config.rope_parameters.rope_theta"),
        ({"rotary_pct": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.25}},
         "rope_parameters.partial_rotary_factor"),
        ({"layer_types": ["sliding", "full"]}, {"layer_types": ["full", "sliding"]}, "layer_types"),
        ({"experts": {}}, {"experts": {"count": 8}}, "experts"),
        ({"experts": 8}, {"experts": {"count": 8}}, "experts"),
        ({"eos_token_id": [2]}, {"eos_token_id": [2, 3]}, "eos_token_id"),
        ({"tie": True}, {"tie": 1}, "tie"),
    ],
)  # fmt: skip
def test_another_setting_is_seen_in_any_spelling(
    mine: dict[str, Any], theirs: dict[str, Any], name: str
) -> None:
    assert compared(mine, theirs) == [name]


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"rope_theta": 10000.0}, {"rope_theta": 10000}),
        ({"rope_theta": 1e4, "rope_scaling": None}, {"rope_parameters": NEW}),
        ({"rope_theta": 1e4, "rope_scaling": YARN},
         {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4}}),
        ({"rope_theta": 1, "rope_local_base_freq": 1e4, "rope_scaling": YARN},
         {"rope_parameters": {"full_attention": YARN | {"rope_theta": 1},
                              "sliding_attention": NEW}}),
        ({"rope_theta": 1e4, "rope_scaling": YARN},
         {"rope_parameters": {"full_attention": YARN | NEW | {"rope_type": "yarn"},
                              "sliding_attention": NEW}}),
        ({"rotary_emb_base": 10000, "rotary_pct": 0.25, "rope_scaling": None},
         {"rope_parameters": NEW | {"partial_rotary_factor": 0.25}}),
        ({"eos_token_id": 2, "quant": {}}, {"eos_token_id": [2], "quant": None}),
        ({"time_step_limit": [0.0, float("inf")]},
         {"time_step_limit": [0, {"__float__": "Infinity"}]}),
        ({"_attn_implementation_internal": "sdpa", "torchscript": False},
         {"_attn_implementation_internal": "eager", "torchscript": True}),
        ({"attn_implementation": "sdpa", "output_attentions": False},
         {"attn_implementation": "eager", "output_attentions": True}),
    ],
)  # fmt: skip
def test_another_spelling_is_no_other_setting(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert compared(mine, theirs) == []


def test_what_an_adapter_sets_for_one_module_is_seen(adapter: Path, tmp_path: Path) -> None:
    other = _changed(adapter, tmp_path, lambda said: said.update(alpha_pattern={"q_proj": 64}))
    found = diff(adapter, other)
    assert found.code is ExitCode.DIFFERENT
    assert [d.name for d in found.state] == ["adapter_config.json.alpha_pattern"]
    assert found.state[0].a == "null"


def test_the_order_of_the_answer_is_that_of_the_file() -> None:
    names = [f"setting_{n}" for n in (3, 1, 2, 5, 4)]
    assert compared(dict.fromkeys(names, 1), dict.fromkeys(names, 2)) == names


BY_RELEASE = json.loads(
    (Path(__file__).parents[2] / "data/huggingface/by_release.json").read_text()
)


@pytest.mark.parametrize("name", BY_RELEASE)
def test_one_model_written_by_two_releases_has_the_same_settings(name: str) -> None:
    older, newer = BY_RELEASE[name].values()
    assert compared(older, newer) == []
    assert any("rope_theta" in path for path, _ in shared_settings(older, newer))
    for field in ("rope_theta", "global_rope_theta"):
        if field in older:
            assert compared(older | {field: 7}, newer)[0].endswith("rope_theta")
