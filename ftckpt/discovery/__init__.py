"""Find the root of a run and the checkpoints in it, and know what is not there."""
