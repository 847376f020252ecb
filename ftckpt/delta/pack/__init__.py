"""Packing: what is stored against what, encoded, built, proven and shown."""
