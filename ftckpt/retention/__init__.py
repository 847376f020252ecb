"""Decide which checkpoints of a root to keep, and why.

`policy.decide` is pure: entries (`scan.entries.RootEntry`), a `Policy` and the time give a
`RetentionPlan`. `apply.prepare` reads a root; `apply.run`, `apply.purge` and `apply.undelete`
change it. Nothing is imported here, because a plan needs nothing of what changes a root.
"""
