"""Write the `config.json` of some models as this release of transformers does.

`python make.py by_release.json` with transformers 4.57.6, then with 5.24.0: each adds its own.
"""

import json
import sys
from pathlib import Path

import transformers

MODELS = ["llama", "gemma3_text", "gpt_neox", "modernbert", "stablelm", "qwen3_moe"]

place = Path(sys.argv[1])
known = json.loads(place.read_text()) if place.exists() else {}
for name in MODELS:
    config = transformers.AutoConfig.for_model(name)
    written = json.loads(config.to_json_string())
    if "layer_types" in written:
        written["layer_types"] = written["layer_types"][:6]
    known.setdefault(name, {})[transformers.__version__] = written
place.write_text(json.dumps(known, sort_keys=True) + "\n")
