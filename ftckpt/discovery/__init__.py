"""Find the root of a run and its checkpoints, and recognise what is missing."""
