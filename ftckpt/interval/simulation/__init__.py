"""Runs of a job with failures, event by event: an independent check of the closed forms."""
