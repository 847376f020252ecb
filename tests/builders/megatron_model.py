"""One tiny seeded model, and the part of it that each of Megatron's ranks holds.

The code here is its own, apart from what reads and writes checkpoints: which rows, layers and
experts a rank has is what readers and writers are held to. The whole model does not depend on the
layout, so any two layouts of a `Job` must read back as the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tests.conformance.formats import Truth

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

HIDDEN, HEADS, GROUPS, WIDTH, FFN, EXPERT_FFN, VOCAB = 12, 4, 2, 3, 20, 8, 64
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Job:
    """A model and how it is laid out.

    Attributes:
        tp, pp, vp, ep, dp: ranks of each kind; `vp` counts the model chunks of a stage.
        etp: tensor ranks of the experts; None for `tp`.
        layers: of the model.
        stages: layers of each chunk of each stage, in the order of the model; None for equal ones.
        recorded: arguments that say so, or that add to or replace the others.
        gated: whether the MLP has a gate (SwiGLU).
        tied: whether the output layer is the embedding.
        bias: whether linear layers have one.
        experts: of each MLP; 0 for none.
        style: how experts are stored: a module each, a weight each, or one weight for all.
        optimizer: none, torch's form in fp32, with fp32 masters, or distributed.
        bucket: elements at which a bucket closes; None for one bucket.
        iteration: of the save.
    """

    tp: int = 1
    pp: int = 1
    vp: int = 1
    ep: int = 1
    dp: int = 1
    etp: int | None = None
    layers: int = 4
    stages: tuple[int, ...] | None = None
    recorded: tuple[tuple[str, Any], ...] = ()
    gated: bool = True
    tied: bool = False
    bias: bool = False
    experts: int = 0
    style: Literal["sequential", "grouped", "stacked"] = "sequential"
    optimizer: Literal["none", "fp32", "masters", "distributed"] = "none"
    bucket: int | None = None
    iteration: int = 100

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def experts_apart(self) -> bool:
        return self.experts > 0 and (self.ep > 1 or self.expert_tp != self.tp)

    def of_stage(self, p: int, v: int) -> range:
        """Return the numbers in the model of the layers of one chunk of one stage."""
        each = self.stages or (self.layers // (self.pp * self.vp),) * (self.pp * self.vp)
        place = v * self.pp + p
        return range(sum(each[:place]), sum(each[: place + 1]))


# --- the whole model ------------------------------------------------------------------------------


def shapes(job: Job) -> dict[str, tuple[int, ...]]:
    """Return the parameters of the whole model, in the order of its modules."""
    qkv = HEADS * WIDTH + 2 * GROUPS * WIDTH
    found: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (VOCAB, HIDDEN)}
    for number in range(job.layers):
        layer = f"decoder.layers.{number}."
        found[layer + "input_layernorm.weight"] = (HIDDEN,)
        found |= _linear(job, layer + "self_attention.linear_proj", HIDDEN, HIDDEN)
        found |= _linear(job, layer + "self_attention.linear_qkv", qkv, HIDDEN)
        found[layer + "pre_mlp_layernorm.weight"] = (HIDDEN,)
        found |= _mlp(job, layer + "mlp.")
    found["decoder.final_layernorm.weight"] = (HIDDEN,)
    if not job.tied:
        found["output_layer.weight"] = (VOCAB, HIDDEN)
    return found


def _linear(job: Job, name: str, out: int, inner: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {f"{name}.weight": (out, inner)}
    if job.bias:
        found[f"{name}.bias"] = (out,)
    return found


def _mlp(job: Job, prefix: str) -> dict[str, tuple[int, ...]]:
    gates = 2 if job.gated else 1
    if not job.experts:
        first = _linear(job, prefix + "linear_fc1", gates * FFN, HIDDEN)
        return first | _linear(job, prefix + "linear_fc2", HIDDEN, FFN)
    found: dict[str, tuple[int, ...]] = {f"{prefix}router.weight": (job.experts, HIDDEN)}
    up, down = (gates * EXPERT_FFN, HIDDEN), (HIDDEN, EXPERT_FFN)
    if job.style == "stacked":
        found[f"{prefix}experts.weight1"] = (job.experts, up[1], up[0])
        found[f"{prefix}experts.weight2"] = (job.experts, down[1], down[0])
    elif job.style == "grouped":
        for linear, shape in (("linear_fc1", up), ("linear_fc2", down)):
            found |= {f"{prefix}experts.{linear}.weight{e}": shape for e in range(job.experts)}
    else:
        for e in range(job.experts):
            found[f"{prefix}experts.local_experts.{e}.linear_fc1.weight"] = up
            found[f"{prefix}experts.local_experts.{e}.linear_fc2.weight"] = down
    return found


def whole(job: Job) -> dict[str, Tensors]:
    """Return the whole model's `param`, `master` and moments, by kind and name.

    A name's values depend on the name alone, so that jobs of other layouts share them.
    """
    import torch

    found: dict[str, Tensors] = {kind: {} for kind in ("param", "master", *MOMENTS)}
    for name, shape in shapes(job).items():
        source = torch.Generator().manual_seed(sum(map(ord, name)) * 1_000_003 + len(name))
        master = torch.randn(shape, generator=source)
        found["master"][name] = master
        found["param"][name] = master if job.optimizer == "fp32" else master.bfloat16()
        found["exp_avg"][name] = torch.randn(shape, generator=source)
        found["exp_avg_sq"][name] = torch.rand(shape, generator=source)
    return found


def truth(job: Job) -> dict[str, Truth]:
    """Return what every tensor must read back as, the ranks' RNG states apart."""
    import torch

    everything = whole(job)
    found = {name: bytes_of(value) for name, value in everything["param"].items()}
    if job.optimizer != "none":
        kinds = MOMENTS if job.optimizer == "fp32" else ("master", *MOMENTS)
        for kind in kinds:
            found |= {f"{kind}:{n}": bytes_of(value) for n, value in everything[kind].items()}
    if job.optimizer in ("fp32", "masters"):
        step = bytes_of(torch.tensor(float(job.iteration)))
        found |= {f"optimizer:{name}.step": step for name in everything["param"]}
    return found


def bytes_of(value: torch.Tensor) -> Truth:
    import torch

    data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return Truth(str(value.dtype).removeprefix("torch."), tuple(value.shape), data)


# --- one rank's part ------------------------------------------------------------------------------


def part(job: Job, name: str, value: torch.Tensor, t: int, et: int) -> torch.Tensor:
    """Return what tensor rank `t` (of the experts `et`) holds of a whole tensor."""
    import torch

    expert = ".experts." in name
    ranks, rank = (job.expert_tp, et) if expert else (job.tp, t)
    if name.endswith((".experts.weight1", ".linear_fc1.weight", ".linear_fc1.bias")) or (
        ".experts.linear_fc1.weight" in name
    ):
        axis = 2 if name.endswith(".experts.weight1") else 0
        halves = value.chunk(2 if job.gated else 1, axis)
        return torch.cat([half.chunk(ranks, axis)[rank] for half in halves], axis)
    if name.endswith(("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight",
                      "linear_qkv.bias")):  # fmt: skip
        return value.chunk(ranks, 0)[rank]
    if name.endswith((".linear_proj.weight", ".linear_fc2.weight", ".experts.weight2")) or (
        ".experts.linear_fc2.weight" in name
    ):
        return value.chunk(ranks, 1)[rank]
    return value


def local_parameters(job: Job, p: int, v: int, e: int) -> list[tuple[str, str]]:
    """Return (local name, name in the whole model) of one chunk, in the order of its modules."""
    first, last = (p, v) == (0, 0), (p, v) == (job.pp - 1, job.vp - 1)
    numbers = {number: place for place, number in enumerate(job.of_stage(p, v))}
    each = job.experts // job.ep
    found = []
    for name in shapes(job):
        parts = name.split(".")
        if name.startswith("embedding."):
            if first:
                found.append((name, name))
        elif parts[1] == "final_layernorm" or parts[0] == "output_layer":
            if last:
                found.append((name, name))
        elif int(parts[2]) in numbers:
            parts[2] = str(numbers[int(parts[2])])
            if "local_experts" in parts:
                at = parts.index("local_experts") + 1
                if int(parts[at]) // each != e:
                    continue
                parts[at] = str(int(parts[at]) % each)
            elif "experts" in parts and job.style == "grouped":
                number = int(parts[-1].removeprefix("weight"))
                if number // each != e:
                    continue
                parts[-1] = f"weight{number % each}"
            found.append((".".join(parts), name))
    if last and job.tied and job.pp > 1:
        found.append(("output_layer.weight", "embedding.word_embeddings.weight"))
    return found


def cut(job: Job, name: str, value: torch.Tensor, at: tuple[int, int, int]) -> torch.Tensor:
    """Return a directory's part of a whole tensor, in the shape in which Megatron stores it."""
    t, et, e = at
    mine = part(job, name, value, t, et)
    if name.endswith((".experts.weight1", ".experts.weight2")):
        mine = mine.chunk(job.ep, 0)[e].contiguous()
        experts, inner, out = mine.shape
        two = (inner, experts * out) if name.endswith("1") else (experts * inner, out)
        return mine.reshape(-1).view(two)
    return mine.contiguous()
