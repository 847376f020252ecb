"""Pickles: read as inert data without running anything, and written."""
