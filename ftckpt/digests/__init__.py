"""Digests: of blocks, of files, of logical tensors, and the CRC-32s that others wrote."""
