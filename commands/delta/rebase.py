"""`ftckpt delta rebase`: the same checkpoint against another base, or none."""

from __future__ import annotations

from ftckpt.operations import packing

from .answer import render as render

operation = packing.delta_rebase
