"""Training state of a wanted size, as frameworks save it: weights, fp32 masters and both moments.

14 bytes a parameter where masters are kept: bf16 weights, fp32 master and both moments. Plain
torch writes the files in the layouts that the frameworks use; the values are random.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class Sizes(NamedTuple):
    """The sizes of a model's tensors; the number of layers follows from the bytes wanted."""

    hidden: int = 1024
    ffn: int = 2816
    heads: int = 16
    groups: int = 8
    vocab: int = 8192

    def layers(self, nbytes: int, bytes_a_parameter: int) -> int:
        width = self.hidden // self.heads
        layer = self.hidden * (self.heads + 2 * self.groups) * width + self.hidden**2
        layer += 3 * self.ffn * self.hidden
        return max(1, round((nbytes / bytes_a_parameter - 2 * self.vocab * self.hidden) / layer))


SMALL = Sizes()
SEVEN_BILLION = Sizes(4096, 11008, 32)  # of a model of 7B; one layer of it takes 2.5 GB
HIDDEN, FFN, HEADS, GROUPS, VOCAB = SMALL
BYTES_A_PARAMETER = 14


def layers_of(nbytes: int, bytes_a_parameter: int) -> int:
    return SMALL.layers(nbytes, bytes_a_parameter)


def save_megatron(place: Path, nbytes: int, *, tp: int, sizes: Sizes = SMALL) -> Path:
    """Write a legacy Megatron checkpoint of `tp` ranks; return its path."""
    import torch

    torch.manual_seed(0)
    layers = sizes.layers(nbytes, BYTES_A_PARAMETER)
    path = place / "iter_0000001"
    args = argparse.Namespace(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None, expert_model_parallel_size=1,
        expert_tensor_parallel_size=tp, context_parallel_size=1, data_parallel_size=1,
        world_size=tp, num_layers=layers, hidden_size=sizes.hidden, ffn_hidden_size=sizes.ffn,
        num_attention_heads=sizes.heads, num_query_groups=sizes.groups, group_query_attention=True,
        kv_channels=sizes.hidden // sizes.heads, swiglu=True, num_experts=None,
        untie_embeddings_and_output_weights=True, padded_vocab_size=sizes.vocab,
        make_vocab_size_divisible_by=128, use_distributed_optimizer=False, bf16=True,
        consumed_train_samples=8, iteration=1, add_bias_linear=False,
    )  # fmt: skip
    for rank in range(tp):
        masters = _megatron_rank(layers, tp, sizes)
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        listed: list[list[torch.Tensor]] = []
        for decay in (True, False):
            names = [n for n, t in masters.items() if (t.ndim > 1) is decay]
            ids = range(len(state), len(state) + len(names))
            for number, name in zip(ids, names, strict=True):
                noise = torch.randn_like(masters[name])
                state[number] = {"exp_avg": noise, "exp_avg_sq": noise.square()}
            groups.append({"params": list(ids), "lr": 1e-3, "wd_mult": float(decay), "step": 1})
            listed.append([masters[n] for n in names])
        folder = path / f"mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        torch.save(
            {
                "args": args,
                "checkpoint_version": 3.0,
                "iteration": 1,
                "model": {n: t.to(torch.bfloat16) for n, t in masters.items()},
                "optimizer": {
                    "optimizer": {"state": state, "param_groups": groups},
                    "fp32_from_fp16_params": listed,
                },
                "opt_param_scheduler": {"num_steps": 8},
                "rng_state": [{"torch_rng_state": torch.get_rng_state()}],
            },
            folder / "model_optim_rng.pt",
        )
    return path


def _megatron_rank(layers: int, tp: int, sizes: Sizes) -> dict[str, torch.Tensor]:
    import torch

    hidden, ffn, heads, groups, vocab = sizes
    qkv = (heads + 2 * groups) * (hidden // heads)
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (vocab // tp, hidden)}
    for number in range(layers):
        layer = f"decoder.layers.{number}."
        shapes[f"{layer}input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}self_attention.linear_proj.weight"] = (hidden, hidden // tp)
        shapes[f"{layer}self_attention.linear_qkv.weight"] = (qkv // tp, hidden)
        shapes[f"{layer}pre_mlp_layernorm.weight"] = (hidden,)
        shapes[f"{layer}mlp.linear_fc1.weight"] = (2 * ffn // tp, hidden)
        shapes[f"{layer}mlp.linear_fc2.weight"] = (hidden, ffn // tp)
    shapes["decoder.final_layernorm.weight"] = (hidden,)
    shapes["output_layer.weight"] = (vocab // tp, hidden)
    # Replicated over tensor-parallel ranks, so equal on all of them.
    return {n: torch.randn(s) if len(s) > 1 else torch.ones(s) for n, s in shapes.items()}


def save_dcp_with_optimizer(path: Path, nbytes: int) -> Path:
    """Let torch save model and AdamW state as a distributed checkpoint; return its path."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    torch.manual_seed(0)
    model = llama(layers_of(nbytes, 12), torch.float32)
    state = {
        "model": model,
        "optimizer": {
            "state": {
                n: {"step": torch.tensor(1.0), "exp_avg": t * 0.1, "exp_avg_sq": t.square()}
                for n, t in model.items()
            },
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1,
                              "params": list(model)}],
        },
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process saves is what is meant
        writer = FileSystemWriter(path, single_file_per_rank=False, thread_count=2)
        save(state, storage_writer=writer, no_dist=True)
    return path


def save_hugging_face(path: Path, nbytes: int) -> Path:
    """Write a Llama in bf16 as safetensors shards with index and configuration; return its path."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    layers = layers_of(nbytes, 2)
    model = llama(layers, torch.bfloat16)
    path.mkdir(parents=True)
    names = list(model)
    shards = 4
    index: dict[str, str] = {}
    for number in range(shards):
        part = {n: model[n] for n in names[number::shards]}
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, path / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    total = sum(t.nbytes for t in model.values())
    document = {"metadata": {"total_size": total}, "weight_map": index}
    (path / "model.safetensors.index.json").write_text(json.dumps(document))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "vocab_size": VOCAB,
        "head_dim": HIDDEN // HEADS, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def save_zero(place: Path, nbytes: int, *, ranks: int, stage: int, python: str) -> Path:
    """Let DeepSpeed, under the interpreter `python`, train one step and save; return the path."""
    script = Path(__file__).with_name("zero_data.py")
    words = [python, str(script), str(place), str(nbytes), str(ranks), str(stage)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"DeepSpeed ended with {done.returncode}: {done.stderr[-2000:]}")
    return place / "global_step1"


def llama(layers: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    import torch

    kv = GROUPS * (HIDDEN // HEADS)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for number in range(layers):
        layer = f"model.layers.{number}."
        shapes |= {
            f"{layer}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{layer}self_attn.k_proj.weight": (kv, HIDDEN),
            f"{layer}self_attn.v_proj.weight": (kv, HIDDEN),
            f"{layer}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{layer}mlp.gate_proj.weight": (FFN, HIDDEN),
            f"{layer}mlp.up_proj.weight": (FFN, HIDDEN),
            f"{layer}mlp.down_proj.weight": (HIDDEN, FFN),
            f"{layer}input_layernorm.weight": (HIDDEN,),
            f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        }
    shapes["model.norm.weight"] = (HIDDEN,)
    shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
