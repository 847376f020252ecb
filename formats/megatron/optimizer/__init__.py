"""The optimizers of a legacy Megatron job, read and written."""
