"""Servers that tests start on loopback, and stop."""
