"""Which checkpoints gc thins, of all that are read: what is left holds all of their weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftckpt.api.thinning import require_weights
from ftckpt.checkpoint import Kind
from ftckpt.errors import UnsupportedError
from ftckpt.formats.support import LAYOUTS
from ftckpt.transfer.content import Content
from ftckpt.transfer.request.narrowing import Only, only
from tests.builders.checkpoints import open_checkpoint

DATA = Path(__file__).parents[1] / "data"
SAMPLES = [s for row in LAYOUTS for s in row.samples if ":" not in s and row.format != "delta"]
# ZeRO 3 keeps what it trains as masters alone; two models are not one.
WHOLE = {
    "deepspeed/z3/global_step2": "its optimizer alone holds down.weight",
    "deepspeed/lora_z3/global_step2": "its optimizer alone holds base_model.model.down.lora_A",
    "trainer_dirs/accelerate_two": "it holds other weights, too: extra:model_1",
}
NO_MODEL = ("trainer_dirs/trainer/optimizer.pt", "deepspeed/lora_left/global_step2")


@pytest.mark.parametrize("sample", SAMPLES)
def test_samples(sample: str) -> None:
    checkpoint = open_checkpoint(DATA / sample)
    if sample in WHOLE:
        with pytest.raises(UnsupportedError, match=WHOLE[sample]):
            require_weights(checkpoint)
        return
    require_weights(checkpoint)
    if sample in NO_MODEL:
        return
    content = only(Content.of(checkpoint), Only.MODEL)
    params = {i.name for i in checkpoint.tensors.values() if i.kind is Kind.PARAM}
    assert {wanted.name for wanted in content.tensors.values()} >= params
