"""Pickles, read as inert data and written back; nothing in them is run."""
