"""Write the samples of trainers that save by hand, with plain torch code as such trainers have it.

    python make_by_hand.py FOLDER [WORLD]

One small model is trained for two steps in one process, the tensor-parallel shards are cut from it
as a trainer's own layers hold them, and every layout saves the same shards in its own way. The
whole state lies beside them as `truth.safetensors`; nothing of ftckpt is used.

Column parallel: `up.weight`, `up.bias`. Row parallel: `down.weight`. Packed queries, keys and
values, each cut on its own: `qkv.weight`. A vocabulary padded to the ranks: `embed.weight`.
Replicated: the norm and `down.bias`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCABULARY, PADDED, WIDTH, INNER = 27, 32, 8, 16
STEP = 100
# name -> (axis that is cut, number of packed blocks)
CUTS: dict[str, tuple[int | None, int]] = {
    "embed.weight": (0, 1),
    "qkv.weight": (0, 3),
    "up.weight": (0, 1),
    "up.bias": (0, 1),
    "down.weight": (1, 1),
    "down.bias": (None, 1),
    "norm.weight": (None, 1),
}
State = dict[str, Any]


def train() -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]], State]:
    """Return the whole parameters, the whole Adam state by name, and the optimizer's groups."""
    torch.manual_seed(11)
    shapes = {
        "embed.weight": (PADDED, WIDTH),
        "qkv.weight": (3 * WIDTH, WIDTH),
        "up.weight": (INNER, WIDTH),
        "up.bias": (INNER,),
        "down.weight": (WIDTH, INNER),
        "down.bias": (WIDTH,),
        "norm.weight": (WIDTH,),
    }
    params = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    with torch.no_grad():
        params["embed.weight"][VOCABULARY:] = 0
    optimizer = torch.optim.AdamW(params.values(), lr=1e-3)
    for _ in range(2):
        for param in params.values():
            param.grad = torch.randn_like(param)
        optimizer.step()
    state = optimizer.state_dict()
    moments = {name: state["state"][i] for i, name in enumerate(params)}
    return {n: p.detach() for n, p in params.items()}, moments, state["param_groups"][0]


def shard(value: torch.Tensor, name: str, rank: int, world: int) -> torch.Tensor:
    """Return what a rank holds of a tensor, as a layer of its own would."""
    axis, blocks = CUTS[name]
    if axis is None or not value.dim():
        return value.clone()
    parts = [block.chunk(world, axis)[rank] for block in value.chunk(blocks, axis)]
    return torch.cat(parts, axis).contiguous()


def states(world: int) -> tuple[list[State], dict[str, torch.Tensor]]:
    """Return each rank's model and optimizer, and the truth by ftckpt's keys."""
    params, moments, group = train()
    ranks = []
    for rank in range(world):
        model = {n: shard(p, n, rank, world) for n, p in params.items()}
        state = {
            i: {leaf: shard(v, n, rank, world) for leaf, v in moments[n].items()}
            for i, n in enumerate(params)
        }
        groups = [{**group, "params": list(range(len(params)))}]
        ranks.append({"model": model, "optimizer": {"state": state, "param_groups": groups}})
    truth = dict(params)
    for name, kept in moments.items():
        for leaf, value in kept.items():
            truth[f"optimizer:{name}.step" if leaf == "step" else f"{leaf}:{name}"] = value
    return ranks, truth


def offsets_of(name: str, piece: torch.Tensor, rank: int) -> list[int]:
    axis, _ = CUTS[name]
    return [rank * size if d == axis else 0 for d, size in enumerate(piece.shape)]


def whole_shape(name: str, piece: torch.Tensor, world: int) -> list[int]:
    axis, _ = CUTS[name]
    return [size * (world if d == axis else 1) for d, size in enumerate(piece.shape)]


def without_packed(state: State) -> State:
    """Return a rank's state less what is cut in blocks, which a plain spec cannot say."""
    names = [n for n in state["model"] if CUTS[n][1] == 1]
    old = {n: i for i, n in enumerate(state["model"])}
    optimizer = state["optimizer"]
    return {
        "model": {n: state["model"][n] for n in names},
        "optimizer": {
            "state": {i: optimizer["state"][old[n]] for i, n in enumerate(names)},
            "param_groups": [{**optimizer["param_groups"][0], "params": list(range(len(names)))}],
        },
    }


def entries(folder: Path, ranks: list[State]) -> None:
    """A spec beside each tensor; nothing beside the files."""
    world = len(ranks)
    for rank, whole in enumerate(ranks):
        state = without_packed(whole)
        tensors = {}
        for name, piece in state["model"].items():
            axis, _ = CUTS[name]
            kind = "replicated" if axis is None else "shard"
            spec = {"type": kind, "dim": axis, "num_shards": world}
            shape = whole_shape(name, piece, world)
            tensors[name] = {"data": piece, "sharding_spec": spec, "global_shape": shape}
        saved = {
            "model_shard": tensors,
            "optimizer": state["optimizer"],
            "world_size": world,
            "rank": rank,
            "step": STEP,
            "config": {"lr": 1e-3, "tensor_parallel_size": world},
            "rng": torch.Generator().manual_seed(rank).get_state(),
        }
        torch.save(saved, folder / f"shard_{rank:05d}.pt")


def recorded(folder: Path, ranks: list[State]) -> None:
    """Plain tensors; `metadata.json`, written last, says how they are cut."""
    world = len(ranks)
    told = {}
    for rank, whole in enumerate(ranks):
        state = without_packed(whole)
        for name, piece in state["model"].items():
            told[name] = {"shape": whole_shape(name, piece, world), "dim": CUTS[name][0]}
        saved = {**state, "step": STEP, "scheduler": {"last_epoch": STEP}}
        torch.save(saved, folder / f"shard_{rank}_of_{world}.pt")
    names = [f"shard_{rank}_of_{world}.pt" for rank in range(world)]
    record = {"world_size": world, "step": STEP, "files": names, "tensors": told}
    (folder / "metadata.json").write_text(json.dumps(record, indent=1))


def offsets(folder: Path, ranks: list[State]) -> None:
    """Offsets beside each tensor; the optimizer in files of its own."""
    world = len(ranks)
    for rank, whole in enumerate(ranks):
        state = without_packed(whole)
        tensors = {
            name: {
                "tensor": piece,
                "global_shape": torch.Size(whole_shape(name, piece, world)),
                "shard_offsets": tuple(offsets_of(name, piece, rank)),
                "shard_sizes": tuple(piece.shape),
            }
            for name, piece in state["model"].items()
        }
        meta = {"world_size": world, "rank": rank, "step": STEP}
        torch.save({"tensors": tensors, "meta": meta}, folder / f"model_rank_{rank}.pt")
        torch.save({**state["optimizer"], "rank": rank}, folder / f"optimizer_rank_{rank}.pt")


def ruled(folder: Path, ranks: list[State]) -> None:
    """Plain tensors and not a word of how they are cut: a table of rules must say it."""
    world = len(ranks)
    for rank, state in enumerate(ranks):
        told = {"tp_size": world, "tp_rank": rank, "iteration": STEP}
        torch.save({**state, **told}, folder / f"rank_{rank}.pt")


def specs(folder: Path, ranks: list[State]) -> None:
    """One mapping of placements and one of shapes for all tensors of a file."""
    world = len(ranks)
    for rank, whole in enumerate(ranks):
        state = without_packed(whole)
        placements, shapes = {}, {}
        for name, piece in state["model"].items():
            axis, _ = CUTS[name]
            placements[name] = ["Replicate()" if axis is None else f"Shard(dim={axis})"]
            shapes[name] = whole_shape(name, piece, world)
        saved = {
            **state,
            "placements": placements,
            "global_shapes": shapes,
            "shard_info": {"shard_id": rank, "num_shards": world},
            "global_step": STEP,
        }
        torch.save(saved, folder / f"checkpoint_rank{rank:02d}.pth")


STAGES = (
    ("embed.weight", "qkv.weight"),
    ("up.weight", "up.bias", "down.weight", "down.bias", "norm.weight"),
)


def stages(folder: Path, step: int) -> None:
    """Pipeline stages of one step, each with the whole of its layers, beside those of others."""
    folder.mkdir(parents=True, exist_ok=True)
    params, moments, group = train()
    for stage, names in enumerate(STAGES):
        optimizer = {
            "state": {i: moments[name] for i, name in enumerate(names)},
            "param_groups": [{**group, "params": list(range(len(names)))}],
        }
        saved = {
            "model": {name: params[name] for name in names},
            "optimizer": optimizer,
            "step": step,
            "stage": stage,
            "config": {"num_stages": len(STAGES)},
        }
        torch.save(saved, folder / f"checkpoint_step{step}_stage{stage}.pt")


def compressed(folder: Path, step: int) -> None:
    """The whole state in one file, which a script compressed afterwards: once with each tool."""
    import gzip
    import io

    import lz4.frame
    import zstandard

    folder.mkdir(parents=True, exist_ok=True)
    params, moments, group = train()
    optimizer = {
        "state": dict(enumerate(moments.values())),
        "param_groups": [{**group, "params": list(range(len(params)))}],
    }
    plain = io.BytesIO()
    torch.save({"model": params, "optimizer": optimizer, "step": step}, plain)
    name, data = f"ckpt_{step}.pt", plain.getvalue()
    # As the command line does it: zstd with a checksum, lz4 with a checksum and without a size.
    zstd = zstandard.ZstdCompressor(write_checksum=True)
    (folder / f"{name}.zst").write_bytes(zstd.compress(data))
    (folder / f"{name}.lz4").write_bytes(
        lz4.frame.compress(data, content_checksum=True, store_size=False)
    )
    (folder / f"{name}.gz").write_bytes(gzip.compress(data, mtime=0))


def packed(folder: Path, ranks: list[State]) -> None:
    """Rank files, and the weights as safetensors, that a script compressed afterwards."""
    import gzip

    import zstandard

    (folder / "ranks").mkdir(parents=True)
    entries(folder / "ranks", ranks)
    for file in sorted((folder / "ranks").iterdir()):
        Path(f"{file}.gz").write_bytes(gzip.compress(file.read_bytes(), mtime=0))
        file.unlink()
    weights = folder / "model.safetensors"
    save_file({name: value.contiguous() for name, value in train()[0].items()}, weights)
    zstd = zstandard.ZstdCompressor(write_checksum=True)
    Path(f"{weights}.zst").write_bytes(zstd.compress(weights.read_bytes()))
    weights.unlink()


def pickled(folder: Path) -> None:
    """The whole state in one file, by pickle alone: of torch's tensors, and of numpy's arrays."""
    import pickle

    folder.mkdir(parents=True, exist_ok=True)
    params, moments, group = train()
    # Arrays of numpy in the two ways that it pickles them.
    for name, protocol, arrays in (
        ("latest.pkl", 4, False), ("ckpt_100.pkl", 5, True), ("step_100.pkl", 3, True),
    ):  # fmt: skip

        def kept(value: torch.Tensor, as_array: bool = arrays) -> Any:
            return value.numpy() if as_array else value

        state = {
            i: {leaf: kept(value) for leaf, value in leaves.items()}
            for i, leaves in enumerate(moments.values())
        }
        groups = [{**group, "params": list(range(len(params)))}]
        saved = {
            "model": {n: kept(p) for n, p in params.items()},
            "optimizer": {"state": state, "param_groups": groups},
            "step": STEP,
        }
        with open(folder / name, "wb") as file:
            pickle.dump(saved, file, protocol)


def one_file(folder: Path, ranks: list[State]) -> None:
    """The shards of all ranks gathered in one file: by rank, in a list of ranks, by tensor."""
    folder.mkdir(parents=True)
    world = len(ranks)
    states = [without_packed(whole) for whole in ranks]
    by_rank: State = {"world_size": world, "step": STEP, "shards": {}}
    by_tensor: State = {"model": {}, "scheduler": {"last_epoch": STEP}, "step": STEP}
    listed = []
    for rank, state in enumerate(states):
        cut, placed = {}, {}
        for name, piece in state["model"].items():
            axis, _ = CUTS[name]
            shape = whole_shape(name, piece, world)
            at = offsets_of(name, piece, rank)
            kind = "replicated" if axis is None else "shard"
            spec = {"type": kind, "dim": axis}
            cut[name] = {"data": piece, "sharding_spec": spec, "global_shape": shape}
            placed[name] = {"data": piece, "shard_offsets": at, "global_shape": shape}
            if axis is not None or rank == 0:
                entry = {"data": piece, "offsets": at, "global_shape": shape}
                by_tensor["model"].setdefault(name, []).append(entry)
        by_rank["shards"][rank] = cut
        listed.append(
            {"model": placed, "optimizer": state["optimizer"], "rank": rank,
             "world_size": world, "step": STEP}
        )  # fmt: skip
    torch.save(by_rank, folder / "by_rank.pt")
    torch.save(listed, folder / "listed.pt")
    torch.save(by_tensor, folder / "by_tensor.pt")


LAYOUTS: dict[str, Callable[[Path, list[State]], None]] = {
    "entries": entries,
    "recorded": recorded,
    "offsets": offsets,
    "ruled": ruled,
    "specs": specs,
}
RULES = """\
family = "by hand"

[[rule]]
names = ["up.*", "embed.weight"]
split = 0

[[rule]]
names = ["qkv.weight"]
split = 0
blocks = [1, 1, 1]

[[rule]]
names = ["down.weight"]
split = 1

[[rule]]
names = ["down.bias", "norm.weight"]
split = "replicated"
"""


def make(root: Path, world: int = 4) -> None:
    """Write every layout below `root`, the truth of all of them, and the table of rules."""
    ranks, truth = states(world)
    for name, write in LAYOUTS.items():
        folder = root / name
        folder.mkdir(parents=True)
        write(folder, ranks)
    stages(root / "stages", STEP)
    compressed(root / "compressed", STEP)
    packed(root / "packed", ranks)
    pickled(root / "pickled")
    one_file(root / "one_file", ranks)
    save_file({k: v.contiguous() for k, v in truth.items()}, root / "truth.safetensors")
    (root / "rules.toml").write_text(RULES)


if __name__ == "__main__":
    make(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
