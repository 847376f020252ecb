"""Which checkpoints gc thins, of all that are read: what is left holds all of their weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ftckpt import delta_pack, delta_unpack
from ftckpt.checkpoint import Kind
from ftckpt.errors import UnsupportedError
from ftckpt.formats.support import LAYOUTS
from ftckpt.manifest.locate import is_thinned
from ftckpt.operations.thinning import require_weights
from ftckpt.operations.transferring import convert, reshard
from ftckpt.transfer.content import Content
from ftckpt.transfer.request.narrowing import Only, only
from tests.builders.checkpoints import open_checkpoint
from tests.commands.saves import answer, ended
from tests.retention.carrying import DAY, NOW
from tests.retention.thinning import date, gc, safetensors, save, weights

DATA = Path(__file__).parents[1] / "data"
SAMPLES = [s for row in LAYOUTS for s in row.samples if ":" not in s and row.format != "delta"]
# ZeRO 3 keeps what it trains as masters alone; two models are not one; what schedule-free trains is
# its own state.
WHOLE = {
    "deepspeed/z3/global_step2": "its optimizer alone holds down.weight",
    "deepspeed/autoep_z3/global_step2": "its optimizer alone holds lm_head.weight",
    "deepspeed/lora_left/global_step2": "its optimizer alone holds",
    "trainer_dirs/trainer/optimizer.pt": "its optimizer alone holds 0.0",
    "deepspeed/lora_z3/global_step2": "its optimizer alone holds base_model.model.down.lora_A",
    "dcp/schedulefree/step-3": "its optimizer holds weights that the model does not: z",
    "trainer_dirs/accelerate_two": "it holds other weights, too: extra:model_1",
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_samples(sample: str) -> None:
    checkpoint = open_checkpoint(DATA / sample)
    if sample in WHOLE:
        with pytest.raises(UnsupportedError, match=WHOLE[sample]):
            require_weights(checkpoint)
        return
    require_weights(checkpoint)
    content = only(Content.of(checkpoint), Only.MODEL)
    params = {i.name for i in checkpoint.tensors.values() if i.kind is Kind.PARAM}
    assert {wanted.name for wanted in content.tensors.values()} >= params


@pytest.mark.parametrize("state", ["ax", "z", "ema", "ema_param", "slow_params", "ema.w"])
def test_weights_that_the_optimizer_holds_keep_it_whole(tmp_path: Path, state: str) -> None:
    """An average, or what an average is made of: the model does not hold it."""
    root = tmp_path / "run"
    for step in (100, 200, 300):
        path = save(root, step)
        held = state if state.endswith(".w") else f"w.{state}"
        data = safetensors(**{held: weights(step + 3), "w.momentum_buffer": weights(step + 4)})
        (path / "optimizer/optimizer.safetensors").write_bytes(data)
        date(path, NOW - (1000 - step) / 100 * DAY)
    plan, done = gc(root)
    assert not plan.thin
    assert not done.thinned
    (kept,) = [d.entry for d in plan.keep if d.entry.name == "step-100"]
    assert "its optimizer holds weights" in kept.whole
    assert state in kept.whole or state == "ema.w"


def test_momentum_alone_does_not(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step in (100, 200, 300):
        path = save(root, step)
        data = safetensors(**{"w.momentum_buffer": weights(step + 4), "w.grad_avg": weights(step)})
        (path / "optimizer/optimizer.safetensors").write_bytes(data)
        date(path, NOW - (1000 - step) / 100 * DAY)
    assert [d.entry.name for d in gc(root)[0].thin] == ["step-100"]


@pytest.fixture
def thinned(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    for step in (100, 200, 300):
        save(root, step)
    gc(root)
    return root / "step-100.ftckpt-weights"


def test_what_is_made_of_weights_alone_says_so(thinned: Path, tmp_path: Path) -> None:
    """Else `latest` takes it for a checkpoint to go on from."""
    new = tmp_path / "new"
    new.mkdir()
    convert(str(thinned), str(new / "step-1"), "safetensors")
    convert(str(thinned), str(new / "step-2.safetensors"))
    reshard(str(thinned), str(new / "step-3"))
    delta_pack(None, str(thinned), str(new / "step-4"))
    delta_unpack(str(new / "step-4"), str(new / "step-5"))
    names = {path.name for path in new.iterdir() if not path.name.endswith(".json")}
    assert len(names) == 5
    for name in sorted(names):
        assert is_thinned(open_checkpoint(new / name).source), name
    assert ended("seal", str(new / "step-2.safetensors"), "--force") == 0
    assert is_thinned(open_checkpoint(new / "step-2.safetensors").source)
    assert answer("latest", str(new))["result"]["code"] == 6


def test_no_pointer_is_moved_to_weights_alone(thinned: Path) -> None:
    root = thinned.parent
    (root / "latest").write_text("step-300")
    document = answer("promote", str(thinned), "--backwards")
    assert document["result"]["code"] == 8
    assert "gc undelete" in document["result"]["hint"]
    copied = shutil.copytree(thinned, root / "step-400")
    assert answer("promote", str(copied))["result"]["code"] == 8
    assert (root / "latest").read_text() == "step-300"
