"""What two folders say of the model is compared where both say it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ftckpt import api
from ftckpt.comparison import DiffReport
from ftckpt.errors import ExitCode
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
