"""Record a training: one record per step, without changing the training."""
