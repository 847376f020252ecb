"""`ftckpt convert --adapter` as a user runs it, and as docs/convert.md shows it."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.formats.lora.samples import all_of, change_config, in_training, unpacked
from tests.json_run import ftckpt_json
from tests.test_docs import validate
from tests.workers.forked import run

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with `base` and `adapter`, the working one."""
    made = unpacked(tmp_path) / "lora"
    shutil.copytree(tmp_path / "bases" / "llama", made / "base")
    monkeypatch.chdir(made)
    return made


def test_the_commands_of_the_page_run(case: Path) -> None:
    in_training(case, case / "run" / "step-1000")
    page = (DOCS / "convert.md").read_text().split("## Merge a LoRA")[1].split("#### Megatron")[0]
    commands = [
        line for block in page.split("```sh\n")[1:] for line in block.split("```")[0].splitlines()
    ]
    assert len(commands) == 5
    for line in commands:
        words = shlex.split(line, comments=True)
        assert words[0] == "ftckpt"
        done = run(words[1:], os.environ)
        assert done.returncode == 0, done.stderr
    sizes = [(case / one / "model.safetensors").stat().st_size for one in ("merged", "merged-fp32")]
    assert sizes[0] < sizes[1] < 2 * sizes[0]
    first, second = (all_of(str(case / one)) for one in ("merged", "merged-1000"))
    assert all(np.array_equal(first[key], second[key]) for key in first)


def test_the_answer_says_what_was_merged(case: Path) -> None:
    words = ("convert", "base", "out", "--to", "safetensors", "--adapter", "adapter")
    done = run(words, os.environ)
    assert done.returncode == 0, done.stderr
    assert "merged into 6 tensors: adapter" in done.stderr
    assert "equal the source merged with its adapters bit for bit" in done.stdout
    assert "rounded once from float32: at most 0.0039 of a value, in model.layers" in done.stdout
    document = ftckpt_json("convert", "base", "again", *words[3:])
    validate(document)
    assert document["adapters"] == ["adapter"]
    assert len(document["merged"]) == 6
    assert document["rounding"]["tensor"] == "model.layers.0.mlp.down_proj.weight"
    assert 0.003 < document["rounding"]["largest"] < 2**-8
    assert (document["untied"], document["untouched"]) == ("", [])
    validate(ftckpt_json("convert", "base", "dry", *words[3:], "--dry-run"))
    assert not (case / "dry").exists()


@pytest.mark.parametrize(
    ("config", "code", "says"),
    [
        ({"peft_type": "LOHA"}, 13, "kind 'LOHA'"),
        ({"r": 2}, 4, "rank 4 in A"),
        ({"target_modules": ["v_proj"]}, 4, "target_modules do not name"),
    ],
)
def test_a_refusal_has_a_code_and_a_sentence(
    case: Path, config: dict[str, object], code: int, says: str
) -> None:
    change_config(case / "adapter", **config)
    document = ftckpt_json("convert", "base", "o", "--to", "safetensors", "--adapter", "adapter")
    assert document["result"]["code"] == code
    assert says in document["result"]["message"]
    assert sorted(p.name for p in case.iterdir() if p.is_dir()) == ["adapter", "base"]


def test_a_base_of_weights_and_optimizer_needs_only_model(case: Path) -> None:
    from safetensors.numpy import save_file

    state = all_of(str(case / "base"))
    (case / "state" / "optimizer").mkdir(parents=True)
    save_file(state, case / "state" / "model.safetensors")
    moments = {f"exp_avg.{name}": one for name, one in state.items()}
    save_file(moments, case / "state" / "optimizer" / "optimizer.safetensors")
    words = ["convert", "state", "o", "--to", "safetensors", "--adapter", "adapter"]
    done = run(words, os.environ)
    assert done.returncode == 2, done.stderr
    assert "weights alone" in done.stderr
    assert run([*words, "--only", "model"], os.environ).returncode == 0


def test_the_answer_says_what_a_loader_will_miss(case: Path) -> None:
    words = ["convert", "base", "out", "--to", "safetensors"]
    done = run(words, os.environ)
    assert "not beside the weights: a tokenizer; --beside DIR" in done.stderr
    (case / "files").mkdir()
    (case / "base" / "config.json").rename(case / "files" / "config.json")
    (case / "files" / "tokenizer.json").write_text("{}")
    document = ftckpt_json("convert", "base", "bare", *words[3:])
    validate(document)
    assert document["lacking"] == ["config.json", "a tokenizer"]
    done = run(["convert", "base", "whole", *words[3:], "--beside", "files"], os.environ)
    assert done.returncode == 0, done.stderr
    assert "llama.cpp's convert_hf_to_gguf.py reads this folder" in done.stderr
    done = run([*words[:2], "x.safetensors", *words[3:], "--beside", "files"], os.environ)
    assert done.returncode == 2
