"""What describes a Megatron job: its arguments, stages, parameters, groups and state."""
