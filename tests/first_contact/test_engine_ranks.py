"""The files of ranks of an inference engine: refused as a set, and a gap is said.

Sources: vLLM's `sharded_state_loader.py` (`model-rank-R-part-P`), TensorRT-LLM's
`modeling_utils.py` (`rankR.safetensors`, `mapping` in config.json).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.json_run import ftckpt_json

from .weights import save, values


def vllm(folder: Path, ranks: int, parts: int = 2, stem: str = "model") -> Path:
    for rank in range(ranks):
        for part in range(parts):
            held = {f"model.layers.{part}.mlp.down_proj.weight": values(4, 3, seed=rank)}
            save(folder / f"{stem}-rank-{rank}-part-{part}.safetensors", held)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def tensorrt(folder: Path, ranks: int, mapping: dict[str, int] | None) -> Path:
    for rank in range(ranks):
        held = {"transformer.layers.0.mlp.fc.weight": values(4, 3, seed=rank)}
        save(folder / f"rank{rank}.safetensors", held)
    config = {"architecture": "LlamaForCausalLM"}
    (folder / "config.json").write_text(
        json.dumps(config | ({"mapping": mapping} if mapping else {}))
    )
    return folder


def code(*arguments: str) -> Any:
    return ftckpt_json(*arguments)["result"]["code"]


FOUR = {"world_size": 4, "tp_size": 2, "pp_size": 2}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("engine", ["vllm", "tensorrt"])
def test_a_set_of_ranks_is_refused_by_name(engine: str, ranks: int, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if engine == "vllm":
        vllm(folder, ranks)
    else:
        tensorrt(folder, ranks, {"world_size": ranks, "tp_size": ranks, "pp_size": 1})
    for verb in (["verify"], ["inspect"], ["seal"], ["convert", "OUT", "--to", "safetensors"]):
        out = [str(tmp_path / "out") if word == "OUT" else word for word in verb[1:]]
        answer = ftckpt_json(verb[0], str(folder), *out)
        assert answer["result"]["code"] == 13
        assert {"vllm": "vLLM", "tensorrt": "TensorRT"}[engine] in answer["result"]["message"]
    assert not (tmp_path / "out").exists()


def test_a_gap_in_the_ranks_is_incomplete(tmp_path: Path) -> None:
    folder = vllm(tmp_path / "vllm", 3)
    for part in range(2):
        (folder / f"model-rank-1-part-{part}.safetensors").unlink()
    answer = ftckpt_json("verify", str(folder))
    assert (answer["result"]["code"], answer["findings"][0]["kind"]) == (5, "missing-rank")
    assert answer["findings"][0]["file"] == "model-rank-1-part-0.safetensors"
    other = tensorrt(tmp_path / "rt", 3, None)
    (other / "rank0.safetensors").rename(other / "rank5.safetensors")
    (other / "rank2.safetensors").rename(other / "rank0.safetensors")
    assert code("verify", str(other)) == 5


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_the_record_of_tensorrt_says_how_many_ranks_there_are(lost: int, tmp_path: Path) -> None:
    folder = tensorrt(tmp_path, 4, FOUR)
    assert code("verify", str(folder)) == 13
    (folder / f"rank{lost}.safetensors").unlink()
    assert code("verify", str(folder)) == 5


def test_ranks_of_context_share_their_files(tmp_path: Path) -> None:
    tensorrt(tmp_path, 2, {"world_size": 4, "tp_size": 2, "pp_size": 1, "cp_size": 2})
    assert code("verify", str(tmp_path)) == 13


def test_a_rank_without_one_of_its_parts_is_damaged(tmp_path: Path) -> None:
    folder = vllm(tmp_path, 2, parts=3, stem="draft")
    (folder / "draft-rank-1-part-1.safetensors").unlink()
    answer = ftckpt_json("verify", str(folder))
    assert (answer["result"]["code"], answer["findings"][0]["kind"]) == (4, "missing-file")


def test_ranks_beside_a_whole_model_are_not_passed_over(tmp_path: Path) -> None:
    folder = vllm(tmp_path, 2)
    save(folder / "model.safetensors", {"a.weight": values(2, 3)})
    assert code("verify", str(folder)) == 13


def test_adapters_named_by_their_rank_are_no_ranks(tmp_path: Path) -> None:
    for rank in (8, 16):
        save(tmp_path / f"rank{rank}.safetensors", {"down.weight": values(rank, 3)})
    assert code("verify", str(tmp_path)) == 0


def test_one_file_of_a_rank_says_that_it_is_one(tmp_path: Path) -> None:
    folder = vllm(tmp_path, 2)
    file = str(folder / "model-rank-0-part-0.safetensors")
    assert "one rank's file" in ftckpt_json("inspect", file)["dialect"]
