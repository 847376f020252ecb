"""The tensors of an adapter are held to the ranks that its configuration records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftckpt
from ftckpt.findings import Finding, Severity
from tests.formats.lora.samples import all_of, change_config, rewrite, unpacked

CASES = (
    "lora", "rslora", "dora", "saved", "embedding", "bias", "gpt2", "tied", "experts", "two",
)  # fmt: skip
ATTENTION = "base_model.model.encoder.attn"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def adapter(samples: Path, tmp_path: Path) -> Path:
    return copied(samples, "lora", tmp_path)


def copied(samples: Path, case: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(samples / case / "adapter", tmp_path / "adapter"))


def found(folder: Path) -> list[Finding]:
    report = ftckpt.verify(str(folder), level="structure")
    return [one for one in report.findings if one.severity is not Severity.NOTE]


def made(folder: Path, tensors: dict[str, tuple[int, ...]], **config: Any) -> Path:
    """Write an adapter of tensors of these shapes."""
    from safetensors.numpy import save_file

    folder.mkdir()
    held = {name: np.ones(shape, np.float32) for name, shape in tensors.items()}
    save_file(held, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_what_peft_wrote_is_as_it_records(samples: Path, case: str) -> None:
    assert found(samples / case / "adapter") == []


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("lora", {"r": 8}),
        ("lora", {"rank_pattern": {"q_proj": 2}}),
        ("lora", {"rank_pattern": {r"layers\.\d+\.(mlp|none)\..*_proj": 2}}),
        ("rslora", {"rank_pattern": {}}),
        ("rslora", {"r": 3}),
        ("embedding", {"r": 8}),
        ("dora", {"r": 2}),
        ("experts", {"r": 3}),
        # A pattern that is not matched here: none of the ranks is that of the tensors.
        ("lora", {"r": 8, "rank_pattern": {r"(?!x)q_proj": 16}}),
    ],
)
def test_another_rank_than_recorded_is_damage(
    samples: Path, tmp_path: Path, case: str, config: dict[str, Any]
) -> None:
    folder = copied(samples, case, tmp_path)
    change_config(folder, **config)
    (one,) = found(folder)
    assert (one.kind, int(one.code), one.file) == ("shape-mismatch", 4, "adapter_config.json")
    assert "is to be of rank" in one.message


def test_one_module_of_another_rank_is_named(adapter: Path) -> None:
    name = next(
        one for one in all_of(str(adapter)) if one.endswith("1.self_attn.q_proj.lora_A.weight")
    )

    def narrow(held: dict[str, Any]) -> None:
        other = name.replace("lora_A", "lora_B")
        held[name], held[other] = held[name][:2].copy(), held[other][:, :2].copy()

    rewrite(adapter, narrow)
    (one,) = found(adapter)
    assert one.kind == "shape-mismatch"
    assert "records other ranks than 2 matrices have" in one.message
    assert f"{name} of [2, 16] is to be of rank 4" in one.message


@pytest.mark.parametrize(
    "config",
    [
        {"r": 4, "rank_pattern": {r"(?!x)q_proj": 16}},
        # Versions before 0.15 took this pattern for one that matches nothing.
        {"rank_pattern": {r"^model\.layers\.0\.self_attn.q_proj": 16}},
        {"peft_type": "ADALORA", "r": 8},
        {"alpha_pattern": {"q_proj": 2}, "use_rslora": True},
    ],
)
def test_what_may_be_right_is_none(adapter: Path, config: dict[str, Any]) -> None:
    change_config(adapter, **config)
    assert found(adapter) == []


def test_a_field_that_is_not_known_may_change_ranks(adapter: Path) -> None:
    change_config(adapter, r=8, lora_experts=2)
    assert [(one.kind, int(one.code)) for one in found(adapter)] == [("state-unknown", 0)]


@pytest.mark.parametrize(("rank", "kind", "code"), [("4", "newer-writer", 13), (0, "bad-index", 4)])
def test_a_rank_that_is_none(adapter: Path, rank: object, kind: str, code: int) -> None:
    change_config(adapter, r=rank)
    (one,) = found(adapter)
    assert (one.kind, int(one.code)) == (kind, code)


def test_modules_that_are_not_named_are_a_warning(adapter: Path) -> None:
    change_config(adapter, target_modules=["q_proj", "k_proj"])
    (one,) = found(adapter)
    assert (one.kind, int(one.code)) == ("state-unknown", 0)
    assert "target_modules does not name 2 modules" in one.message


# The second is matched by no pattern of ours, and magnitudes need none.
@pytest.mark.parametrize("config", [{}, {"target_modules": r"^(?!.*head).*_proj"}])
def test_magnitudes_that_are_recorded_are_missed(
    samples: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    folder = copied(samples, "dora", tmp_path)
    change_config(folder, **config)
    name = next(one for one in all_of(str(folder)) if "magnitude" in one)
    rewrite(folder, lambda held: held.pop(name))
    (one,) = found(folder)
    assert (one.kind, int(one.code)) == ("missing-tensor", 4)


@pytest.mark.parametrize(
    ("shapes", "kinds"),
    [
        (((4, 3, 3, 3), (8, 4, 1, 1)), []),
        (((4, 3, 3, 3), (8, 2, 1, 1)), []),  # of two groups
        (((2, 3, 3, 3), (8, 2, 1, 1)), ["shape-mismatch"]),
        (((4, 3, 3, 3), (8, 3, 1, 1)), ["shape-mismatch"]),
    ],
)
def test_convolutions(
    tmp_path: Path, shapes: tuple[tuple[int, ...], ...], kinds: list[str]
) -> None:
    names = [f"base_model.model.conv.lora_{side}.weight" for side in "AB"]
    folder = made(tmp_path / "a", dict(zip(names, shapes, strict=True)), target_modules=["conv"])
    assert [one.kind for one in found(folder)] == kinds


@pytest.mark.parametrize(
    ("shapes", "kinds"),
    [
        (((4, 16, 3), (8, 4, 1)), []),  # PEFT's Conv1d
        (((3, 16, 3), (8, 3, 1)), ["shape-mismatch"]),
        (((4, 1, 3), (8, 3, 1)), ["shape-mismatch"]),  # neither a convolution nor experts
        (((5, 4, 16), (5, 32, 4)), []),
        (((1, 4, 16), (5, 32, 4)), []),  # one A for all experts
        (((5, 4, 16), (1, 32, 4)), []),
        (((4, 16), (5, 32, 4)), []),
        (((5, 3, 16), (5, 32, 3)), ["state-unknown"]),
        (((5, 4, 16), (5, 32, 3)), ["shape-mismatch"]),
        (((5, 3, 16), (6, 32, 3)), ["shape-mismatch"]),  # of other numbers of experts
    ],
)
def test_matrices_of_three_axes(
    tmp_path: Path, shapes: tuple[tuple[int, ...], ...], kinds: list[str]
) -> None:
    names = [f"base_model.model.layers.0.mlp.experts.w1.lora_{side}.weight" for side in "AB"]
    held = dict(zip(names, shapes, strict=True))
    folder = made(tmp_path / "a", held, target_modules="all-linear")
    assert [one.kind for one in found(folder)] == kinds


def of_ranks(**ranks: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of modules, by name (`_` for a dot) and rank."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rank in ranks.items():
        stem = f"base_model.model.layers.{name.replace('_', '.')}"
        shapes[f"{stem}.lora_A.weight"] = (rank, 16)
        shapes[f"{stem}.lora_B.weight"] = (16, rank)
    return shapes


@pytest.mark.parametrize(
    ("ranks", "told", "kinds"),
    [
        # NeMo's `moe_rank_scaling`.
        ({"0_q": 4, "0_experts_0_up": 2, "0_experts_1_up": 2}, {}, ["state-unknown"]),
        ({"0_q": 4, "0_experts_0_up": 2, "1_experts_0_up": 2}, {}, ["state-unknown"]),
        ({"0_q": 4, "0_experts_0_up": 2, "0_experts_1_up": 1}, {}, ["shape-mismatch"]),
        ({"0_q": 4, "0_experts_0_up": 2, "0_experts_1_up": 4}, {}, ["shape-mismatch"]),
        ({"0_q": 4, "0_experts_0_up": 2}, {}, ["shape-mismatch"]),
        ({"0_q": 2, "0_experts_0_up": 2, "0_experts_1_up": 2}, {}, ["shape-mismatch"]),
        ({"0_q": 2, "1_q": 2, "0_up": 4, "1_up": 4}, {}, ["shape-mismatch"]),  # no experts
        (
            {"0_q": 4, "0_experts_0_up": 2, "0_experts_1_up": 2},
            {"rank_pattern": {"up": 1}},
            ["shape-mismatch"],
        ),
    ],
)
def test_experts_may_have_a_rank_of_their_own(
    tmp_path: Path, ranks: dict[str, int], told: dict[str, Any], kinds: list[str]
) -> None:
    folder = made(tmp_path / "a", of_ranks(**ranks), target_modules=["q", "up"], **told)
    assert [one.kind for one in found(folder)] == kinds


@pytest.mark.parametrize(("rank", "kinds"), [(2, []), (3, ["shape-mismatch"])])
def test_attention_that_is_wrapped_as_a_whole(tmp_path: Path, rank: int, kinds: list[str]) -> None:
    """PEFT wraps the projection inside too, with the rank of the whole."""
    tensors: dict[str, tuple[int, ...]] = {}
    for module in (ATTENTION, f"{ATTENTION}.base_layer.out_proj"):
        tensors[f"{module}.lora_A.weight"] = (rank, 8)
        tensors[f"{module}.lora_B.weight"] = (8, rank)
    told = {"target_modules": ["attn"], "rank_pattern": {r"encoder\.attn": 2}}
    assert [one.kind for one in found(made(tmp_path / "a", tensors, **told))] == kinds


def test_an_adapter_in_a_folder_of_a_trainer(samples: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(samples / "lora" / "adapter", tmp_path / "checkpoint-3"))
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    assert not [one for one in found(folder) if one.kind == "shape-mismatch"]
    change_config(folder, r=8)
    assert [one.kind for one in found(folder)].count("shape-mismatch") == 1
