"""Names that a wrapper made longer, in files that transformers and PEFT read by their own names.

`torch.compile` puts `_orig_mod.` before each name and `DistributedDataParallel` puts `module.`.
A trainer that saves the wrapper's `state_dict()` writes them, and loaders match none of them: the
model stays as it was made, of random numbers, and only a log says so (transformers#25205).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping

from ftckpt.checkpoint import Checkpoint, Kind
from ftckpt.checkpoint.names import unwrapped
from ftckpt.errors import CorruptError, UnsafeError
from ftckpt.findings import Finding, counted, finding

from .config import ADAPTER_CONFIG, CONFIG, parsed_json

# Files that loaders read by the names of the model; not those that a wrapper itself reads again.
_FILES = r"(?:model|adapter_model|diffusion_pytorch_model|pytorch_model(?!_fsdp))\b.*"
_MOST = 4  # entries of a table that a message shows


def check_wrapped(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield where names of a model or an adapter are those of a wrapper around it."""
    of_folder: dict[str, dict[str, None]] = {}
    for info in checkpoint.tensors.values():
        if info.component != "model" or info.kind not in (Kind.PARAM, Kind.BUFFER):
            continue
        folder, _, name = info.pieces[0].extent.file.rpartition("/") if info.pieces else ("",) * 3
        if re.fullmatch(_FILES, name):
            of_folder.setdefault(folder, {})[info.stored_name or info.name] = None
    for folder, names in of_folder.items():
        where = f"{folder}/" if folder else ""
        for file in (where + ADAPTER_CONFIG, where + CONFIG):
            if file in checkpoint.source.entries and _is_read_by_name(checkpoint, file):
                yield from _check(names, file)
                break


def _is_read_by_name(checkpoint: Checkpoint, file: str) -> bool:
    try:
        said = parsed_json(checkpoint.source, file)
    except (CorruptError, UnsafeError):  # said where JSON is checked
        return False
    return any(said.get(field) for field in ("peft_type", "model_type", "architectures"))


def _check(names: Collection[str], file: str) -> Iterator[Finding]:
    bare = unwrapped(names)
    odd = {name: own for name, own in bare.items() if name != own}
    if not odd:
        return
    many = "all" if len(odd) == len(bare) else f"{len(odd)} of"
    first, own = next(iter(odd.items()))
    yield finding(
        "state-unknown",
        f"{many} {counted(len(bare), 'name')} are those of a wrapper ({first}, where {file} means"
        f" {own}): what loads by name leaves them out; {_mended(odd)}",
        file=file,
        tensor=first,
    )


def of_another_name(prefix: str, names: Collection[str], file: str) -> Finding:
    """Return the finding for names that all have `prefix` before what `file` describes."""
    first = next(iter(names))
    return finding(
        "state-unknown",
        f"all {counted(len(names), 'name')} begin with {prefix}, and {file} describes none that"
        f" does ({first}): what loads by name leaves them out; "
        + _table([{"from": f"{prefix}*", "to": "*"}]),
        file=file,
        tensor=first,
    )


def _mended(odd: Mapping[str, str]) -> str:
    """Return the table that takes the wrappers off: by their names in front, or wherever."""
    entries: dict[str, dict[str, str]] = {}
    for name, own in odd.items():
        if name.endswith(own):
            prefix = name.removesuffix(own)
            entries[prefix] = {"from": f"{prefix}*", "to": "*"}
        else:
            parts, kept = name.split("."), own.split(".")
            taken = []
            for part in parts:
                if kept and part == kept[0]:
                    kept.pop(0)
                else:
                    taken.append(part)
            regex = "(.*?)" + "(.*?)".join(rf"\b{re.escape(part)}\." for part in taken) + "(.*)"
            to = "".join(f"\\{n}" for n in range(1, len(taken) + 2))
            entries[regex] = {"regex": regex, "to": to}
    return _table(list(entries.values())[:_MOST])


def _table(entries: Collection[Mapping[str, str]]) -> str:
    rows = ", ".join(
        "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in entry.items()) + "}"
        for entry in entries
    )
    return f"a file for --rename that mends it: rename = [{rows}]"
