"""`ftckpt delta pack`: a checkpoint as its difference from another one, or compressed whole."""

from __future__ import annotations

from ftckpt.operations import packing

from .answer import render as render

operation = packing.delta_pack
