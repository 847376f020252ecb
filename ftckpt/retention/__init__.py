"""Retention: what of a root to keep, and why.

Deciding is pure: `decide` takes what was found (`RootEntry`), a `Policy` and the time, and returns
a `Plan`. Reading a root (`prepare`) and carrying a plan out are separate.
"""
