"""Shards are numbered in four ways, and the index decides which files are the set.

Sources: the file lists of openai/gpt-oss-20b (00000..00002 of 00002), inclusionAI/Ring-2.5-1T and
MiniMaxAI/MiniMax-M1 (0..N-1 and 0..N), moonshotai/Kimi-K2 (1-of-61), Qwen/Qwen3.5 (the suffix
within the stem), deepseek-ai/DeepSeek-V3 (of-000163).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.json_run import ftckpt_json

from .weights import save, sharded, values

SETS = {
    "transformers": [f"model-0000{n}-of-00003" for n in (1, 2, 3)],
    "ring": [f"model-0000{n}-of-00003" for n in (0, 1, 2)],
    "gpt-oss": [f"model-0000{n}-of-00002" for n in (0, 1, 2)],
    "kimi": [f"model-{n}-of-3" for n in (1, 2, 3)],
    "deepseek": [f"model-0000{n}-of-000003" for n in (1, 2, 3)],
    "qwen": [f"model.safetensors-0000{n}-of-00003" for n in (1, 2, 3)],
    "other stems": ["model-00001-of-00002", "model-00002-of-00002", "mtp-1-of-1"],
    "no numbers": ["model-attention", "model-mlp", "mtp"],
    "a folder": [f"weights/model-0000{n}-of-00003" for n in (1, 2, 3)],
    "folders": ["a/model", "b/model", "model-00001-of-00001"],
}


def kinds(answer: dict[str, object]) -> list[str]:
    findings = answer["findings"]
    assert isinstance(findings, list)
    return [one["kind"] for one in findings if one["severity"] != "note"]


@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
def test_a_set_is_whole_and_lacks_each_shard_that_is_lost(names: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tensors = sharded(folder, [f"{name}.safetensors" for name in names])
    answer = ftckpt_json("verify", str(folder), "--level", "values")
    assert (answer["result"]["code"], kinds(answer)) == (0, [])
    listed = ftckpt_json("inspect", str(folder), "--tensors")["tensors"]["list"]
    assert {one["key"] for one in listed} == set(tensors)

    for name in names:
        file = folder / f"{name}.safetensors"
        kept = file.read_bytes()
        file.unlink()
        answer = ftckpt_json("verify", str(folder))
        assert answer["result"]["code"] == 4
        assert "missing-file" in kinds(answer)
        file.write_bytes(kept)


@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
def test_a_set_is_sealed_copied_and_converted_whole(names: list[str], tmp_path: Path) -> None:
    folder, there, made = (str(tmp_path / name) for name in ("model", "there", "made"))
    sharded(Path(folder), [f"{name}.safetensors" for name in names])
    assert ftckpt_json("seal", folder)["result"]["code"] == 0
    assert ftckpt_json("copy", folder, there)["result"]["code"] == 0
    assert ftckpt_json("diff", folder, there)["result"]["code"] == 0
    assert ftckpt_json("convert", folder, made, "--to", "safetensors")["result"]["code"] == 0
    assert ftckpt_json("diff", folder, made)["result"]["code"] == 0


def _pickled(path: Path, names: list[str]) -> None:
    import torch

    weight_map = {}
    path.mkdir()
    for number, name in enumerate(names):
        torch.save({f"layer.{number}.weight": torch.ones(2, 3)}, path / f"{name}.bin")
        weight_map[f"layer.{number}.weight"] = f"{name}.bin"
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (path / "pytorch_model.bin.index.json").write_text(text)


@pytest.mark.parametrize(
    "numbers", [(0, 1, 2), (0, 1, 2, 3), (1, 2, 3)], ids=["ring", "gpt-oss", "transformers"]
)
@pytest.mark.parametrize("digits", [1, 5])
def test_pickled_shards_are_numbered_likewise(
    numbers: tuple[int, ...], digits: int, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    _pickled(folder, [f"pytorch_model-{n:0{digits}d}-of-{3:0{digits}d}" for n in numbers])
    assert ftckpt_json("verify", str(folder))["result"]["code"] == 0
    (folder / f"pytorch_model-{2:0{digits}d}-of-{3:0{digits}d}.bin").unlink()
    assert ftckpt_json("verify", str(folder))["result"]["code"] == 4
    (folder / "pytorch_model.bin.index.json").unlink()
    assert ftckpt_json("verify", str(folder))["result"]["code"] == 5


def test_shards_of_any_spelling_without_their_index_are_an_unfinished_save(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    sharded(folder, [f"model-{n}-of-3.safetensors" for n in (1, 2, 3)])
    (folder / "model.safetensors.index.json").unlink()
    assert ftckpt_json("verify", str(folder))["result"]["code"] == 5


def test_parts_of_a_dcp_save_may_begin_at_zero(tmp_path: Path) -> None:
    def write(parts: tuple[int, ...]) -> Path:
        folder = tmp_path / "-".join(map(str, parts))
        for rank in (1, 2):
            for part in parts:
                said = {f"layer.{part}": {"saved_offsets": [2 * (rank - 1), 0]}}
                save(
                    folder / f"shard-0000{rank}-model-0000{part}-of-00002.safetensors",
                    {f"layer.{part}": values(2, 3, seed=rank + part)},
                    {"DCP_SHARDING_INFO": json.dumps(said)},
                )
        return folder

    def code(path: Path) -> object:
        return ftckpt_json("verify", str(path))["result"]["code"]

    assert code(write((1, 2))) == 0
    assert code(write((0, 1, 2))) == 0
    assert code(write((0, 1))) == 0
    assert code(write((0, 2))) == 4


@pytest.mark.parametrize("shard", ["/etc/x.safetensors", "../x.safetensors", "a/../../x", "a//x"])
def test_an_index_names_nothing_outside_its_folder(shard: str, tmp_path: Path) -> None:
    sharded(tmp_path / "model", ["model-00001-of-00001.safetensors"])
    text = json.dumps({"weight_map": {"x": shard}})
    (tmp_path / "model" / "model.safetensors.index.json").write_text(text)
    assert ftckpt_json("verify", str(tmp_path / "model"))["result"]["code"] == 7
