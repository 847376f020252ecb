"""Layouts that the world writes and that ftckpt once judged wrongly."""
