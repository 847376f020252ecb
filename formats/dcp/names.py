"""The names of a DCP checkpoint's files, and of Megatron-Core's files beside them.

Whether Lightning or Fabric saved a store, by its folder's name and by what is in it.

Both save a sharded checkpoint under the name that a whole one would have (`epoch=0-step=10.ckpt`,
litgpt's `lit_model.pth`), and their strategies name what they save: Lightning's Trainer `model` and
`optimizer_0`, a script with Fabric mostly `model` and `optimizer`.

Sources: lightning/pytorch/strategies/fsdp.py and model_parallel.py (`save_checkpoint`);
litgpt/pretrain.py (`save_checkpoint`).

What each rank saves for itself beside the store (see `OF_RANK` for who does, and the names).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ftckpt.errors import IncompleteError
from ftckpt.findings import Finding, finding
from ftckpt.storage.source import Source

# The commit marker: one file, or one per rank in a save without collectives.
MARKER = ".metadata"
RANK_METADATA = re.compile(r"__(\d+)\.metadata$")
DATA = re.compile(r"(?:^|/|_)_(\d+)_(\d+)\.distcp$")
# Of Megatron, up to core 0.18: a torch.save stream beside the metadata.
COMMON = "common.pt"
# Of Megatron-Bridge (src/megatron/bridge/training/checkpointing.py, 2025 to 2026): the run's
# progress, as a torch.save stream, and its configuration.
TRAIN_STATE = "train_state.pt"
RUN_CONFIG = "run_config.yaml"
# Of Lightning and Fabric: everything but model and optimizer (the loops, the epoch, the user's
# own), as a torch.save stream, written last. They take no folder without it for a checkpoint
# (lightning/fabric/strategies/fsdp.py, `save_checkpoint`, `_is_sharded_checkpoint`).
META = "meta.pt"
# Megatron's commit marker: Megatron reads no checkpoint without it.
CONFIGURATION = "metadata.json"
# Megatron's SHA-256 digests of the files, where they were asked for (`--verify-integrity`).
INTEGRITY = "integrity.json"
# What each rank saves for itself beside the store, with torch.save: VeOmni's
# `extra_state/extra_state_rank_0.pt` (veomni/checkpoint/dcp_checkpointer.py), prime-rl's
# `dataloader/rank_0.pt` (prime_rl/trainer/ckpt.py), pith-train's `rng-rank-00000.pt`
# (pithtrain/tasks/pretrain_lm.py), all of 2026. The word keeps shards of the model out.
_WORD = r"(?:extra(?:_states?)?|(?:rng|random|train|trainer|client|loader|dataloader)(?:_states?)?)"
OF_RANK = re.compile(
    rf"(?P<before>(?:{_WORD}/)?(?:{_WORD}[-_]|(?<=/)))(?P<tag>rank[-_])(?P<rank>\d{{1,7}})\.pt"
)


_OF_A_FILE = r".+\.(?:ckpt|pth|pt)"
_OWN_NAME = r"lit_model\.pth|(?:.+-)?(?:epoch|step)=\d+.*\.ckpt|last(?:-v\d+)?\.ckpt"
_OWN_OPTIMIZER = re.compile(r"optimizer_\d+\.")


def lost_meta(source: Source, stored: Iterable[str]) -> list[Finding]:
    """Return a warning if `meta.pt` is perhaps lost.

    Args:
        source: the store's folder.
        stored: the names in its metadata.

    Raises:
        IncompleteError: it is not there, and both the folder's name and the content are Lightning's
            or Fabric's.
    """
    if META in source.entries or re.fullmatch(_OF_A_FILE, source.name) is None:
        return []
    numbered, tops = False, set()
    for name in stored:
        numbered = numbered or _OWN_OPTIMIZER.match(name) is not None
        tops.add(name.partition(".")[0])
    if "model" not in tops:
        return []
    own = re.fullmatch(_OWN_NAME, source.name) is not None
    if numbered or (own and tops <= {"model", "optimizer"}):
        raise IncompleteError(
            f"{META} is not there: Lightning writes it last, and loads no store without it",
            hint="an earlier checkpoint is complete",
            kind="uncommitted",
            file=META,
        )
    if tops <= {"model", "optimizer"}:
        what = f"{META} is not there: Fabric saves it with such a store, and others do not"
        return [finding("state-unknown", what, file=META)]
    return []


# More ranks than this are not named one by one.
_MOST = 10_000


def own_files(source: Source) -> dict[str, int]:
    """Return the files of ranks beside a store, and whose each is, by rank."""
    found = {
        name: int(match["rank"]) for name in source.entries if (match := OF_RANK.fullmatch(name))
    }
    return dict(sorted(found.items(), key=lambda pair: (pair[1], pair[0])))


def lost_own_files(source: Source, world: int) -> Iterator[Finding]:
    """Yield the ranks whose file is missing where others have one of that name.

    Args:
        source: the checkpoint.
        world: the number of ranks by the data files, which may be more: a rank that only holds
            replicas writes none.
    """
    series: dict[str, dict[int, str]] = {}
    for name, rank in own_files(source).items():
        series.setdefault(OF_RANK.sub(r"\g<before>", name), {})[rank] = name
    for held in series.values():
        ranks = max(world, 1 + max(held))
        example = held[min(held)]
        match = OF_RANK.fullmatch(example)
        assert match is not None
        for rank in range(min(ranks, _MOST)):
            if rank not in held:
                number = f"{rank:0{len(match['rank'])}d}" if _padded(held) else str(rank)
                name = f"{match['before']}{match['tag']}{number}.pt"
                what = f"{name} is missing: what rank {rank} of {ranks} saved for itself"
                yield finding("missing-rank", what, file=name, rank=rank)


def _padded(held: dict[int, str]) -> bool:
    """Say whether ranks are written with zeros before them."""
    lengths = {
        rank: len(match["rank"])
        for rank, name in held.items()
        if (match := OF_RANK.fullmatch(name))
    }
    return any(length > len(str(rank)) for rank, length in lengths.items())
