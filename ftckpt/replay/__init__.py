"""Test whether a restart is exact, and find the state that is missing.

Two runs of one training are compared bit by bit, step by step, event by event. `record` logs a run
from inside the user's process; `run` starts the processes; `compare` finds the first difference of
two logs, attributes it to a component of the state and gives the verdict; `audit` checks a
checkpoint without running anything.
"""
