"""The state of a training beside its tensors: its fields, paths and records."""
