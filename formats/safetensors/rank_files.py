"""Weights as an inference engine keeps them: the files of each rank, cut as that engine cuts.

    model-rank-<R>-part-<P>.safetensors   vLLM and SGLang (`--load-format sharded_state`)
    rank<R>.safetensors                   TensorRT-LLM, with `mapping` in config.json

A rank's tensors are fused and cut by the engine's own rules, padded for its kernels, and nothing in
the files says along which axis. So they are refused by name, as a set: one rank alone is never the
model. What is missing of the set is said first. How many ranks there are stands in TensorRT-LLM's
`mapping` alone; elsewhere the highest number tells.

Sources: `DEFAULT_PATTERN` and `save_model` in vLLM's `sharded_state_loader.py`; TensorRT-LLM's
`from_checkpoint` in `models/modeling_utils.py` (ranks of context parallelism share files).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ftckpt.errors import CorruptError, FtckptError, IncompleteError, UnsupportedError
from ftckpt.findings import counted
from ftckpt.storage.source import Source

_PARTS = re.compile(r"(?P<stem>.+-)?rank-(?P<rank>\d{1,6})-part-(?P<part>\d{1,6})\.safetensors")
_WHOLE = re.compile(r"rank(?P<rank>\d{1,6})\.safetensors")
_VLLM, _TENSORRT = "vLLM's sharded_state", "TensorRT-LLM"
_MOST = 100_000  # ranks


class EngineRanks(NamedTuple):
    """The files of all ranks.

    Attributes:
        engine: whose they are.
        parts: rank -> number of each part -> file.
        ranks: how many there must be, where it is recorded; else 0.
    """

    engine: str
    parts: Mapping[int, Mapping[int, str]]
    ranks: int

    @property
    def files(self) -> list[str]:
        """Return all files."""
        return [file for held in self.parts.values() for file in held.values()]

    def error(self, url: str) -> FtckptError:
        """Return what is missing, else that the set is not read."""
        count = max(self.ranks, max(self.parts) + 1)
        known = f"config.json says {self.ranks}" if self.ranks else f"rank {count - 1} is there"
        absent = [rank for rank in range(min(count, _MOST)) if rank not in self.parts]
        if absent:
            lost = re.sub(r"rank(-?)\d+", rf"rank\g<1>{absent[0]}", self.files[0])
            lost = re.sub(r"part-\d+", "part-0", lost)
            return IncompleteError(
                f"{lost} is not there: {len(self.parts)} of {count} ranks have files ({known})",
                hint="wait until every rank has written its file, or write the set again",
                kind="missing-rank",
                file=lost,
            )
        for held in self.parts.values():
            gap = next((part for part in range(max(held)) if part not in held), None)
            if gap is not None:
                lost = re.sub(r"part-\d+", f"part-{gap}", held[max(held)])
                return CorruptError(
                    f"{lost} is missing: part {max(held)} of its rank is there",
                    kind="missing-file",
                    file=lost,
                )
        return UnsupportedError(
            f"{url} holds the files of {counted(count, 'rank')} of {self.engine}: each"
            " has its part of every tensor, and nothing records how they join",
            hint="name the model that the engine read; it has all that these files have",
        )


def is_rank_file(name: str) -> bool:
    """Say whether a name is that of one rank's file, without a look at those beside it."""
    return (_PARTS.fullmatch(name) or _WHOLE.fullmatch(name)) is not None


def rank_files(source: Source, names: Iterable[str]) -> EngineRanks | None:
    """Return the files of ranks among the safetensors files of a folder; None where there are none.

    `rank16.safetensors` alone may be an adapter of that rank: a set has a first rank, or a record.

    Args:
        source: the folder.
        names: files directly in it that no index names.
    """
    parts: dict[int, dict[int, str]] = {}
    whole: dict[int, dict[int, str]] = {}
    for name in names:
        if match := _PARTS.fullmatch(name):
            parts.setdefault(int(match["rank"]), {})[int(match["part"])] = name
        elif match := _WHOLE.fullmatch(name):
            whole[int(match["rank"])] = {0: name}
    if parts:
        return EngineRanks(_VLLM, dict(sorted(parts.items())), 0)
    if not whole:
        return None
    from ftckpt.formats.huggingface.config import CONFIG, parsed_json

    mapping = parsed_json(source, CONFIG).get("mapping")
    ranks = _recorded(mapping) if isinstance(mapping, dict) else 0
    if not ranks and 0 not in whole:
        return None
    return EngineRanks(_TENSORRT, dict(sorted(whole.items())), ranks)


def _recorded(mapping: Mapping[str, object]) -> int:
    """Return how many files a `mapping` means: one for each rank of tensors and of the pipeline."""
    tp, pp, world = (mapping.get(f"{one}_size") for one in ("tp", "pp", "world"))
    if type(tp) is int and type(pp) is int and 0 < tp * pp <= _MOST:
        return tp * pp
    return world if type(world) is int and 0 < world <= _MOST else 0
