"""Proving a result before it is visible: by its elements, or by digests."""
