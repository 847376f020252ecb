"""verl with the Megatron backend: torch_dist stores of one role, and a list of what was saved.

    actor/dist_ckpt/               until 2025: one store of model, optimizer and RNG
          huggingface/             configuration and tokenizer, perhaps the weights too
          transformer_config.json
    actor/model/dist_ckpt/         since 2026 (schema 2): a store each
          model/huggingface/
          optimizer/dist_ckpt/
          extra/dist_ckpt/         random streams
          ckpt_contents.json       what was saved, and where: written last

Source: verl/utils/checkpoint/megatron_checkpoint_manager.py (2025), and verl's docs/advance/
checkpoint.rst on layout schema 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ftckpt.errors import NewerWriterError, UnsupportedError
from ftckpt.findings import Finding, finding
from ftckpt.storage.source import Source, safe_name
from ftckpt.strict_json import JsonLimits, parse

from .checkpoint import OpenedPart
from .names import CONTENTS, HUGGING_FACE

_JSON = JsonLimits(depth=8, objects=1000, keys=10_000, items=10_000, naturals=False)
_MOST_BYTES = 1 << 20
_WEIGHTS = (".safetensors", ".bin")


class SavedContents(NamedTuple):
    """What `ckpt_contents.json` says.

    Attributes:
        places: folder -> names of what lies there, in their order.
        step: the global step; None if not recorded.
        world: the number of ranks; None if not recorded.
    """

    places: dict[str, list[str]]
    step: int | None
    world: int | None


def read_contents(source: Source) -> SavedContents:
    """Return what verl's list says.

    Raises:
        CorruptError, UnsafeError: the JSON cannot be trusted, names no contents with paths,
            or a path leaves the folder.
        UnsupportedError: it is too large.
    """
    if source.size(CONTENTS) > _MOST_BYTES:
        size = source.size(CONTENTS)
        raise UnsupportedError(f"{CONTENTS} has {size} bytes", file=CONTENTS)
    said = parse(source.read(CONTENTS), _JSON, file=CONTENTS, what="list of contents",
                 bad="bad-index", unsafe="unsafe-index")  # fmt: skip
    contents = said.get("contents") if isinstance(said, dict) else None
    places: dict[str, list[str]] = {}
    if isinstance(contents, dict):
        for name, entry in contents.items():
            path = entry.get("path") if isinstance(entry, dict) else None
            if isinstance(path, str) and path:
                place = safe_name(path.rstrip("/"), named_by=CONTENTS)
                places.setdefault(place, []).append(name)
    if not places:
        raise NewerWriterError.of(
            f"contents of {CONTENTS}", expected="names with paths", found=contents, file=CONTENTS
        )
    return SavedContents(places, _count(said, "global_step"), _count(said, "world_size"))


def parts_of(
    source: Source, contents: SavedContents, open_folder: Callable[[str], OpenedPart]
) -> tuple[list[OpenedPart], list[Finding]]:
    """Return the opened stores, and what is named and not there.

    Weights in Hugging Face's form are opened if no store holds the model; else they are side files.
    """
    wrong = list(_lost(source, contents))
    lost = {found.file for found in wrong}
    stores = [p for p in contents.places if p not in lost and _is_store(source, p)]
    of_model = [p for p in stores if any(name.startswith("model") for name in contents.places[p])]
    if not of_model:
        stores = [
            p
            for p in contents.places
            if p in stores or (p.split("/")[-1] == HUGGING_FACE and _has_weights(source, p))
        ]
    return [open_folder(place) for place in stores], wrong


def _lost(source: Source, contents: SavedContents) -> Iterator[Finding]:
    for place, names in contents.places.items():
        beside = place in source.entries or any(n.startswith(f"{place}/") for n in source.entries)
        if not beside:
            what = f"{place} is not there: {CONTENTS} names it as the place of {', '.join(names)}"
            yield finding("missing-file", what, file=place)


def _is_store(source: Source, place: str) -> bool:
    inside = (n for n in source.entries if n.startswith(f"{place}/"))
    return any(n.endswith((".distcp", "/.metadata")) for n in inside)


def _has_weights(source: Source, place: str) -> bool:
    return any(n.startswith(f"{place}/") and n.endswith(_WEIGHTS) for n in source.entries)


def _count(said: Any, name: str) -> int | None:
    value = said.get(name)
    return value if type(value) is int and 0 <= value < 1 << 63 else None
