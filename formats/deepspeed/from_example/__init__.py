"""Laying DeepSpeed's files out as an example of the target job shows."""
