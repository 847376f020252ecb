"""Read a Hugging Face folder's `config.json`, and keep what it says of the weights' type true.

Names that a wrapper made longer, in files that transformers and PEFT read by their own names.

`torch.compile` puts `_orig_mod.` before each name and `DistributedDataParallel` puts `module.`.
A trainer that saves the wrapper's `state_dict()` writes them, and loaders match none of them: the
model stays as it was made, of random numbers, and only a log says so (transformers#25205).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from ftckpt.checkpoint import Checkpoint, Kind
from ftckpt.checkpoint.names import unwrapped
from ftckpt.errors import CorruptError, UnsafeError
from ftckpt.findings import Finding, counted, finding
from ftckpt.storage.source import Source
from ftckpt.strict_json import JsonLimits, parse
from ftckpt.transfer.content import Content

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
# Models with Mamba layers have `"time_step_limit": [0.0, Infinity]`.
_LIMITS = JsonLimits(
    32, objects=10_000, keys=1_000_000, items=1_000_000, naturals=False, infinities=True
)
LARGEST = 16 << 20  # bytes
_FLOATS = ("float64", "float32", "float16", "bfloat16")
# How it names the type of the weights: since transformers 5, and before.
DTYPE_FIELDS = ("dtype", "torch_dtype")


@runtime_checkable
class KeepsConfig(Protocol):
    """A checkpoint whose `config.json` may lie in a folder of it."""

    @property
    def config_file(self) -> str:
        """Its path in the checkpoint; `CONFIG` if it is not in a folder."""


@runtime_checkable
class ReplacesFiles(Protocol):
    """A checkpoint with other weights than its files, and other small files to go with them."""

    @property
    def replaced(self) -> Mapping[str, bytes]:
        """Contents by path."""


@runtime_checkable
class MayBePartial(Protocol):
    """A checkpoint that records whether a conversion left out weights of its model on demand."""

    @property
    def partial(self) -> bool:
        """Whether one did."""


def is_partial(checkpoint: Checkpoint) -> bool:
    """Return whether weights of a model were left out on demand, so that none of them is lost."""
    return isinstance(checkpoint, MayBePartial) and checkpoint.partial


def config_file(checkpoint: Checkpoint) -> str:
    """Return the path of a checkpoint's `config.json`, whether it is there or not."""
    return checkpoint.config_file if isinstance(checkpoint, KeepsConfig) else CONFIG


def read_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the `config.json` of a checkpoint; empty where there is none.

    Raises:
        CorruptError, UnsafeError: it is damaged or hostile.
    """
    return parsed_json(checkpoint.source, config_file(checkpoint))


def parsed_json(source: Source, file: str) -> dict[str, Any]:
    """Return a small file of JSON; empty if it is absent or holds another value.

    Raises:
        CorruptError, UnsafeError: it is damaged or hostile.
    """
    if source.single or file not in source.entries:
        return {}
    size = source.size(file)
    if size > LARGEST:
        raise UnsafeError(
            f"{file} has {size} bytes, and no {file} has as many: it is not read",
            kind="unsafe-index",
            file=file,
        )
    raw = source.read(file)
    value = parse(raw, _LIMITS, file=file, what="text", bad="bad-index", unsafe="unsafe-index")
    return value if isinstance(value, dict) else {}


def parsed_config(text: str, file: str) -> dict[str, Any]:
    """Return the content of a `config.json` that the user names.

    Raises:
        CorruptError, UnsafeError: it is damaged or hostile.
    """
    value = parse(
        text.encode(), _LIMITS, file=file, what="text", bad="bad-index", unsafe="unsafe-index"
    )
    return value if isinstance(value, dict) else {}


def weights_dtype(content: Content) -> str:
    """Return the floating type that most of the model's weights have; "" where none has one."""
    weights = (w for w in content.tensors.values() if w.kind is Kind.PARAM)
    found = Counter(w.dtype.name for w in weights if w.component == "model")
    return next((name for name, _ in found.most_common() if name in _FLOATS), "")


def retyped_config(content: Content) -> bytes | None:
    """Return a `config.json` that says what type the weights are cast to; None where they are not.

    transformers loads weights in the type that it names, whatever the files hold.

    Raises:
        CorruptError, UnsafeError: the source's is damaged or hostile.
    """
    before, after = weights_dtype(Content.of(content.checkpoint)), weights_dtype(content)
    config = read_config(content.checkpoint) if before != after else {}
    said = [field for field in DTYPE_FIELDS if config.get(field) in _FLOATS]
    if not said or not after:
        return None
    config |= dict.fromkeys(said, after)
    return json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"


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
