"""Comparing records: where two runs part ways, and which component it was."""
