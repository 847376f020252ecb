"""Tell saves that lie side by side in one folder from the files of one checkpoint.

Trainers of adapters write every save of a run into one folder, as `my_lora_000000250.safetensors`
(ai-toolkit) or `2026-11-01_10-00-00-save-250-2-50.safetensors` (OneTrainer). Names that differ in
numbers, or in a word such as `best`, may as well be those of shards or of several models. The
headers decide: files of one checkpoint hold tensors of different names, and saves of one run hold
the same tensors, in the same shapes and dtypes.

Sources: ostris/ai-toolkit `BaseSDTrainProcess.save`; Nerogar/OneTrainer `GenericTrainer.__save`;
kohya-ss/sd-scripts `train_util.py` (`get_step_ckpt_name`, `get_epoch_ckpt_name`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache

from ftckpt.discovery.recognise import Listing
from ftckpt.discovery.step_names import worded_step

OPTIMIZERS = frozenset({"optimizer", "optimizers", "optim", "optims", "opt"})
STATES = frozenset(
    {
        "scheduler", "schedulers", "sched", "schedule", "scaler", "rng", "random", "dataloader",
        "loader", "sampler", "reader", "train", "trainer", "training", "state", "states", "extra",
        "progress", "counter", "counters", "callbacks", "loop", "loops", "normalizer",
    }
)  # fmt: skip
VERSIONS = frozenset(
    {
        "best", "last", "latest", "final", "old", "new", "good", "bad", "broken", "backup", "bak",
        "copy", "tmp", "temp", "step", "epoch", "ep", "iter", "iteration", "initial", "init",
        "release", "checkpoint", "checkpoints", "ckpt", "ckpts", "emergency",
    }
)  # fmt: skip
# Numbers that say which piece of one save a file is: the rank, the shard, and how many there are.
OF_PIECE = re.compile(
    r"(?:(?<![a-z])(?:rank|tp|pp|dp|cp|ep|mp|sdp|exp|zero|shard|part|stage|worker|node)[-_=]?\d+"
    r"|[-_]?of[-_]?\d+|\d+[-_]of[-_]\d+)",
    re.IGNORECASE,
)
_SAFETENSORS = ".safetensors"
_TORCH = (".pt", ".pth", ".ckpt", ".tar")
_TOKEN = re.compile(r"[a-z]+|\d+|@")
# What describes the one model of a folder, and the names that its file has.
_CONFIGS = frozenset({"config.json", "adapter_config.json"})
_MAIN = frozenset(
    f"{stem}{_SAFETENSORS}"
    for stem in ("model", "pytorch_model", "diffusion_pytorch_model", "adapter_model")
)
# accelerate numbers the models of one save (`model_1.safetensors`), and saves these with them.
_OF_ACCELERATE = re.compile(r"random_states_\d+\.pkl")
# Of a header: a longer one is compared by its beginning. Its text holds no quote that is not
# escaped, so that nothing in the metadata reads as a tensor.
_HEADER = 256 << 10
_TENSOR = re.compile(
    rb'"((?:[^"\\]++|\\.)*+)"(?:\s*:\s*(\{\s*"(?:dtype|shape|data_offsets)"[^}]*\}))?', re.DOTALL
)
_SHAPE = re.compile(rb'"shape"\s*:\s*(\[[^\]]*\])')
_DTYPE = re.compile(rb'"dtype"\s*:\s*"([^"]*)"')
# Files of one group whose headers are read.
_READ = 6


def saves_beside(listing: Listing) -> frozenset[str]:
    """Return those of the `.safetensors` files of a folder that are saves side by side.

    A folder whose own name says a step is one save: then the numbers in it are of pieces or models,
    as they are where accelerate's other files lie. A folder that describes one model holds it, and
    what lies beside is not a save of it unless a number and the model's own name say so.
    """
    groups = alike(name for name in listing.files if name.endswith(_SAFETENSORS))
    if not groups or worded_step(listing.called) is not None:
        return frozenset()
    if any(map(_OF_ACCELERATE.fullmatch, listing.files)):
        return frozenset()
    if not _CONFIGS.isdisjoint(listing.files):
        groups = [g for g in groups if not _MAIN.isdisjoint(g) and any(map(_has_number, g))]
    return frozenset(name for group in groups if _hold_the_same(listing, group) for name in group)


def is_among_saves(listing: Listing) -> bool:
    """Say whether the `.safetensors` files of a folder lie among whole saves of torch.save.

    A base that was copied into a run (F5-TTS: `pretrained_model_1250000.safetensors`) makes no
    checkpoint of the folder. A file by a model's own name, or described there, is the folder's.
    """
    held = {name for name in listing.files if name.endswith(_SAFETENSORS)}
    if not held or not held.isdisjoint(_MAIN) or not _CONFIGS.isdisjoint(listing.files):
        return False
    if worded_step(listing.called) is not None:
        return False
    saves = alike(name for name in listing.files if name.endswith(_TORCH))
    return any(sum(map(_has_number, group)) > 1 for group in saves)


def _has_number(name: str) -> bool:
    return any(map(str.isdigit, _told(name)[1]))


def alike(names: Iterable[str]) -> list[list[str]]:
    """Return the groups of names that differ in numbers or in words of versions alone.

    Numbers of ranks and shards make no difference, and names of state make no group: a trainer
    writes `rng_state_0.pth` and `rng_state_1.pth` of one save.
    """
    groups: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = defaultdict(dict)
    for name in sorted(names):
        shape, version = _told(name)
        if OPTIMIZERS.isdisjoint(shape) and STATES.isdisjoint(shape):
            groups[shape][name] = version
    return [list(group) for group in groups.values() if len(set(group.values())) > 1]


@lru_cache(maxsize=4096)
def _told(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words of a name with its suffix, and the numbers and words of its version."""
    stem, _, suffix = OF_PIECE.sub("@", name).rpartition(".")
    tokens = _TOKEN.findall(stem.lower())
    version = [one for one in tokens if one.isdigit() or one in VERSIONS]
    kept = [one for one in tokens if not (one.isdigit() or one in VERSIONS)]
    return (suffix, *kept), tuple(version)


def _hold_the_same(listing: Listing, names: Iterable[str]) -> bool:
    read: list[frozenset[tuple[bytes, ...]]] = []
    for held in _headers(listing, names):
        if any(2 * len(held & other) > max(len(held), len(other)) for other in read):
            return True
        read.append(held)
    return False


def _headers(listing: Listing, names: Iterable[str]) -> Iterator[frozenset[tuple[bytes, ...]]]:
    """Yield what the beginnings of some headers declare: names, dtypes and shapes."""
    for name in list(names)[:_READ]:
        length = int.from_bytes(listing.head(name, 8), "little")
        text = listing.head(name, 8 + min(length, _HEADER))[8:]
        found = []
        for match in _TENSOR.finditer(text):
            said = match[2] or b""
            dtype, shape = _DTYPE.search(said), _SHAPE.search(said)
            if dtype and shape:
                found.append((match[1], dtype[1], shape[1].replace(b" ", b"")))
        if found:
            yield frozenset(found)
