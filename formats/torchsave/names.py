"""The names of `torch.save` weights in a Hugging Face folder."""

from __future__ import annotations

import re

STEMS = (
    "pytorch_model", "model", "pytorch_model_fsdp", "diffusion_pytorch_model", "adapter_model",
)  # fmt: skip
INDEX = re.compile(r"(?P<stem>[^/]+)\.bin\.index(?P<variant>\.[^/]+)?\.json")
SHARD = re.compile(rf"(?:{'|'.join(STEMS)})-[0-9]{{1,18}}-of-[0-9]{{1,18}}\.bin")
