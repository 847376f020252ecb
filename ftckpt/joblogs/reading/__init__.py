"""Readers of logs: each yields entries (`ftckpt.joblogs.entries`) in bounded memory."""
