"""The judge that torch has: its reader of quantised Hugging Face folders."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

import ftckpt
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.checkpoint.read_tensor import read_tensor

DATA = Path(__file__).parents[2] / "data" / "quantised"


@pytest.mark.parametrize(("folder", "block"), [("fp8-block", 16), ("fp8-partial", 128)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_of_fp8_are_what_torch_reads(
    folder: str, block: int, dtype: str, tmp_path: Path
) -> None:
    pytest.importorskip("safetensors")
    path = tmp_path / "folder"
    shutil.copytree(DATA / folder, path)
    stored = ftckpt.open_checkpoint(str(path))
    ours = stored.dequantised(DTYPES[dtype])
    names = [one.name for one in stored.quantised.values()]
    kind = getattr(torch, dtype)
    state = {name: torch.empty(ours.tensors[name].shape, dtype=kind) for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        reader = QuantizedHuggingFaceStorageReader(str(path), target_dtype=kind, block_size=block)
        load(state, storage_reader=reader)
    for name, value in state.items():
        assert read_tensor(ours, name) == value.view(torch.uint8).numpy().tobytes()
