"""Write tiny legacy Megatron checkpoints of any layout, and hold what reads them to the model.

Written by plain torch as Megatron-LM's `save_checkpoint` writes them (`--ckpt-format torch`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.formats.megatron import Megatron
from ftckpt.formats.megatron.reader import MegatronCheckpoint
from tests.builders.megatron_model import (
    GROUPS,
    HEADS,
    HIDDEN,
    MOMENTS,
    VOCAB,
    Job,
    bytes_of,
    cut,
    local_parameters,
    shapes,
    truth,
    whole,
)
from tests.conformance.formats import Made, open_path

if TYPE_CHECKING:
    import torch

    from tests.builders.megatron_model import Tensors


def opened(path: Path) -> MegatronCheckpoint:
    checkpoint = open_path(Megatron(), path)
    assert isinstance(checkpoint, MegatronCheckpoint)
    return checkpoint


def require(made: Made) -> MegatronCheckpoint:
    """Hold an opened checkpoint to its truth, tensor by tensor."""
    checkpoint = opened(made.path)
    assert set(checkpoint.tensors) == set(made.truth)
    for key, (dtype, shape, data) in made.truth.items():
        tensor = checkpoint.tensors[key]
        assert (tensor.dtype.name, tensor.shape) == (dtype, shape), key
        assert read_tensor(checkpoint, key) == data, key
    opaque = [n for n in checkpoint.notes if n.kind != "opaque-object"]
    assert [*checkpoint.check(), *opaque] == []
    return checkpoint


def altered(made: Made, directory: str, **changes: Any) -> None:
    """Save one rank's file again with other values at its top; `args__NAME` changes an argument."""
    import torch

    file = made.path / directory / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    for name, value in changes.items():
        if name.startswith("args__"):
            setattr(state["args"], name.removeprefix("args__"), value)
        elif value is None:
            del state[name]
        else:
            state[name] = value
    torch.save(state, file)


def directories(job: Job) -> Iterator[tuple[str, int, int, int, int, int]]:
    """Yield (name, tensor, experts' tensor, pipeline, expert rank) of every directory.

    Last comes the first rank of a stage that has them.
    """
    seen = set()
    for rank in range(lcm(job.tp, job.expert_tp * job.ep)):
        t, et, e = rank % job.tp, rank % job.expert_tp, rank // job.expert_tp % job.ep
        for p in range(job.pp):
            name = f"mp_rank_{t:02d}"
            name += f"_{p:03d}" if job.pp > 1 else ""
            name += f"_{e:03d}" if job.ep > 1 else ""
            if name not in seen:
                seen.add(name)
                yield name, t, et, p, e, rank


def arguments(job: Job) -> argparse.Namespace:
    """Return what Megatron pickles of its command line, as far as it matters."""
    usual = argparse.Namespace(
        tensor_model_parallel_size=job.tp, pipeline_model_parallel_size=job.pp,
        virtual_pipeline_model_parallel_size=job.vp if job.vp > 1 else None,
        expert_model_parallel_size=job.ep, expert_tensor_parallel_size=job.expert_tp,
        context_parallel_size=1, data_parallel_size=job.dp, world_size=job.tp * job.pp * job.dp,
        num_layers=job.layers, hidden_size=HIDDEN, num_attention_heads=HEADS,
        num_query_groups=GROUPS, swiglu=job.gated, num_experts=job.experts or None,
        untie_embeddings_and_output_weights=not job.tied, padded_vocab_size=VOCAB,
        use_distributed_optimizer=job.optimizer == "distributed",
        overlap_grad_reduce=job.bucket is not None, ddp_bucket_size=job.bucket,
        consumed_train_samples=job.iteration * 8, iteration=0, bf16=job.optimizer != "fp32",
    )  # fmt: skip
    return argparse.Namespace(**(vars(usual) | dict(job.recorded)))


def write(root: Path, job: Job) -> Made:
    """Write `root/iter_<iteration>` and the root's tracker; return what it must read back as."""
    import torch

    path = root / f"iter_{job.iteration:07d}"
    everything = whole(job)
    expected = truth(job)
    listed = sorted(directories(job), key=lambda item: (item[1], item[3], item[4]))
    for number, (name, t, et, p, e, rank) in enumerate(listed):
        chunks: list[dict[str, Tensors]] = []
        for v in range(job.vp):
            held = local_parameters(job, p, v, e)
            chunks.append(
                {
                    kind: {own: cut(job, n, values[n], (t, et, e)) for own, n in held}
                    for kind, values in everything.items()
                }
            )
        rng = torch.full((16,), number, dtype=torch.uint8)
        state: dict[str, Any] = {
            "args": arguments(job), "checkpoint_version": 3.0, "iteration": job.iteration
        }  # fmt: skip
        optimizer, buffers = _optimizer(job, p, chunks, writes_dense=rank < job.tp)
        keys = ["model"] if job.vp == 1 else [f"model{v}" for v in range(job.vp)]
        for key, chunk in zip(keys, chunks, strict=True):
            state[key] = _with_extra_states(chunk["param"])
        if optimizer is not None:
            state["optimizer"] = optimizer
        state["opt_param_scheduler"] = {"num_steps": job.iteration * 8, "max_lr": 1e-3}
        state["rng_state"] = [{"cuda_rng_state": rng, "random_rng_state": (3, (number,), None)}]
        (path / name).mkdir(parents=True)
        torch.save(state, path / name / "model_optim_rng.pt")
        if buffers is not None:
            torch.save(buffers, path / name / "distrib_optim.pt")
        expected[f"extra:rank{number}:rng_state.0.cuda_rng_state"] = bytes_of(rng)
    (root / "latest_checkpointed_iteration.txt").write_text(str(job.iteration))
    return Made(path, expected)


def _with_extra_states(weights: Tensors) -> dict[str, Any]:
    """Put a place for quantised arithmetic behind the weights of each linear layer, empty."""
    modules = [name.rpartition(".")[0] for name in weights]
    found: dict[str, Any] = {}
    for (name, value), module, following in zip(
        weights.items(), modules, [*modules[1:], ""], strict=True
    ):
        found[name] = value
        if module.rpartition(".")[2].startswith("linear_") and module != following:
            found[f"{module}._extra_state"] = None
    return found


# --- optimizers -----------------------------------------------------------------------------------


def _optimizer(
    job: Job, p: int, chunks: list[dict[str, Tensors]], *, writes_dense: bool
) -> tuple[Any, Any]:
    """Return what `model_optim_rng.pt` has of the optimizer, and what `distrib_optim.pt` holds.

    With the distributed optimizer the weights in `chunks` become views of their buffers. Its first
    data-parallel rank alone saves it: `writes_dense` says whether that is this one for the dense
    parameters.
    """
    if job.optimizer == "none":
        return None, None
    sides = [False, True] if job.experts_apart else [False]
    if job.optimizer == "distributed":
        states, buffers = [], []
        for experts in sides:
            flat: dict[Any, Any] = {"buckets_coalesced": True}
            for v, chunk in enumerate(chunks):
                names = [n for n in chunk["param"] if _side(job, n) == experts]
                if names:
                    limit = job.bucket if (p, v) == (0, 0) else None
                    flat[len(flat) - 1] = _buffer(job, (p, v), chunk, names, limit)
            states.append({"optimizer": {"param_groups": [{"step": job.iteration, "lr": 1e-3}]}})
            buffers.append(flat if experts or writes_dense else None)
        return (states, buffers) if len(sides) > 1 else (states[0], buffers[0])
    found = [_plain(job, chunks, experts) for experts in sides]
    return (found if len(sides) > 1 else found[0]), None


def _side(job: Job, name: str) -> bool:
    return job.experts_apart and ".experts." in name


def _decays(name: str, shape: Sequence[int]) -> bool:
    return len(shape) > 1 and not name.endswith(".bias")


def _plain(job: Job, chunks: list[dict[str, Tensors]], experts: bool) -> dict[str, Any]:
    import torch

    groups: list[dict[str, Any]] = []
    state: dict[int, Any] = {}
    masters: list[list[torch.Tensor]] = []
    for decay in (True, False):
        # All ranks have the groups that any of them has parameters for.
        if not any(
            _side(job, n) == experts and _decays(n, s) == decay for n, s in shapes(job).items()
        ):
            continue
        ids = []
        masters.append([])
        for chunk in chunks:
            for name, value in chunk["param"].items():
                if _decays(name, value.shape) != decay or _side(job, name) != experts:
                    continue
                ids.append(len(state))
                state[len(state)] = {
                    "step": torch.tensor(float(job.iteration)),
                    **{moment: chunk[moment][name] for moment in MOMENTS},
                }
                masters[-1].append(chunk["master"][name])
        groups.append({"wd_mult": float(decay), "is_expert_parallel": experts,
                       "is_decoupled_lr": False, "lr": 1e-3, "params": ids})  # fmt: skip
    inner = {"state": state, "param_groups": groups}
    if job.optimizer == "fp32":
        return inner
    return {"optimizer": inner, "fp32_from_fp16_params": masters}


def _buffer(
    job: Job, stage: tuple[int, int], chunk: dict[str, Tensors], names: list[str], limit: int | None
) -> Mapping[Any, Any]:
    """Lay the parameters into one buffer, last one first, and return its state without padding."""
    import torch

    ranks = job.tp * job.dp // (job.expert_tp * job.ep) if _side(job, names[0]) else job.dp
    shared = job.tied and job.pp > 1
    starts: dict[str, int] = {}
    buckets: list[tuple[int, int, int]] = []  # begin, end of the parameters, end of the padding
    begin = end = 0
    for name in reversed(names):
        alone = shared and name in ("embedding.word_embeddings.weight", "output_layer.weight")
        start = -(-end // 64) * 64
        if alone and end > begin:
            buckets.append((begin, start, _up(start, lcm(ranks, 128))))
            begin = start = buckets[-1][2]
        starts[name] = start
        end = start + chunk["param"][name].numel()
        if alone or (limit is not None and end - begin >= limit):
            buckets.append((begin, end, _up(end, lcm(ranks, 128))))
            begin = end = buckets[-1][2]
    if end > begin:
        buckets.append((begin, end, _up(end, lcm(ranks, 128))))
    dtype = chunk["param"][names[0]].dtype
    weights = torch.zeros(buckets[-1][2], dtype=dtype)
    flat = {"param": "master", **{moment: moment for moment in MOMENTS}}
    state: dict[Any, Any] = {}
    for key, kind in flat.items():
        padded = torch.zeros(buckets[-1][2])
        for name in names:
            padded[starts[name] :][: chunk[kind][name].numel()] = chunk[kind][name].reshape(-1)
        state[key] = torch.cat([padded[first:last] for first, last, _ in buckets])
    for name in names:
        value = chunk["param"][name]
        view = weights[starts[name] :][: value.numel()].view(value.shape)
        chunk["param"][name] = view.copy_(value)
    state["numel_unpadded"] = len(state["param"])
    return {(dtype, torch.float32): state}


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
