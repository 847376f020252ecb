"""Write `bridge.json`: which names Megatron-Bridge gives one another, by family.

python tests/data/families/make_bridge.py CLONE     # of NVIDIA-NeMo/Megatron-Bridge
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

BRIDGES = {
    "llama": "llama/llama_bridge.py", "qwen2": "qwen/qwen2_bridge.py",
    "qwen3_moe": "qwen/qwen3_moe_bridge.py", "deepseek_v3": "deepseek/common.py",
    "glm4_moe": "glm/glm45_bridge.py", "minimax_m2": "minimax_m2/minimax_m2_bridge.py",
    "gemma2": "gemma/gemma2_bridge.py", "gemma3_text": "gemma/gemma3_bridge.py",
}  # fmt: skip
_MEGATRON = re.compile(r"(decoder|embedding|output_layer)\.")
_PAIR = re.compile(r'"([^"]+)":\s*\(?\s*"([^"]+)"')
_MAPPING = re.compile(r"\w+Mapping\(\s*((?:\w+=\"[^\"]+\",?\s*)+)\)")
_WORD = re.compile(r'(\w+)="([^"]+)"')
_ORDER = ("hf_param", "q", "k", "v", "gate", "up")


def names(text: str) -> dict[str, list[str]]:
    """Return Megatron's names in a bridge's source, and Hugging Face's parts of each."""
    found: dict[str, list[str]] = {}
    for one, other in _PAIR.findall(text):
        for megatron, hf in ((one, other), (other, one)):
            if _MEGATRON.match(megatron) and not _MEGATRON.match(hf):
                found[megatron] = [hf]
    for block in _MAPPING.findall(text):
        words = dict(_WORD.findall(block))
        megatron = words.pop("megatron_param", "")
        if _MEGATRON.match(megatron):
            found[megatron] = [words[key] for key in _ORDER if key in words]
    return dict(sorted(found.items()))


def main(clone: str) -> None:
    """Read the bridges of a clone's newest commit."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", clone, *arguments], check=True, capture_output=True, text=True
        ).stdout

    root = "HEAD:src/megatron/bridge/models/"
    said = {
        "commit": git("rev-parse", "HEAD").strip(),
        "families": {name: names(git("show", root + path)) for name, path in BRIDGES.items()},
    }
    Path(__file__).with_name("bridge.json").write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
