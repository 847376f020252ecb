"""The codec of a delta: what predicts a block, and how the difference is stored."""
