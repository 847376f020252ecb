"""The formats in the order in which they are asked: the first that recognises a place reads it."""

from __future__ import annotations

from ftckpt.registry import Format

from .dcp import Dcp
from .safetensors import Safetensors

FORMATS: tuple[Format, ...] = (Dcp(), Safetensors())
