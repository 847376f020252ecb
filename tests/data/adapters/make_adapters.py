"""Train nothing, but save small adapters with PEFT, and what `merge_and_unload` makes of them.

Run: python make_adapters.py   (torch, transformers, peft, safetensors)

`adapters.tar.xz` gets `bases/BASE`, and for each case `CASE/adapter` (two have `CASE/second` too),
`CASE/base.txt` with the name of its base, and `CASE/truth.safetensors` with the tensors that the
merge changed. Where the base ties its head to the embedding, PEFT changes both, although the
adapter was trained to change one: `CASE/logits.safetensors` has the logits of the model with its
adapter, not merged.
"""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    Qwen2Config,
)

HERE = Path(__file__).parent
SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
IDS = torch.tensor([[1, 7, 39, 0, 12, 5]])
BASES = {
    "llama": (LlamaConfig(**SMALL, tie_word_embeddings=False), torch.bfloat16),
    "llama-tied": (LlamaConfig(**SMALL, tie_word_embeddings=True), torch.float32),
    "qwen2": (Qwen2Config(**SMALL, tie_word_embeddings=False), torch.float16),
    "gpt2": (
        GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32),
        torch.float32,
    ),
    "gpt-oss": (
        GptOssConfig(**{**SMALL, "intermediate_size": 16}, num_local_experts=4, head_dim=8,
                     num_experts_per_tok=2, sliding_window=8, layer_types=["full_attention"] * 2,
                     tie_word_embeddings=False),
        torch.float32,
    ),
}  # fmt: skip
PATTERN = r".*\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|down)_proj)"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"target_modules": ["q_proj", "k_proj", "down_proj"]}),
    "rslora": (
        "llama",
        {
            "target_modules": PATTERN,
            "use_rslora": True,
            "rank_pattern": {r"layers\.1\.self_attn\..*": 6, "layers.0.mlp.down_proj": 2},
            "alpha_pattern": {"o_proj": 3, r"^model\.layers\.0\.mlp\.gate_proj": 9},
        },
    ),
    "dora": ("llama", {"target_modules": ["q_proj", "up_proj", "o_proj"], "use_dora": True}),
    "saved": (
        "llama",
        {"target_modules": "all-linear", "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "bias": ("qwen2", {"target_modules": ["q_proj", "v_proj"], "lora_bias": True, "bias": "all"}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "wte"], "use_dora": True}),
    "tied": ("llama-tied", {"target_modules": ["lm_head", "q_proj"]}),
    "experts": (
        "gpt-oss",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "rank_pattern": {"1.mlp.experts.down_proj": 2},
        },
    ),
    "two": ("llama", {"target_modules": ["q_proj", "gate_proj"]}),
    "untrained": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
}


def scattered(model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    for name, one in model.named_parameters():
        if one.requires_grad:
            values = torch.randn(one.shape) * 0.1
            with torch.no_grad():
                moved = one + values if "magnitude" in name or "lora" not in name else values
                one.copy_(moved.abs() if "magnitude" in name else moved)


def loaded(out: Path, base: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(out / "bases" / base, dtype="auto")


def save(base: Any, folder: Path, wanted: dict[str, Any], seed: int) -> None:
    asked = LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **wanted})
    model = get_peft_model(base, asked)
    if seed:
        scattered(model, seed)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)


def main() -> None:
    out = Path(tempfile.mkdtemp())
    for name, (config, dtype) in BASES.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        scattered(model, 2)
        model.save_pretrained(out / "bases" / name)
        (out / "bases" / name / "generation_config.json").unlink(missing_ok=True)
    for number, (case, (base, wanted)) in enumerate(CASES.items()):
        folder = out / case
        folder.mkdir()
        (folder / "base.txt").write_text(base)

        save(
            loaded(out, base), folder / "adapter", wanted, 0 if case == "untrained" else 10 + number
        )
        model = PeftModel.from_pretrained(loaded(out, base), folder / "adapter")
        if case == "two":
            also = {"target_modules": ["q_proj", "v_proj"], "use_dora": True}
            save(loaded(out, base), folder / "second", also, 50)
            model = model.merge_and_unload()
            model = PeftModel.from_pretrained(model, folder / "second")
        if base in ("gpt2", "llama-tied"):
            with torch.no_grad():
                save_file({"logits": model(IDS).logits}, folder / "logits.safetensors")
        before = load_file(out / "bases" / base / "model.safetensors")
        state = model.merge_and_unload().state_dict()
        changed = {
            n: state[n].contiguous().clone()
            for n, t in before.items()
            if state[n].dtype != t.dtype or not torch.equal(state[n], t)
        }
        save_file(changed, folder / "truth.safetensors")
        print(case, sorted(changed)[:3], len(changed))
    for one in out.rglob("adapter_config.json"):
        text = one.read_text().replace(str(out) + "/bases/", "somewhere/")
        one.write_text(text)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:xz", preset=9) as tar:
        for one in sorted(p for p in out.rglob("*") if p.is_file()):
            info = tar.gettarinfo(one, one.relative_to(out).as_posix())
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            with one.open("rb") as stream:
                tar.addfile(info, stream)
    (HERE / "adapters.tar.xz").write_bytes(raw.getvalue())
    shutil.rmtree(out)


if __name__ == "__main__":
    main()
