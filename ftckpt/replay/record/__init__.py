"""Recording a training: one record a step, without changing the training."""
