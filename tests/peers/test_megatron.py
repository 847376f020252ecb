"""Megatron-LM as the judge: it loads what we laid out anew, and saves the same files again.

Set FTCKPT_MEGATRON to a checkout of Megatron-LM; it needs einops, psutil and what we have.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.formats.families import to_megatron
from ftckpt.formats.families.translator import DEFAULT_SPELLINGS
from ftckpt.formats.megatron.writer import MegatronWriter
from ftckpt.formats.writers import format_and_writer
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from tests.builders.checkpoints import open_checkpoint
from tests.builders.hf_models import Model
from tests.builders.materialise import materialise
from tests.builders.megatron_files import opened
from tests.builders.megatron_trees import assert_same_files

CHECKOUT = os.environ.get("FTCKPT_MEGATRON", "")
pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not CHECKOUT, reason="FTCKPT_MEGATRON names no checkout of Megatron-LM"),
]

MODEL = """
    --num-layers 4 --hidden-size 16 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --ffn-hidden-size 24 --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4
    --tokenizer-type NullTokenizer --vocab-size 90 --make-vocab-size-divisible-by 8
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --attention-dropout 0 --hidden-dropout 0 --use-cpu-initialization --distributed-backend gloo
    --lr 1e-3 --min-lr 1e-5 --train-iters 10 --weight-decay 0.1 --no-check-for-nan-in-loss-and-grad
    --rerun-mode disabled --ckpt-format torch --save-interval 1 --mock-data
"""
WORLD = 4
TRUE_VOCABULARY = 91  # the tokenizer has a token of its own
MIXED = ["--bf16"]
DISTRIBUTED = [*MIXED, "--use-distributed-optimizer"]
UNTIED = ["--untie-embeddings-and-output-weights"]
EXPERTS = ["--num-experts", "4", "--moe-router-topk", "2"]


# What `--use-checkpoint-args` leaves to the command line.
OWN = ("--num-layers", "--hidden-size", "--num-attention-heads", "--num-query-groups",
       "--ffn-hidden-size", "--seq-length", "--max-position-embeddings", "--normalization",
       "--position-embedding-type")  # fmt: skip
FLAGS = ("--group-query-attention", "--swiglu", "--disable-bias-linear")


def of_checkpoint() -> list[str]:
    """Return the arguments without those that make the model."""
    words = iter(MODEL.split())
    found = []
    for word in words:
        if word in OWN:
            next(words)
        elif word not in FLAGS:
            found.append(word)
    return [*found, "--use-checkpoint-args"]


def megatron(
    place: Path, sizes: dict[str, int], more: Sequence[str], model: Sequence[str] = MODEL.split()
) -> Path:
    """Let Megatron save to `place`; return the checkpoint."""
    given = []
    for name, flag in (("tp", "--tensor-model-parallel-size"),
                       ("pp", "--pipeline-model-parallel-size"),
                       ("vp", "--num-virtual-stages-per-pipeline-rank"),
                       ("ep", "--expert-model-parallel-size")):  # fmt: skip
        if sizes.get(name, 1) > 1:
            given += [flag, str(sizes[name])]
    job = Path(__file__).with_name("megatron_job.py")
    done = subprocess.run(
        [sys.executable, str(job), str(WORLD), *model, *given, *more, "--save", str(place)],
        env={**os.environ, "PYTHONPATH": CHECKOUT, "OMP_NUM_THREADS": "1",
             "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    reasons = [line for line in done.stderr.splitlines() if "Error" in line]
    assert done.returncode == 0, reasons or done.stderr[-4000:]
    return next(place.glob("iter_*"))


CASES: dict[str, tuple[dict[str, int], dict[str, int], list[str]]] = {
    "stages": ({"tp": 2, "pp": 2}, {"tp": 4, "pp": 1}, []),
    "tied stages": ({"tp": 4, "pp": 1}, {"tp": 1, "pp": 2, "vp": 2}, MIXED),
    "buffers": ({"tp": 2, "pp": 1}, {"tp": 1, "pp": 2}, DISTRIBUTED),
    "tied buffers": ({"tp": 1, "pp": 2, "vp": 2}, {"tp": 2, "pp": 2}, DISTRIBUTED),
    "more ranks of data": ({"tp": 2, "pp": 2}, {"tp": 1, "pp": 1}, [*DISTRIBUTED, *UNTIED]),
    "experts": ({"tp": 1, "pp": 1, "ep": 2}, {"tp": 1, "pp": 2}, [*DISTRIBUTED, *EXPERTS]),
    "experts apart": ({"tp": 1, "pp": 2}, {"tp": 1, "pp": 1, "ep": 4}, [*MIXED, *EXPERTS]),
}


@pytest.mark.parametrize("case", CASES)
def test_it_loads_and_saves_the_same_again(case: str, tmp_path: Path) -> None:
    before, after, more = CASES[case]
    source = megatron(tmp_path / "source", before, more)
    made = tmp_path / "made" / "iter_0000001"
    request: dict[str, Any] = {"vp": 1, "ep": 1, **after}
    request["dp"] = WORLD // (after["tp"] * after["pp"])
    request["true_vocab_size"] = TRUE_VOCABULARY
    layout = MegatronWriter().layout(Content.of(opened(source)), LayoutRequest(**request))
    assert list(layout.unplaced) == []
    materialise(layout, opened(source), made)
    (made.parent / "latest_checkpointed_iteration.txt").write_text("1")
    more = [*more, "--load", str(made.parent), "--no-load-rng"]
    again = megatron(tmp_path / "again", after, more)
    distributed = "--use-distributed-optimizer" in more
    assert_same_files(made, again, without=("args", "rng_state"), places=distributed)


@pytest.mark.parametrize("form", ["megatron", "megatron-dist"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("llama", {"tp": 2, "pp": 2}), ("mixtral", {"ep": 2}), ("gpt2", {"pp": 2, "vp": 2}),
     ("qwen3", {"tp": 2})],
)  # fmt: skip
def test_it_builds_and_loads_a_model_of_hugging_face(
    name: str, sizes: dict[str, int], form: str, tmp_path: Path
) -> None:
    """Megatron makes the model from the arguments alone, loads it, and saves the same weights."""
    Model(name, tied=name == "gpt2").save(tmp_path / "hf")
    content = to_megatron(
        Content.of(open_checkpoint(tmp_path / "hf")), spellings=("local", *DEFAULT_SPELLINGS)
    )
    made = tmp_path / "made" / "iter_0000000"
    request: dict[str, Any] = {**sizes}
    layout = format_and_writer(form)[1].layout(content, LayoutRequest(**request))
    materialise(layout, content.checkpoint, made)
    (made.parent / "latest_checkpointed_iteration.txt").write_text("0")
    kind = "torch" if form == "megatron" else "torch_dist"
    (note,) = (n.message for n in layout.notes if "--use-checkpoint-args" in n.message)
    flags = note.split("--use-checkpoint-args")[1].split()
    more = [*flags, "--finetune", "--load", str(made.parent), "--ckpt-format", kind]
    again = megatron(tmp_path / "again", sizes, more, of_checkpoint())
    wanted, found = open_checkpoint(made), open_checkpoint(again)
    weights = {key for key, info in found.tensors.items() if info.component == "model"}
    assert weights == set(wanted.tensors)
    for key in weights:
        assert read_tensor(found, key) == read_tensor(wanted, key), key


@pytest.mark.parametrize("way", ["megatron-dist", "safetensors", "like"])
@pytest.mark.parametrize("case", ["stages", "tied stages", "tied buffers", "experts"])
def test_an_optimizer_of_another_format_is_loaded_and_saved_again(
    case: str, way: str, tmp_path: Path
) -> None:
    """Megatron goes on with what came back from another format, and with what an example shows."""
    before, after, more = CASES[case]
    sizes: dict[str, Any] = {"vp": 1, "ep": 1, **after}
    sizes["dp"] = WORLD // (after["tp"] * after["pp"])
    source = megatron(tmp_path / "source", before, more)
    form = "megatron-dist" if way == "like" else way
    first = Content.of(open_checkpoint(source))
    between = format_and_writer(form)[1].layout(first, LayoutRequest())
    assert list(between.unplaced) == []
    materialise(between, first.checkpoint, tmp_path / "between")
    content = Content.of(open_checkpoint(tmp_path / "between"))
    request = LayoutRequest(true_vocab_size=TRUE_VOCABULARY, **sizes)
    if way == "like":
        example = opened(megatron(tmp_path / "example", after, more))
        request = LayoutRequest(true_vocab_size=TRUE_VOCABULARY, like=example)
    layout = format_and_writer("megatron")[1].layout(content, request)
    assert list(layout.unplaced) == []
    made = tmp_path / "made" / "iter_0000001"
    materialise(layout, content.checkpoint, made)
    (made.parent / "latest_checkpointed_iteration.txt").write_text("1")
    more = [*more, "--load", str(made.parent), "--no-load-rng"]
    again = megatron(tmp_path / "again", after, more)
    distributed = "--use-distributed-optimizer" in more
    without = ("args", "rng_state")
    assert_same_files(made, again, without=without, places=distributed, extra_states=False)
