"""The files of a DeepSpeed model: whole, or layer by layer of a pipeline."""
