"""Scan a root entry by entry for a retention plan."""
