"""Write `torchtitan/step-3` as torchtitan saves a Llama over two ranks, and what it computes.

    python tests/data/families/make_torchtitan.py

The modules have torchtitan's names (`models/llama3/model.py`), the state is flattened as its
checkpointer does it, and the forward pass rotates neighbours by complex numbers as its `rope.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

HERE = Path(__file__).parent
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 37,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "max_position_embeddings": 32, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 35, 8, 9, 7]


class Qkv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(16, 24, bias=False)
        self.wk = nn.Linear(16, 12, bias=False)
        self.wv = nn.Linear(16, 12, bias=False)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_linear = Qkv()
        self.wo = nn.Linear(24, 16, bias=False)

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        angles = torch.outer(torch.arange(length), 500000.0 ** (-torch.arange(0, 6, 2) / 6))
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]

        def heads(layer: Any, count: int, turned: bool) -> Any:
            y = layer(x).view(batch, length, count, 6)
            if turned:
                pairs = torch.view_as_complex(y.reshape(batch, length, count, 3, 2))
                y = torch.view_as_real(pairs * turns).flatten(3)
            return y.repeat_interleave(4 // count, dim=2).transpose(1, 2)

        q = heads(self.qkv_linear.wq, 4, True)
        k = heads(self.qkv_linear.wk, 2, True)
        v = heads(self.qkv_linear.wv, 2, False)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(16, 24, bias=False)
        self.w2 = nn.Linear(24, 16, bias=False)
        self.w3 = nn.Linear(16, 24, bias=False)

    def forward(self, x: Any) -> Any:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(16))

    def forward(self, x: Any) -> Any:
        return rms_norm(x, (16,), self.weight, 1e-5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.feed_forward = FeedForward()
        self.attention_norm = Norm()
        self.ffn_norm = Norm()

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(37, 16)
        self.layers = nn.ModuleDict({str(n): Block() for n in range(2)})
        self.norm = Norm()
        self.lm_head = nn.Linear(16, 37, bias=False)

    def forward(self, tokens: Any) -> Any:
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x)
        return self.lm_head(self.norm(x))


def work(rank: int) -> None:
    """Train three steps on one of two ranks, and save."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29741"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(11)
    model = Llama()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.tensor([TOKENS])
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    # Of the settings of each parameter one is enough: a sample is to be small.
    held = {
        key: value
        for key, value in get_optimizer_state_dict(model, optimizer, options=options).items()
        if not key.startswith("param_groups.") or key.endswith(".lr")
    }
    state = get_model_state_dict(model) | {"optimizer": held, "train_state": {"step": 3}}
    save(state, checkpoint_id=HERE / "torchtitan" / "step-3")
    with torch.no_grad():
        logits = model(tokens)[0]
    if rank == 0:
        said = {"config": CONFIG, "tokens": TOKENS, "logits": logits.tolist()}
        (HERE / "torchtitan.json").write_text(json.dumps(said) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn(work, nprocs=2)  # type: ignore[no-untyped-call]
