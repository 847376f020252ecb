"""Training states for benchmarks/delta.py: a small GPT, trained here on Python's own sources.

    python benchmarks/delta_data.py DIR [--width 256] [--layers 4] [--steps 100]

Mixed precision as Megatron and DeepSpeed keep it: bf16 weights, which the forward pass uses, and
their fp32 masters with AdamW's two moments, 14 bytes a parameter. Three regimes: `high` (the
learning rate 1e-3 of early training, saved after `--steps`), `late` (the same run after six times
as many, its rate fallen to 3e-5) and `tune` (a new AdamW at 1e-5, after half as many). Each is
saved at its base step, 1 and 10 steps later, and `high` also 100 steps later.
"""

from __future__ import annotations

import argparse
import math
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

REGIMES = {"high": 1e-3, "late": 3e-5, "tune": 1e-5}
DISTANCES = {"high": (1, 10, 100), "late": (1, 10), "tune": (1, 10)}
VOCABULARY, CONTEXT, BATCH = 6144, 128, 24
BETAS = {"high": (0.9, 0.95), "late": (0.9, 0.95), "tune": (0.9, 0.999)}
EPS, DECAY = 1e-8, 0.1


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.before_attention = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.before_mlp = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = self.down(functional.gelu(self.up(self.before_mlp(x))))
        return x + hidden


class Network(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Trainer:
    """The network holds the bf16 weights' values; `masters` are what AdamW moves."""

    def __init__(self, width: int, layers: int) -> None:
        torch.manual_seed(0)
        self.network = Network(width, layers)
        self.named = dict(self.network.named_parameters())
        self.masters = {n: p.detach().clone() for n, p in self.named.items()}
        self.text = torch.tensor(words(), dtype=torch.int64)
        self.tokens = torch.Generator().manual_seed(1)

    def optimise(self, regime: str) -> None:
        self.steps = 0
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), betas=BETAS[regime], eps=EPS, weight_decay=DECAY
        )

    def step(self, lr: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(self.masters[name].bfloat16())
        starts = torch.randint(len(self.text) - CONTEXT, (BATCH, 1), generator=self.tokens)
        window = self.text[starts + torch.arange(CONTEXT + 1)]
        logits = self.network(window[:, :-1])
        loss = functional.cross_entropy(logits.reshape(-1, VOCABULARY), window[:, 1:].reshape(-1))
        self.network.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for name, parameter in self.named.items():
            self.masters[name].grad = parameter.grad
        self.optimizer.step()
        self.steps += 1
        return float(loss.detach())

    def save(self, path: Path, lr: float, betas: tuple[float, float]) -> None:
        from safetensors.torch import save_file

        state = {}
        for name, master in self.masters.items():
            held = self.optimizer.state[master]
            state[f"param.{name}"] = master.bfloat16()
            state[f"master.{name}"] = master.clone()
            state[f"exp_avg.{name}"] = held["exp_avg"]
            state[f"exp_avg_sq.{name}"] = held["exp_avg_sq"]
        said = {
            "lr": lr, "beta1": betas[0], "beta2": betas[1],
            "eps": EPS, "weight_decay": DECAY, "step": self.steps,
        }  # fmt: skip
        save_file(state, path, {key: str(value) for key, value in said.items()})


def words() -> list[int]:
    """Return the standard library's modules as words: the most frequent ones, and one for others.

    A vocabulary much larger than what one step sees: rows of the embedding without a gradient are
    a part of every real state.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join(path.read_text("utf-8") for path in sorted(folder.glob("*.py")))
    found = re.findall(r"\w+|\s+|[^\w\s]", text)
    frequent = Counter(found).most_common(VOCABULARY - 1)
    numbers = {word: number for number, (word, _) in enumerate(frequent, 1)}
    return [numbers.get(word, 0) for word in found]


def make(place: Path, width: int, layers: int, steps: int) -> None:
    trainer = Trainer(width, layers)
    for regime in REGIMES:
        if regime != "late":
            trainer.optimise(regime)
        base = base_step(regime, steps)
        while trainer.steps < base + max(DISTANCES[regime]):
            lr = rate(regime, trainer.steps + 1, steps)
            loss = trainer.step(lr)
            assert math.isfinite(loss)
            if trainer.steps == base or trainer.steps - base in DISTANCES[regime]:
                name = f"{regime}-{trainer.steps - base}.safetensors"
                trainer.save(place / name, lr, BETAS[regime])
                print(f"{name}: step {trainer.steps}, loss {loss:.3f}", flush=True)


def base_step(regime: str, steps: int) -> int:
    """Return the optimizer's step at which a regime's base is saved."""
    return {"high": steps, "late": 6 * steps, "tune": steps // 2}[regime]


def rate(regime: str, step: int, steps: int) -> float:
    """Return the learning rate: it rises, stays, and falls by a cosine to that of `late`."""
    if regime == "tune":
        return REGIMES["tune"]
    high, low = REGIMES["high"], REGIMES["late"]
    rising = min(1.0, 5 * step / steps)
    falling = min(1.0, max(0.0, (step - 2 * steps) / (3 * steps)))
    return low + (high * rising - low) * (1 + math.cos(math.pi * falling)) / 2


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("place", type=Path)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument(
        "--steps", type=int, default=100, help="of the first regime, before it is saved"
    )
    options = parser.parse_args()
    make(options.place, options.width, options.layers, options.steps)
