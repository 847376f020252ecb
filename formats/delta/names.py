"""The name of the delta format and of its data files."""

from __future__ import annotations

FORMAT = "delta"
DATA = r"\d{5,}\.blocks"
