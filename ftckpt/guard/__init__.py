"""Guard one training job: start it from the newest good checkpoint, watch it, restart it.

`decisions` is pure: what to do next, from what has happened. `supervise` and `keeper` run the
command, `watch` finds and verifies its saves, `notices` hears of preemptions, `nodes` makes several
guards of one job agree. `attempt` is one run of the command, `run` the loop over them. The choice
of a checkpoint is the caller's.
"""
