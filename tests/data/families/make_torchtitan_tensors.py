"""Write `torchtitan_tensors.json`: what torchtitan's adapter of Llama 4 makes of a small model.

PYTHONPATH=. python tests/data/families/make_torchtitan_tensors.py CLONE    # of pytorch/torchtitan

torchtitan took the model out in June 2026; COMMIT is the last that has it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.formats.families.test_native import MODELS, tensors_of

COMMIT = "43e52fd017ce8689cb0b34c62a35daac9910c6c1"
PLACE = "torchtitan/models/llama4"


class _Adapter:
    """What the adapter's base class does for it."""

    def __init__(self, *_: object) -> None:
        pass

    def _validate_hf_rope_config(self, *_: object, **more: object) -> None:
        """Hold the rotation to the folder's config.json, which is not there."""


def adapter(clone: str) -> Any:
    """Return the adapter's module, of the commit."""
    source = subprocess.run(
        ["git", "-C", clone, "show", f"{COMMIT}:{PLACE}/state_dict_adapter.py"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name, held in (
        ("torchtitan.protocols.state_dict_adapter", {"StateDictAdapter": _Adapter}),
        ("titan.model", {"Llama4Model": SimpleNamespace(Config=object)}),
        ("torchtitan.models.common.attention", {"FusedQKVLinear": SimpleNamespace(Config=int)}),
        ("torchtitan.models.common.rope", {"ComplexRoPE": SimpleNamespace(Config=object)}),
    ):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update(held)
    packages = ("torchtitan", "torchtitan.protocols", "torchtitan.models", "titan")
    for name in (*packages, "torchtitan.models.common"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = []
    made = ModuleType("titan.adapter")
    made.__package__ = "titan"
    exec(compile(source, "state_dict_adapter.py", "exec"), made.__dict__)
    return made


def main(clone: str) -> None:
    """Ask the adapter for each tensor, and for the way back."""
    import torch

    found = tensors_of(MODELS["llama4_text"]["stored"])
    weights = {f"language_model.{key}": value for key, value in found.items()}
    attention = SimpleNamespace(qkv_linear=object(), rope=object())
    model = SimpleNamespace(layers=[SimpleNamespace(attention=attention)])
    one = adapter(clone).Llama4StateDictAdapter(model, None)
    there = one.from_hf(weights)
    back = one.to_hf(there)
    assert all(torch.equal(weights[key], value) for key, value in back.items())
    said = {
        key: hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:32]
        for key, value in sorted(there.items())
    }
    place = Path(__file__).with_name("torchtitan_tensors.json")
    place.write_text(json.dumps({"commit": COMMIT, "llama4_text": said}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
