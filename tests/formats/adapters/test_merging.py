"""Adapters are merged as PEFT merges them.

Every element is one rounding of a number within `bound` of the exact sum: the stated error of a
product of rank r in float32. PEFT's own results are within the same bound, widened where it rounds
more often: the product of an embedding in the adapter's type, and between two adapters.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftckpt
from ftckpt.errors import (
    CorruptError,
    FtckptError,
    NoResourceError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from ftckpt.formats.adapters.fit import Added, ChangedTensor, Replaced
from ftckpt.formats.adapters.merging import Merged, merge
from tests.formats.adapters.samples import (
    ARCHIVE,
    Array,
    adapters_of,
    all_of,
    base_of,
    change_config,
    rewrite,
    rounded,
    unpacked,
    values,
)

CASES = (
    "bias", "dora", "embedding", "experts", "gpt2", "lora", "rslora", "saved", "tied", "two",
)  # fmt: skip
EPSILON = 2.0**-24
HALF_ULP = {"float32": EPSILON, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def case(samples: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of one case and of the bases, to be changed."""
    for name in (request.param, "bases"):
        shutil.copytree(samples / name, tmp_path / name)
    return Path(tmp_path / request.param)


def merged(case: Path, **options: Any) -> Merged:
    opened = [ftckpt.open_checkpoint(one) for one in (base_of(case), *adapters_of(case))]
    return merge(opened[0], opened[1:], **options)


def exact(base: Array, target: ChangedTensor) -> tuple[Array, Array, Array]:
    """Return the sum in float64, a bound of its error in float32, and the size of the products."""
    total = base.astype(np.float64)
    bound = np.zeros_like(total)
    products = np.zeros_like(total)
    for change in target.changes:
        held = {
            name: values(change.adapter, info.key).astype(np.float64)
            for name, info in change._asdict().items()
            if hasattr(info, "key")
        }
        if isinstance(change, Replaced):
            total = held["info"].copy()
        elif isinstance(change, Added):
            total = total + change.scale * held["info"]
            bound += 2 * EPSILON * (np.abs(total) + abs(change.scale) * np.abs(held["info"]))
        else:
            a = held["a"].reshape(change.experts, change.rank, -1)
            b = held["b"].reshape(held["b"].shape[0], change.rank, change.experts)
            path = "ore,eri->eio" if change.turned else "ore,eri->eoi"
            product = change.scale * np.einsum(path, b, a).reshape(total.shape)
            size = abs(change.scale) * np.einsum(path, abs(b), abs(a)).reshape(total.shape)
            bound += (change.rank + 3) * EPSILON * (np.abs(total) + size)
            total, products = total + product, products + np.abs(product)
            if change.magnitude is not None:
                axis = 0 if change.turned else 1
                norm = np.sqrt((total**2).sum(axis=axis, keepdims=True))
                factor = held["magnitude"].reshape(norm.shape) / norm
                spread = np.sqrt((bound**2).sum(axis=axis, keepdims=True)) / norm
                total, bound = total * factor, np.abs(bound * factor)
                bound += np.abs(total) * (spread + 8 * EPSILON)
                products *= np.abs(factor)
    return total, bound, products


def within(made: Array, total: Array, bound: Array, dtype: str) -> Any:
    low, high = rounded(total - bound, dtype), rounded(total + bound, dtype)
    return (low <= made) & (made <= high)


@pytest.mark.parametrize("name", CASES)
def test_merged_weights_are_the_exact_ones_rounded_once(samples: Path, name: str) -> None:
    case = samples / name
    found = merged(case)
    base = ftckpt.open_checkpoint(base_of(case))
    truth = ftckpt.open_checkpoint(str(case / "truth.safetensors"))
    tied = {"lm_head.weight", "model.embed_tokens.weight"} if found.found.untied else set()
    assert set(found.found.targets) - tied == set(truth) - tied
    for key, target in found.found.targets.items():
        total, bound, products = exact(values(base, target.info.key), target)
        made = values(found.checkpoint, key)
        dtype = target.info.dtype.name
        assert found.checkpoint.tensors[key].dtype == target.info.dtype
        assert within(made, total, bound, dtype).all(), key
        if key not in truth or key in tied:
            continue
        theirs, twice = values(truth, key), bound
        if name == "embedding" and key == "model.embed_tokens.weight":
            twice = bound + HALF_ULP[dtype] * products
        elif name == "two" and len(target.changes) > 1:
            twice = bound + 4 * HALF_ULP[dtype] * (np.abs(total) + products)
        assert within(theirs, total, twice, dtype).all(), key
        if twice is bound and dtype != "float32":
            off = np.abs(made - theirs) / np.maximum(np.abs(theirs), 1e-30)
            assert off.max() <= 4 * HALF_ULP[dtype]
            assert np.count_nonzero(off) <= made.size // 100, key


def test_a_result_is_written_and_proven(samples: Path, tmp_path: Path) -> None:
    case, out = samples / "rslora", tmp_path / "out"
    report = ftckpt.convert(base_of(case), str(out), "safetensors", adapter=adapters_of(case))
    assert report.proof is not None
    made, before = all_of(str(out)), all_of(base_of(case))
    assert made.keys() == before.keys()
    changed = {key for key in made if not np.array_equal(made[key], before[key])}
    assert changed == set(ftckpt.open_checkpoint(str(case / "truth.safetensors")))
    assert (out / "config.json").read_bytes() == Path(base_of(case), "config.json").read_bytes()
    wide = tmp_path / "wide"
    ftckpt.convert(base_of(case), str(wide), "safetensors", adapter=adapters_of(case), dtype="fp32")
    assert json.loads((wide / "config.json").read_text())["dtype"] == "float32"
    for key, exactly in all_of(str(wide)).items():
        assert np.array_equal(rounded(exactly, "bfloat16"), made[key]), key


def test_bytes_may_be_asked_for_in_any_order(samples: Path) -> None:
    for name in ("gpt2", "experts", "embedding"):
        found = merged(samples / name)
        for key in found.found.targets:
            info = found.checkpoint.tensors[key]
            whole = bytearray(info.nbytes)
            found.weights.fill(key, 0, memoryview(whole))
            again = merged(samples / name).weights
            for at in range(info.nbytes - info.nbytes % 7, -1, -7):
                part = bytearray(min(7, info.nbytes - at))
                again.fill(key, at, memoryview(part))
                assert part == whole[at : at + 7], (key, at)


@pytest.mark.parametrize(
    ("case", "embedding"),
    [("tied", "model.embed_tokens.weight"), ("gpt2", "transformer.wte.weight")],
    indirect=["case"],
)
def test_a_tied_head_becomes_a_tensor_of_its_own(case: Path, embedding: str) -> None:
    found = merged(case)
    base = ftckpt.open_checkpoint(base_of(case))
    assert found.found.untied == "lm_head.weight"
    assert "lm_head.weight" not in base
    head = values(found.checkpoint, "lm_head.weight")
    body = values(found.checkpoint, embedding)
    before = values(base, embedding)
    assert np.array_equal(body, before) != np.array_equal(head, before)
    out = case.parent / "out"
    ftckpt.convert(base_of(case), str(out), "safetensors", adapter=adapters_of(case))
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(str(out))
    with torch.no_grad():
        logits = model(torch.tensor([[1, 7, 39, 0, 12, 5]])).logits.numpy()
    truth = all_of(str(case / "logits.safetensors"))["logits"]
    assert np.abs(logits - truth).max() < 2e-6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*CASES, "untrained"])
def test_peft_itself_agrees(samples: Path, name: str) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    case = samples / name
    model = transformers.AutoModelForCausalLM.from_pretrained(base_of(case), dtype="auto")
    for one in adapters_of(case):
        model = peft.PeftModel.from_pretrained(model, one).merge_and_unload()
    truth = all_of(str(case / "truth.safetensors"))
    state = model.state_dict()
    for key, wanted in truth.items():
        theirs = state[key].float().numpy()
        assert np.abs(theirs - wanted).max() <= np.abs(wanted).max() * 1e-5, key


def test_several_threads_and_a_small_budget_make_the_same(samples: Path, tmp_path: Path) -> None:
    case, found = samples / "dora", []
    for jobs in (1, 4):
        out = tmp_path / str(jobs)
        ftckpt.convert(base_of(case), str(out), "safetensors", adapter=adapters_of(case), jobs=jobs)
        found.append((out / "model.safetensors").read_bytes())
    assert found[0] == found[1]
    from ftckpt.workers import budget

    before = budget.budget()
    try:
        budget.set_budget(100 << 20)
        with pytest.raises(NoResourceError):
            merged(case)
    finally:
        budget.set_budget(before)


Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def refusals() -> Iterator[Any]:
    def config(**fields: Any) -> Any:
        return lambda folder: change_config(folder, **fields)

    def tensors(change: Any) -> Any:
        return lambda folder: rewrite(folder, change)

    def renamed(old: str, new: str) -> Any:
        def change(held: dict[str, Array]) -> None:
            held.update({k.replace(old, new): held.pop(k) for k in list(held) if old in k})

        return tensors(change)

    def lost(held: dict[str, Array]) -> None:
        del held[f"{Q0}.lora_B.weight"]

    def empty(held: dict[str, Array]) -> None:
        held.update({k: v[:0] for k, v in held.items()})

    def odd(held: dict[str, Array]) -> None:
        held[f"{Q0}.lora_diag"] = np.ones(4, np.float32)

    def nan(held: dict[str, Array]) -> None:
        held[f"{Q0}.lora_A.weight"][1, 1] = np.nan

    def wide(held: dict[str, Array]) -> None:
        held[f"{Q0}.lora_A.weight"] = np.ones((4, 17), np.float32)

    def more(held: dict[str, Array]) -> None:
        held["base_model.model.score.weight"] = np.ones((2, 16), np.float32)

    yield "kind", config(peft_type="IA3"), UnsupportedError, "kind 'IA3'"
    yield "kasa", config(kasa_config={"beta": 1}), UnsupportedError, "kasa_config"
    yield "unheard", config(from_the_future=3), UnsupportedError, "from_the_future"
    yield "alora", config(alora_invocation_tokens=[1]), UnsupportedError, "alora_invocation_tokens"
    yield "tokens", config(trainable_token_indices=[1]), UnsupportedError, "trainable_token"
    yield "pissa", config(init_lora_weights="pissa"), UnsupportedError, "another base"
    yield "look", config(target_modules="(?!x).*"), UnsupportedError, "pattern"
    yield "rank", config(r=8), CorruptError, "rank 4 in A"
    yield "ranks", config(rank_pattern={"0.self_attn.q_proj": 2}), CorruptError, "2 by adapter_conf"
    yield "no rank", config(r=0), CorruptError, "r = 0"
    yield "no alpha", config(lora_alpha="6"), CorruptError, "lora_alpha"
    yield "dora", config(use_dora=True), CorruptError, "no magnitude"
    yield "targets", config(target_modules=["k_proj", "down_proj"]), CorruptError, "target_modules"
    yield "names", renamed("layers.0", "layers.7"), UsageError, "lacks 3 modules"
    yield "shape", tensors(wide), UsageError, r"\[16, 16\] in the base, and \[16, 17\]"
    yield "half", tensors(lost), CorruptError, "without the other matrix"
    yield "none", tensors(lambda held: held.clear()), CorruptError, "no tensor"
    yield "zero", tensors(empty), CorruptError, "zero elements"
    yield "unused", tensors(odd), UnsupportedError, "lora_diag"
    yield "head", tensors(more), UsageError, "score.weight"
    yield "nan", tensors(nan), CorruptError, "infinite or NaN"
    yield (
        "gone",
        lambda folder: (folder / "adapter_config.json").unlink(),
        NotFoundError,
        "no adapt",
    )


@pytest.mark.parametrize("case", ["lora"], indirect=True)
@pytest.mark.parametrize(
    ("change", "kind", "says"), [pytest.param(*one[1:], id=one[0]) for one in refusals()]
)
def test_what_does_not_fit_is_refused(
    case: Path, change: Any, kind: type[FtckptError], says: str
) -> None:
    change(case / "adapter")
    out = case.parent / "out"
    with pytest.raises(kind, match=says) as caught:
        ftckpt.convert(base_of(case), str(out), "safetensors", adapter=adapters_of(case))
    assert caught.value.exit_code == kind.exit_code
    assert not out.exists()


@pytest.mark.parametrize("case", ["lora"], indirect=True)
def test_a_lost_module_is_named(case: Path) -> None:
    def change(held: dict[str, Array]) -> None:
        for key in [k for k in held if "layers.1.self_attn.k_proj" in k]:
            del held[key]

    rewrite(case / "adapter", change)
    found = merged(case)
    assert list(found.found.untouched) == ["model.layers.1.self_attn.k_proj"]
    assert "stay as they are" in found.notes()[0]


@pytest.mark.parametrize("case", ["lora"], indirect=True)
def test_a_training_state_is_not_merged_into(case: Path, tmp_path: Path) -> None:
    from tests.builders.checkpoints import save_dcp

    save_dcp(tmp_path / "step-1")
    with pytest.raises(UsageError, match="lacks"):
        ftckpt.convert(
            str(tmp_path / "step-1"), str(tmp_path / "o"), "dcp", adapter=adapters_of(case)
        )
    with pytest.raises(UsageError, match="--from-master"):
        ftckpt.convert(
            base_of(case), "o", "safetensors", adapter=adapters_of(case), from_master=True
        )


@pytest.mark.parametrize("case", ["lora"], indirect=True)
def test_an_adapter_and_a_base_of_torch_save_give_the_same(case: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    first = merged(case).checkpoint
    wanted = {key: values(first, key) for key in first.tensors}
    adapter, base = case / "adapter", Path(base_of(case))
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    again = merged(case)
    assert again.checkpoint.source_format == "torchsave"
    for key in again.checkpoint.tensors:
        assert np.array_equal(values(again.checkpoint, key), wanted[key]), key
    out = case.parent / "out"
    ftckpt.convert(str(base), str(out), "safetensors", adapter=adapters_of(case), only="model")
    assert (out / "config.json").exists()


def test_an_untrained_adapter_is_a_warning(samples: Path) -> None:
    report = ftckpt.verify(str(samples / "untrained" / "adapter"), level="values")
    assert report.code == 0
    assert [f.kind for f in report.findings if f.severity == "warning"] == ["untrained"]
    strict = ftckpt.verify(
        str(samples / "untrained" / "adapter"), level="values", strict=["values"]
    )
    assert strict.code == 4
    sound = ftckpt.verify(str(samples / "lora" / "adapter"), level="values")
    assert "untrained" not in {f.kind for f in sound.findings}


def test_the_archive_is_small() -> None:
    assert ARCHIVE.stat().st_size < 256 << 10
