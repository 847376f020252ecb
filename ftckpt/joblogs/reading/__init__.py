"""Readers of logs: each yields entries (`ftckpt.joblogs.collect`) in bounded memory."""
