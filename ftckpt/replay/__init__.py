"""Is a restart exact, and if not, what is missing?

Two runs of one training are compared bit by bit, step by step, event by event: `records` are what a
run logs, `comparing` finds where two logs part ways, `attribution` says which component of the
state that shows, `judging` weighs the uninterrupted run, its repetition and the restarts together.
`recorder` and `instruments` log a run from inside the user's process, `running` starts the
processes, `runs` and `trial` make all that a verdict needs, `closer` looks again at what differs
first, `audit` looks at a checkpoint without running anything.
"""
