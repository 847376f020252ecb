"""Readers of logs: each yields entries (`ftckpt.incidents.entries`) in bounded memory."""
