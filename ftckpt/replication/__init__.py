"""Replicas of a checkpoint: made whole on another tier, and used to mend a damaged one."""

from __future__ import annotations
