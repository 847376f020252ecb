"""A model that lies twice in a folder is one model: written once, and compared.

Sources: the file lists of mistralai/Mistral-7B-v0.3 (`consolidated.safetensors`), of
google-bert/bert-base-uncased and most models of before 2023 (`pytorch_model.bin`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.json_run import ftckpt_json

from .weights import save, values

HF = {
    "model.embed_tokens.weight": values(8, 4, seed=1),
    "model.layers.0.self_attn.q_proj.weight": values(4, 4, seed=2),
    "model.norm.weight": values(4, seed=3),
}
OWN = {
    "tok_embeddings.weight": HF["model.embed_tokens.weight"],
    "layers.0.attention.wq.weight": HF["model.layers.0.self_attn.q_proj.weight"][::-1],
    "norm.weight": HF["model.norm.weight"],
}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 9\n"


def model(folder: Path) -> Path:
    save(folder / "model.safetensors", HF)
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    return folder


def pickled(path: Path, tensors: dict[str, Any], tied: bool = False) -> None:
    import torch

    state = {name: torch.from_numpy(one.copy()) for name, one in tensors.items()}
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    torch.save(state, path)


def judged(folder: Path, *more: str) -> tuple[int, list[str]]:
    answer = ftckpt_json("verify", str(folder), *more)
    found = answer["findings"]
    return answer["result"]["code"], [one["kind"] for one in found if one["severity"] != "note"]


def names(folder: Path) -> set[str]:
    listed = ftckpt_json("inspect", str(folder), "--tensors")["tensors"]["list"]
    return {one["key"] for one in listed}


def notes(folder: Path) -> str:
    found = ftckpt_json("verify", str(folder))["findings"]
    return " ".join(one["message"] for one in found if one["severity"] == "note")


@pytest.mark.parametrize("sharded", [False, True])
def test_consolidated_weights_are_the_model_again(sharded: bool, tmp_path: Path) -> None:
    folder = model(tmp_path / "in")
    if sharded:
        files = [f"consolidated-0000{n}-of-00002.safetensors" for n in (1, 2)]
        items = list(OWN.items())
        save(folder / files[0], dict(items[:2]))
        save(folder / files[1], dict(items[2:]))
        weight_map = {name: files[number > 1] for number, (name, _) in enumerate(items)}
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "consolidated.safetensors.index.json").write_text(text)
    else:
        save(folder / "consolidated.safetensors", OWN)
    assert judged(folder, "--level", "values") == (0, [])
    assert names(folder) == set(HF)
    assert "holds the model a second time" in notes(folder)
    out = tmp_path / "out"
    assert (
        ftckpt_json("convert", str(folder), str(out), "--to", "safetensors")["result"]["code"] == 0
    )
    assert names(out) == set(HF)
    assert not list(out.glob("**/consolidated*"))
    assert ftckpt_json("copy", str(folder), str(tmp_path / "copy"))["result"]["code"] == 0
    assert list((tmp_path / "copy").glob("consolidated*"))


def test_consolidated_weights_of_another_model_stay_apart(tmp_path: Path) -> None:
    folder = model(tmp_path)
    save(folder / "consolidated.safetensors", {**OWN, "vision.weight": values(3, 3)})
    assert judged(folder) == (0, [])
    assert len(names(folder)) == 7


def test_consolidated_weights_alone_are_the_model(tmp_path: Path) -> None:
    save(tmp_path / "consolidated.safetensors", OWN)
    assert names(tmp_path) == set(OWN)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.safetensors"])
def test_a_second_copy_is_compared_by_its_values(file: str, tmp_path: Path) -> None:
    folder = model(tmp_path / "in")
    changed = {name: one.copy() for name, one in HF.items()}
    changed["model.norm.weight"][2] += np.float32(1)
    for held, code in ((HF, 0), (changed, 4)):
        if file.endswith(".bin"):
            pickled(folder / file, held)
        else:
            save(folder / file, held)
        assert judged(folder) == (0, [])
        assert names(folder) == set(HF)
        kinds = ["copy-differs"] if code else []
        assert judged(folder, "--level", "values") == (code, kinds)


def test_tied_weights_of_a_second_copy_stand_once(tmp_path: Path) -> None:
    folder = model(tmp_path)
    pickled(folder / "pytorch_model.bin", HF, tied=True)
    assert judged(folder, "--level", "values") == (0, [])
    assert "compares 3 tensors" in notes(folder)


def test_a_second_copy_of_another_type_is_said(tmp_path: Path) -> None:
    folder = model(tmp_path)
    pickled(
        folder / "pytorch_model.bin", {name: one.astype(np.float16) for name, one in HF.items()}
    )
    assert judged(folder, "--level", "values") == (0, [])
    assert "compares 0 tensors; 3 others have another name or type there" in notes(folder)


def test_a_cut_second_copy_is_damage_and_one_never_fetched_is_said(tmp_path: Path) -> None:
    folder = model(tmp_path)
    pickled(folder / "pytorch_model.bin", HF)
    whole = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(whole[: len(whole) // 2])
    assert judged(folder)[0] == 4
    (folder / "pytorch_model.bin").write_text(POINTER)
    assert judged(folder) == (0, [])
    assert "the content was never fetched" in notes(folder)


def test_an_adapter_beside_a_model_is_no_copy_of_it(tmp_path: Path) -> None:
    folder = model(tmp_path)
    pair = {"x.lora_A.weight": values(2, 3), "x.lora_B.weight": values(4, 2)}
    pickled(folder / "adapter_model.bin", pair)
    assert judged(folder, "--level", "values") == (0, [])
    assert "second copy" not in notes(folder)
    # It is read as an adapter, and a damaged one is damage as the model's is.
    assert names(folder) == {*HF, *(f"extra:adapter_model:{name}" for name in pair)}
    out = tmp_path.parent / "adapted"
    assert ftckpt_json("convert", str(folder), str(out), "--to", "dcp")["result"]["code"] == 0
    assert names(out) >= {f"extra:adapter_model:{name}" for name in pair}
    whole = (folder / "adapter_model.bin").read_bytes()
    (folder / "adapter_model.bin").write_bytes(whole[: len(whole) // 2])
    assert judged(folder)[0] == 4
    (folder / "adapter_model.bin").write_text(POINTER)
    assert judged(folder) == (5, ["unfetched-file"])


def test_an_adapter_lies_twice_beside_a_model(tmp_path: Path) -> None:
    adapter = {"base_model.model.q_proj.lora_A.weight": values(2, 4, seed=7)}
    model(tmp_path)
    save(tmp_path / "adapter_model.safetensors", adapter)
    pickled(tmp_path / "adapter_model.bin", adapter)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    code, kinds = judged(tmp_path)
    assert code == 0
    assert "unknown-part" not in kinds
    assert "adapter_model.bin is a second copy" in notes(tmp_path)
    assert judged(tmp_path, "--level", "values")[0] == 0
    pickled(tmp_path / "adapter_model.bin", {name: one + 1 for name, one in adapter.items()})
    code, kinds = judged(tmp_path, "--level", "values")
    assert code == 4
    assert "copy-differs" in kinds
