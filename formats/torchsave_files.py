"""The names of `torch.save` weights in a Hugging Face folder, and of what lies beside them."""

from __future__ import annotations

import re

STEMS = (
    "pytorch_model", "model", "pytorch_model_fsdp", "diffusion_pytorch_model", "adapter_model",
)  # fmt: skip
INDEX = re.compile(r"(?P<stem>[^/]+)\.bin\.index(?P<variant>\.[^/]+)?\.json")
SHARD = re.compile(rf"(?:{'|'.join(STEMS)})-\d{{5}}-of-\d{{5}}\.bin")
_BESIDE = (
    r"[^/]+\.(json|txt|model|py|md|jinja|tiktoken|bpe)"
    r"|(LICENSE|NOTICE|README|tokenizer|vocab)[^/]*|\.gitattributes"
)


def is_beside(name: str) -> bool:
    """Say whether a file is of the kind that lies beside weights: configuration, a tokenizer."""
    return re.fullmatch(_BESIDE, name, re.IGNORECASE) is not None
