"""The name of the delta format and of its data files."""

from __future__ import annotations

import re

FORMAT = "delta"
DATA = re.compile(r"\d{5,}\.blocks")
