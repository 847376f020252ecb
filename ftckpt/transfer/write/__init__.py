"""Writing a result block by block, and taking over what an earlier run has made."""
