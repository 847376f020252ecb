"""Merge a LoRA: the whole command against PEFT's load, merge and save.

The base is a Llama of random weights in bfloat16, the adapter of rank 16 is of all linear layers.
Needs peft and transformers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from side_by_side import (
    Contestant,
    arguments,
    compare,
    environment,
    peak_memory,
    remove,
    run_ftckpt,
    show,
    warm,
    workplace,
)

from ftckpt.amounts import size as size_in_bytes

PEFT = """
import sys, torch
from transformers import AutoModelForCausalLM
from peft import PeftModel
base, adapter, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)
"""
LINEAR = {
    "self_attn.q_proj": (2048, 2048),
    "self_attn.k_proj": (512, 2048),
    "self_attn.v_proj": (512, 2048),
    "self_attn.o_proj": (2048, 2048),
    "mlp.gate_proj": (8192, 2048),
    "mlp.up_proj": (8192, 2048),
    "mlp.down_proj": (2048, 8192),
}
RANK, ROWS = 16, 32_000
SHARD = 1 << 30


class Shards:
    """Safetensors files of random weights, written as they come."""

    def __init__(self, folder: Path, stem: str, dtype: str) -> None:
        self.folder, self.stem, self.dtype = folder, stem, dtype
        self.size = {"BF16": 2, "F32": 4}[dtype]
        self.held: dict[str, tuple[tuple[int, ...], bytes]] = {}
        self.files: list[tuple[Path, list[str]]] = []
        self.random = np.random.default_rng(1)
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, shape: tuple[int, ...]) -> None:
        values = self.random.standard_normal(shape, np.float32) * 0.02
        raw = values.view(np.uint32)
        data = raw.tobytes() if self.size == 4 else (raw >> 16).astype(np.uint16).tobytes()
        self.held[name] = (shape, data)
        if sum(len(d) for _, d in self.held.values()) > SHARD:
            self.flush()

    def flush(self) -> None:
        at, header = 0, {}
        for name, (shape, data) in self.held.items():
            place = [at, at + len(data)]
            header[name] = {"dtype": self.dtype, "shape": list(shape), "data_offsets": place}
            at += len(data)
        text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
        path = self.folder / f"part-{len(self.files)}"
        with path.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for _, data in self.held.values():
                stream.write(data)
        self.files.append((path, list(self.held)))
        self.held = {}

    def finish(self) -> None:
        if self.held:
            self.flush()
        total = len(self.files)
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self.files, 1):
            name = f"{self.stem}-{number:05d}-of-{total:05d}.safetensors"
            name = f"{self.stem}.safetensors" if total == 1 else name
            path.rename(self.folder / name)
            weight_map |= dict.fromkeys(names, name)
        if total > 1:
            index = {"metadata": {}, "weight_map": weight_map}
            (self.folder / f"{self.stem}.safetensors.index.json").write_text(json.dumps(index))


def make(folder: Path, nbytes: int) -> None:
    """Write `base` and `adapter`."""
    each = 2 * (sum(a * b for a, b in LINEAR.values()) + 2 * 2048)
    layers = max(1, (nbytes - 4 * ROWS * 2048) // each)
    base = Shards(folder / "base", "model", "BF16")
    adapter = Shards(folder / "adapter", "adapter_model", "F32")
    base.add("model.embed_tokens.weight", (ROWS, 2048))
    for layer in range(layers):
        for name, (rows, columns) in LINEAR.items():
            whole = f"model.layers.{layer}.{name}"
            base.add(f"{whole}.weight", (rows, columns))
            adapter.add(f"base_model.model.{whole}.lora_A.weight", (RANK, columns))
            adapter.add(f"base_model.model.{whole}.lora_B.weight", (rows, RANK))
        for name in ("input_layernorm", "post_attention_layernorm"):
            base.add(f"model.layers.{layer}.{name}.weight", (2048,))
    base.add("model.norm.weight", (2048,))
    base.add("lm_head.weight", (ROWS, 2048))
    base.finish()
    adapter.finish()
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": layers, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": ROWS, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "base" / "config.json").write_text(json.dumps(config))
    targets = [name.rpartition(".")[2] for name in LINEAR]
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 32, "target_modules": targets}
    (folder / "adapter" / "adapter_config.json").write_text(
        json.dumps(said | {"task_type": "CAUSAL_LM", "base_model_name_or_path": "base"})
    )


def main() -> None:
    parser = arguments(__doc__ or "", size="2GB", rounds=3)
    parser.add_argument("--memory", action="store_true", help="also print peak memory")
    parser.add_argument("--make", help="only write the data into this directory")
    asked = parser.parse_args()
    if asked.make:
        make(Path(asked.make), int(size_in_bytes(asked.size)))
        return
    with workplace(asked.dir) as place:
        # Elsewhere: the peak of a process that is started counts what this one holds.
        made = (sys.executable, __file__, "--size", asked.size, "--make", str(place))
        subprocess.run(made, check=True)
        nbytes = sum(file.stat().st_size for file in (place / "base").iterdir())
        warm(place)
        base, adapter, out = (str(place / name) for name in ("base", "adapter", "out"))
        words = ("convert", base, out, "--to", "safetensors", "--adapter", adapter)
        peft = (sys.executable, "-c", PEFT, base, adapter, out)

        def ours(*more: str) -> int:
            run_ftckpt(*words, *more)
            return nbytes

        def theirs() -> int:
            subprocess.run(peft, check=True, capture_output=True, env=environment())
            return nbytes

        def clear() -> None:
            remove(Path(out), Path(base))

        rows = compare(
            [
                Contestant("ftckpt convert --adapter", ours, ours=True, prepare=clear),
                Contestant("the same, --no-proof", lambda: ours("--no-proof"), prepare=clear),
                Contestant("PEFT: load, merge, save", theirs, prepare=clear),
            ],
            asked.rounds,
        )
        extra: dict[str, Any] = {}
        if asked.memory:
            clear()
            extra["peak MiB, ftckpt"] = peak_memory(sys.executable, "-m", "ftckpt", *words)
            clear()
            extra["peak MiB, PEFT"] = peak_memory(*peft)
        show("merge a LoRA of rank 16", rows, extra, as_json=asked.json)


if __name__ == "__main__":
    main()
