"""Load a checkpoint with its own framework, again and again, each time with one bit flipped.

    python -m tests.verification.flip_loader KIND PATH

Reads `FILE OFFSET BIT` lines; answers each with a digest of all that the framework gives and one
of the values without their names at the top, or `fail`.
A process of its own: a flipped file may crash the framework.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _feed(value: Any, feed: Callable[[bytes], object]) -> None:
    """Digest a value of the framework: types, keys, numbers, and every element of every tensor."""
    import torch

    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous().reshape(-1).view(torch.uint8)
        feed(f"{value.dtype}{tuple(value.shape)}".encode())
        feed(plain.numpy().tobytes())
    elif isinstance(value, dict):
        feed(f"dict{len(value)}".encode())
        for key, member in value.items():
            feed(repr(key).encode())
            _feed(member, feed)
    elif isinstance(value, (list, tuple)):
        feed(f"{type(value).__name__}{len(value)}".encode())
        for member in value:
            _feed(member, feed)
    else:
        feed(repr(value).encode())


def _torch(path: Path) -> Any:
    import torch

    return torch.load(path, weights_only=True)


def _dcp(path: Path) -> Any:
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(
        state, storage_reader=FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(),  # type: ignore[no-untyped-call]
        no_dist=True,
    )  # fmt: skip
    return state


def _safetensors(path: Path) -> Any:
    from safetensors.torch import load_file

    if path.is_file():
        return load_file(path)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    found: dict[str, Any] = {}
    for name in dict.fromkeys(index["weight_map"].values()):
        found.update(load_file(path / name))
    missing = set(index["weight_map"]) ^ set(found)
    if missing:
        raise KeyError(missing)  # as transformers' strict loading does
    return {name: found[name] for name in sorted(found)}


LOADERS: dict[str, Callable[[Path], Any]] = {
    "torch": _torch, "dcp": _dcp, "safetensors": _safetensors,
}  # fmt: skip


def main() -> None:
    """Answer line by line."""
    warnings.simplefilter("ignore")
    kind, path = sys.argv[1], Path(sys.argv[2])
    load = LOADERS[kind]
    for line in sys.stdin:
        name, offset, bit = line.split()
        file = path / name if name != "." else path
        good = file.read_bytes()
        bad = bytearray(good)
        if int(bit) >= 0:
            bad[int(offset)] ^= 1 << int(bit)
        try:
            file.write_bytes(bad)
            found = load(path)
            digest = hashlib.sha256()
            _feed(found, digest.update)
            values = hashlib.sha256()
            _feed(list(found.values()) if kind == "dcp" else found, values.update)
            answer = f"{digest.hexdigest()}:{values.hexdigest()}"
        except BaseException:  # dcp's own errors are no Exceptions
            answer = "fail"
        finally:
            file.write_bytes(good)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
