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
    NewerWriterError,
    NoResourceError,
    NotFoundError,
    RefusedError,
    UnsupportedError,
    UsageError,
)
from ftckpt.formats.lora import arithmetic
from ftckpt.formats.lora.fit import Added, ChangedTensor, Replaced
from ftckpt.formats.lora.merging import Merged, merge
from tests.formats.lora.samples import (
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

    def twice(held: dict[str, Array]) -> None:
        name = f"{Q0}.lora_B.weight"
        held[name.removeprefix("base_model.model.")] = -held[name]

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
    yield "no alpha", config(lora_alpha="6"), NewerWriterError, "lora_alpha"
    yield "dora", config(use_dora=True), CorruptError, "no magnitude"
    yield "targets", config(target_modules=["k_proj", "down_proj"]), CorruptError, "target_modules"
    yield "layers", config(layers_to_transform=[1]), CorruptError, "target_modules do not name"
    yield "layer", config(layers_to_transform="1"), CorruptError, "layers_to_transform = '1'"
    yield "list", config(layers_pattern="h.*"), UnsupportedError, "layers_pattern"
    yield "saved", config(modules_to_save=["norm"]), CorruptError, "modules_to_save"
    yield "twice", tensors(twice), CorruptError, "are one tensor"
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


def forget(case: Path, *parts: str) -> None:
    """Take tensors out of an adapter, by parts of their names."""

    def change(held: dict[str, Array]) -> None:
        for key in [k for k in held if any(part in k for part in parts)]:
            del held[key]

    rewrite(case / "adapter", change)


@pytest.mark.parametrize("case", ["lora"], indirect=True)
@pytest.mark.parametrize("lost", ["layers.1.self_attn.k_proj", "layers.1.", "layers.0."])
@pytest.mark.parametrize("targets", ["names", "all-linear"])
def test_an_adapter_that_has_lost_layers_is_refused(case: Path, lost: str, targets: str) -> None:
    forget(case, lost)
    if targets == "all-linear":
        change_config(
            case / "adapter", target_modules=targets,
            exclude_modules=["v_proj", "o_proj", "gate_proj", "up_proj"],
        )  # fmt: skip
    with pytest.raises(RefusedError, match=lost.rstrip(".")) as caught:
        merged(case)
    assert "--allow-gaps" in caught.value.hint
    kept = merged(case, allow_gaps=True)
    assert not any(lost in name for name in kept.found.targets)
    if targets == "names":
        assert all(lost.rstrip(".") in name for name in kept.found.untouched)
        assert "stay as they are" in kept.notes()[0]


@pytest.mark.parametrize("case", ["lora"], indirect=True)
@pytest.mark.parametrize("lists", [None, "layers", ["h", "layers"]])
def test_layers_that_were_not_to_be_trained_are_no_gap(case: Path, lists: Any) -> None:
    forget(case, "layers.1.")
    change_config(case / "adapter", layers_to_transform=[0], layers_pattern=lists)
    assert merged(case).found.untouched == []
    change_config(case / "adapter", layers_to_transform=[0], layers_pattern="blocks")
    with pytest.raises(CorruptError, match="do not name"):
        merged(case)


@pytest.mark.parametrize("case", ["lora"], indirect=True)
def test_layers_beyond_those_of_the_model_are_no_gap(case: Path) -> None:
    """Such as DeepSeek's for multi-token prediction, which no trainer loads."""
    forget(case, "layers.1.")
    config = Path(base_of(case)) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 1}))
    assert [one.split(".")[2] for one in merged(case).found.untouched] == ["1", "1", "1"]


@pytest.mark.parametrize("case", ["lora"], indirect=True)
def test_a_kind_of_module_that_was_never_trained_is_noted(case: Path) -> None:
    forget(case, "k_proj")
    found = merged(case)
    assert [one.rpartition(".")[2] for one in found.found.untouched] == ["k_proj", "k_proj"]
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


@pytest.mark.parametrize("run", [1, 48, 200])
@pytest.mark.parametrize("name", ["gpt2", "experts", "dora", "bias"])
def test_many_blocks_make_the_same_sums(
    samples: Path, name: str, run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "_RUN", run)
    monkeypatch.setattr(arithmetic, "_ALONE", 8 * run)
    test_merged_weights_are_the_exact_ones_rounded_once(samples, name)
    if run == 48:
        test_bytes_may_be_asked_for_in_any_order(samples)


def by_hand(folder: Path, module: str, rows: int, columns: int) -> Path:
    """Write an adapter of rank 2 for one module."""
    from safetensors.numpy import save_file

    folder.mkdir()
    random = np.random.default_rng(3)
    factors = {"A": (2, columns), "B": (rows, 2)}
    save_file(
        {
            f"base_model.model.{module}.lora_{x}.weight": random.normal(size=s).astype(np.float32)
            for x, s in factors.items()
        },
        folder / "adapter_model.safetensors",
    )
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 1, "target_modules": [module]}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def test_a_quantised_base_is_dequantised_first(tmp_path: Path) -> None:
    base = ARCHIVE.parents[1] / "quantised" / "fp8-block"
    plain = tmp_path / "plain"
    ftckpt.convert(str(base), str(plain), "safetensors", dtype="bf16")
    before = all_of(str(plain))
    key = next(k for k in before if k.endswith("_proj.weight"))
    adapter = by_hand(tmp_path / "adapter", key.removesuffix(".weight"), *before[key].shape)
    with pytest.raises(UnsupportedError, match="float8_e4m3fn"):
        ftckpt.convert(str(base), str(tmp_path / "o"), "safetensors", adapter=[str(adapter)])
    for number, source in enumerate((base, plain)):
        out = str(tmp_path / str(number))
        ftckpt.convert(str(source), out, "safetensors", adapter=[str(adapter)], dtype="bf16")
    made = [all_of(str(tmp_path / one)) for one in "01"]
    assert made[0].keys() == made[1].keys() == before.keys()
    assert all(np.array_equal(made[0][k], made[1][k]) for k in before)
    assert [k for k in before if not np.array_equal(made[0][k], before[k])] == [key]
    assert "quantization_config" not in json.loads((tmp_path / "0" / "config.json").read_text())


@pytest.mark.parametrize("case", ["gpt2"], indirect=True)
def test_a_base_may_be_a_distributed_checkpoint(case: Path) -> None:
    wanted = merged(case).checkpoint
    state = case.parent / "step-1"
    ftckpt.convert(base_of(case), str(state), "dcp", dp=3)
    shutil.copy(Path(base_of(case)) / "config.json", state)
    out = case.parent / "out"
    ftckpt.convert(
        str(state), str(out), "safetensors", adapter=adapters_of(case), beside=base_of(case)
    )
    made = all_of(str(out))
    assert made.keys() == set(wanted.tensors)
    assert all(np.array_equal(made[key], values(wanted, key)) for key in made)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


def change_base(base: Path, change: Any, **config: Any) -> None:
    """Change the tensors of a base, and its configuration; None takes a field out."""
    from safetensors.numpy import save_file

    held = all_of(str(base))
    change(held)
    save_file(held, base / "model.safetensors")
    said = json.loads((base / "config.json").read_text()) | config
    kept = {field: value for field, value in said.items() if value is not None}
    (base / "config.json").write_text(json.dumps(kept))


@pytest.mark.parametrize("case", ["tied"], indirect=True)
@pytest.mark.parametrize("said", [True, None])
def test_a_stored_head_that_a_configuration_ties(case: Path, said: bool | None) -> None:
    found = merged(case).checkpoint
    wanted = {key: values(found, key) for key in found.tensors}

    def head(held: dict[str, Array]) -> None:
        held["lm_head.weight"] = held["model.embed_tokens.weight"]

    change_base(Path(base_of(case)), head, tie_word_embeddings=said)
    out = case.parent / "out"
    ftckpt.convert(base_of(case), str(out), "safetensors", adapter=adapters_of(case))
    made = all_of(str(out))
    assert made.keys() == wanted.keys()
    assert all(np.array_equal(made[key], wanted[key]) for key in made)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("case", ["tied"], indirect=True)
def test_a_head_that_shares_its_storage(case: Path) -> None:
    torch = pytest.importorskip("torch")
    wanted = {key: values(merged(case).checkpoint, key) for key in merged(case).checkpoint.tensors}
    base = Path(base_of(case))
    state = {key: torch.tensor(one) for key, one in all_of(str(base)).items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    torch.save(state, base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    opened = ftckpt.open_checkpoint(str(base))
    assert opened.aliases
    out = case.parent / "out"
    ftckpt.convert(opened, str(out), "safetensors", adapter=adapters_of(case), only="model")
    made = all_of(str(out))
    assert made.keys() == wanted.keys()
    assert all(np.array_equal(made[key], wanted[key]) for key in made)


@pytest.mark.parametrize("case", ["embedding"], indirect=True)
def test_a_base_that_says_nothing_of_a_tie(case: Path) -> None:
    base = Path(base_of(case))

    def headless(held: dict[str, Array]) -> None:
        del held["lm_head.weight"]

    def no_head(held: dict[str, Array]) -> None:
        for key in [k for k in held if "lm_head" in k]:
            del held[key]

    rewrite(case / "adapter", no_head)
    change_base(base, headless, architectures=None)
    out = str(case.parent / "out")
    with pytest.raises(UnsupportedError, match="nothing says"):
        ftckpt.convert(str(base), out, "safetensors", adapter=adapters_of(case))
    change_base(base, lambda held: held, architectures=["LlamaModel"])
    ftckpt.convert(str(base), out, "safetensors", adapter=adapters_of(case))
    assert "lm_head.weight" not in all_of(out)


def test_what_is_beyond_the_type_is_counted_once(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "base").mkdir()
    save_file(
        {"up.weight": np.full((3, 4), 60000, np.float16)}, tmp_path / "base" / "model.safetensors"
    )
    adapter = by_hand(tmp_path / "adapter", "up", 3, 4)
    large = {
        f"base_model.model.up.lora_{x}.weight": np.zeros(s, np.float32)
        for x, s in (("A", (2, 4)), ("B", (3, 2)))
    }
    large["base_model.model.up.lora_A.weight"][0] = [0, 1, 90000, 1]
    large["base_model.model.up.lora_B.weight"][:, 0] = 1
    save_file(large, adapter / "adapter_model.safetensors")
    found = merge(
        ftckpt.open_checkpoint(str(tmp_path / "base")), [ftckpt.open_checkpoint(str(adapter))]
    )
    for _ in range(2):
        found.weights._thread.kept = None
        made = values(found.checkpoint, "up.weight")
    assert np.isinf(made[:, 2]).all()
    assert found.rounding.infinite == 3
    assert 0 < found.rounding.largest < 2**-11
