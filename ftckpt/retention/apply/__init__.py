"""Carry out retention plans: prepare, recheck, drop, purge, undelete."""
