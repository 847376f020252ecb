"""Small checkpoints that stand for those of the pages, each made once, when a page names it."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import ftckpt
from ftckpt.manifest.seal import seal
from tests.builders.archives import extract
from tests.builders.checkpoints import flip, open_checkpoint
from tests.builders.hf_models import Model
from tests.builders.incident_year import simulate

DATA = Path(__file__).parents[1] / "data"
DOCS = Path(__file__).parents[2] / "docs"
Make = Callable[[Path, "Samples"], None]
MAKES: dict[str, Make] = {}


def sample(make: Make) -> Make:
    """Enter a function that writes a file or a folder, under its name."""
    MAKES[make.__name__.replace("_", "-")] = make
    return make


class Samples:
    """Samples by name, below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, name: str) -> Path:
        """Return a sample, or a place within one: `root/step-9000`."""
        first, _, rest = name.partition("/")
        place = self.folder / first
        if not place.exists():
            MAKES[first](place, self)
        return place / rest if rest else place

    def copy(self, name: str, to: Path) -> None:
        source = self[name]
        to.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, to, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy(source, to)


def save(path: Path, state: Mapping[str, Any], writer: Any = None) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings(action="ignore"):
        save(dict(state), checkpoint_id=path, storage_writer=writer, no_dist=True)


def train(path: Path, step: int, writer: Any = None) -> None:
    """Save all that a trainer needs for an exact restart."""
    import torch

    torch.manual_seed(step)
    names = [f"layers.{n}.mlp.up.weight" for n in range(2)] + ["lm_head.weight"]
    weights = {name: torch.randn(12, 8) for name in names}
    moments = {
        name: {"exp_avg": one * 0.1, "exp_avg_sq": one**2, "step": torch.tensor(float(step))}
        for name, one in weights.items()
    }
    groups = [{"lr": 0.1, "betas": [0.9, 0.999], "params": names}]
    save(path, {
        "model": weights,
        "optimizer": {"state": moments, "param_groups": groups},
        "scheduler": {"last_epoch": step, "_last_lr": [0.1]},
        "rng": {"torch": torch.get_rng_state()},
        "dataloader": {"samples_seen": step * 8},
        "scaler": {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5,
                   "growth_interval": 2000, "_growth_tracker": 3},
        "step": step,
    }, writer)  # fmt: skip


def age(place: Path, seconds: float, took: float = 0.0) -> None:
    """Let a save be so old, and its last file so much younger than its first."""
    files = sorted(one for one in place.rglob("*") if one.is_file())
    for number, file in enumerate(files):
        written = time.time() - seconds - took + took * number / max(1, len(files) - 1)
        os.utime(file, (written, written))
    os.utime(place, (time.time() - seconds,) * 2)


@sample
def root(out: Path, _: Samples) -> None:
    """A run that goes on: a save every twenty minutes."""
    for ago, step in enumerate((9000, 8000, 7000, 1000)):
        train(out / f"step-{step}", step)
        age(out / f"step-{step}", 300.0 + 1200.0 * ago)


@sample
def pairs(out: Path, _: Samples) -> None:
    """A run of two models that are saved together."""
    import torch

    out.mkdir()
    for number in (800, 1600):
        for name in "GD":
            state = {"model": {"w": torch.ones(3, 3)}, "iteration": number}
            torch.save(state, out / f"{name}_{number}.pth")


@sample
def slower_root(out: Path, of: Samples) -> None:
    """A run of which the newest saves took twice as long to write."""
    for ago in range(57):
        step = f"step-{30000 - 500 * ago}"
        of.copy("root/step-9000", out / step)
        age(out / step, 900.0 + 1320.0 * ago, took=120.0 if ago < 6 else 60.0)


@sample
def longer_root(out: Path, of: Samples) -> None:
    """A run with a save that is still being written."""
    of.copy("root", out)
    of.copy("root/step-9000/__0_0.distcp", out / "step-9150" / "__0_0.distcp")


@sample
def rotated_root(out: Path, _: Samples) -> None:
    """As retention.md shows one: a damaged save among those of the last hours."""
    for ago, step in enumerate((2200, 2100, 2000, 1800, 1000)):
        train(out / f"checkpoint-{step}", step)
        age(out / f"checkpoint-{step}", 15000.0 + 1400.0 * ago)
    cut = out / "checkpoint-2100" / "__0_0.distcp"
    os.truncate(cut, cut.stat().st_size // 2)
    age(cut.parent, 16400.0)


@sample
def old_root(out: Path, of: Samples) -> None:
    """A run that began more than a month ago."""
    for days, step in ((1, 9000), (5, 8000), (36, 1000)):
        of.copy(f"root/step-{step}", out / f"step-{step}")
        age(out / f"step-{step}", days * 86400.0)


@sample
def sealed_root(out: Path, of: Samples) -> None:
    of.copy("root", out)
    for step in out.glob("step-*"):
        seal(open_checkpoint(step))


@sample
def promoted_root(out: Path, of: Samples) -> None:
    of.copy("root", out)
    (out / "last-known-good").write_text("step-8000")


@sample
def damaged_root(out: Path, of: Samples) -> None:
    of.copy("root", out)
    damage(out / "step-9000")


@sample
def damaged_step(out: Path, of: Samples) -> None:
    of.copy("sealed-root/step-9000", out)
    damage(out)


def damage(step: Path) -> None:
    """Flip a bit of a tensor."""
    opened = open_checkpoint(step)
    extent = opened.payload(opened.tensors["lm_head.weight"].pieces[0]).extent
    flip(step / extent.file, extent.offset)


@sample
def nodes(out: Path, _: Samples) -> None:
    """One save of several data files, on the disks of three nodes, or of two."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    whole = out / "whole"
    train(whole, 9, FileSystemWriter(whole, thread_count=3))
    for file in whole.iterdir():
        number = re.sub(r"__0_(\d)\.distcp", r"\1", file.name) if file.name[0] != "." else "0"
        for place in (f"node{number}", f"n{min(int(number), 1)}"):
            (out / place).mkdir(exist_ok=True)
            shutil.copy(file, out / place)
    for node in ("n0", "n1"):
        shutil.copytree(out / node, out / f"run-{node}" / "step-9")


@sample
def chain(out: Path, of: Samples) -> None:
    """A delta of which the base is a delta, with the full checkpoint at its end."""
    names = {"step-900": 1000, "step-960": 7000, "step-1020": 8000}
    of.copy("root/step-1000", out / "step-900")
    for base, name in pairwise(names):
        ftckpt.delta_pack(str(out / base), str(of[f"root/step-{names[name]}"]), str(out / name))


@sample
def shipped_root(out: Path, of: Samples) -> None:
    """What a sync has shipped before."""
    out.mkdir()
    ftckpt.sync(str(of["root"]), str(out))
    shutil.rmtree(out / "step-9000")


@sample
def delta(out: Path, of: Samples) -> None:
    """A delta and its base, beside each other."""
    of.copy("root/step-8000", out / "step-8000")
    ftckpt.delta_pack(str(out / "step-8000"), str(of["root/step-9000"]), str(out / "step-9000"))


@sample
def titan(out: Path, _: Samples) -> None:
    shutil.copytree(DATA / "families" / "torchtitan" / "step-3", out)


@sample
def titan_config(out: Path, _: Samples) -> None:
    said = json.loads((DATA / "families" / "torchtitan.json").read_text())
    out.write_text(json.dumps(said["config"]))


@sample
def families(out: Path, of: Samples) -> None:
    """The table of families.md, and a model that it is for."""
    import torch

    out.mkdir()
    page = (DOCS / "families.md").read_text()
    table = re.findall(r"```toml\n(# mine.toml.*?)```", page, re.DOTALL)[0]
    (out / "mine.toml").write_text(table)
    config = json.loads(of["titan-config"].read_text()) | {"attention_bias": True}
    (out / "config.json").write_text(json.dumps(config))
    ftckpt.convert(str(of["titan"]), str(out / "weights.pt"), "torchsave", only="model")
    weights = torch.load(out / "weights.pt")
    for layer in range(config["num_hidden_layers"]):
        for name in ("wq", "wk", "wv", "wo"):
            of_it = next(key for key in weights if f"layers.{layer}." in key and f".{name}." in key)
            rows = weights[of_it].shape[0]
            weights[f"layers.{layer}.attention.{name}.bias"] = torch.arange(float(rows))
    save(out / "step-3", {"model": weights})


@sample
def ruled(out: Path, _: Samples) -> None:
    """Shards of eight ranks, without any record of how they are cut, and the table of rules.md."""
    import torch

    (out / "ranks").mkdir(parents=True)
    page = (DOCS / "rules.md").read_text()
    table = re.findall(r"```toml\n(family = .mine.*?)```", page, re.DOTALL)[0]
    (out / "mine.toml").write_text(table)
    for rank in range(8):
        torch.manual_seed(rank)
        state = {
            "embed.weight": torch.randn(4, 8),
            "layers.0.q_proj.weight": torch.randn(2, 8),
            "layers.0.k_proj.weight": torch.randn(2, 8),
            "layers.0.o_proj.bias": torch.ones(8),
            "layers.0.norm.weight": torch.ones(8),
            "layers.0.linear_fc1.weight": torch.randn(4, 8),
        }
        torch.save({"model": state, "world_size": 8}, out / "ranks" / f"rank_{rank}.pt")


@sample
def stepped_ranks(out: Path, _: Samples) -> None:
    """Files of two ranks and two steps, side by side."""
    import torch

    out.mkdir()
    for step in (90, 100):
        for rank in range(2):
            torch.manual_seed(step + rank)
            local = {"local": torch.randn(4, 8), "global_shape": (8, 8), "placements": ["Shard(0)"]}
            state = {"model": {"up.weight": local}, "world_size": 2, "step": step}
            torch.save(state, out / f"ckpt_{step}_rank{rank}.pt")


@sample
def fp8(out: Path, _: Samples) -> None:
    shutil.copytree(DATA / "quantised" / "fp8-block", out)


@sample
def bf16(out: Path, of: Samples) -> None:
    ftckpt.convert(str(of["fp8"]), str(out), "safetensors", dtype="bf16")


@sample
def fp32_state(out: Path, of: Samples) -> None:
    """A training state of that model."""
    ftckpt.convert(str(of["fp8"]), str(out), "dcp", dtype="fp32")


@sample
def gpt_oss_bf16(out: Path, _: Samples) -> None:
    """Two experts of GPT-OSS, input first, as transformers has them."""
    import torch
    from safetensors.torch import save_file

    out.mkdir()
    experts = {"gate_up_proj": (2, 64, 64), "down_proj": (2, 32, 64)}
    weights = {
        f"model.layers.0.mlp.experts.{name}": torch.randn(shape).bfloat16()
        for name, shape in experts.items()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 32}
    (out / "config.json").write_text(json.dumps(config))


@sample
def lora(out: Path, _: Samples) -> None:
    from tests.formats.lora.samples import base_of, in_training, unpacked

    case = unpacked(out / "all") / "lora"
    shutil.copytree(base_of(case), out / "base")
    shutil.copytree(case / "adapter", out / "adapter")
    in_training(case, out / "training")
    ftckpt.convert(
        str(out / "training"), str(out / "adapter-1000"), "safetensors",
        only="adapter", beside=str(out / "adapter"),
    )  # fmt: skip


@sample
def bridge(out: Path, _: Samples) -> None:
    extract(DATA / "adapters" / "bridge_adapters.tar.xz", out)


@sample
def bridge_adapter(out: Path, of: Samples) -> None:
    ftckpt.convert(
        str(of["bridge/lora/iter_0000001"]), str(out), "safetensors", only="adapter", names="hf",
        config=str(of["bridge/base/hf/config.json"]),
    )  # fmt: skip


@sample
def maxtext(out: Path, _: Samples) -> None:
    shutil.copytree(DATA / "orbax" / "maxtext_llama" / "100", out)


@sample
def maxtext_config(out: Path, _: Samples) -> None:
    said = json.loads((DATA / "orbax" / "maxtext_llama.json").read_text())
    out.write_text(json.dumps(said["config"]))


@sample
def maxtext31(out: Path, _: Samples) -> None:
    shutil.copytree(DATA / "orbax" / "maxtext_llama31" / "100", out)


@sample
def maxtext31_config(out: Path, _: Samples) -> None:
    said = json.loads((DATA / "orbax" / "maxtext_llama31.json").read_text())
    out.write_text(json.dumps(said["config"]))


@sample
def llama(out: Path, _: Samples) -> None:
    """A model that divides over eight ranks."""
    import torch
    from safetensors.torch import save_file

    made = Model("llama", heads=8, groups=8, layers=4)
    weights = made.save(out)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], weights[name][:3]])
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(made.config() | {"vocab_size": 40}))


@sample
def meta(out: Path, of: Samples) -> None:
    ftckpt.convert(str(of["llama"]), str(out), "ranks", names="meta", only="model", tp=2)


@sample
def tower(out: Path, _: Samples) -> None:
    """Qwen3-VL under the names that it has in torchtitan, and its `config.json`."""
    from tests.formats.families.test_towers import MODELS, in_memory

    save(out / "packed", {"model": in_memory("qwen3_vl")})
    (out / "config.json").write_text(json.dumps(MODELS["qwen3_vl"]["config"]))


@sample
def tower_hf(out: Path, of: Samples) -> None:
    ftckpt.convert(
        str(of["tower/packed"]), str(out), "safetensors", names="hf", only="model",
        config=str(of["tower/config.json"]),
    )  # fmt: skip


@sample
def megatron(out: Path, of: Samples) -> None:
    """A start for Megatron, in its two formats."""
    for form in ("megatron", "megatron-dist"):
        ftckpt.convert(
            str(of["llama"]), str(out / form / "iter_0000000"), form, names="megatron", only="model"
        )


@sample
def zero2(out: Path, _: Samples) -> None:
    shutil.copytree(DATA / "deepspeed" / "z2" / "global_step2", out)


@sample
def zero2_dcp(out: Path, of: Samples) -> None:
    ftckpt.convert(str(of["zero2"]), str(out), "dcp")


@sample
def trainer(out: Path, _: Samples) -> None:
    shutil.copytree(DATA / "trainer_dirs" / "trainer", out)


@sample
def orbax(out: Path, _: Samples) -> None:
    shutil.copytree(DATA / "orbax" / "manager", out)


@sample
def nvrx(out: Path, _: Samples) -> None:
    extract(DATA / "nvrx" / "two.tar.xz", out)


@sample
def own_copies(out: Path, _: Samples) -> None:
    """A save with two copies of each file, of which one is damaged."""
    extract(DATA / "dialects" / "copies.tar.xz", out)
    file = out / "copies" / "step-3" / "copy-0" / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)


@sample
def month(out: Path, _: Samples) -> None:
    """Logs of a month: of a job, of kernels, of the scheduler."""
    told = simulate(
        Random(7), {"gpu": 9 * 3600.0, "host": 20 * 3600.0}, days=27, steps=500, save=90.0,
        recovery=900.0, worst=12.0,
    )  # fmt: skip
    out.mkdir()
    (out / "job.log").write_text("\n".join(told.job) + "\n")
    for number in (1, 2):
        with gzip.open(out / f"kern-n{number}.log.gz", "wt") as file:
            file.write("\n".join(told.kernel[number - 1 :: 2]) + "\n")
    (out / "sacct.txt").write_text(
        "JobID|JobName|State|Start|End|NodeList|ExitCode\n"
        "42|run7|COMPLETED|2026-01-01T00:00:00|2026-01-27T00:00:00|n[0-15]|0:0\n"
    )


@sample
def replay_logs(out: Path, _: Samples) -> None:
    """Logs of an uninterrupted run and of two exact restarts."""
    from ftckpt.replay.record.log import SCHEMA, StepRecord, line
    from tests.replay.made import events

    for name, first in (("U", 1), ("A", 5), ("B", 5)):
        (out / name).mkdir(parents=True)
        head = json.dumps({"log": SCHEMA, "rank": 0, "world_size": 1})
        rows = [line(StepRecord(step, 0, events(step, 0))) for step in range(first, 9)]
        (out / name / "rank-0.jsonl").write_text("\n".join([head, *rows]) + "\n")


@sample
def train_py(out: Path, _: Samples) -> None:
    """A training that needs no torch."""
    from tests.commands.replay.replaying import SCRIPT

    out.write_text(SCRIPT)


@sample
def config_toml(out: Path, _: Samples) -> None:
    """The settings that config.md shows."""
    page = (DOCS / "config.md").read_text()
    out.write_text(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[0])


@sample
def remotes_toml(out: Path, _: Samples) -> None:
    """Remotes of the names that storage.md has, on the stage."""
    urls = {"hot": "{folder}/hot", "cold": "{s3}/cold"}
    out.write_text("".join(f'[remotes.{name}]\nurl = "{url}"\n' for name, url in urls.items()))


@sample
def names_toml(out: Path, _: Samples) -> None:
    out.write_text('[[rename]]\nfrom = "layers.*"\nto = "h.*"\n')


@sample
def folder(out: Path, _: Samples) -> None:
    out.mkdir()
