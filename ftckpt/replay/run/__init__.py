"""The runs of a trial: the uninterrupted one, its repetition, and the restarts."""
